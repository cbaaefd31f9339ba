"""The libvirt platform on libvirt's own test driver: an event stops a VM at most once.

Whatever starts the VM again, here or in another process, and whenever this one ends.
"""

from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import RedeployMethod
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest
from forewarn.platform.libvirt.marker import Marker, mark, mark_stop, read
from tests.builders import guid
from tests.unit.platform.libvirt.libvirt_world import (
    DRAIN,
    DRAIN_AGAIN,
    LIVE_MIGRATION,
    OFF,
    RUNNING,
    Host,
    MoveWorld,
    Target,
    break_down,
    order,
    refusal,
    refuse,
)

pytestmark = pytest.mark.system

LIVE_ONLY = order(EventType.REDEPLOY, method=RedeployMethod.LIVE_ONLY)


@pytest.fixture
def world(tmp_path: Path) -> MoveWorld:
    return MoveWorld(tmp_path)


def test_vm_that_its_owner_starts_during_the_move_is_not_stopped(world: MoveWorld) -> None:
    """It was off, so it would have been left off on the other host."""
    world.web.destroy()

    def start_meanwhile(handle: Any) -> str:
        world.web.create()
        return "<domainCapabilities/>"

    world.target = Target(world.on("host-b"), getDomainCapabilities=start_meanwhile)

    with pytest.raises(ImpactFailed, match="the VM was started on host-a meanwhile") as failed:
        world.carry_out(DRAIN)
    assert not failed.value.facts.get("is_final")
    assert (world.state(), world.names_on("host-b")) == (RUNNING, [])
    assert not {"shutdown", "destroy"} & {*world.source.calls}


def starting_again(world: MoveWorld) -> Host:
    """host-a, where something starts web-0 as soon as it is seen to be off."""

    def state(handle: Any) -> Any:
        found = handle.state()
        if found[0] == OFF:
            handle.create()
        return found

    return Host(world.on("host-a"), state=state)


def stops(world: MoveWorld) -> int:
    return world.source.calls.count("shutdown") + world.source.calls.count("destroy")


def fails_finally(world: MoveWorld, request: ImpactRequest, reason: str) -> bool:
    with pytest.raises(ImpactFailed, match=reason) as failed:
        world.carry_out(request)
    return bool(failed.value.facts["is_final"])


def test_vm_that_its_owner_starts_after_it_was_stopped_is_left_alone(world: MoveWorld) -> None:
    """A cluster manager or a watchdog does that after each stop, so another try is pointless. To
    start it on the target would duplicate it.
    """
    world.source = starting_again(world)

    assert fails_finally(world, DRAIN, "the VM was started on host-a meanwhile")
    assert (world.state(), world.names_on("host-b"), stops(world)) == (RUNNING, [], 1)
    assert read(world.web) == Marker(stopped_by=guid(1))

    assert fails_finally(world, DRAIN_AGAIN, "it was stopped for this event before")
    assert (world.state(), world.names_on("host-b"), stops(world)) == (RUNNING, [], 1)


def test_vm_that_is_started_again_before_it_is_seen_off_is_stopped_once(world: MoveWorld) -> None:
    def shut_down_and_start(handle: Any) -> None:
        handle.shutdown()
        handle.create()

    world.source = Host(world.on("host-a"), shutdown=shut_down_and_start)

    assert fails_finally(world, DRAIN, "the VM was started on host-a meanwhile")
    assert (world.state(), stops(world)) == (RUNNING, 1)


def test_transient_vm_that_is_started_again_is_stopped_once(world: MoveWorld) -> None:
    """Its metadata is gone with it, so this try must be the last."""
    xml = world.web.XMLDesc()
    world.web.undefine()

    def state(handle: Any) -> Any:
        if not world.names_on("host-a"):
            world.on("host-a").createXML(xml)
            return [OFF, 0]
        return handle.state()

    world.source = Host(world.on("host-a"), state=state)

    assert fails_finally(world, DRAIN, "the VM was started on host-a meanwhile")
    assert fails_finally(world, DRAIN_AGAIN, "it was stopped for this event before")
    assert (world.state(), stops(world)) == (RUNNING, 1)


class Crash(BaseException):
    """The process ends here."""


def crash(handle: Any) -> None:
    raise Crash


def crash_before_the_start(world: MoveWorld) -> None:
    world.target = Target(world.on("host-b"), create=crash)
    with pytest.raises(Crash):
        world.carry_out(DRAIN)
    assert (world.state(), stops(world)) == (OFF, 1)
    world.target = Target(world.on("host-b"))


