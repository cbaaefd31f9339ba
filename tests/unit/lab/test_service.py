"""The lab: the service's own rules under a clock, ids and faults of one's own."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from forewarn import server
from forewarn.core.event import EventType
from forewarn.engine.clock import VirtualClock
from forewarn.errors import Invalid, Refused, Unavailable, UnknownVm
from forewarn.fleetfile.parser import Fleet, parse
from forewarn.lab.fault.active import Standing
from forewarn.lab.fault.active import parse as parse_fault
from forewarn.lab.listeners import DOORS_MAX
from forewarn.lab.service import LabService, Setup, laboratory, timing_at
from forewarn.store.memory import MemoryStore

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
POLL = "/metadata/scheduledevents?api-version=2020-07-01"
REQUEST = f"GET {POLL} HTTP/1.1\r\nHost: lab\r\nMetadata: true\r\n\r\n".encode()
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

Story = Callable[[LabService], Awaitable[None]]


def tell(story: Story, setup: Setup | None = None) -> LabService:
    async def run() -> LabService:
        async with laboratory(setup or Setup(fleet=FLEET, start=NOON)) as lab:
            await story(lab)
        return lab

    return asyncio.run(run())


async def poll(lab: LabService, vm: str = "web-0") -> dict[str, object]:
    answer = await lab.ask(vm, "GET", POLL, headers=HEADER)
    assert answer.status == 200
    found: dict[str, object] = json.loads(answer.body)
    return found


def whats(lab: LabService) -> list[str]:
    return [
        entry.what
        for entry in lab.transcript.entries
        if entry.kind == "change" and entry.what != "claimed"
    ]


def fleet_of(numbers: range) -> Fleet:
    return parse(
        json.dumps(
            {"scopes": [{"name": f"s-{n}", "vms": [{"name": f"vm-{n:03}"}]} for n in numbers]}
        ).encode(),
        "fleet",
    )


async def place_of(lab: LabService, vm: str) -> tuple[str, int]:
    host, _, port = (await lab.door(vm)).removeprefix("http://").partition(":")
    return host, int(port)


async def connect(host: str, port: int) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()


async def until_touched(fault: Standing) -> None:
    async with asyncio.timeout(10):
        while fault.left == 10:
            await asyncio.sleep(0)


def listen(where: tuple[str, int], is_shared: int) -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_shared)
        listening.bind(where)
        listening.listen()


def test_time_stands_still_until_it_is_advanced_and_then_all_that_is_due_is_done() -> None:
    async def story(lab: LabService) -> None:
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
    async def story(lab: LabService) -> None:
        await lab.operations.maintain("host-a", type=EventType.REBOOT, by="test")
        await lab.jump(NOON + timedelta(hours=5))

    lab = tell(story)
    started = [entry for entry in lab.transcript.entries if entry.what == "started"]
    assert [entry.at for entry in started] == [NOON + timedelta(hours=5)]


@pytest.mark.parametrize(
    "moment", [NOON - timedelta(seconds=1), NOON + timedelta(days=367), NOON.replace(tzinfo=None)]
)
def test_a_jump_back_too_far_or_to_nowhere_is_refused(moment: datetime) -> None:
    async def story(lab: LabService) -> None:
        with pytest.raises(Invalid, match="expected a moment with a time zone"):
            await lab.jump(moment)
        assert lab.clock.now() == NOON

    tell(story)


def test_a_running_clock_follows_the_real_time_until_it_is_paused() -> None:
    async def story(lab: LabService) -> None:
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
    async def story(lab: LabService) -> None:
        with pytest.raises(Refused, match="the clock is the real one"):
            await lab.advance(timedelta(seconds=1))
        lab.set_rate(900)
        (told,) = await lab.operations.maintain("host-a", type=EventType.REBOOT, by="test")
        assert told.event.not_before - lab.clock.now() <= timedelta(seconds=2)
        with pytest.raises(Invalid, match="expected 0\\.001 to"):
            lab.set_rate(0)

    tell(story, Setup(fleet=FLEET, is_virtual=False))


def test_the_same_seed_gives_the_same_transcript_and_another_one_another() -> None:
    async def story(lab: LabService) -> None:
        lab.add_fault(parse_fault({"fault": "status", "code": 500, "chance": "0.5", "for": "10m"}))
        for _ in range(20):
            await lab.ask("web-0", "GET", POLL, headers=HEADER)
            await lab.advance(timedelta(seconds=1))
        await lab.operations.maintain("host-a", type=EventType.FREEZE, by="test")
        await lab.advance(timedelta(hours=1))

    first, again, other = (
        tell(story, Setup(fleet=FLEET, start=NOON, seed=seed)).transcript.dump()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_door_is_its_vm_and_is_shut_while_connections_are_refused() -> None:
    async def story(lab: LabService) -> None:
        where = await place_of(lab, "web-1")
        assert await place_of(lab, "web-1") == where
        await connect(*where)
        lab.add_fault(
            parse_fault({"fault": "refuse", "vms": ["web-1"], "from": "10s", "for": "1m"})
        )
        await lab.advance(timedelta(seconds=10))
        with pytest.raises(ConnectionRefusedError):
            await connect(*where)
        await lab.advance(timedelta(minutes=1))
        await connect(*where)

    tell(story)


@pytest.mark.parametrize("is_shared", [0, 1])
def test_the_port_of_a_door_is_nobody_elses_while_the_door_is_shut(is_shared: int) -> None:
    async def story(lab: LabService) -> None:
        where = await place_of(lab, "web-0")
        lab.add_fault(parse_fault({"fault": "refuse"}))
        await lab.enforce_faults()
        with pytest.raises(OSError, match="Address already in use"):
            listen(where, is_shared)
        lab.remove_fault("f1")
        await lab.enforce_faults()
        await connect(*where)

    tell(story)


class Unlucky(LabService):
    """Somebody has taken the port of a door: it is opened at the fourth try."""

    RETRY_SECONDS = 0.0
    tries = 0

    async def enforce_faults(self) -> datetime:
        self.tries += 1
        if self.tries < 4:
            raise Unavailable("cannot listen on 127.0.0.1:1: another program does already")
        return await super().enforce_faults()


def test_a_door_that_cannot_be_opened_is_told_once_and_tried_until_it_can() -> None:
    async def story() -> None:
        clock = VirtualClock(NOON)
        store, timing = MemoryStore(), timing_at(1)
        async with server.open_service(store, clock, timing, lambda: "") as service:
            lab = Unlucky(Setup(), clock, service)
            keeping = asyncio.create_task(lab.keep_faults())
            async with asyncio.timeout(10):
                while lab.tries < 4:
                    await asyncio.sleep(0)
            assert not keeping.done()
            assert [(entry.kind, entry.what, entry.detail) for entry in lab.transcript.entries] == [
                ("fault", "not ended", "cannot listen on 127.0.0.1:1: another program does already")
            ]
            keeping.cancel()

    asyncio.run(story())


def test_a_request_that_is_under_way_when_its_door_is_shut_is_in_the_transcript(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(lab: LabService) -> None:
        where = await place_of(lab, "web-0")
        late = lab.add_fault(parse_fault({"fault": "latency", "seconds": 100, "requests": 10}))
        reader, writer = await asyncio.open_connection(*where)
        writer.write(REQUEST)
        await until_touched(late)
        lab.add_fault(parse_fault({"fault": "refuse"}))
        await lab.enforce_faults()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    lab = tell(story)
    (asked,) = (entry for entry in lab.transcript.entries if entry.kind == "request")
    assert (asked.vm, asked.status, asked.faults) == ("web-0", 0, ("latency",))
    assert caplog.records == []


def test_a_request_that_is_under_way_when_the_lab_ends_is_in_the_transcript(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as client:

        async def story(lab: LabService) -> None:
            client.connect(await place_of(lab, "web-0"))
            late = lab.add_fault(parse_fault({"fault": "latency", "seconds": 100, "requests": 10}))
            client.sendall(REQUEST)
            await until_touched(late)

        lab = tell(story)
    assert [entry.status for entry in lab.transcript.entries if entry.kind == "request"] == [0]
    assert caplog.records == []


def test_a_fault_of_a_vm_that_is_not_there_is_refused() -> None:
    async def story(lab: LabService) -> None:
        with pytest.raises(UnknownVm, match="web-O"):
            lab.add_fault(parse_fault({"fault": "refuse", "vms": ["web-0", "web-O"]}))
        assert lab.faults.standing == {}

    tell(story)


@pytest.mark.parametrize("is_virtual", [True, False])
def test_of_a_change_of_the_clock_nothing_is_done_if_a_part_of_it_is_refused(
    is_virtual: bool,
) -> None:
    async def story(lab: LabService) -> None:
        with pytest.raises((Invalid, Refused)):
            await lab.change_clock(rate=5, moment=NOON - timedelta(days=1), is_running=True)
        with pytest.raises((Invalid, Refused)):
            await lab.change_clock(rate=0, moment=NOON + timedelta(days=1), is_running=True)
        assert lab.rate == 1
        assert not is_virtual or lab.clock.now() == NOON
        assert [entry for entry in lab.transcript.entries if entry.kind == "clock"] == []

    tell(story, Setup(fleet=FLEET, start=NOON if is_virtual else None, is_virtual=is_virtual))


def test_the_doors_of_vms_that_are_gone_make_room() -> None:
    async def story(lab: LabService) -> None:
        first = await place_of(lab, "vm-000")
        assert len(await lab.doors()) == DOORS_MAX
        with pytest.raises(Refused, match="there are 256 doors already; use /as/vm-299"):
            await lab.door("vm-299")
        await lab.operations.apply(fleet_of(range(1, 300)), by="test")
        await lab.door("vm-299")
        with pytest.raises(ConnectionRefusedError):
            await connect(*first)
        doors = await lab.doors()
        assert len(doors) == DOORS_MAX
        assert "vm-299" in doors

    tell(story, Setup(fleet=fleet_of(range(300)), start=NOON))


@pytest.mark.parametrize(
    "start",
    [
        datetime(9999, 12, 31, tzinfo=UTC),
        datetime(9000, 1, 2, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
    ],
)
def test_a_clock_does_not_start_where_the_calendar_ends(start: datetime) -> None:
    async def story(lab: LabService) -> None:
        raise AssertionError("there is no such lab")

    with pytest.raises(
        Invalid, match=re.escape(f"start at {start.isoformat()}; expected a moment from 1970")
    ):
        tell(story, Setup(fleet=FLEET, start=start))


def test_a_clock_does_not_go_on_for_ever() -> None:
    async def story(lab: LabService) -> None:
        with pytest.raises(Invalid, match="it ends in the year 9000"):
            await lab.advance(timedelta(days=2))
        with pytest.raises(Invalid, match="not after 9000-01-01"):
            await lab.jump(lab.clock.now() + timedelta(days=2))
        await lab.advance(timedelta(days=1))

    tell(story, Setup(fleet=FLEET, start=datetime(8999, 12, 31, tzinfo=UTC)))


def test_while_enablement_lapses_polls_count_for_nothing_and_a_restart_makes_no_event() -> None:
    async def story(lab: LabService) -> None:
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
    async def story(lab: LabService) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        tell(story)
