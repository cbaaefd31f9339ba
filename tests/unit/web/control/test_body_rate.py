"""Reading a body takes CPU time that polls need, so each host has so many bytes per second."""

from collections.abc import AsyncIterator

from forewarn.web.control.body_rate import BodyRate
from forewarn.web.control.routes.hostd import BODY_BYTES_MAX
from tests.unit.engine.hostd_world import World, reported, run

LARGEST = str(BODY_BYTES_MAX)


def test_host_that_sends_too_many_bytes_gets_a_429_before_its_body_is_read() -> None:
    async def test(world: World) -> None:
        thief, neighbor = await world.daemon("host-a"), await world.daemon("host-b")
        read = list[int]()

        async def send(number: int) -> AsyncIterator[bytes]:
            read.append(number)
            yield b" " * BODY_BYTES_MAX

        responses = [
            await thief.server.client.post(
                thief.url("work"),
                content=send(number),
                headers=thief.headers
                | {"content-type": "application/json", "content-length": LARGEST},
            )
            for number in range(4)
        ]
        statuses = [each.status_code for each in responses]
        assert (statuses[0], statuses[-1]) == (400, 429)
        assert read == [number for number, status in enumerate(statuses) if status == 400]
        assert responses[-1].headers["retry-after"] == "1"
        message = "too many bytes from host-a; at most 1048576 per second are read"
        assert responses[-1].json()["message"] == message
        assert await neighbor.report(reported("web-0")) == []

    run(test)


def test_bytes_come_back_with_time() -> None:
    rate = BodyRate()
    admitted = [rate.admits("host-a", LARGEST, BODY_BYTES_MAX, 100.0) for _ in range(2)]
    assert admitted == [True, False]
    assert rate.admits("host-a", LARGEST, BODY_BYTES_MAX, 100.1)
    assert not rate.admits("host-a", "1", BODY_BYTES_MAX, 103.9)
    assert rate.admits("host-a", "1", BODY_BYTES_MAX, 104.1)


def test_largest_body_leaves_room_for_a_small_one_after_it() -> None:
    """A daemon that gets a 429 looks for another server."""
    rate = BodyRate()
    assert rate.admits("host-a", LARGEST, BODY_BYTES_MAX, 100.0)
    assert rate.admits("host-a", "1000", BODY_BYTES_MAX, 100.01)


def test_small_bodies_count_together() -> None:
    rate = BodyRate()
    admitted = [rate.admits("host-a", "300000", BODY_BYTES_MAX, 100.0) for _ in range(20)]
    assert admitted == [True] * 14 + [False] * 6


def test_host_with_2000_vms_may_report_them_every_second() -> None:
    rate = BodyRate()
    for second in range(600):
        assert rate.admits("host-a", "1000000", BODY_BYTES_MAX, 100.0 + second)


def test_body_without_a_length_counts_as_the_largest() -> None:
    for length in ("", "-1", "9" * 5000):
        rate = BodyRate()
        admitted = [rate.admits("host-a", length, BODY_BYTES_MAX, 100.0) for _ in range(2)]
        assert admitted == [True, False]


def test_hosts_that_have_all_their_bytes_are_forgotten() -> None:
    rate = BodyRate()
    for number in range(5000):
        assert rate.admits(f"host-{number}", "1000000", BODY_BYTES_MAX, float(number))
    assert len(vars(rate)["_whole_at"]) < 2000
