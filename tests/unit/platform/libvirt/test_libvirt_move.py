"""The libvirt platform on libvirt's own test driver: a VM moves.

That driver cannot migrate, so most moves stop it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import libvirt
import msgspec
import pytest

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Power
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactResult
from forewarn.platform.libvirt.marker import mark
from tests.builders import guid
from tests.unit.platform.libvirt.libvirt_world import (
    NOT_LIVE,
    OFF,
    RUNNING,
    Host,
    LibvirtWorld,
    is_marked,
    order,
    refusal,
)

pytestmark = pytest.mark.system

REDEPLOY = order(EventType.REDEPLOY, Cause.REDEPLOY)
AGAIN = order(EventType.REDEPLOY, Cause.REDEPLOY, tries=2)


@pytest.fixture
def world(tmp_path: Path) -> LibvirtWorld:
    return LibvirtWorld(tmp_path)


def test_without_live_migration_the_vm_is_stopped_and_moved(
    world: LibvirtWorld,
) -> None:
    done = world.run_impact(REDEPLOY)

    assert done == ImpactResult(
        host="host-b",
        detail=f"{NOT_LIVE}; the guest shut down by itself; moved to host-b",
        is_back=False,
    )
    assert world.names_on("host-a") == []
    assert world.state("host-b") == RUNNING
    assert world.on("host-b").lookupByName("web-0").UUIDString() == guid(1).lower()


def test_a_failed_host_moves_its_vms_too(world: LibvirtWorld) -> None:
    assert world.run_impact(order(EventType.REBOOT, Cause.FAILED)).host == "host-b"


@pytest.mark.parametrize(("power", "state"), [(Power.RUNNING, RUNNING), (Power.STOPPED, OFF)])
def test_failed_host_starts_only_vms_that_ran(
    world: LibvirtWorld, power: Power, state: int
) -> None:
    """The failure may have stopped it; or its owner did, and then it stays off on its new host."""
    world.web.destroy()
    request = order(EventType.REBOOT, Cause.FAILED)

    done = world.run_impact(
        dataclasses.replace(request, vm=msgspec.structs.replace(request.vm, power=power))
    )

    assert (done.host, done.is_back) == ("host-b", power is Power.STOPPED)
    assert world.state("host-b") == state


def test_live_migration_moves_the_definition(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"), migrate3=lambda handle: handle)

    done = world.run_impact(
        REDEPLOY, connect=lambda uri: host if uri.endswith("host-a") else world.connect(uri)
    )

    assert done == ImpactResult(host="host-b", detail="migrated live to host-b")
    to, _, flags = host.arguments["migrate3"]
    assert to is world.on("host-b")
    assert (
        flags
        == libvirt.VIR_MIGRATE_LIVE
        | libvirt.VIR_MIGRATE_PERSIST_DEST
        | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
    )
    assert "shutdown" not in host.calls


def test_marker_of_the_next_impact_outlives_the_end_of_a_move(world: LibvirtWorld) -> None:
    """A daemon that is cut off still cleans up, and the new host acts on the VM already."""

    def undefine(handle: Any) -> None:
        mark(world.on("host-b").lookupByName("web-0"), guid(9))
        handle.undefine()

    host = Host(world.on("host-a"), undefineFlags=undefine)

    world.run_impact(
        REDEPLOY, connect=lambda uri: host if uri.endswith("host-a") else world.connect(uri)
    )

    assert world.names_on("host-a") == []
    assert is_marked(world.on("host-b").lookupByName("web-0"), guid(9))


def test_aborted_migration_fails_and_does_not_stop_the_vm(
    world: LibvirtWorld,
) -> None:
    def break_off(handle: Any) -> None:
        raise refusal(libvirt.VIR_ERR_OPERATION_FAILED)

    host = Host(world.on("host-a"), migrate3=break_off)

    with pytest.raises(ImpactFailed, match="libvirt of host-a: no"):
        world.run_impact(
            REDEPLOY, connect=lambda uri: host if uri.endswith("host-a") else world.connect(uri)
        )
    assert world.state() == RUNNING


def test_with_one_host_the_vm_is_stopped_and_started(tmp_path: Path) -> None:
    world = LibvirtWorld(tmp_path, ["host-a"])

    done = world.run_impact(REDEPLOY)

    assert done == ImpactResult(
        detail="the guest shut down by itself; started again: there is no other host",
        is_back=False,
    )
    assert world.state() == RUNNING


def test_try_after_a_crash_between_stop_and_start_continues(world: LibvirtWorld) -> None:
    world.on("host-b").defineXML(world.web.XMLDesc())
    world.web.destroy()

    assert world.run_impact(AGAIN).host == "host-b"
    assert world.names_on("host-a") == []
    assert world.state("host-b") == RUNNING


def test_try_after_a_crash_does_not_start_a_moved_vm_again(
    world: LibvirtWorld,
) -> None:
    """Two copies on one disk destroy it."""
    world.on("host-b").defineXML(world.web.XMLDesc()).create()
    world.web.destroy()

    assert world.run_impact(AGAIN) == ImpactResult("host-b", "running on host-b", is_back=False)
    assert world.names_on("host-a") == []


def test_vm_that_fails_to_start_on_the_target_is_restored(world: LibvirtWorld) -> None:
    class Full(Host):
        def defineXML(self, xml: str) -> Any:
            return Guests(self._connection.defineXML(xml))

    class Guests:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def create(self) -> None:
            raise refusal(libvirt.VIR_ERR_OPERATION_FAILED)

        def __getattr__(self, verb: str) -> Any:
            return getattr(self.handle, verb)

    full = Full(world.on("host-b"))

    with pytest.raises(ImpactFailed, match="libvirt of host-b: no"):
        world.run_impact(
            REDEPLOY, connect=lambda uri: full if uri.endswith("host-b") else world.connect(uri)
        )
    assert world.state() == RUNNING
    assert world.names_on("host-b") == []


def test_maintenance_moves_a_stopped_vm_without_starting_it(
    world: LibvirtWorld,
) -> None:
    world.web.destroy()

    done = world.run_impact(order(EventType.REDEPLOY))

    assert done.host == "host-b"
    assert world.state("host-b") == OFF
    again = world.run_impact(order(EventType.REDEPLOY, tries=2))
    assert again == ImpactResult(host="host-b", detail="off on host-b")
    assert world.state("host-b") == OFF


def test_second_try_leaves_a_stopped_vm_off(world: LibvirtWorld) -> None:
    world.web.destroy()

    world.run_impact(order(EventType.REDEPLOY, tries=2))

    assert world.state("host-b") == OFF


@pytest.mark.parametrize("is_defined_there", [False, True])
def test_second_try_starts_what_the_first_stopped(
    world: LibvirtWorld, is_defined_there: bool
) -> None:
    mark(world.web, guid(1))
    if is_defined_there:
        world.on("host-b").defineXML(world.web.XMLDesc())
    world.web.destroy()

    assert world.run_impact(order(EventType.REDEPLOY, tries=2)).host == "host-b"
    assert world.names_on("host-a") == []
    assert world.state("host-b") == RUNNING
    assert not is_marked(world.on("host-b").lookupByName("web-0"), guid(1))
