"""The libvirt platform.

Each try inspects the domain first and does only what is left to do, so a try after a crash
continues: a marker in the domain's metadata records what an earlier try began. A guest gets
`grace` to shut down or reboot by itself before it is forced. Steps are short calls with waits in
between, so no thread is blocked while a guest takes its time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import libvirt

from forewarn.core.event import DURATION_SECONDS, Cause, EventType
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.libvirt.connection import CANNOT_MIGRATE, Domain, LibvirtError, LibvirtHosts
from forewarn.platform.libvirt.marker import mark, reset, resume, start, suspend, unmark
from forewarn.platform.simulated import Sleeper, choose_host

CHECK_EVERY = timedelta(seconds=0.5)
HOSTS_AT_ONCE_MAX = 16
MIGRATION_SECONDS_MAX = 86_400.0
"""`impact_seconds_max`, the limit of every impact, is reached first."""
STARTS = (Cause.RESTART, Cause.REDEPLOY, Cause.FAILED)
"""Causes that start a VM that is off. Maintenance leaves it off."""
GONE_IS_DONE = (EventType.PREEMPT, EventType.TERMINATE)


class LibvirtPlatform:
    """Acts on the domains of the fleet's hosts.

    `hosts` are the possible targets of a move; `avoid` says which are bad ones, and how bad.
    """

    def __init__(
        self,
        libvirts: LibvirtHosts,
        clock: Sleeper,
        *,
        hosts: Callable[[], Iterable[str]],
        avoid: Callable[[], Mapping[str, int]] = dict,
        grace: timedelta,
    ) -> None:
        self._avoid = avoid
        self._libvirts = libvirts
        self._clock = clock
        self._hosts = hosts
        self._grace = grace

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        moves = request.type is EventType.REDEPLOY or request.cause is Cause.FAILED
        domain = await self._find(request, is_active=moves)
        if domain is None and request.type in GONE_IS_DONE:
            return ImpactResult(detail="libvirt has no such domain: nothing to do")
        if domain is None:
            raise ImpactFailed(
                f"no host of the fleet has a domain {request.vm.id or request.vm.name}",
                vm=request.vm.name,
            )
        if moves:
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

    async def _find(self, request: ImpactRequest, *, is_active: bool) -> Domain | None:
        """Find the VM's domain: on its own host first, else on any host.

        With `is_active` a running domain is preferred.
        """
        here = (
            await self._look(request, request.vm.host)
            if self._libvirts.uri(request.vm.host)
            else None
        )
        if here is not None and not (is_active and await here.is_off()):
            return here
        found = [] if here is None else [here]
        others = self._others(request.vm.host)
        for first in range(0, len(others), HOSTS_AT_ONCE_MAX):
            batch = others[first : first + HOSTS_AT_ONCE_MAX]
            answers = await asyncio.gather(*(self._look(request, host) for host in batch))
            found += [domain for domain in answers if domain is not None]
        for domain in found:
            if not await domain.is_off():
                return domain
        return found[0] if found else None

    async def _look(self, request: ImpactRequest, host: str) -> Domain | None:
        return await self._libvirts.find(host, request.vm)

    def _others(self, host: str) -> list[str]:
        """Return the other hosts with a known URI, one for each libvirt."""
        uris = {self._libvirts.uri(other): other for other in sorted(self._hosts(), reverse=True)}
        return sorted(
            other for uri, other in uris.items() if uri and uri != self._libvirts.uri(host)
        )

    async def _freeze(self, request: ImpactRequest, domain: Domain) -> str:
        if await domain.is_off():
            return "the VM was off: nothing to freeze"
        state, reason = await domain.state()
        if state == libvirt.VIR_DOMAIN_PAUSED and reason != libvirt.VIR_DOMAIN_PAUSED_USER:
            raise ImpactFailed(
                f"{request.vm.name} is already paused, and not by a user (reason {reason})",
                reason=reason,
            )
        if state == libvirt.VIR_DOMAIN_PAUSED and not await domain.is_marked(request.event_id):
            return "the VM was already suspended and stays suspended"
        if state == libvirt.VIR_DOMAIN_PAUSED:
            await domain.do(resume)
            return "resumed; an earlier try had suspended it"
        seconds = (
            request.duration_seconds
            if request.duration_seconds >= 0
            else DURATION_SECONDS[EventType.FREEZE]
        )
        try:
            await domain.do_or_undo(lambda handle: suspend(handle, request.event_id), resume)
            await self._clock.sleep_until(self._clock.now() + timedelta(seconds=seconds))
            await domain.do(resume)
        except asyncio.CancelledError:
            domain.run_to_completion(resume)
            raise
        except ImpactFailed:
            with suppress(ImpactFailed):
                await domain.do(resume)
            raise
        return f"suspended for {seconds} seconds and resumed"

    async def _reboot(self, request: ImpactRequest, domain: Domain) -> str:
        should_run = request.cause in STARTS or await domain.is_marked(request.event_id)
        state, reason = await domain.state()
        if (
            state == libvirt.VIR_DOMAIN_PAUSED
            and reason == libvirt.VIR_DOMAIN_PAUSED_USER
            and not should_run
        ):
            return "the VM was suspended and stays suspended"
        if await domain.is_off():
            if not should_run:
                return "the VM was off and stays off"
            await domain.do(start)
            return "the VM was off: started"
        await domain.do(lambda handle: mark(handle, request.event_id))
        rebooted, stop_listening = await domain.listen_for_reboot()
        try:
            with suppress(LibvirtError):  # the guest does not support it; it is reset below
                await domain.do(lambda handle: handle.reboot(0))
                await self._wait_until(lambda: self._has_rebooted(domain, rebooted.is_set))
        finally:
            stop_listening()
        if await domain.is_off():
            await domain.do(start)
            return "the guest shut down: started again"
        if rebooted.is_set():
            await domain.do(unmark)
            return "the guest rebooted by itself"
        await domain.do(reset)
        return f"the guest did not reboot within {self._grace.total_seconds():g} seconds: reset"

    async def _has_rebooted(self, domain: Domain, is_set: Callable[[], bool]) -> bool:
        return is_set() or await domain.is_off()

    async def _stop(self, request: ImpactRequest, domain: Domain) -> str:
        """Shut down within the grace period, else force it off."""
        if await domain.is_off():
            return "the VM was off"
        with suppress(LibvirtError):  # the guest cannot be asked: it is destroyed below
            await domain.do(lambda handle: handle.shutdown())
            if await self._wait_until(domain.is_off):
                return "the guest shut down by itself"
        if not await domain.is_off():
            await domain.do(lambda handle: handle.destroy())
        return (
            f"the guest did not shut down within {self._grace.total_seconds():g} seconds: stopped"
        )

    async def _remove(self, request: ImpactRequest, domain: Domain) -> str:
        how = await self._stop(request, domain)
        await domain.undefine(keep_nvram=False)
        return f"{how}, undefined"

    async def _move(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        """Move to another host. If there is none, stop and start the VM."""
        is_elsewhere = self._libvirts.uri(domain.host) != self._libvirts.uri(request.vm.host)
        if is_elsewhere:  # moved by an earlier try, or by an operator
            return await self._finish_move(request, domain)
        target = choose_host(request.vm.host, self._others(request.vm.host), self._avoid())
        if not target:
            return ImpactResult(detail=await self._move_stopped(request, domain, domain.host))
        try:
            return ImpactResult(host=target, detail=await self._migrate(domain, target))
        except LibvirtError as refused:
            if refused.number not in CANNOT_MIGRATE and not await domain.is_off():
                raise
        return ImpactResult(host=target, detail=await self._move_stopped(request, domain, target))

    async def _finish_move(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        """Start a moved VM if it should run, and undefine what is left on the old host."""
        is_off = await domain.is_off()
        if is_off and (request.cause in STARTS or await domain.is_marked(request.event_id)):
            await domain.do(start)
            is_off = False
        left = (
            await self._look(request, request.vm.host)
            if self._libvirts.uri(request.vm.host)
            else None
        )
        if left is not None and await left.is_off():
            await left.undefine(keep_nvram=True)
        return ImpactResult(
            host=domain.host, detail=f"{'off' if is_off else 'running'} on {domain.host}"
        )

    async def _migrate(self, domain: Domain, target: str) -> str:
        def work(handle: Any, connection: Any) -> None:
            flags = libvirt.VIR_MIGRATE_LIVE
            if handle.isPersistent():
                flags |= libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
            handle.migrate3(connection, {}, flags)

        connection = await self._libvirts.ask(target, lambda connection: connection)
        try:
            await domain.do(lambda handle: work(handle, connection), MIGRATION_SECONDS_MAX)
        except asyncio.CancelledError:
            domain.run_to_completion(lambda handle: handle.abortJob())
            raise
        return f"migrated live to {target}"

    async def _move_stopped(self, request: ImpactRequest, domain: Domain, target: str) -> str:
        """Stop the VM here and start it on the target.

        If it does not start there, it is started here again and the try fails.
        """
        should_run = (
            request.cause in STARTS
            or not await domain.is_off()
            or await domain.is_marked(request.event_id)
        )
        if should_run:  # the definition carries the marker along
            await domain.do(lambda handle: mark(handle, request.event_id))
        xml = await domain.definition()
        there = await self._libvirts.define(target, xml)
        how = await self._stop(request, domain)
        if not should_run:
            how += " and stays off"
        try:
            if should_run:
                await there.do(start)
        except ImpactFailed:
            back = await self._libvirts.define(domain.host, xml)
            await back.do(start)
            if target != domain.host:
                with suppress(ImpactFailed):
                    await there.undefine(keep_nvram=True)
            raise
        if target == domain.host:
            return f"{how}; started again: there is no other host"
        await domain.undefine(keep_nvram=True)
        return f"{how}; moved to {target}"

    async def _wait_until(self, is_done: Callable[[], Awaitable[bool]]) -> bool:
        """Wait for a condition. False if the grace period ends first."""
        end = self._clock.now() + self._grace
        while not await is_done():  # ends with the grace period
            now = self._clock.now()
            if now >= end:
                return False
            await self._clock.sleep_until(min(now + CHECK_EVERY, end))
        return True