def test_vm_that_is_started_at_home_after_a_crash_is_not_stopped_again(world: MoveWorld) -> None:
    """By libvirt itself, say, when the machine boots."""
    crash_before_the_start(world)
    world.web.create()

    assert fails_finally(world, DRAIN_AGAIN, "it was stopped for this event before")
    assert (world.state(), world.names_on("host-b"), stops(world)) == (RUNNING, [], 1)
    assert read(world.web) == Marker(stopped_by=guid(1))


def test_vm_that_is_still_off_after_a_crash_moves(world: MoveWorld) -> None:
    crash_before_the_start(world)

    assert world.carry_out(DRAIN_AGAIN).host == "host-b"
    assert (world.names_on("host-a"), world.state("host-b"), stops(world)) == ([], RUNNING, 1)
    assert read(world.on("host-b").lookupByName("web-0")) == Marker()


def test_vm_that_is_started_at_home_while_it_waits_for_its_move_is_not_stopped(
    world: MoveWorld,
) -> None:
    """Others may leave the host first, which takes minutes."""
    crash_before_the_start(world)

    def start(handle: Any) -> Any:
        if not handle.isActive():
            handle.create()
        return handle.info()

    world.source = Host(world.on("host-a"), info=start)

    assert fails_finally(world, DRAIN_AGAIN, "the VM was started on host-a meanwhile")
    assert (world.state(), world.names_on("host-b"), stops(world)) == (RUNNING, [], 0)


def test_crash_before_the_guest_is_off_does_not_end_the_move(world: MoveWorld) -> None:
    """It still runs as it did before, so nothing has started it again."""
    world.source = Host(world.on("host-a"), shutdown=crash)
    with pytest.raises(Crash):
        world.carry_out(DRAIN)
    assert world.state() == RUNNING
    world.source = Host(world.on("host-a"))

    assert world.carry_out(DRAIN_AGAIN).host == "host-b"
    assert stops(world) == 1


def test_guest_that_still_shuts_down_after_a_crash_is_waited_for(world: MoveWorld) -> None:
    """A live migration would be refused, or would arrive as a guest that shuts down."""
    mark(world.web, guid(1), "host-a", "host-b")
    mark_stop(world.web, guid(1))
    states = [[RUNNING, 1]] * 4

    def state(handle: Any) -> Any:
        if states:
            return states.pop()
        if handle.isActive():
            handle.destroy()
        return handle.state()

    world.source = Host(world.on("host-a"), state=state)

    done = world.carry_out(DRAIN_AGAIN, grace=30)

    assert (done.host, done.detail) == ("host-b", "the VM was off; moved to host-b")
    assert (world.state("host-b"), stops(world)) == (RUNNING, 0)


def test_vm_that_is_started_again_between_two_targets_is_stopped_once(tmp_path: Path) -> None:
    """The second target fails for a reason that may pass, which is no reason to stop it again."""
    world = MoveWorld(tmp_path, ("host-a", "host-b", "host-c"))

    class Away(Host):
        def defineXML(self, xml: str) -> Any:
            world.web.create()
            break_down(None)

    world.connections["test:///host-c"] = Away(world.on("host-c"))
    world.target = Target(world.on("host-b"), create=refuse(libvirt.VIR_ERR_OPERATION_FAILED))

    assert fails_finally(world, DRAIN, "host-b failed: .*; host-c failed: ")
    assert (world.state(), stops(world)) == (RUNNING, 1)
    assert fails_finally(world, DRAIN_AGAIN, "it was stopped for this event before")


# --- a restart in place

REDEPLOY = order(EventType.REDEPLOY, Cause.REDEPLOY)
REDEPLOY_AGAIN = order(EventType.REDEPLOY, Cause.REDEPLOY, tries=2)


@pytest.fixture
def one_host(tmp_path: Path) -> MoveWorld:
    world = MoveWorld(tmp_path)
    world.hosts = ["host-a"]
    return world


def test_restart_in_place_is_done_if_something_else_starts_the_vm(one_host: MoveWorld) -> None:
    one_host.source = starting_again(one_host)

    done = one_host.carry_out(REDEPLOY)

    assert done.detail == "the guest shut down by itself; started again: there is no other host"
    assert (one_host.state(), stops(one_host), read(one_host.web)) == (RUNNING, 1, Marker())


@pytest.mark.parametrize("is_started", [False, True])
def test_restart_in_place_after_a_crash_stops_the_vm_no_more(
    one_host: MoveWorld, is_started: bool
) -> None:
    one_host.source = Target(one_host.on("host-a"), create=crash)
    with pytest.raises(Crash):
        one_host.carry_out(REDEPLOY)
    assert (one_host.state(), stops(one_host)) == (OFF, 1)
    if is_started:
        one_host.web.create()
    one_host.source = Host(one_host.on("host-a"))

    done = one_host.carry_out(REDEPLOY_AGAIN)

    assert (done.host, done.is_back) == ("", False)
    assert (one_host.state(), stops(one_host), read(one_host.web)) == (RUNNING, 0, Marker())


