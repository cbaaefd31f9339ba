"""The relay knows for how long no server has answered its guests."""

import asyncio

import pytest

from forewarn.hostd.unconfirmed import FORGET_SECONDS, Unconfirmed
from forewarn.hostd.upstream import HttpConnection, ServerLost
from forewarn.platform.base import PROBLEM_LENGTH_MAX
from forewarn.platform.remote import BRIDGES_MAX, UNCONFIRMED_SECONDS_MAX, UnservedBridge
from tests.unit.hostd.recording_server import RecordingServer, response
from tests.unit.hostd.relay_world import RelayWorld, until

POLL = (
    b"GET /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1\r\n"
    b"Host: h\r\nMetadata: true\r\n\r\n"
)
REFUSAL = response("503 Service Unavailable", b"{}")
NO_VLANS = "the bridge br1 has vlan_filtering on"


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def fail_at(self, unconfirmed: Unconfirmed, seconds: float) -> None:
        """A guest asks at this time and gets no answer."""
        self.seconds = seconds
        unconfirmed.fail(seconds)


def test_documents_that_only_the_relay_has_confirm_nothing() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL)
        world.stop_servers()
        world.ask(POLL)
        assert world.unconfirmed.seconds == 0
        world.ahead_seconds = 10.5
        assert world.ask(POLL).headers["age"] == "10"
        assert 10 <= world.unconfirmed.seconds < 20
        world.ahead_seconds = 100.5
        assert world.ask(POLL).status == 503
        assert 100 <= world.unconfirmed.seconds < 120


def test_server_that_is_not_ready_confirms_nothing_until_it_is() -> None:
    with RelayWorld(RecordingServer(REFUSAL, REFUSAL, response())) as world:
        ended = list[int]()
        world.unconfirmed.on_change = lambda: ended.append(1)
        world.ask(POLL)
        world.ahead_seconds = 10.5
        world.ask(POLL)
        assert 10 <= world.unconfirmed.seconds < 20
        assert world.ask(POLL).status == 200
        assert (world.unconfirmed.has_ended, ended) == (True, [1])


def test_server_that_says_that_nothing_has_changed_confirms_it() -> None:
    with RelayWorld(RecordingServer(REFUSAL, REFUSAL, response("304 Not Modified"))) as world:
        world.ask(POLL)
        world.ahead_seconds = 10.5
        world.ask(POLL)
        assert world.unconfirmed.seconds >= 10
        assert world.ask(POLL).status == 304
        assert world.unconfirmed.has_ended


