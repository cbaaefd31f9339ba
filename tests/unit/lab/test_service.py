"""LabService: clock, faults, listeners, and what it records."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from forewarn.core.event import EventType
from forewarn.errors import Invalid, Refused, UnknownVm
from forewarn.fleetfile.parser import Fleet, parse
from forewarn.lab.fault.active import ActiveFault, parse_fault
from forewarn.lab.service import LISTENERS_MAX, LabService, Setup, open_lab

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
POLL = "/metadata/scheduledevents?api-version=2020-07-01"
REQUEST = f"GET {POLL} HTTP/1.1\r\nHost: lab\r\nMetadata: true\r\n\r\n".encode()
HEADER = ((b"metadata", b"true"),)
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


def run_lab(main: Story, setup: Setup | None = None) -> LabService:
    async def run() -> LabService:
        async with open_lab(setup or Setup(fleet=FLEET, start=NOON)) as lab:
            await main(lab)
        return lab

    return asyncio.run(run())


async def poll(lab: LabService, vm: str = "web-0") -> dict[str, object]:
    scripted = await lab.request(vm, "GET", POLL, headers=HEADER)
    assert scripted.status == 200
    found: dict[str, object] = json.loads(scripted.body)
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


async def get_address(lab: LabService, vm: str) -> tuple[str, int]:
    host, _, port = (await lab.listen_vm(vm)).removeprefix("http://").partition(":")
    return host, int(port)


async def send(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(REQUEST)
        return await reader.read(1024)
    finally:
        writer.close()


async def add_fault(lab: LabService, **members: Any) -> ActiveFault:
    return await lab.add_fault(parse_fault(members))


async def wait_until_used(fault: ActiveFault) -> None:
    async with asyncio.timeout(10):
        while fault.requests_left == 10:
            await asyncio.sleep(0)


def test_advance_does_everything_that_is_due() -> None:
    async def main(lab: LabService) -> None:
        await poll(lab)
        created = await lab.operations.restart("web-0", by="test")
        assert created is not None
        assert lab.clock.now() == NOON
        await lab.advance(timedelta(minutes=14, seconds=59))
        assert lab.operations.find_event(created.event.id).event.status == "Scheduled"
        await lab.advance(timedelta(seconds=1))
        assert lab.operations.find_event(created.event.id).event.status == "Started"
        await lab.advance(timedelta(minutes=10))

    lab = run_lab(main)
    assert whats(lab) == ["enabled", "scheduled", "started", "impacted", "completed"]
    assert lab.clock.now() == NOON + timedelta(minutes=25)


def test_jump_makes_everything_in_between_due() -> None:
    async def main(lab: LabService) -> None:
        await lab.operations.maintain("host-a", type=EventType.REBOOT, by="test")
        await lab.change_clock(time=NOON + timedelta(hours=5))

    lab = run_lab(main)
    started = [entry for entry in lab.transcript.entries if entry.what == "started"]
    assert [entry.at for entry in started] == [NOON + timedelta(hours=5)]


@pytest.mark.parametrize(
    "time", [NOON - timedelta(seconds=1), NOON + timedelta(days=367), NOON.replace(tzinfo=None)]
)
def test_invalid_jump_is_refused(time: datetime) -> None:
    async def main(lab: LabService) -> None:
        with pytest.raises(Invalid, match="expected a time from 2030-01-31T12:00:00"):
            await lab.change_clock(time=time)
        assert lab.clock.now() == NOON

    run_lab(main)


def test_running_clock_follows_the_real_time() -> None:
    async def main(lab: LabService) -> None:
        async with asyncio.timeout(10):
            while lab.clock.now() == NOON:
                await asyncio.sleep(0)
        await lab.change_clock(is_running=False)
        paused = lab.clock.now()
        await asyncio.sleep(0.05)
        assert lab.clock.now() == paused

    run_lab(main, Setup(fleet=FLEET, start=NOON, is_running=True))


def test_real_clock_takes_only_a_rate() -> None:
    async def main(lab: LabService) -> None:
        with pytest.raises(Refused, match="this lab has the real clock"):
            await lab.advance(timedelta(seconds=1))
        await lab.change_clock(rate=900)
        (created,) = await lab.operations.maintain("host-a", type=EventType.REBOOT, by="test")
        assert created.event.not_before - lab.clock.now() <= timedelta(seconds=2)
        with pytest.raises(Invalid, match="expected 0\\.001 to"):
            await lab.change_clock(rate=0)

    run_lab(main, Setup(fleet=FLEET, is_virtual=False))


def test_same_seed_gives_the_same_transcript() -> None:
    async def main(lab: LabService) -> None:
        await lab.add_fault(
            parse_fault({"fault": "status", "code": 500, "chance": "0.5", "for": "10m"})
        )
        for _ in range(20):
            await lab.request("web-0", "GET", POLL, headers=HEADER)
            await lab.advance(timedelta(seconds=1))
        await lab.operations.maintain("host-a", type=EventType.FREEZE, by="test")
        await lab.advance(timedelta(hours=1))

    first, again, other = (
        run_lab(main, Setup(fleet=FLEET, start=NOON, seed=seed)).transcript.dump()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_requests_on_a_vm_listener_are_those_of_the_vm() -> None:
    async def main(lab: LabService) -> None:
        address = await get_address(lab, "web-1")
        assert await get_address(lab, "web-1") == address
        assert (await send(address)).startswith(b"HTTP/1.1 200")

    lab = run_lab(main)
    assert [entry.vm for entry in lab.transcript.entries if entry.kind == "request"] == ["web-1"]


def test_refuse_resets_the_connection_without_a_byte() -> None:
    """The request is in the transcript, so that a retry can be expected of the client."""

    async def main(lab: LabService) -> None:
        address = await get_address(lab, "web-1")
        await add_fault(lab, fault="refuse", vms=["web-1"], **{"from": "10s", "for": "1m"})
        await lab.advance(timedelta(seconds=10))
        with pytest.raises(ConnectionResetError):
            await send(address)
        await lab.advance(timedelta(minutes=1))
        assert (await send(address)).startswith(b"HTTP/1.1 200")

    lab = run_lab(main)
    requests = [entry for entry in lab.transcript.entries if entry.kind == "request"]
    assert [(entry.status, entry.faults) for entry in requests] == [(0, ("refuse",)), (200, ())]


@pytest.mark.parametrize("kind", ["refuse", "reset", "truncate"])
def test_guest_without_a_socket_gets_no_broken_response(kind: str) -> None:
    async def main(lab: LabService) -> None:
        await add_fault(lab, fault=kind)
        response = await lab.request("web-0", "GET", POLL, headers=HEADER)
        assert (response.status, response.body) == (0, b"")

    lab = run_lab(main)
    assert lab.transcript.entries[-1].faults == (kind,)


def test_delay_of_a_guest_without_a_socket_is_on_the_labs_clock() -> None:
    async def main(lab: LabService) -> None:
        await add_fault(lab, fault="latency", seconds=100)
        polling = asyncio.create_task(poll(lab))
        await lab.advance(timedelta(seconds=99))
        assert not polling.done()
        await lab.advance(timedelta(seconds=1))
        assert polling.done()

    run_lab(main)


def test_request_in_progress_at_the_end_is_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as client:

        async def main(lab: LabService) -> None:
            client.connect(await get_address(lab, "web-0"))
            late = await lab.add_fault(
                parse_fault({"fault": "latency", "seconds": 100, "requests": 10})
            )
            client.sendall(REQUEST)
            await wait_until_used(late)

        lab = run_lab(main)
    assert [entry.status for entry in lab.transcript.entries if entry.kind == "request"] == [0]
    assert caplog.records == []


def test_fault_of_an_unknown_vm_is_refused() -> None:
    async def main(lab: LabService) -> None:
        with pytest.raises(UnknownVm, match="web-O"):
            await lab.add_fault(parse_fault({"fault": "refuse", "vms": ["web-0", "web-O"]}))
        assert lab.faults.by_id == {}

    run_lab(main)


@pytest.mark.parametrize("is_virtual", [True, False])
def test_clock_change_is_all_or_nothing(
    is_virtual: bool,
) -> None:
    async def main(lab: LabService) -> None:
        with pytest.raises((Invalid, Refused)):
            await lab.change_clock(rate=5, time=NOON - timedelta(days=1), is_running=True)
        with pytest.raises((Invalid, Refused)):
            await lab.change_clock(rate=0, time=NOON + timedelta(days=1), is_running=True)
        assert lab.rate == 1
        assert not is_virtual or lab.clock.now() == NOON
        assert [entry for entry in lab.transcript.entries if entry.kind == "clock"] == []

    run_lab(main, Setup(fleet=FLEET, start=NOON if is_virtual else None, is_virtual=is_virtual))


def test_listeners_of_deleted_vms_make_room() -> None:
    async def main(lab: LabService) -> None:
        first = await get_address(lab, "vm-000")
        assert len(await lab.listen_vms()) == LISTENERS_MAX
        with pytest.raises(Refused, match="256 VMs have a listener already; use /as/vm-299"):
            await lab.listen_vm("vm-299")
        await lab.operations.apply(fleet_of(range(1, 300)), by="test")
        await lab.listen_vm("vm-299")
        with pytest.raises(ConnectionRefusedError):
            await send(first)
        urls = await lab.listen_vms()
        assert len(urls) == LISTENERS_MAX
        assert "vm-299" in urls

    run_lab(main, Setup(fleet=fleet_of(range(300)), start=NOON))


@pytest.mark.parametrize(
    "start",
    [
        datetime(9999, 12, 31, tzinfo=UTC),
        datetime(9000, 1, 2, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
    ],
)
def test_start_outside_the_calendar_is_refused(start: datetime) -> None:
    async def main(lab: LabService) -> None:
        raise AssertionError("there is no such lab")

    with pytest.raises(Invalid, match=re.escape(f"start at {start.isoformat()}; expected 1970")):
        run_lab(main, Setup(fleet=FLEET, start=start))


def test_clock_ends_in_the_year_9000() -> None:
    async def main(lab: LabService) -> None:
        with pytest.raises(Invalid, match="a time before the year 9000"):
            await lab.advance(timedelta(days=2))
        with pytest.raises(Invalid, match="to 9000-01-01T00:00:00"):
            await lab.change_clock(time=lab.clock.now() + timedelta(days=2))
        await lab.advance(timedelta(days=1))

    run_lab(main, Setup(fleet=FLEET, start=datetime(8999, 12, 31, tzinfo=UTC)))


@pytest.mark.parametrize("begin", ["0s", "10s"])
def test_polls_do_not_count_during_a_lapse(begin: str) -> None:
    """A scope that is not polled gets no events of users, as on Azure."""

    async def main(lab: LabService) -> None:
        await poll(lab)
        await add_fault(lab, fault="lapse", **{"from": begin, "for": "1m"})
        await lab.advance(timedelta(seconds=10))
        await poll(lab)
        assert await lab.operations.restart("web-0", by="test") is None
        await lab.advance(timedelta(minutes=20))
        await poll(lab)
        assert await lab.operations.restart("web-1", by="test") is not None

    run_lab(main)


def test_lapse_removed_before_its_begin_changes_nothing() -> None:
    async def main(lab: LabService) -> None:
        await poll(lab)
        lapse = await add_fault(lab, fault="lapse", **{"from": "10s"})
        lab.remove_fault(lapse.id)
        await lab.advance(timedelta(minutes=1))
        assert await lab.operations.restart("web-0", by="test") is not None

    run_lab(main)


def test_errors_inside_a_lab_are_raised() -> None:
    async def main(lab: LabService) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run_lab(main)
