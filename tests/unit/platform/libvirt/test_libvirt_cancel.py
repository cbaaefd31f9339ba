"""A canceled call of the libvirt platform ends when libvirt has done what it was asked for.

A thread cannot be canceled. If the call ended before, the next one, of this server or of another
one, would act on the VM at the same time.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import EventType
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, SlowToStop
from forewarn.platform.libvirt.driver import LibvirtPlatform
from forewarn.platform.libvirt.marker import mark_move
from forewarn.platform.threads import LAST_CALL_SECONDS
from tests.builders import guid
from tests.unit.platform.libvirt.libvirt_world import (
    DRAIN,
    LIVE_MIGRATION,
    PAUSED,
    RUNNING,
    Host,
    LibvirtWorld,
    Target,
    order,
    refusal,
    refuse,
)

REBOOT, PREEMPT = order(EventType.REBOOT), order(EventType.PREEMPT)
WAIT_SECONDS_MAX = 30
CALL_SECONDS_MAX = 30.0
THREADS_MAX = 4
"""How many calls to a host run at a time."""


@pytest.fixture
def world(tmp_path: Path) -> LibvirtWorld:
    return LibvirtWorld(tmp_path)


class SlowVerb:
    """Stands in for a verb of a domain, and takes its time."""

    def __init__(self, verb: Callable[[Any], Any]) -> None:
        self._verb = verb
        self.asked, self.go = threading.Event(), threading.Event()
        self.has_ended = False

    def __call__(self, handle: Any) -> Any:
        self.asked.set()
        assert self.go.wait(WAIT_SECONDS_MAX)
        self.has_ended = True
        return self._verb(handle)


def unable(handle: Any) -> None:
    raise refusal(libvirt.VIR_ERR_AGENT_UNRESPONSIVE)


def start(world: LibvirtWorld, host: Host, what: ImpactRequest) -> asyncio.Task[Any]:
    home = world.on("host-a")
    platform = world.platform(
        lambda uri: host if world.connect(uri) is home else world.connect(uri)
    )
    return asyncio.create_task(platform.run_impact(what))


async def cancel(call: asyncio.Task[Any], slow: SlowVerb) -> None:
    """Cancel a call while libvirt is busy."""
    await asyncio.to_thread(slow.asked.wait, WAIT_SECONDS_MAX)
    call.cancel()
    await asyncio.wait((call,), timeout=0.05)


@pytest.mark.parametrize(
    ("what", "verb"),
    [
        (REBOOT, "setMetadata"),
        (REBOOT, "reset"),
        (PREEMPT, "shutdown"),
        (PREEMPT, "destroy"),
        (order(EventType.TERMINATE), "undefineFlags"),
    ],
)
def test_canceled_call_ends_with_what_libvirt_does(
    world: LibvirtWorld, what: ImpactRequest, verb: str
) -> None:
    async def test() -> None:
        slow = SlowVerb(lambda handle: None)
        ways: dict[str, Callable[[Any], Any]] = {"reboot": unable, "shutdown": unable, verb: slow}
        call = start(world, Host(world.on("host-a"), **ways), what)
        await cancel(call, slow)
        assert not call.done()

        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert slow.has_ended

    asyncio.run(asyncio.wait_for(test(), WAIT_SECONDS_MAX))


def test_canceled_migration_is_aborted_and_ends_then(world: LibvirtWorld) -> None:
    """libvirt takes a while to abort one, and may complete it instead."""

    async def test() -> None:
        aborted = threading.Event()

        def end(handle: Any) -> None:
            raise refusal(libvirt.VIR_ERR_OPERATION_ABORTED)

        slow = SlowVerb(end)
        host = Host(world.on("host-a"), migrate3=slow, abortJob=lambda handle: aborted.set())
        call = start(world, host, LIVE_MIGRATION)
        await cancel(call, slow)
        assert await asyncio.to_thread(aborted.wait, WAIT_SECONDS_MAX)
        assert not call.done()

        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(asyncio.wait_for(test(), WAIT_SECONDS_MAX))
    assert world.state() == RUNNING


class Migration(SlowVerb):
    """A live migration that goes on, whatever libvirt is asked for, until it may end."""

    def __init__(self) -> None:
        super().__init__(lambda handle: handle)

    def host(self, connection: Any) -> Host:
        return Host(
            connection, migrate3=self, abortJob=lambda handle: None, jobStats=self._describe
        )

    def _describe(self, handle: Any) -> dict[str, int]:
        if not self.asked.is_set() or self.has_ended:
            return {"type": libvirt.VIR_DOMAIN_JOB_NONE}
        operation = libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT
        return {"type": libvirt.VIR_DOMAIN_JOB_UNBOUNDED, "operation": operation}


IN_PROGRESS = "a migration is in progress on host-a"
ACTIONS = {"setMetadata", "suspend", "resume", "reboot", "reset", "shutdown", "destroy", "migrate3"}
"""What a try does to a VM that runs."""


@pytest.mark.parametrize(
    "what",
    [
        LIVE_MIGRATION,
        DRAIN,
        REBOOT,
        PREEMPT,
        order(EventType.FREEZE),
        order(EventType.TERMINATE),
    ],
    ids=["live migration", "redeploy", "reboot", "preempt", "freeze", "terminate"],
)
def test_nothing_acts_on_a_vm_whose_migration_was_canceled_and_goes_on(
    world: LibvirtWorld, what: ImpactRequest
) -> None:
    """Its target may be dead. The next try, of any server, begins after the time to stop."""

    async def test() -> None:
        migration = Migration()
        host = migration.host(world.on("host-a"))
        call = start(world, host, LIVE_MIGRATION)
        await cancel(call, migration)
        call.cancel()  # as the limit does
        await asyncio.wait((call,))
        assert call.cancelled()

        other = migration.host(world.on("host-a"))
        with pytest.raises(ImpactFailed, match=IN_PROGRESS) as failed:
            await start(world, other, what)
        assert not failed.value.facts.get("is_final")
        assert not ACTIONS & {*other.calls}

        migration.go.set()
        while not migration.has_ended:
            await asyncio.sleep(0)
        with suppress(ImpactFailed):  # this one does not go anywhere
            await start(world, other, what)
        assert ACTIONS & {*other.calls}

    asyncio.run(asyncio.wait_for(test(), WAIT_SECONDS_MAX))


@pytest.mark.parametrize("number", [libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_NO_SUPPORT])
def test_domain_without_statistics_of_a_job_has_no_migration(
    world: LibvirtWorld, number: int
) -> None:
    host = Host(world.on("host-a"), jobStats=refuse(number), reboot=unable)
    asyncio.run(start_and_wait(world, host, REBOOT))
    assert "reset" in host.calls


def test_vm_that_arrives_is_left_alone(world: LibvirtWorld) -> None:
    """Statistics are available on the host that it leaves only."""
    host = Host(world.on("host-a"), jobStats=refuse(libvirt.VIR_ERR_OPERATION_INVALID))
    with pytest.raises(ImpactFailed, match=IN_PROGRESS):
        asyncio.run(start_and_wait(world, host, REBOOT))
    assert not ACTIONS & {*host.calls}


def test_vm_that_still_migrates_is_not_recovered(world: LibvirtWorld) -> None:
    """The event is over, and the migration is not. The daemon tries again later."""
    mark_move(world.web, guid(1), "host-a", "host-b")
    host = Host(world.on("host-a"), jobStats=refuse(libvirt.VIR_ERR_OPERATION_INVALID))
    platform = world.platform(lambda uri: host)
    recovery = platform.recover("host-a", guid(1), "web-0", may_start=True, may_run_on=())
    with pytest.raises(ImpactFailed, match=IN_PROGRESS):
        asyncio.run(recovery)
    assert not ACTIONS & {*host.calls}


def test_backup_of_a_vm_delays_no_impact(world: LibvirtWorld) -> None:
    """It is a job too, and may take hours."""
    operation = libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP
    job = {"type": libvirt.VIR_DOMAIN_JOB_BOUNDED, "operation": operation}
    host = Host(world.on("host-a"), jobStats=lambda handle: job, reboot=unable)
    asyncio.run(start_and_wait(world, host, REBOOT))
    assert "reset" in host.calls


async def start_and_wait(world: LibvirtWorld, host: Host, what: ImpactRequest) -> None:
    await start(world, host, what)


def test_canceled_move_leaves_no_definition_on_its_target(world: LibvirtWorld) -> None:
    """It is removed before the call ends: the next try defines the VM there again."""

    async def test() -> None:
        slow = SlowVerb(unable)
        world.connections["test:///host-b"] = SlowCapabilities(world.on("host-b"), slow)
        call = start(world, Host(world.on("host-a")), DRAIN)
        await asyncio.to_thread(slow.asked.wait, WAIT_SECONDS_MAX)
        assert world.names_on("host-b") == ["web-0"]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert world.names_on("host-b") == []
        slow.go.set()

    asyncio.run(asyncio.wait_for(test(), WAIT_SECONDS_MAX))
    assert world.state() == RUNNING


@pytest.mark.parametrize("how", ["cancel", "limit"])
def test_freeze_that_got_no_thread_leaves_the_vm_alone(world: LibvirtWorld, how: str) -> None:
    """It has suspended nothing. Its owner may have, and the VM stays so."""
    slow = SlowVerb(lambda handle: None)

    async def test() -> None:
        host = Host(world.on("host-a"))
        platform = world.platform(
            lambda uri: host, call_seconds_max=0.2 if how == "limit" else WAIT_SECONDS_MAX
        )
        (domain,) = await platform.targets.find(order(EventType.FREEZE))
        calls = [asyncio.create_task(domain.do(slow)) for _ in range(THREADS_MAX)]
        await asyncio.sleep(0)
        call = asyncio.create_task(platform._suspend(guid(1), domain, timedelta(seconds=9)))
        await asyncio.to_thread(slow.asked.wait, WAIT_SECONDS_MAX)
        world.web.suspend()
        if how == "cancel":
            call.cancel()
        (ended,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(ended, ImpactFailed if how == "limit" else asyncio.CancelledError)
        slow.go.set()
        await asyncio.gather(*calls, return_exceptions=True)
        assert "setMetadata" not in host.calls

    others = {*threading.enumerate()}
    asyncio.run(asyncio.wait_for(test(), WAIT_SECONDS_MAX))
    names = {thread.name for thread in {*threading.enumerate()} - others}
    assert "last-call-wait" not in names, "it would be resumed later"
    assert world.state() == PAUSED


def test_claim_of_a_libvirt_impact_covers_the_call_in_progress_and_the_last_one(
    world: LibvirtWorld,
) -> None:
    """Neither can be canceled, and another server takes the impact over after that."""
    platform = world.platform(call_seconds_max=30)
    assert isinstance(platform, SlowToStop)
    assert platform.stop_seconds == 30 + LAST_CALL_SECONDS == 40


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until it is moved. Threads take their time."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_canceled_freeze_has_resumed_the_vm_when_it_ends(world: LibvirtWorld) -> None:
    """libvirt suspends the VM after the time limit of a call, and it is resumed after that."""

    async def test() -> None:
        slow = SlowVerb(lambda handle: handle.suspend())
        host = Host(world.on("host-a"), suspend=slow)
        platform = world.platform(lambda uri: host, call_seconds_max=CALL_SECONDS_MAX)
        call = asyncio.create_task(platform.run_impact(order(EventType.FREEZE)))
        await asyncio.to_thread(slow.asked.wait, WAIT_SECONDS_MAX)
        call.cancel()
        await pass_turns()
        loop.now += CALL_SECONDS_MAX
        await pass_turns()
        assert not call.done()

        slow.go.set()
        await asyncio.wait((call,))
        assert call.cancelled()
        assert world.state() == RUNNING

    loop = ManualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test())


async def pass_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class SlowCapabilities:
    """A connection that takes its time to say what it can run."""

    def __init__(self, connection: Any, slow: SlowVerb) -> None:
        self._connection, self._slow = connection, slow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def getDomainCapabilities(self, *arguments: Any) -> Any:
        return self._slow(None)


def test_hanging_guest_agent_does_not_delay_the_next_impact(world: LibvirtWorld) -> None:
    """A question changes nothing: nothing has to wait for its answer."""

    async def test() -> None:
        slow = SlowVerb(lambda handle: {})
        host = Host(world.on("host-a"), getTime=slow)
        platform = world.platform(lambda uri: host)
        call = asyncio.create_task(platform.wait_until_back(REBOOT))
        await cancel(call, slow)
        assert call.done()
        slow.go.set()

    asyncio.run(asyncio.wait_for(test(), WAIT_SECONDS_MAX))


EARLIER = "an earlier call on host-a has not ended"


async def outlive_limit(loop: ManualLoop, call: asyncio.Task[Any], slow: SlowVerb) -> None:
    """Let the time limit of a call pass while libvirt is busy."""
    await asyncio.to_thread(slow.asked.wait, WAIT_SECONDS_MAX)
    loop.now += CALL_SECONDS_MAX
    with pytest.raises(ImpactFailed, match="did not answer within 30 seconds"):
        await call


async def is_refused(platform: LibvirtPlatform, what: ImpactRequest) -> bool:
    """Run an impact, unless an earlier call has not ended."""
    (result,) = await asyncio.gather(platform.run_impact(what), return_exceptions=True)
    return str(result) == EARLIER


@pytest.mark.parametrize(
    "what",
    [REBOOT, PREEMPT, DRAIN, order(EventType.FREEZE), order(EventType.TERMINATE)],
    ids=["reboot", "preempt", "redeploy", "freeze", "terminate"],
)
def test_nothing_acts_on_a_vm_while_a_call_that_outlived_its_limit_may(
    world: LibvirtWorld, what: ImpactRequest
) -> None:
    """Else the late call resets the VM a second time, when its event is over."""

    async def test() -> None:
        slow = SlowVerb(lambda handle: handle.reset(0))
        host = Host(world.on("host-a"), reboot=unable, shutdown=unable, reset=slow)
        platform = world.platform(
            lambda uri: host if uri.endswith("host-a") else world.connect(uri),
            call_seconds_max=CALL_SECONDS_MAX,
        )
        await outlive_limit(loop, asyncio.create_task(platform.run_impact(REBOOT)), slow)

        host.calls.clear()
        with pytest.raises(ImpactFailed, match=EARLIER) as failed:
            await platform.run_impact(what)
        assert not failed.value.facts.get("is_final")
        with pytest.raises(ImpactFailed, match=EARLIER):
            await platform.recover("host-a", guid(1), "web-0", may_start=True, may_run_on=())
        assert not ACTIONS & {*host.calls}

        slow.go.set()
        while await is_refused(platform, what):
            await asyncio.sleep(0)
        assert ACTIONS & {*host.calls}

    loop = ManualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test())


def test_vm_is_started_nowhere_while_a_start_that_outlived_its_limit_may_run_it(
    world: LibvirtWorld,
) -> None:
    """Someone has started it at home meanwhile: it would run twice."""

    async def test() -> None:
        slow = SlowVerb(lambda handle: None)
        target = Target(world.on("host-b"), create=slow)
        target.lookupByName = world.on("host-b").lookupByName  # type: ignore[method-assign]
        platform = world.platform(
            lambda uri: target if uri.endswith("host-b") else world.connect(uri),
            call_seconds_max=CALL_SECONDS_MAX,
        )
        await outlive_limit(loop, asyncio.create_task(platform.run_impact(DRAIN)), slow)

        world.on("host-a").lookupByName("web-0").create()
        with pytest.raises(ImpactFailed, match="an earlier call on host-b has not ended"):
            await platform.run_impact(REBOOT)
        slow.go.set()

    loop = ManualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test())


@pytest.mark.parametrize("verb", ["jobStats", "setTime"])
def test_hanging_call_that_can_do_no_harm_later_delays_no_impact(
    world: LibvirtWorld, verb: str
) -> None:
    """It asks a question, or it sets the guest's clock, which takes as long as the guest wants."""

    async def test() -> None:
        slow = SlowVerb(lambda handle: {"type": libvirt.VIR_DOMAIN_JOB_NONE})
        ways: dict[str, Callable[[Any], Any]] = {verb: slow}
        host = Host(world.on("host-a"), **ways, reboot=unable)
        platform = world.platform(lambda uri: host, call_seconds_max=CALL_SECONDS_MAX)
        call = asyncio.create_task(platform.run_impact(order(EventType.FREEZE)))
        await asyncio.to_thread(slow.asked.wait, WAIT_SECONDS_MAX)
        loop.now += CALL_SECONDS_MAX
        await asyncio.gather(call, return_exceptions=True)
        del host._ways[verb]

        await platform.run_impact(REBOOT)
        assert "reset" in host.calls
        slow.go.set()

    loop = ManualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test())