def test_restart_in_place_that_needs_two_starts_stops_the_vm_once(one_host: MoveWorld) -> None:
    refusals = [refusal(libvirt.VIR_ERR_OPERATION_FAILED)]

    def create(handle: Any) -> None:
        if refusals:
            raise refusals.pop()
        handle.create()

    one_host.source = Target(one_host.on("host-a"), create=create)

    with pytest.raises(ImpactFailed, match="host-a failed: libvirt of host-a: no"):
        one_host.carry_out(REDEPLOY)
    assert one_host.state() == RUNNING
    assert one_host.carry_out(REDEPLOY_AGAIN).detail == "started again: there is no other host"
    assert (one_host.state(), stops(one_host), read(one_host.web)) == (RUNNING, 1, Marker())


# --- a VM that may only be moved live


@pytest.mark.parametrize("request_", [LIVE_ONLY, LIVE_MIGRATION], ids=["redeploy", "freeze"])
def test_live_only_vm_that_its_owner_starts_is_not_stopped(
    world: MoveWorld, request_: ImpactRequest
) -> None:
    """It was off when its move began, so no migration was tried."""
    world.web.destroy()

    def state(handle: Any) -> Any:
        found = handle.state()
        if found[0] == OFF and "info" in world.source.calls:  # the targets are chosen
            handle.create()
        return found

    world.source = Host(world.on("host-a"), state=state)

    with pytest.raises(ImpactFailed, match="the VM was started on host-a meanwhile") as failed:
        world.carry_out(request_)
    assert not failed.value.facts.get("is_final")
    assert (world.state(), world.names_on("host-b"), stops(world)) == (RUNNING, [], 0)


# --- a move that no target completes


def test_event_stops_a_vm_once(world: MoveWorld) -> None:
    """No target starts it, so it is started at home, and stays there."""
    world.target = Target(world.on("host-b"), create=refuse(libvirt.VIR_ERR_OPERATION_FAILED))

    with pytest.raises(ImpactFailed, match="host-b failed: libvirt of host-b: no") as failed:
        world.carry_out(DRAIN)

    assert failed.value.facts["is_final"]
    assert world.source.calls.count("shutdown") == 1
    assert (world.state(), world.names_on("host-b")) == (RUNNING, [])
    assert read(world.web) == Marker(stopped_by=guid(1))


def test_next_try_after_a_lost_result_does_not_stop_the_vm_again(world: MoveWorld) -> None:
    """The daemon or the server died before it could record the failure."""
    mark(world.web, "", "", "", guid(1))

    with pytest.raises(ImpactFailed, match="it was stopped for this event before") as failed:
        world.carry_out(DRAIN_AGAIN)
    assert failed.value.facts["is_final"]
    assert (world.state(), "shutdown" in world.source.calls) == (RUNNING, False)


def test_vm_that_was_to_stay_and_is_off_is_started(world: MoveWorld) -> None:
    """The daemon died while it started the VM at home."""
    mark(world.web, guid(1), "", "", guid(1))
    world.web.destroy()

    with pytest.raises(ImpactFailed, match="it was stopped for this event before"):
        world.carry_out(DRAIN_AGAIN)
    assert world.state() == RUNNING
    assert read(world.web) == Marker(stopped_by=guid(1))


def test_vm_that_could_not_be_started_at_home_is_started_there_by_the_next_try(
    world: MoveWorld,
) -> None:
    """The event has given up its move, so the next try does not begin it again."""
    world.target = Target(world.on("host-b"), create=refuse(libvirt.VIR_ERR_OPERATION_FAILED))
    world.source = Target(world.on("host-a"), create=refuse(libvirt.VIR_ERR_OPERATION_FAILED))
    with pytest.raises(ImpactFailed, match="libvirt of host-a: no"):
        world.carry_out(DRAIN)
    assert world.state() == OFF

    world.source, world.target = Host(world.on("host-a")), Target(world.on("host-b"))
    with pytest.raises(ImpactFailed, match="it was stopped for this event before"):
        world.carry_out(DRAIN_AGAIN)
    assert (world.state(), world.names_on("host-b")) == (RUNNING, [])


def test_another_event_may_stop_the_vm(world: MoveWorld) -> None:
    mark(world.web, "", "", "", guid(2))

    assert world.carry_out(DRAIN).host == "host-b"
