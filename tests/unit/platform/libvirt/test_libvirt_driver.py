"""The libvirt platform on libvirt's own test driver: what is done to a domain that stays where it
is.
"""

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Vm
from forewarn.errors import ImpactFailed
from forewarn.platform.libvirt.connection import LibvirtHosts
from forewarn.platform.libvirt.marker import mark, suspend
from tests.builders import SECOND, guid
from tests.unit.platform.libvirt.libvirt_world import (
    OFF,
    PAUSED,
    RUNNING,
    URIS,
    Host,
    LibvirtWorld,
    domain_xml,
    is_marked,
    order,
    refusal,
)

pytestmark = pytest.mark.system

STEPS = ("suspend", "resume", "reboot", "reset", "shutdown", "destroy", "create", "undefineFlags")


@pytest.fixture
def world(tmp_path: Path) -> LibvirtWorld:
    return LibvirtWorld(tmp_path)


def steps(host: Host) -> list[str]:
    return [verb for verb in host.calls if verb in STEPS]


def test_freeze_suspends_for_the_announced_duration(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"))

    done = world.run_impact(order(EventType.FREEZE, seconds=5), connect=lambda uri: host)

    assert done.detail.startswith("suspended for 5 seconds and resumed")
    assert steps(host) == ["suspend", "resume"]
    assert world.clock.slept == [5 * SECOND]
    assert world.state() == RUNNING


def test_clock_of_a_frozen_guest_is_set_where_an_agent_answers(world: LibvirtWorld) -> None:
    """It stood still while the VM was suspended. The agent sets it from the VM's RTC."""
    host = Host(world.on("host-a"), setTime=lambda handle: 0)

    done = world.run_impact(order(EventType.FREEZE, seconds=5), connect=lambda uri: host)

    assert done.detail == "suspended for 5 seconds and resumed; the guest agent set its clock"
    assert host.arguments["setTime"] == (None, libvirt.VIR_DOMAIN_TIME_SYNC)
    assert host.calls.index("resume") < host.calls.index("setTime")


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED, "no guest agent sets its clock"),
        (libvirt.VIR_ERR_AGENT_UNRESPONSIVE, "no guest agent sets its clock"),
        (
            libvirt.VIR_ERR_INTERNAL_ERROR,
            "the guest agent did not set its clock: libvirt of host-a: no",
        ),
    ],
    ids=["no channel", "no agent", "failed"],
)
def test_freeze_says_why_the_clock_was_not_set(
    world: LibvirtWorld, number: int, outcome: str
) -> None:
    """Most guests have no agent: that must not read like a failure."""

    def refuse(handle: Any) -> None:
        raise refusal(number)

    host = Host(world.on("host-a"), setTime=refuse)

    done = world.run_impact(order(EventType.FREEZE, seconds=5), connect=lambda uri: host)

    assert done.detail == f"suspended for 5 seconds and resumed; {outcome}"


def test_clock_is_set_too_when_an_earlier_try_froze_the_guest(world: LibvirtWorld) -> None:
    suspend(world.web, guid(1))
    host = Host(world.on("host-a"), setTime=lambda handle: 0)

    world.run_impact(order(EventType.FREEZE, tries=2), connect=lambda uri: host)

    assert "setTime" in host.calls


def test_hanging_guest_agent_delays_no_other_call(world: LibvirtWorld) -> None:
    """A guest can take a request and never answer; its neighbours need the same libvirt."""
    go = threading.Event()

    async def main() -> None:
        libvirts = LibvirtHosts(URIS, call_seconds_max=30, connect=world.connect)
        asked = [
            asyncio.create_task(libvirts.ask("host-a", lambda _: go.wait(30), seconds_max=20))
            for _ in range(5)
        ]
        await asyncio.sleep(0)
        assert await libvirts.ask("host-a", lambda connection: connection) is world.on("host-a")
        await libvirts.ask("host-a", lambda connection: connection, seconds_max=30)
        go.set()
        await asyncio.gather(*asked)

    asyncio.run(main())


def test_freeze_of_unknown_duration_takes_nine_seconds(world: LibvirtWorld) -> None:
    world.run_impact(order(EventType.FREEZE))

    assert world.clock.slept == [9 * SECOND]


