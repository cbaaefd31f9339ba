"""The libvirt platform on libvirt's own test driver: when a restarted VM is back."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import Cause, EventType
from tests.builders import SECOND
from tests.unit.platform.libvirt.libvirt_world import Host, LibvirtWorld, order, refusal

pytestmark = pytest.mark.system

REBOOT = order(EventType.REBOOT)
WAIT_SECONDS_MAX = 30


@pytest.fixture
def world(tmp_path: Path) -> LibvirtWorld:
    return LibvirtWorld(tmp_path)


def failing(*numbers: int) -> Callable[[Any], object]:
    """A guest agent that fails with these errors, and then answers."""
    left = list(numbers)

    def answer(handle: Any) -> object:
        if left:
            raise refusal(left.pop(0))
        return {"seconds": 1, "nseconds": 0}

    return answer


def wait_until_back(world: LibvirtWorld, host: Host, of: Any = REBOOT) -> None:
    platform = world.platform(connect=lambda uri: host)
    asyncio.run(asyncio.wait_for(platform.wait_until_back(of), WAIT_SECONDS_MAX))


@pytest.mark.parametrize(
    "reboot",
    [
        pytest.param(lambda handle: 0, id="reset"),
        pytest.param(lambda handle: handle.shutdown(), id="started again"),
    ],
)
def test_restarted_vm_is_not_back_yet(world: LibvirtWorld, reboot: Callable[[Any], object]) -> None:
    host = Host(world.on("host-a"), reboot=reboot)

    assert not world.run_impact(REBOOT, connect=lambda uri: host).is_back


def test_vm_that_rebooted_by_itself_is_not_back_yet(world: LibvirtWorld) -> None:
    host = Host(
        world.on("host-a"), reboot=lambda handle: [listener() for listener in host.listeners]
    )

    assert not world.run_impact(REBOOT, connect=lambda uri: host, grace=60).is_back


def test_vm_that_was_started_is_not_back_yet(world: LibvirtWorld) -> None:
    world.web.destroy()

    assert not world.run_impact(order(EventType.REBOOT, Cause.RESTART)).is_back


def test_vm_that_stays_off_or_suspended_is_not_waited_for(world: LibvirtWorld) -> None:
    """It does not come back, and its event would last until the limit."""
    world.web.suspend()
    assert world.run_impact(REBOOT).is_back
    world.web.destroy()
    assert world.run_impact(REBOOT).is_back
    assert world.run_impact(order(EventType.REDEPLOY)).is_back
    assert world.run_impact(order(EventType.REDEPLOY, tries=2)).is_back


@pytest.mark.parametrize("type_", [EventType.FREEZE, EventType.PREEMPT])
def test_impact_without_a_restart_is_not_waited_for(world: LibvirtWorld, type_: EventType) -> None:
    assert world.run_impact(order(type_)).is_back


def test_migrated_vm_was_never_away(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"), migrate3=lambda handle: handle)

    done = world.run_impact(
        order(EventType.REDEPLOY),
        connect=lambda uri: host if uri.endswith("host-a") else world.connect(uri),
    )

    assert done.detail == "migrated live to host-b"
    assert done.is_back


def test_vm_is_back_when_its_agent_answers(world: LibvirtWorld) -> None:
    """It is asked every two seconds; while the guest boots, nothing is connected."""
    connected = failing(*[libvirt.VIR_ERR_AGENT_UNRESPONSIVE] * 3)
    host = Host(world.on("host-a"), getTime=connected)

    wait_until_back(world, host)

    assert host.calls.count("getTime") == 4
    assert world.clock.slept == [2 * SECOND] * 3


def test_moved_vm_is_asked_on_its_new_host(world: LibvirtWorld) -> None:
    """The daemon of its old host asks, and its request still names that host."""
    moved = order(EventType.REDEPLOY, Cause.REDEPLOY, targets=("host-b",))
    target = Host(world.on("host-b"), getTime=failing())

    async def main() -> None:
        await world.platform().run_impact(moved)
        world.hosts = []
        platform = world.platform(
            connect=lambda uri: target if uri.endswith("host-b") else world.connect(uri)
        )
        await platform.wait_until_back(moved)

    asyncio.run(asyncio.wait_for(main(), WAIT_SECONDS_MAX))
    assert "getTime" in target.calls


@pytest.mark.parametrize(
    "number",
    [libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_SYSTEM_ERROR],
)
def test_failing_libvirt_does_not_end_the_wait(world: LibvirtWorld, number: int) -> None:
    """The VM may be off for a moment, and libvirtd may be restarted."""
    host = Host(world.on("host-a"), getTime=failing(number))

    wait_until_back(world, host)

    assert host.calls.count("getTime") == 2


def test_vm_that_no_host_has_is_not_back(world: LibvirtWorld) -> None:
    async def main() -> None:
        waiting = asyncio.create_task(
            world.platform().wait_until_back(order(EventType.REBOOT, name="web-9"))
        )
        while len(world.clock.slept) < 5:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), WAIT_SECONDS_MAX))


@pytest.mark.parametrize(
    "number", [libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED, libvirt.VIR_ERR_NO_SUPPORT]
)
def test_vm_without_an_agent_is_asked_once(world: LibvirtWorld, number: int) -> None:
    """Its polls or the limit decide."""
    host = Host(world.on("host-a"), getTime=failing(number))

    async def main() -> None:
        waiting = asyncio.create_task(
            world.platform(connect=lambda uri: host).wait_until_back(REBOOT)
        )
        while "getTime" not in host.calls:
            await asyncio.sleep(0.001)
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), WAIT_SECONDS_MAX))
    assert host.calls.count("getTime") == 1
    assert world.clock.slept == []


def test_reset_comes_before_the_first_question_to_the_agent(world: LibvirtWorld) -> None:
    """An agent that answers before the guest goes down is not a sign that it is back."""
    host = Host(world.on("host-a"), reboot=lambda handle: 0, getTime=failing())

    async def main() -> None:
        platform = world.platform(connect=lambda uri: host)
        await platform.run_impact(REBOOT)
        await platform.wait_until_back(REBOOT)

    asyncio.run(asyncio.wait_for(main(), WAIT_SECONDS_MAX))
    assert [verb for verb in host.calls if verb in ("reset", "getTime")] == ["reset", "getTime"]
