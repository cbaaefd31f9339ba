"""The lab: the service's own rules under a clock, ids and faults of one's own."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from forewarn.core.event import EventType
from forewarn.errors import Invalid, Refused
from forewarn.lab.fault.standing import parse as parse_fault
from forewarn.lab.laboratory import Laboratory, Setup, laboratory
from forewarn.wire.fleet import parse

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
POLL = "/metadata/scheduledevents?api-version=2020-07-01"
HEADER = (("Metadata", "true"),)
FLEET = parse(
    b"""
scopes:
  - name: web
    kind: availability-set
    vms:
      - {name: web-0, update_domain: 0, host: host-a}
      - {name: web-1, update_domain: 1, host: host-b}
""",
    "fleet",
)

Story = Callable[[Laboratory], Awaitable[None]]


def tell(story: Story, setup: Setup | None = None) -> Laboratory:
    async def run() -> Laboratory:
        async with laboratory(setup or Setup(fleet=FLEET, start=NOON)) as lab:
            await story(lab)
        return lab

    return asyncio.run(run())


async def poll(lab: Laboratory, vm: str = "web-0") -> dict[str, object]:
    answer = await lab.ask(vm, "GET", POLL, headers=HEADER)
    assert answer.status == 200
    found: dict[str, object] = json.loads(answer.body)
    return found


def whats(lab: Laboratory) -> list[str]:
    return [entry.what for entry in lab.transcript.entries if entry.kind == "change" and entry.what != "claimed"]


def test_time_stands_still_until_it_is_advanced_and_then_all_that_is_due_is_done() -> None:
    async def story(lab: Laboratory) -> None:
        await poll(lab)
        told = await lab.operations.restart("web-0", by="test")
        assert told is not None
        assert lab.clock.now() == NOON
        await lab.advance(timedelta(minutes=14, seconds=59))
        assert lab.operations.find_event(told.event.id).event.status == "Scheduled"
        await lab.advance(timedelta(seconds=1))
        assert lab.operations.find_event(told.event.id).event.status == "Started"
        await lab.advance(timedelta(minutes=10))

    lab = tell(story)
    assert whats(lab) == ["enabled", "scheduled", "started", "impacted", "completed"]
    assert lab.clock.now() == NOON + timedelta(minutes=25)


def test_a_jump_makes_due_at_once_what_came_between() -> None:
    async def story(lab: Laboratory) -> None:
        await lab.operations.maintain("host-a", type=EventType.REBOOT, by="test")
        await lab.jump(NOON + timedelta(hours=5))

    lab = tell(story)
    started = [entry for entry in lab.transcript.entries if entry.what == "started"]
    assert [entry.at for entry in started] == [NOON + timedelta(hours=5)]


@pytest.mark.parametrize("moment", [NOON - timedelta(seconds=1), NOON + timedelta(days=367), NOON.replace(tzinfo=None)])
def test_a_jump_back_too_far_or_to_nowhere_is_refused(moment: datetime) -> None:
    async def story(lab: Laboratory) -> None:
        with pytest.raises(Invalid, match="expected a moment with a time zone"):
            await lab.jump(moment)
        assert lab.clock.now() == NOON

    tell(story)


def test_a_running_clock_follows_the_real_time_until_it_is_paused() -> None:
    async def story(lab: Laboratory) -> None:
        async with asyncio.timeout(10):
            while lab.clock.now() == NOON:
                await asyncio.sleep(0)
        lab.run(is_running=False)
        await lab.advance(timedelta(0))
        paused = lab.clock.now()
        await asyncio.sleep(0.05)
        assert lab.clock.now() == paused

    tell(story, Setup(fleet=FLEET, start=NOON, is_running=True))


def test_the_real_clock_is_not_moved_but_its_rate_is() -> None:
    async def story(lab: Laboratory) -> None:
        with pytest.raises(Refused, match="the clock is the real one"):
            await lab.advance(timedelta(seconds=1))
        lab.set_rate(900)
        (told,) = await lab.operations.maintain("host-a", type=EventType.REBOOT, by="test")
        assert told.event.not_before - lab.clock.now() <= timedelta(seconds=2)
        with pytest.raises(Invalid, match="expected 0\\.001 to"):
            lab.set_rate(0)

    tell(story, Setup(fleet=FLEET, is_virtual=False))


def test_the_same_seed_gives_the_same_transcript_and_another_one_another() -> None:
    async def story(lab: Laboratory) -> None:
        lab.add_fault(parse_fault({"fault": "status", "code": 500, "chance": "0.5", "for": "10m"}))
        for _ in range(20):
            await lab.ask("web-0", "GET", POLL, headers=HEADER)
            await lab.advance(timedelta(seconds=1))
        await lab.operations.maintain("host-a", type=EventType.FREEZE, by="test")
        await lab.advance(timedelta(hours=1))

    first, again, other = (tell(story, Setup(fleet=FLEET, start=NOON, seed=seed)).transcript.dump() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_door_is_its_vm_and_is_shut_while_connections_are_refused() -> None:
    async def connect(url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()

    async def story(lab: Laboratory) -> None:
        url = await lab.door("web-1")
        assert await lab.door("web-1") == url
        await connect(url)
        lab.add_fault(parse_fault({"fault": "refuse", "vms": ["web-1"], "for": "1m"}))
        await lab.enforce_faults()
        with pytest.raises(ConnectionRefusedError):
            await connect(url)
        await lab.advance(timedelta(minutes=1))
        await lab.enforce_faults()
        await connect(url)

    tell(story)


def test_while_enablement_lapses_polls_count_for_nothing_and_a_restart_makes_no_event() -> None:
    async def story(lab: Laboratory) -> None:
        await poll(lab)
        lab.add_fault(parse_fault({"fault": "lapse", "for": "1m"}))
        await lab.advance(timedelta(0))
        await poll(lab)
        assert await lab.operations.restart("web-0", by="test") is None
        await lab.advance(timedelta(minutes=20))
        await poll(lab)
        assert await lab.operations.restart("web-1", by="test") is not None

    tell(story)


def test_what_goes_wrong_within_a_lab_comes_out_as_it_is() -> None:
    async def story(lab: Laboratory) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        tell(story)
