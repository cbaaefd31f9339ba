"""The libvirt platform on libvirt's own test driver: VMs that an impact left suspended or off, and
whose event ended while nobody could act on them.
"""

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import Cause, EventType
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest
from forewarn.platform.libvirt.marker import mark, read, suspend
from tests.builders import guid
from tests.unit.platform.libvirt.libvirt_world import (
    OFF,
    PAUSED,
    RUNNING,
    Host,
    LibvirtWorld,
    order,
    refusal,
)

pytestmark = pytest.mark.system

EVENT = guid(1)


@pytest.fixture
def world(tmp_path: Path) -> LibvirtWorld:
    world = LibvirtWorld(tmp_path)
    world.hosts = []  # a daemon knows only its own
    return world


def recover(
    world: LibvirtWorld,
    connect: Any = None,
    *,
    may_start: bool = True,
    may_run_on: tuple[str, ...] = (),
    **more: Any,
) -> str:
    return asyncio.run(
        world.platform(connect, **more).recover(
            "host-a", EVENT, "web-0", may_start=may_start, may_run_on=may_run_on
        )
    )


def begun(world: LibvirtWorld, host: str = "host-a") -> list[tuple[str, str]]:
    return asyncio.run(world.platform().list_begun(host))


def test_marked_domains_of_a_host_are_listed(world: LibvirtWorld) -> None:
    """What another host has defined here during a move is that host's."""
    world.run_vm("host-a", "web-1", 2)
    mark(world.web, EVENT)
    copy = world.on("host-b").defineXML(world.web.XMLDesc())
    mark(copy, EVENT, "host-a", "host-b")

    assert begun(world) == [(EVENT, "web-0")]
    assert begun(world, "host-b") == []


def test_suspended_vm_is_resumed(world: LibvirtWorld) -> None:
    suspend(world.web, EVENT)

    assert recover(world) == "the VM was suspended: resumed; the guest agent set its clock"

    assert world.state() == RUNNING
    assert begun(world) == []
    assert recover(world) == "nothing was left to do"


@pytest.mark.parametrize(
    ("what", "first"),
    [
        (order(EventType.REBOOT), "reboot"),
        (order(EventType.FREEZE), "suspend"),
        (order(EventType.REDEPLOY, Cause.FAILED), "migrate3"),
        (order(EventType.PREEMPT), "shutdown"),
    ],
    ids=lambda each: getattr(each, "type", each),
)
def test_vm_that_another_event_left_suspended_is_resumed_before_the_next_one_acts(
    world: LibvirtWorld, what: ImpactRequest, first: str
) -> None:
    """Failed hardware and evictions do not wait for the next try of an event that has failed."""
    world.hosts = ["host-a", "host-b"]
    suspend(world.web, guid(2))
    acted = list[int]()

    def act(handle: Any) -> None:
        acted.append(handle.state()[0])
        raise KeyboardInterrupt

    home = world.on("host-a")
    host = Host(home, **{"setTime": lambda handle: 0, first: act})
    with pytest.raises(KeyboardInterrupt):
        world.run_impact(
            what, connect=lambda uri: host if world.connect(uri) is home else world.connect(uri)
        )

    assert acted == [RUNNING]
    assert host.calls.index("resume") < host.calls.index("setTime") < host.calls.index(first)


@pytest.mark.parametrize("marker", [(guid(2),), (guid(2), "host-a", "host-b")])
def test_vm_that_its_owner_suspended_stays_so_whatever_an_earlier_event_has_left(
    world: LibvirtWorld, marker: tuple[str, ...]
) -> None:
    """A failed Reboot, say: it suspends nothing."""
    mark(world.web, *marker)
    world.web.suspend()

    done = world.run_impact(order(EventType.FREEZE))

    assert done.detail == "the VM was already suspended and stays suspended"
    assert world.state() == PAUSED


def test_clock_of_a_resumed_vm_is_set(world: LibvirtWorld) -> None:
    """It stood still, as in a Freeze that ends in time."""
    suspend(world.web, EVENT)
    host = Host(world.on("host-a"), setTime=lambda handle: 0)

    done = recover(world, lambda uri: host)

    assert done == "the VM was suspended: resumed; the guest agent set its clock"
    assert host.calls.index("resume") < host.calls.index("setTime")


@pytest.mark.parametrize("marker", [(EVENT,), (EVENT, "host-a", "host-b")])
def test_stopped_vm_is_started(world: LibvirtWorld, marker: tuple[str, ...]) -> None:
    """Its target has answered, and does not run it; what the move has defined there is removed."""
    mark(world.web, *marker)
    world.on("host-b").defineXML(world.web.XMLDesc())
    world.web.destroy()

    assert recover(world) == "the VM was off: started"

    assert (world.state(), world.names_on("host-b")) == (RUNNING, [] if marker[1:] else ["web-0"])
    assert begun(world) == []


def test_target_of_a_move_does_not_remove_the_vm_from_its_host(world: LibvirtWorld) -> None:
    """Both are off, and have the marker of the move: only what it has defined may be removed. Else
    two hosts, each looking for the VM, could remove both.
    """
    mark(world.web, EVENT, "host-b", "host-a")  # it moves from host-b to host-a
    world.on("host-b").defineXML(world.web.XMLDesc())
    world.web.destroy()

    assert recover(world, may_run_on=("host-b",)) == "nothing was left to do"

    assert (world.names_on("host-a"), world.names_on("host-b")) == (["web-0"], ["web-0"])


