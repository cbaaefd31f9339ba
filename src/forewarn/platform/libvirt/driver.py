"""The libvirt platform.

Each try inspects the domain first and does only what is left to do, so a try after a crash
continues: a marker in the domain's metadata records what an earlier try began. A guest gets
`grace` to shut down or reboot by itself before it is forced. Steps are short calls with waits in
between, so no thread is blocked while a guest takes its time.

A VM must never run on two hosts: two copies destroy their disk. So a move writes its target into
the marker before the VM can run there, and goes on to another target only when libvirt has refused
to start the VM on the last one. If a start got no answer, the try fails. A VM that is off on its
host is acted on only if the target in its marker, and each host that reports it running, answer.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import libvirt
from msgspec.structs import replace

from forewarn.core.event import DURATION_SECONDS, Cause, EventType
from forewarn.core.fleet import Power, Vm
from forewarn.errors import ImpactFailed
from forewarn.platform.base import STARTS, ImpactRequest, ImpactResult, Sleeper
from forewarn.platform.libvirt import marker
from forewarn.platform.libvirt.connection import OFF, Domain, LibvirtError, ignoring
from forewarn.platform.libvirt.targets import Targets
from forewarn.platform.threads import LAST_CALL_SECONDS, run_to_completion

UNSUPPORTED = (
    libvirt.VIR_ERR_NO_SUPPORT,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED,
)
"""Error codes that mean a domain cannot do this: it has no channel for a guest agent, say."""
CANNOT_MIGRATE = (*UNSUPPORTED, libvirt.VIR_ERR_MIGRATE_UNSAFE)
NOT_THE_TARGET = (
    libvirt.VIR_ERR_NO_DOMAIN,
    libvirt.VIR_ERR_OPERATION_ABORTED,
    libvirt.VIR_ERR_OPERATION_INVALID,
    libvirt.VIR_ERR_OPERATION_TIMEOUT,
)
"""Error codes of a move that fails with any target: the domain is not in the right state, another
job holds it, or an operator aborted the migration.
"""
TARGETS_MAX = 3
PING_EVERY = timedelta(seconds=2)
AGENT_SECONDS_MAX = 10.0
"""libvirt itself gives up after 5 seconds on a guest agent that does not react at all."""
SUSPENDED_BY_USER = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER)
CHECK_EVERY = timedelta(seconds=0.5)
MIGRATION_SECONDS_MAX = 86_400.0
"""`impact_seconds_max`, the limit of every impact, is reached first."""
IN_PLACE = "started again: there is no other host"
GONE_IS_DONE = (EventType.PREEMPT, EventType.TERMINATE)


@dataclass
class LibvirtPlatform:
    """Acts on the domains of the fleet's hosts."""

    targets: Targets
    clock: Sleeper
    grace: timedelta

    def __post_init__(self) -> None:
        self.libvirts = self.targets.libvirts

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        found = await self.targets.find(request)
        if not found:
            hosts = ", ".join(filter(None, (request.vm.host, *self.targets.others(request))))
            problem = f"no domain {request.vm.id or request.vm.name} on {hosts}"
            if request.type in GONE_IS_DONE:
                return ImpactResult(detail=f"{problem}: nothing to do")
            raise ImpactFailed(problem, vm=request.vm.name)
        domain = found[0]
        if request.moves:
            return await self._move(request, domain)
        if request.type is EventType.REBOOT:
            result = await self._reboot(request, domain)
        elif request.type is EventType.FREEZE:
            result = ImpactResult(detail=await self._freeze(request, domain))
        elif request.type is EventType.PREEMPT:
            await domain.do(marker.unmark)  # whatever an earlier event has begun, it stays off
            result = ImpactResult(detail=await self._stop(domain))
        else:
            details = [await self._remove(each) for each in found]
            result = ImpactResult(detail=details[0])
        return replace(result, host="" if domain.host == request.vm.host else domain.host)

    async def wait_until_back(self, request: ImpactRequest) -> None:
        """Return when the guest agent answers; never if the VM has no channel for one.

        Only the new boot can answer: the impact ended after the reset, the start, or libvirt's
        event of the reboot, and each of them had ended the agent of the old boot.
        """
        while True:  # ends when the agent answers, or when cancelled
            try:
                for domain in (await self.targets.find(request))[:1]:
                    await domain.do(lambda handle: handle.getTime(), AGENT_SECONDS_MAX)
                    return
            except ImpactFailed as error:
                if error.facts.get("number") in UNSUPPORTED:
                    await asyncio.Event().wait()
            await self.clock.sleep_until(self.clock.now() + PING_EVERY)

    async def list_begun(self, host: str) -> list[tuple[str, str]]:
        def look(connection: Any) -> list[tuple[str, str]]:
            marked = [(marker.read(each), each.name()) for each in connection.listAllDomains()]
            return [(m.event, vm) for m, vm in marked if m.event and m.host in ("", host)]

        return await self.libvirts.ask(host, look)

    async def recover(
        self, host: str, event_id: str, vm: str, *, may_start: bool, may_run_on: tuple[str, ...]
    ) -> str:
        kind, cause, place = EventType.REBOOT, Cause.RESTART, Vm(name=vm, host=host)
        request = ImpactRequest(event_id, "", place, kind, cause, tries=2, may_run_on=may_run_on)
        for domain in (await self.targets.find(request))[:1]:
            if domain.host == host and await self._has_begun(request, domain):
                state = await domain.state()
                if state == SUSPENDED_BY_USER:
                    await domain.do(marker.resume)
                    return f"the VM was suspended: resumed; {await self._set_clock(domain)}"
                is_off, is_paused = state[0] in OFF, state[0] == libvirt.VIR_DOMAIN_PAUSED
                # A guest that runs may still shut down, as the impact has asked it to.
                if not (is_off or is_paused) and await self._wait_until_off(domain):
                    return await self.recover(
                        host, event_id, vm, may_start=True, may_run_on=may_run_on
                    )
                await domain.do(marker.start if may_start and is_off else marker.unmark)
                if is_off:
                    return "the VM was off: started" if may_start else "the VM is off and stays off"
        return "nothing was left to do"

    async def _freeze(self, request: ImpactRequest, domain: Domain) -> str:
        state, reason = await domain.state()
        if state in OFF:
            return "the VM was off: nothing to freeze"
        if state == libvirt.VIR_DOMAIN_PAUSED:
            if reason != libvirt.VIR_DOMAIN_PAUSED_USER:
                raise ImpactFailed(
                    f"{request.vm.name} is already paused, and not by a user (reason {reason})",
                    reason=reason,
                )
            if not await self._has_begun(request, domain):
                return "the VM was already suspended and stays suspended"
            await domain.do(marker.resume)
            return f"resumed; an earlier try had suspended it; {await self._set_clock(domain)}"
        seconds = request.duration_seconds
        if seconds < 0:
            seconds = DURATION_SECONDS[EventType.FREEZE]
        await self._suspend(request.event_id, domain, timedelta(seconds=seconds))
        return f"suspended for {seconds} seconds and resumed; {await self._set_clock(domain)}"

    async def _set_clock(self, domain: Domain) -> str:
        """Let the guest agent set the guest's clock, which stood still. Return what came of it."""
        sync = libvirt.VIR_DOMAIN_TIME_SYNC
        try:
            await domain.do(lambda handle: handle.setTime(None, sync), AGENT_SECONDS_MAX)
        except ImpactFailed as error:
            if error.facts.get("number") in (*UNSUPPORTED, libvirt.VIR_ERR_AGENT_UNRESPONSIVE):
                return "no guest agent sets its clock"
            return f"the guest agent did not set its clock: {error}"
        return "the guest agent set its clock"

    async def _suspend(self, event_id: str, domain: Domain, duration: timedelta) -> None:
        """Suspend the VM for a while. It is resumed whatever happens.

        If we give up before the suspend call has ended, its own thread resumes the VM. If the
        process ends as well, it waits for that.
        """
        has_given_up, has_ended = threading.Event(), threading.Event()

        def suspend_or_give_up(handle: Any) -> None:
            try:
                marker.suspend(handle, event_id)
            finally:
                has_ended.set()
            if has_given_up.is_set():
                marker.resume(handle)

        def resume_at_last() -> None:
            has_ended.wait(LAST_CALL_SECONDS)
            marker.resume(domain.handle)
            domain.handle.setTime(None, libvirt.VIR_DOMAIN_TIME_SYNC)

        try:
            await domain.do(suspend_or_give_up)
            await self.clock.sleep_until(self.clock.now() + duration)
            await domain.do(marker.resume)
        except (asyncio.CancelledError, ImpactFailed):
            has_given_up.set()
            run_to_completion(resume_at_last)
            raise

    async def _reboot(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        should_run = await self._should_start(request, domain)
        state = await domain.state()
        if state == SUSPENDED_BY_USER and not should_run:
            return ImpactResult(detail="the VM was suspended and stays suspended")
        if state[0] in OFF and not should_run:
            return ImpactResult(detail="the VM was off and stays off")
        if state[0] not in OFF:
            detail = await self._restart(request, domain)
        else:
            await domain.do(marker.start)
            detail = "the VM was off: started"
        return ImpactResult(detail=detail, is_back=False)

    async def _restart(self, request: ImpactRequest, domain: Domain) -> str:
        """Reboot a running VM: by its guest within the grace period, else by a reset."""
        await domain.do(lambda handle: marker.mark(handle, request.event_id))
        async with domain.watch_reboot() as rebooted:
            with suppress(LibvirtError):  # the guest does not support it; it is reset below
                await domain.do(lambda handle: handle.reboot(0))
                await self._wait_until_off(domain, rebooted.is_set)
        if await domain.is_off():
            await domain.do(marker.start)
            return "the guest shut down: started again"
        if rebooted.is_set():
            await domain.do(marker.unmark)
            return "the guest rebooted by itself"
        await domain.do(marker.reset)
        return f"the guest did not reboot within {self.grace.total_seconds():g} seconds: reset"

    async def _has_begun(self, request: ImpactRequest, domain: Domain) -> bool:
        """Whether an earlier try of this event has begun to act."""
        return (await domain.do(marker.read)).event == request.event_id

    async def _should_start(self, request: ImpactRequest, domain: Domain) -> bool:
        """Whether a VM that is off is started: its owner wants it, or we or a failure stopped it.

        The fleet knows what its owner had stopped before its host failed.
        """
        has_failed = request.cause is Cause.FAILED and request.vm.power is Power.RUNNING
        return request.cause in STARTS or has_failed or await self._has_begun(request, domain)

    async def _stop(self, domain: Domain) -> str:
        """Shut down within the grace period, else force it off."""
        if await domain.is_off():
            return "the VM was off"
        with suppress(LibvirtError):  # the guest cannot be asked: it is destroyed below
            await domain.do(lambda handle: handle.shutdown())
            if await self._wait_until_off(domain):
                return "the guest shut down by itself"
        if not await domain.is_off():
            await domain.do_to_the_end(lambda handle: handle.destroy())
        return f"the guest did not shut down within {self.grace.total_seconds():g} seconds: stopped"

    async def _remove(self, domain: Domain) -> str:
        how = await self._stop(domain)
        await domain.undefine(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)
        return f"{how}, undefined"

    async def _move(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        """Move to another host. If there is none, stop and start the VM."""
        begun = await domain.do(marker.read)
        source = request.vm.host
        if begun.event == request.event_id:
            source = begun.host or source  # the fleet may already know the new host
        if self.libvirts.uri(domain.host) != self.libvirts.uri(source):
            return await self._finish_move(request, domain, source)
        with suppress(ImpactFailed):  # the VM is here, whether the last target answers or not
            copy = await self.libvirts.find(begun.target, request.vm)
            if copy is not None and copy.host != domain.host:
                await self.targets.discard(copy, begun)
        async with self.targets.leave(request, domain) as targets:
            return await self._move_to_first(request, domain, targets or [domain.host])

    async def _move_to_first(
        self, request: ImpactRequest, domain: Domain, targets: Sequence[str]
    ) -> ImpactResult:
        """Move to the first target that takes the VM. If none does, it runs here again."""
        was_off = await domain.is_off()
        should_run = not was_off or await self._should_start(request, domain)

        def mark(target: str, handle: Any) -> str:
            if should_run:  # the definition carries the marker along
                marker.mark(handle, request.event_id, domain.host, target)
            secure = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE
            return str(handle.XMLDesc(secure))

        is_live, how, xml, failures = not was_off and targets[0] != domain.host, "", "", list[str]()
        for target in targets[:TARGETS_MAX]:
            async with self.targets.arrive(domain, target):
                try:
                    xml = await domain.do(functools.partial(mark, target))
                    is_live = is_live and await self._migrate(domain, target)
                    if is_live:
                        detail = "; ".join((*failures, f"migrated live to {target}"))
                        return ImpactResult(host=target, detail=detail)
                    there = await self.libvirts.define(target, xml)
                except ImpactFailed as error:
                    failures.append(f"{target} failed: {error}")
                    may_run_there = is_live and await domain.is_off()
                    if may_run_there or error.facts.get("number") in NOT_THE_TARGET:
                        break
                    continue
                how = how or await self._stop(domain)
                refusal = await self._try_start(there, domain) if should_run else ""
                if not refusal:
                    await self._settle(there, domain)
                    how += "" if should_run else " and stays off"
                    has_moved = target != domain.host
                    end = f"moved to {target}" if has_moved else IN_PLACE
                    detail = "; ".join((how, *failures, end))
                    return ImpactResult(target * has_moved, detail, is_back=not should_run)
                failures.append(f"{target} failed: {refusal}")
        if not await domain.is_off():
            await domain.do(marker.unmark)
        elif how and should_run:
            await (await self.libvirts.define(domain.host, xml)).do(marker.start)
        raise ImpactFailed("; ".join(failures), vm=request.vm.name)

    async def _try_start(self, there: Domain, domain: Domain) -> str:
        """Start the VM on a target. Return why libvirt refused to, empty if the VM runs.

        Raises if it may run or not.
        """
        try:
            await there.do(lambda handle: handle.create())
        except LibvirtError as error:
            if await there.is_off():
                if there.host != domain.host:
                    with suppress(ImpactFailed):
                        await there.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
                return str(error)
        return ""

    async def _settle(self, there: Domain, left: Domain | None) -> None:
        """Undefine what is left on its old host of a VM that is on its new one."""
        if left is not None and left.host != there.host and await left.is_off():
            await left.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
        await there.do(marker.unmark)

    async def _finish_move(
        self, request: ImpactRequest, domain: Domain, source: str
    ) -> ImpactResult:
        """Start a moved VM if it should run, and undefine what is left on the old host.

        One that runs may have been started by the last try, and still boot.
        """
        is_off = await domain.is_off()
        if is_off and await self._should_start(request, domain):
            await domain.do(marker.start)
            is_off = False
        await self._settle(domain, await self.libvirts.find(source, request.vm))
        detail = f"{'off' if is_off else 'running'} on {domain.host}"
        return ImpactResult(host=domain.host, detail=detail, is_back=is_off)

    async def _migrate(self, domain: Domain, target: str) -> bool:
        """Migrate live. False if libvirt cannot do that."""
        connection = await self.libvirts.ask(target, lambda connection: connection)

        def work(handle: Any) -> bool:
            flags = libvirt.VIR_MIGRATE_LIVE
            if handle.isPersistent():
                flags |= libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
            with ignoring(*CANNOT_MIGRATE):
                marker.unmark(handle.migrate3(connection, {}, flags))
                return True
            return False

        try:
            return await domain.do(work, MIGRATION_SECONDS_MAX)
        except asyncio.CancelledError:
            run_to_completion(domain.handle.abortJob)
            raise

    async def _wait_until_off(
        self, domain: Domain, has_rebooted: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until the VM is off or has rebooted. False if the grace period ends first."""
        end = self.clock.now() + self.grace
        while not (has_rebooted() or await domain.is_off()):  # ends with the grace period
            now = self.clock.now()
            if now >= end:
                return False
            await self.clock.sleep_until(min(now + CHECK_EVERY, end))
        return True