def test_try_after_a_crash_during_a_freeze_resumes_the_vm(world: LibvirtWorld) -> None:
    """Whoever suspended it is no more, and nobody else would wake it."""
    suspend(world.web, guid(1))

    world.run_impact(order(EventType.FREEZE, tries=2))

    assert world.state() == RUNNING
    assert world.clock.slept == []
    assert not is_marked(world.web, guid(1))


@pytest.mark.parametrize("tries", [1, 2])
def test_vm_suspended_by_its_owner_stays_suspended(world: LibvirtWorld, tries: int) -> None:
    """A first try that failed before it did anything is no sign that it was us."""
    world.web.suspend()

    done = world.run_impact(order(EventType.FREEZE, tries=tries))

    assert done.detail == "the VM was already suspended and stays suspended"
    assert world.state() == PAUSED
    assert (
        world.run_impact(order(EventType.REBOOT, tries=tries)).detail
        == "the VM was suspended and stays suspended"
    )
    assert world.state() == PAUSED


def test_restart_resumes_a_suspended_vm(world: LibvirtWorld) -> None:
    world.web.suspend()

    world.run_impact(order(EventType.REBOOT, Cause.RESTART))

    assert world.state() == RUNNING


def test_freeze_removes_only_its_own_marker(world: LibvirtWorld) -> None:
    ours = "<f:vm xmlns:f='urn:forewarn:vm:1' scope='web'/>"
    world.on("host-a").defineXML(domain_xml(metadata=ours))
    before = world.web.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)

    world.run_impact(order(EventType.FREEZE))

    assert world.web.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE) == before
    assert not is_marked(world.web, guid(1))


@pytest.mark.parametrize("how", ["limit", "cancel"])
def test_suspend_after_a_timeout_is_undone(world: LibvirtWorld, how: str) -> None:
    """The wake of a try that gives up comes too early, and there may be no other try."""
    entered, go, awake = threading.Event(), threading.Event(), threading.Event()

    def slow(handle: Any) -> None:
        entered.set()
        go.wait(30)
        handle.suspend()

    def resume(handle: Any) -> None:
        handle.resume()
        awake.set()

    async def main() -> None:
        host = Host(world.on("host-a"), suspend=slow, resume=resume)
        platform = world.platform(
            connect=lambda uri: host, call_seconds_max=0.3 if how == "limit" else 30
        )
        work = asyncio.create_task(platform.run_impact(order(EventType.FREEZE, tries=3)))
        await asyncio.to_thread(entered.wait, 30)
        if how == "cancel":
            work.cancel()
            await asyncio.wait((work,), timeout=0.05)
            while not work.done():  # it is canceled again when the process exits
                work.cancel()
                await asyncio.sleep(0)
        (ended,) = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(ended, ImpactFailed if how == "limit" else asyncio.CancelledError)

    asyncio.run(main())
    assert world.state() == RUNNING
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    is_awaited = any(thread.name == "last-call-wait" for thread in threads)
    assert is_awaited or how == "limit", "the process would exit before the VM is resumed"
    go.set()
    assert awake.wait(30)
    assert world.state() == RUNNING


def test_a_freeze_that_is_cancelled_resumes_the_vm(world: LibvirtWorld) -> None:
    """The service is stopped, or another server has taken over: the VM must not stay frozen.

    Its clock is set after that.
    """
    awake = threading.Event()

    def set_clock(handle: Any) -> None:
        assert world.state() == RUNNING
        awake.set()

    class Endless:
        now = world.clock.now

        async def sleep_until(self, moment: object) -> None:
            frozen.set()
            await asyncio.Event().wait()

    async def main() -> None:
        host = Host(world.on("host-a"), setTime=set_clock)
        platform = world.platform(connect=lambda uri: host, clock=Endless())
        work = asyncio.create_task(platform.run_impact(order(EventType.FREEZE)))
        await frozen.wait()
        assert world.state() == PAUSED
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    frozen = asyncio.Event()
    asyncio.run(main())

    assert awake.is_set(), "the call ends when the VM is as it was"
    assert world.state() == RUNNING