def test_vm_that_somebody_may_have_started_elsewhere_is_not_started(world: LibvirtWorld) -> None:
    """Its host was away. An operator has started it on another one, as the runbook says."""
    mark(world.web, EVENT)
    world.on("host-b").defineXML(world.web.XMLDesc()).create()
    world.web.destroy()

    assert recover(world, may_start=False) == "the VM is off and stays off"

    assert (world.state(), world.state("host-b")) == (OFF, RUNNING)
    assert begun(world) == []


def test_vm_that_runs_on_its_target_is_not_started(world: LibvirtWorld) -> None:
    mark(world.web, EVENT, "host-a", "host-b")
    world.on("host-b").defineXML(world.web.XMLDesc()).create()
    world.web.destroy()

    recover(world)

    assert (world.state(), world.state("host-b")) == (OFF, RUNNING)


def test_vm_that_runs_on_another_host_is_not_started(world: LibvirtWorld) -> None:
    """An operator has started it there after a failed try, before the event was completed."""
    mark(world.web, EVENT)
    world.on("host-b").defineXML(world.web.XMLDesc()).create()
    world.web.destroy()

    assert recover(world, may_run_on=("host-b",)) == "nothing was left to do"

    assert (world.state(), world.state("host-b")) == (OFF, RUNNING)


def test_vm_whose_target_does_not_answer_is_not_started(world: LibvirtWorld) -> None:
    mark(world.web, EVENT, "host-a", "host-b")
    world.web.destroy()

    def connect(uri: str) -> Any:
        if uri == "test:///host-b":
            raise refusal(libvirt.VIR_ERR_NO_CONNECT)
        return world.connect(uri)

    with pytest.raises(ImpactFailed, match="web-0 may run on host-b, which does not answer"):
        recover(world, connect)
    assert world.state() == OFF


def test_vm_that_another_host_moves_here_is_left_to_that_host(world: LibvirtWorld) -> None:
    """An earlier try has moved it there, and the next one moves it back: it starts it here."""
    mark(world.web, EVENT, "host-b", "host-a")
    world.web.destroy()

    assert recover(world) == "nothing was left to do"

    assert (world.state(), read(world.web).event) == (OFF, EVENT)


@pytest.mark.parametrize("is_off", [False, True])
def test_vm_that_another_event_acts_on_is_left_alone(world: LibvirtWorld, is_off: bool) -> None:
    """Or that its owner has suspended or stopped since."""
    suspend(world.web, guid(2))
    if is_off:
        world.web.destroy()

    recover(world)

    assert world.state() == (OFF if is_off else PAUSED)
    assert read(world.web).event == guid(2)


def test_vm_that_is_paused_for_another_reason_stays_paused(world: LibvirtWorld) -> None:
    """Its disk is full, say."""
    mark(world.web, EVENT)
    paused = [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR]
    host = Host(world.on("host-a"), state=lambda handle: paused)

    recover(world, lambda uri: host)

    assert "resume" not in host.calls
    assert begun(world) == []


def test_evicted_vm_stays_off(world: LibvirtWorld) -> None:
    """The eviction has overtaken a failed try of another event, which is over now."""
    mark(world.web, EVENT)
    world.run_impact(
        dataclasses.replace(order(EventType.PREEMPT, Cause.EVICTION), event_id=guid(2))
    )

    assert recover(world) == "nothing was left to do"

    assert world.state() == OFF


@pytest.mark.parametrize("is_stopped", [True, False])
def test_vm_that_a_cancelled_call_still_stops_is_started(
    world: LibvirtWorld, is_stopped: bool
) -> None:
    """The event is completed while libvirt destroys the domain, which takes its time, or refuses
    to.
    """
    asked, go = threading.Event(), threading.Event()

    def destroy(handle: Any) -> None:
        asked.set()
        assert go.wait(10)
        if is_stopped:
            handle.destroy()

    host = Host(world.on("host-a"), shutdown=lambda handle: None, destroy=destroy)
    platform = world.platform(lambda uri: host)

    async def test() -> str:
        redeploy = order(EventType.REDEPLOY, Cause.REDEPLOY)
        call = asyncio.create_task(platform.run_impact(redeploy))
        await asyncio.to_thread(asked.wait, 10)
        call.cancel()
        asyncio.get_running_loop().call_later(0.01, go.set)
        with pytest.raises(asyncio.CancelledError):
            await call
        return await platform.recover("host-a", EVENT, "web-0", may_start=True, may_run_on=())

    expected = "the VM was off: started" if is_stopped else "nothing was left to do"
    assert asyncio.run(test()) == expected

    assert world.state() == RUNNING
    assert begun(world) == []


def test_vm_that_still_shuts_down_is_started(world: LibvirtWorld) -> None:
    """Its guest was asked to, and the event was completed before it was off."""
    mark(world.web, EVENT)
    states = [[RUNNING, 1]] * 3

    def state(handle: Any) -> Any:
        if states:
            return states.pop()
        if "destroy" not in host.calls:
            host.calls.append("destroy")
            handle.destroy()
        return handle.state()

    host = Host(world.on("host-a"), state=state)

    assert recover(world, lambda uri: host, grace=30) == "the VM was off: started"
    assert world.state() == RUNNING
