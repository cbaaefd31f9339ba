"""The libvirt platform.

Each try inspects the domain first and does only what is left to do, so a try after a crash
continues: a marker in the domain's metadata records what an earlier try began. A guest gets
`grace` to shut down or reboot by itself before it is forced. Steps are short calls with waits in
between, so no thread is blocked while a guest takes its time.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import libvirt

from forewarn.core.event import DURATION_SECONDS, Cause, EventType
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, ImpactResult, Sleeper
from forewarn.platform.libvirt.connection import OFF, Domain, LibvirtError, LibvirtHosts, ignoring
from forewarn.platform.libvirt.marker import is_marked, mark, reset, resume, start, suspend, unmark
from forewarn.platform.simulated import choose_host
from forewarn.platform.threads import LAST_CALL_SECONDS, run_to_completion

CANNOT_MIGRATE = (
    libvirt.VIR_ERR_NO_SUPPORT,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED,
    libvirt.VIR_ERR_MIGRATE_UNSAFE,
)
"""Error codes that mean a domain cannot be migrated live."""
SUSPENDED_BY_USER = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER)
CHECK_EVERY = timedelta(seconds=0.5)
MIGRATION_SECONDS_MAX = 86_400.0
"""`impact_seconds_max`, the limit of every impact, is reached first."""
STARTS = (Cause.RESTART, Cause.REDEPLOY, Cause.FAILED)
"""Causes that start a VM that is off. Maintenance leaves it off."""
GONE_IS_DONE = (EventType.PREEMPT, EventType.TERMINATE)


@dataclass(frozen=True)
class LibvirtPlatform:
    """Acts on the domains of the fleet's hosts.

    `hosts` are the possible targets of a move; `avoid` says which are bad ones, and how bad.
    """

    libvirts: LibvirtHosts
    clock: Sleeper
    hosts: Callable[[], Iterable[str]]
    avoid: Callable[[], Mapping[str, int]]
    grace: timedelta

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        domain = await self._find(request)
        if domain is None and request.type in GONE_IS_DONE:
            return ImpactResult(detail="libvirt has no such domain: nothing to do")
        if domain is None:
            raise ImpactFailed(
                f"no host of the fleet has a domain {request.vm.id or request.vm.name}",
                vm=request.vm.name,
            )
        if request.moves:
            return await self._move(request, domain)
        steps: dict[EventType, Callable[[ImpactRequest, Domain], Awaitable[str]]] = {
            EventType.FREEZE: self._freeze,
            EventType.REBOOT: self._reboot,
            EventType.PREEMPT: self._stop,
            EventType.TERMINATE: self._remove,
        }
        detail = await steps[request.type](request, domain)
        return ImpactResult(
            host="" if domain.host == request.vm.host else domain.host, detail=detail
        )

    async def _find(self, request: ImpactRequest) -> Domain | None:
        """Find the VM's domain: on its own host first, else on any host.

        For a move, which an earlier try may have half done, a running domain is preferred.
        """
        vm = request.vm
        here = await self.libvirts.find(vm.host, vm)
        if here is not None and not (request.moves and await here.is_off()):
            return here
        elsewhere = await self.libvirts.for_each(
            self._others(vm.host), lambda host: self.libvirts.find(host, vm)
        )
        found = [domain for domain in (here, *elsewhere) if domain is not None]
        for domain in found:
            if not await domain.is_off():
                return domain
        return found[0] if found else None

    def _others(self, host: str) -> list[str]:
        """Return the other hosts with a known URI, one for each libvirt."""
        uris = {self.libvirts.uri(other): other for other in sorted(self.hosts(), reverse=True)}
        return sorted(
            other for uri, other in uris.items() if uri and uri != self.libvirts.uri(host)
        )

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
            await domain.do(resume)
            return "resumed; an earlier try had suspended it"
        seconds = request.duration_seconds
        if seconds < 0:
            seconds = DURATION_SECONDS[EventType.FREEZE]
        await self._suspend(request.event_id, domain, timedelta(seconds=seconds))
        return f"suspended for {seconds} seconds and resumed"

    async def _suspend(self, event_id: str, domain: Domain, duration: timedelta) -> None:
        """Suspend the VM for a while. It is resumed whatever happens.

        If we give up before the suspend call has ended, its own thread resumes the VM. If the
        process ends as well, it waits for that.
        """
        has_given_up, has_ended = threading.Event(), threading.Event()

        def suspend_or_give_up(handle: Any) -> None:
            try:
                suspend(handle, event_id)
            finally:
                has_ended.set()
            if has_given_up.is_set():
                resume(handle)

        def resume_at_last() -> None:
            has_ended.wait(LAST_CALL_SECONDS)
            resume(domain.handle)

        try:
            await domain.do(suspend_or_give_up)
            await self.clock.sleep_until(self.clock.now() + duration)
            await domain.do(resume)
        except asyncio.CancelledError:
            has_given_up.set()
            run_to_completion(resume_at_last)
            raise
        except ImpactFailed:
            has_given_up.set()
            with suppress(ImpactFailed):
                await domain.do(resume)
            raise

    async def _reboot(self, request: ImpactRequest, domain: Domain) -> str:
        should_run = await self._should_start(request, domain)
        state = await domain.state()
        if state == SUSPENDED_BY_USER and not should_run:
            return "the VM was suspended and stays suspended"
        if state[0] in OFF:
            if not should_run:
                return "the VM was off and stays off"
            await domain.do(start)
            return "the VM was off: started"
        await domain.do(lambda handle: mark(handle, request.event_id))
        async with domain.watch_reboot() as rebooted:
            with suppress(LibvirtError):  # the guest does not support it; it is reset below
                await domain.do(lambda handle: handle.reboot(0))
                await self._wait_until_off(domain, rebooted.is_set)
        if await domain.is_off():
            await domain.do(start)
            return "the guest shut down: started again"
        if rebooted.is_set():
            await domain.do(unmark)
            return "the guest rebooted by itself"
        await domain.do(reset)
        return f"the guest did not reboot within {self.grace.total_seconds():g} seconds: reset"

    async def _has_begun(self, request: ImpactRequest, domain: Domain) -> bool:
        """Whether an earlier try of this event has begun to act."""
        return await domain.do(lambda handle: is_marked(handle, request.event_id))

    async def _should_start(self, request: ImpactRequest, domain: Domain) -> bool:
        """Whether a VM that is off is started: its owner wants it, or we stopped it."""
        return request.cause in STARTS or await self._has_begun(request, domain)

    async def _stop(self, request: ImpactRequest, domain: Domain) -> str:
        """Shut down within the grace period, else force it off."""
        if await domain.is_off():
            return "the VM was off"
        with suppress(LibvirtError):  # the guest cannot be asked: it is destroyed below
            await domain.do(lambda handle: handle.shutdown())
            if await self._wait_until_off(domain):
                return "the guest shut down by itself"
        if not await domain.is_off():
            await domain.do(lambda handle: handle.destroy())
        return f"the guest did not shut down within {self.grace.total_seconds():g} seconds: stopped"

    async def _remove(self, request: ImpactRequest, domain: Domain) -> str:
        how = await self._stop(request, domain)
        await domain.undefine(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)
        return f"{how}, undefined"

    async def _move(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        """Move to another host. If there is none, stop and start the VM."""
        is_elsewhere = self.libvirts.uri(domain.host) != self.libvirts.uri(request.vm.host)
        if is_elsewhere:  # moved by an earlier try, or by an operator
            return await self._finish_move(request, domain)
        target = choose_host(request.vm.host, self._others(request.vm.host), self.avoid())
        if not target:
            return ImpactResult(detail=await self._move_stopped(request, domain, domain.host))
        if await self._migrate(domain, target):
            return ImpactResult(host=target, detail=f"migrated live to {target}")
        return ImpactResult(host=target, detail=await self._move_stopped(request, domain, target))

    async def _finish_move(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        """Start a moved VM if it should run, and undefine what is left on the old host."""
        is_off = await domain.is_off()
        if is_off and await self._should_start(request, domain):
            await domain.do(start)
            is_off = False
        left = await self.libvirts.find(request.vm.host, request.vm)
        if left is not None and await left.is_off():
            await left.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
        return ImpactResult(
            host=domain.host, detail=f"{'off' if is_off else 'running'} on {domain.host}"
        )

    async def _migrate(self, domain: Domain, target: str) -> bool:
        """Migrate live. False if that is impossible: the VM is off, or libvirt cannot do it."""
        connection = await self.libvirts.ask(target, lambda connection: connection)

        def work(handle: Any) -> bool:
            flags = libvirt.VIR_MIGRATE_LIVE
            if handle.isPersistent():
                flags |= libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
            with ignoring(*CANNOT_MIGRATE):
                handle.migrate3(connection, {}, flags)
                return True
            return False

        if await domain.is_off():
            return False
        try:
            return await domain.do(work, MIGRATION_SECONDS_MAX)
        except asyncio.CancelledError:
            run_to_completion(domain.handle.abortJob)
            raise

    async def _move_stopped(self, request: ImpactRequest, domain: Domain, target: str) -> str:
        """Stop the VM here and start it on the target.

        If it does not start there, it is started here again and the try fails.
        """
        should_run = not await domain.is_off() or await self._should_start(request, domain)
        if should_run:  # the definition carries the marker along
            await domain.do(lambda handle: mark(handle, request.event_id))
        secure = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE
        xml = await domain.do(lambda handle: str(handle.XMLDesc(secure)))
        there = await self.libvirts.define(target, xml)
        how = await self._stop(request, domain)
        if not should_run:
            how += " and stays off"
        try:
            if should_run:
                await there.do(start)
        except ImpactFailed:
            back = await self.libvirts.define(domain.host, xml)
            await back.do(start)
            if target != domain.host:
                with suppress(ImpactFailed):
                    await there.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
            raise
        if target == domain.host:
            return f"{how}; started again: there is no other host"
        await domain.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
        return f"{how}; moved to {target}"

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