def test_cooperative_guest_reboots_by_itself(world: LibvirtWorld) -> None:
    host = Host(
        world.on("host-a"), reboot=lambda handle: [listener() for listener in host.listeners]
    )

    done = world.run_impact(order(EventType.REBOOT), connect=lambda uri: host, grace=60)

    assert done.detail == "the guest rebooted by itself"
    assert steps(host) == ["reboot"]


def test_unresponsive_guest_is_reset_after_the_grace_period(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"), reboot=lambda handle: 0)

    done = world.run_impact(order(EventType.REBOOT), connect=lambda uri: host, grace=60)

    assert done.detail == "the guest did not reboot within 60 seconds: reset"
    assert steps(host) == ["reboot", "reset"]
    assert sum(world.clock.slept, 0 * SECOND) == 60 * SECOND


def test_guest_without_reboot_support_is_reset(world: LibvirtWorld) -> None:
    def refuse(handle: Any) -> None:
        raise refusal(libvirt.VIR_ERR_OPERATION_UNSUPPORTED)

    host = Host(world.on("host-a"), reboot=refuse)

    world.run_impact(order(EventType.REBOOT), connect=lambda uri: host, grace=60)

    assert steps(host) == ["reboot", "reset"]
    assert world.clock.slept == []


def test_guest_that_shuts_down_instead_of_rebooting_is_started(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"), reboot=lambda handle: handle.shutdown())

    world.run_impact(order(EventType.REBOOT), connect=lambda uri: host, grace=60)

    assert steps(host) == ["reboot", "create"]
    assert world.state() == RUNNING


def test_restart_starts_a_stopped_vm_and_maintenance_does_not(
    world: LibvirtWorld,
) -> None:
    world.web.destroy()

    for tries in (1, 2):
        world.run_impact(order(EventType.REBOOT, tries=tries))
        assert world.state() == OFF
    world.run_impact(order(EventType.REBOOT, Cause.RESTART))
    assert world.state() == RUNNING


def test_try_after_a_crash_during_a_reboot_starts_the_vm(
    world: LibvirtWorld,
) -> None:
    mark(world.web, guid(1))
    world.web.shutdown()

    assert world.run_impact(order(EventType.REBOOT, tries=2)).detail == "the VM was off: started"
    assert world.state() == RUNNING
    assert not is_marked(world.web, guid(1))


def test_reboot_removes_its_marker(world: LibvirtWorld) -> None:
    host = Host(
        world.on("host-a"), reboot=lambda handle: [listener() for listener in host.listeners]
    )

    world.run_impact(order(EventType.REBOOT), connect=lambda uri: host, grace=60)
    assert not is_marked(world.web, guid(1))
    world.run_impact(order(EventType.REBOOT))
    assert not is_marked(world.web, guid(1))


def test_an_eviction_shuts_the_guest_down_and_keeps_its_definition(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"))

    done = world.run_impact(order(EventType.PREEMPT, Cause.EVICTION), connect=lambda uri: host)

    assert done.detail == "the guest shut down by itself"
    assert steps(host) == ["shutdown"]
    assert world.state() == OFF


def test_unresponsive_guest_is_forced_off(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"), shutdown=lambda handle: 0)

    done = world.run_impact(
        order(EventType.PREEMPT, Cause.EVICTION), connect=lambda uri: host, grace=30
    )

    assert done.detail == "the guest did not shut down within 30 seconds: stopped"
    assert steps(host) == ["shutdown", "destroy"]
    assert sum(world.clock.slept, 0 * SECOND) == 30 * SECOND
    assert world.state() == OFF


def test_deletion_stops_and_undefines_the_vm(world: LibvirtWorld) -> None:
    world.run_impact(order(EventType.TERMINATE, Cause.DELETION))

    assert world.names_on("host-a") == []


def test_deletion_refused_by_libvirt_fails(world: LibvirtWorld) -> None:
    def refuse(handle: Any) -> None:
        raise refusal(libvirt.VIR_ERR_OPERATION_INVALID)

    host = Host(world.on("host-a"), undefineFlags=refuse)

    with pytest.raises(ImpactFailed, match="libvirt of host-a: no"):
        world.run_impact(order(EventType.TERMINATE, Cause.DELETION), connect=lambda uri: host)


def test_deleting_a_missing_domain_succeeds(world: LibvirtWorld) -> None:
    """The try before this one may have done it, and died before it could tell."""
    done = world.run_impact(order(EventType.TERMINATE, Cause.DELETION, name="web-9"))

    assert done.detail == "no domain web-9 on host-a, host-b: nothing to do"


def test_a_domain_that_does_not_exist_cannot_be_rebooted(world: LibvirtWorld) -> None:
    with pytest.raises(ImpactFailed, match=r"^no domain web-9 on host-a, host-b$"):
        world.run_impact(order(EventType.REBOOT, name="web-9"))


def test_vm_with_an_id_is_found_by_id(world: LibvirtWorld) -> None:
    world.run_impact(order(EventType.PREEMPT, name="another", vm_id=guid(1).lower()))
    assert world.state() == OFF

    with pytest.raises(ImpactFailed, match=guid(7).lower()):
        world.run_impact(order(EventType.REBOOT, vm_id=guid(7).lower()))


def test_vm_on_another_host_is_found_there(
    world: LibvirtWorld,
) -> None:
    done = world.run_impact(order(EventType.REBOOT, host="host-b"))

    assert done.host == "host-a"


def test_host_without_a_uri_is_not_queried(world: LibvirtWorld) -> None:
    """An empty URI would be the libvirt of this machine."""
    libvirts = LibvirtHosts((), call_seconds_max=30, connect=world.connect)

    assert asyncio.run(libvirts.find("host-a", Vm(name="web-0"))) is None


def test_hanging_libvirt_fails_only_its_own_impact(world: LibvirtWorld) -> None:
    """The second host is served while the first one hangs, time and again."""

    def connect(uri: str) -> Any:
        if uri == "test:///host-a":
            threading.Event().wait()
        return world.connect(uri)

    async def main() -> None:
        platform = world.platform(connect, call_seconds_max=0.2)
        world.on("host-b").defineXML(world.web.XMLDesc()).create()
        hanging = [platform.run_impact(order(EventType.REBOOT)) for _ in range(9)]
        answers = await asyncio.gather(*hanging, return_exceptions=True)
        assert {str(response) for response in answers} == {
            "libvirt of host-a did not answer within 0.2 seconds"
        }
        assert sum(thread.name == "call-test:///host-a" for thread in threading.enumerate()) == 4
        await platform.run_impact(order(EventType.REBOOT, host="host-b"))

    asyncio.run(main())


def test_call_that_gets_no_thread_is_a_failed_try(world: LibvirtWorld) -> None:
    """The daemon lists its VMs with such calls, and goes on after a failure."""

    def connect(uri: str) -> Any:
        raise OSError(errno.EAGAIN, "the system has no threads left")

    with pytest.raises(ImpactFailed, match="host-a cannot be called: the system has no threads"):
        world.run_impact(order(EventType.REBOOT), connect=connect)


def test_connection_that_hung_is_not_reused(world: LibvirtWorld) -> None:
    class Hung(Host):
        def isAlive(self) -> bool:
            return threading.Event().wait()

    connections = [Hung(world.on("host-a")), world.on("host-a")]

    async def main() -> None:
        libvirts = LibvirtHosts(URIS, call_seconds_max=0.2, connect=lambda uri: connections.pop(0))
        await libvirts.ask("host-a", lambda connection: connection)
        with pytest.raises(ImpactFailed, match="did not answer"):
            await libvirts.ask("host-a", lambda connection: connection)
        assert await libvirts.ask("host-a", lambda connection: connection) is world.on("host-a")

    asyncio.run(main())


def test_only_one_connection_to_a_host_stays_open(world: LibvirtWorld) -> None:
    """Closing one waits for the host. In the event loop, a silent host would stop the server."""
    both_ask = threading.Barrier(2)
    closed_in = list[str]()

    class Connection(Host):
        def __del__(self) -> None:
            closed_in.append(threading.current_thread().name)

    def connect(uri: str) -> Any:
        both_ask.wait(30)
        return Connection(world.on("host-a"))

    async def main() -> None:
        libvirts = LibvirtHosts(URIS, call_seconds_max=30, connect=connect)
        first, second = await asyncio.gather(
            *(libvirts.ask("host-a", lambda connection: connection) for _ in range(2))
        )
        assert first is second
        assert closed_in == ["call-test:///host-a"]

    asyncio.run(main())