def test_time_of_a_long_poll_counts_until_its_server_is_lost() -> None:
    """It was held by a server that would have answered with a new event."""

    async def hold(request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    with RelayWorld(RecordingServer(answer=hold)) as world, world.connect() as client:
        client.send(POLL.replace(b"Metadata:", b"Prefer: wait=60\r\nMetadata:"))
        until(lambda: bool(world.servers[0].requests))
        world.ahead_seconds = 50.0
        world.stop_servers()
        assert client.response().status == 503
        assert world.unconfirmed.seconds == 0


def test_long_poll_that_its_server_never_answers_counts_from_its_beginning() -> None:
    """A server that was stopped keeps its connections, and may have been so all the time. Others
    may have announced an event meanwhile.
    """

    async def hold(request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def ask(port: int) -> float:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: HttpConnection(""), "127.0.0.1", port)
        with pytest.raises(ServerLost) as lost:
            await connection.send(POLL, 0.02)
        return lost.value.silent_seconds

    async def main() -> float:
        async with RecordingServer(answer=hold) as server:
            return await ask(server.port)

    assert asyncio.run(main()) == 0.02


def test_guest_that_waited_at_a_suspended_server_could_not_read_although_others_could() -> None:
    """Their polls went to another server; its own waited where nothing was answered."""

    async def answer(request: bytes) -> bytes:
        if b"prefer" in request or b"versions" in request:
            await asyncio.Event().wait()
        return response()

    with RelayWorld(RecordingServer(answer=answer)) as world, world.connect() as client:
        client.send(POLL.replace(b"Metadata:", b"Prefer: wait=60\r\nMetadata:"))
        until(lambda: bool(world.servers[0].requests))
        world.ahead_seconds = 20.0
        world.ask(POLL, "127.0.0.2")
        (server,) = world.upstream._servers
        server.answered_at -= 10.0  # the other guest was answered by another server
        world.run(world.relay.check_servers(seconds_max=0.05))
        assert client.response().status == 503
        assert 10 <= world.unconfirmed.seconds < 20
        assert world.unconfirmed.has_ended


def test_refusal_of_a_server_is_no_reason_to_wait() -> None:
    """It answers: that the guest may not read is not an outage."""
    with RelayWorld(RecordingServer(response("403 Forbidden", b"{}"))) as world:
        world.ask(POLL)
        world.ahead_seconds = 10.5
        world.ask(POLL)
        assert world.unconfirmed.seconds == 0


def test_one_poll_that_failed_at_once_is_nothing() -> None:
    """Its server has just been stopped; the guest may ask another one only in a minute."""
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.fail_at(unconfirmed, 1010.0)
    clock.seconds = 1060.0
    assert unconfirmed.seconds == 0


def test_poll_that_no_server_answered_for_long_counts_from_when_it_was_sent() -> None:
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.seconds = 1015.0
    unconfirmed.fail(1000.0)
    assert unconfirmed.seconds == 15


def test_time_before_the_last_answer_does_not_count() -> None:
    """Another guest got an answer while this one waited."""
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.seconds = 1010.0
    unconfirmed.confirm()
    clock.seconds = 1015.0
    unconfirmed.fail(1000.0)
    assert unconfirmed.seconds == 5


def test_time_that_has_ended_is_reported_until_a_server_knows_of_it() -> None:
    """The daemon may have had no server itself, or was in the middle of a request."""
    clock, ended = Clock(), list[int]()
    unconfirmed = Unconfirmed(clock)
    unconfirmed.on_change = lambda: ended.append(1)
    clock.fail_at(unconfirmed, 1000.0)
    clock.fail_at(unconfirmed, 1004.0)
    clock.seconds = 1005.0
    unconfirmed.confirm()
    clock.seconds = 1010.0
    unconfirmed.report(0)
    assert (unconfirmed.seconds, unconfirmed.has_ended, ended) == (10, True, [1])
    unconfirmed.report(10)
    assert (unconfirmed.seconds, unconfirmed.has_ended, ended) == (0, False, [1, 1])


def test_guest_that_waited_for_its_answer_could_not_read_meanwhile() -> None:
    """Its server died, and another one answered in the end."""
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.seconds = 1012.0
    unconfirmed.confirm(1000.0)
    assert (unconfirmed.seconds, unconfirmed.has_ended) == (12, True)


def test_daemon_that_was_without_a_server_reports_the_time_in_which_no_guest_could_read() -> None:
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.seconds = 1004.0
    unconfirmed.confirm()  # a guest got an answer
    clock.seconds = 1012.0
    unconfirmed.miss(11.0)
    assert unconfirmed.seconds == 8
    unconfirmed.report(8)
    unconfirmed.miss(2.0)
    assert not unconfirmed.has_ended, "too short"


def test_guests_that_ask_no_more_delay_nothing() -> None:
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.fail_at(unconfirmed, 1000.0)
    clock.fail_at(unconfirmed, 1010.0)
    clock.seconds += FORGET_SECONDS
    assert unconfirmed.seconds == 10 + FORGET_SECONDS
    clock.seconds += 1
    assert unconfirmed.seconds == 0
    clock.fail_at(unconfirmed, clock.seconds)
    assert unconfirmed.seconds == 0


def test_reported_time_has_a_limit() -> None:
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    for hour in range(0, 100 * 60, 5):
        clock.fail_at(unconfirmed, 1000.0 + 60 * hour)
    assert unconfirmed.seconds == UNCONFIRMED_SECONDS_MAX


def test_another_server_of_the_control_api_is_no_answer_to_guests() -> None:
    """The way to the metadata servers may be another one, and guests still get nothing there."""
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.fail_at(unconfirmed, 1000.0)
    clock.fail_at(unconfirmed, 1100.0)
    unconfirmed.miss(0.5)
    unconfirmed.report(unconfirmed.seconds)
    clock.seconds = 1120.0
    assert unconfirmed.seconds == 120
    unconfirmed.miss(10.0)
    unconfirmed.report(unconfirmed.seconds)
    assert unconfirmed.seconds == 120
    unconfirmed.confirm()
    assert (unconfirmed.seconds, unconfirmed.has_ended) == (120, True)


def test_what_was_confirmed_by_a_server_that_was_cut_off_does_not_count() -> None:
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.seconds = 1100.0
    unconfirmed.confirm()
    unconfirmed.doubt([12.0], asked_at=1100.0)
    assert unconfirmed.seconds == 12
    clock.seconds = 1101.0
    unconfirmed.confirm()
    assert unconfirmed.has_ended
    assert unconfirmed.seconds == 13


def test_server_that_was_cut_off_for_hours_does_not_void_what_another_one_confirmed() -> None:
    """A load balancer, or a restart of the daemon, may lead to it for one poll."""
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    clock.seconds = 9000.0
    unconfirmed.confirm()
    clock.seconds = 9001.0
    unconfirmed.doubt([7209.0], asked_at=9001.0, is_confirmed=True)
    unconfirmed.confirm()
    assert (unconfirmed.seconds, unconfirmed.has_ended) == (0, False)


@pytest.mark.parametrize(("seconds", "counted"), [(1.0, 0), (3.9, 0), (9.0, 9)])
def test_daemon_that_was_suspended_has_confirmed_nothing(seconds: float, counted: int) -> None:
    """Guests got no answers, and a poll that arrived meanwhile is read only afterwards."""
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    is_over = False

    async def sleep(_: float) -> None:
        nonlocal is_over
        if is_over:
            raise asyncio.CancelledError
        clock.seconds += seconds
        unconfirmed.confirm()
        is_over = True

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(unconfirmed.run(sleep))
    assert unconfirmed.seconds == counted


def test_vms_of_a_bridge_that_is_not_served_cannot_read_although_others_can() -> None:
    """They do not get an error: nothing listens on their bridge."""
    clock, changes = Clock(), list[int]()
    unconfirmed = Unconfirmed(clock)
    unconfirmed.on_change = lambda: changes.append(1)
    unconfirmed.set_bridge("br1", NO_VLANS, vms=2)
    assert unconfirmed.list_bridges() == [UnservedBridge("br1", NO_VLANS, 2)]
    assert (unconfirmed.seconds, changes) == (0, [1])
    clock.seconds = 1020.0
    unconfirmed.set_bridge("br1", NO_VLANS, vms=2)
    unconfirmed.confirm()  # a guest of another bridge
    assert (unconfirmed.seconds, unconfirmed.has_ended, changes) == (20, False, [1])

    unconfirmed.set_bridge("br1", "")
    assert unconfirmed.list_bridges() == []
    assert (unconfirmed.seconds, unconfirmed.has_ended) == (20, True)
    unconfirmed.report(20)
    assert unconfirmed.seconds == 0


def test_bridge_without_a_vm_delays_nothing_until_it_has_one() -> None:
    """libvirt may create it later."""
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    unconfirmed.set_bridge("br1", "the bridge br1 does not exist", vms=0)
    clock.seconds = 1100.0
    assert (unconfirmed.seconds, len(unconfirmed.list_bridges())) == (0, 1)

    unconfirmed.set_bridge("br1", NO_VLANS, vms=1)
    clock.seconds = 1110.0
    assert unconfirmed.seconds == 10

    unconfirmed.set_bridge("br1", NO_VLANS, vms=0)
    assert (unconfirmed.seconds, unconfirmed.has_ended) == (10, True), "its last VM has missed that"


def test_bridge_that_was_made_again_within_seconds_is_nothing() -> None:
    clock = Clock()
    unconfirmed = Unconfirmed(clock)
    unconfirmed.set_bridge("br1", NO_VLANS, vms=1)
    clock.seconds = 1002.0
    unconfirmed.set_bridge("br1", "")
    assert (unconfirmed.seconds, unconfirmed.has_ended) == (0, False)


def test_number_and_length_of_reported_bridges_have_limits() -> None:
    unconfirmed = Unconfirmed(Clock())
    for number in range(BRIDGES_MAX + 5):
        unconfirmed.set_bridge(f"br{number}", "x" * 9999)
    assert len(unconfirmed.list_bridges()) == BRIDGES_MAX
    assert len(unconfirmed.list_bridges()[0].problem) == PROBLEM_LENGTH_MAX
