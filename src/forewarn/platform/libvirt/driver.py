"""A platform that is libvirt. Each try looks at the domain first and does what is left to do, so a
try after a crash goes on: a mark in the domain's metadata tells what an earlier try has begun.

A guest is asked before it is made to: it has `grace` to shut down or reboot by itself. Steps are
short calls with waits between them, so no thread is held while a guest takes its time.
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
from forewarn.platform.libvirt.connection import CANNOT_MIGRATE, Domain, LibvirtRefused, Libvirts
from forewarn.platform.libvirt.marker import mark, reset, start, suspend, unmark, wake
from forewarn.platform.simulated import Sleeper, another_host

LOOK_EVERY = timedelta(seconds=0.5)
HOSTS_AT_ONCE_MAX = 16
MIGRATION_SECONDS_MAX = 86_400.0
"""The limit of all impacts, `impact_seconds_max`, comes first."""
STARTS = (Cause.RESTART, Cause.REDEPLOY, Cause.FAILED)
"""Why a VM that does not run is started; maintenance leaves it as it was."""
GONE_IS_DONE = (EventType.PREEMPT, EventType.TERMINATE)


class LibvirtPlatform:
    """Acts on the domains of the fleet's hosts.

    `hosts` tells which there are to move to, `wanted` which of them serve badly.
    """

    def __init__(
        self,
        libvirts: Libvirts,
        clock: Sleeper,
        *,
        hosts: Callable[[], Iterable[str]],
        wanted: Callable[[], Mapping[str, int]] = dict,
        grace: timedelta,
    ) -> None:
        self._wanted = wanted
        self._libvirts = libvirts
        self._clock = clock
        self._hosts = hosts
        self._grace = grace

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        moves = order.type is EventType.REDEPLOY or order.cause is Cause.FAILED
        domain = await self._find(order, is_active=moves)
        if domain is None and order.type in GONE_IS_DONE:
            return ImpactResult(detail="libvirt knows no such domain: there was nothing left to do")
        if domain is None:
            raise ImpactFailed(
                f"libvirt knows no domain {order.vm.id or order.vm.name} on any host of the fleet",
                vm=order.vm.name,
            )
        if moves:
            return await self._move(order, domain)
        steps: dict[EventType, Callable[[ImpactRequest, Domain], Awaitable[str]]] = {
            EventType.FREEZE: self._freeze,
            EventType.REBOOT: self._reboot,
            EventType.PREEMPT: self._stop,
            EventType.TERMINATE: self._remove,
        }
        detail = await steps[order.type](order, domain)
        return ImpactResult(host="" if domain.host == order.vm.host else domain.host, detail=detail)

    async def _find(self, order: ImpactRequest, *, is_active: bool) -> Domain | None:
        """The VM's domain on the host that the fleet names, else wherever it is; where it matters,
        the one that runs.
        """
        here = await self._look(order, order.vm.host) if self._libvirts.uri(order.vm.host) else None
        if here is not None and not (is_active and await here.is_off()):
            return here
        found = [] if here is None else [here]
        others = self._others(order.vm.host)
        for first in range(0, len(others), HOSTS_AT_ONCE_MAX):
            batch = others[first : first + HOSTS_AT_ONCE_MAX]
            answers = await asyncio.gather(*(self._look(order, host) for host in batch))
            found += [domain for domain in answers if domain is not None]
        for domain in found:
            if not await domain.is_off():
                return domain
        return found[0] if found else None

    async def _look(self, order: ImpactRequest, host: str) -> Domain | None:
        return await self._libvirts.find(host, order.vm)

    def _others(self, host: str) -> list[str]:
        """The other hosts whose libvirt we can ask, one for each libvirt."""
        uris = {self._libvirts.uri(other): other for other in sorted(self._hosts(), reverse=True)}
        return sorted(
            other for uri, other in uris.items() if uri and uri != self._libvirts.uri(host)
        )

    async def _freeze(self, order: ImpactRequest, domain: Domain) -> str:
        if await domain.is_off():
            return "it did not run: there was nothing to freeze"
        state, reason = await domain.state()
        if state == libvirt.VIR_DOMAIN_PAUSED and reason != libvirt.VIR_DOMAIN_PAUSED_USER:
            raise ImpactFailed(
                f"{order.vm.name} is paused already, and not by anybody's wish (reason {reason})",
                reason=reason,
            )
        if state == libvirt.VIR_DOMAIN_PAUSED and not await domain.is_marked(order.event_id):
            return "it was suspended already, and stays so"
        if state == libvirt.VIR_DOMAIN_PAUSED:
            await domain.do(wake)
            return "an earlier try had suspended it: resumed"
        seconds = (
            order.duration_seconds
            if order.duration_seconds >= 0
            else DURATION_SECONDS[EventType.FREEZE]
        )
        try:
            await domain.do_or_undo(lambda handle: suspend(handle, order.event_id), wake)
            await self._clock.sleep_until(self._clock.now() + timedelta(seconds=seconds))
            await domain.do(wake)
        except asyncio.CancelledError:
            domain.see_through(wake)
            raise
        except ImpactFailed:
            with suppress(ImpactFailed):
                await domain.do(wake)
            raise
        return f"suspended for {seconds} seconds, and resumed"

    async def _reboot(self, order: ImpactRequest, domain: Domain) -> str:
        is_to_run = order.cause in STARTS or await domain.is_marked(order.event_id)
        state, reason = await domain.state()
        if (
            state == libvirt.VIR_DOMAIN_PAUSED
            and reason == libvirt.VIR_DOMAIN_PAUSED_USER
            and not is_to_run
        ):
            return "it was suspended, and stays so"
        if await domain.is_off():
            if not is_to_run:
                return "it did not run, and stays so"
            await domain.do(start)
            return "it did not run: started"
        await domain.do(lambda handle: mark(handle, order.event_id))
        heard, stop_listening = await domain.listen_for_reboot()
        try:
            with suppress(LibvirtRefused):  # no way to ask this guest: it is made to
                await domain.do(lambda handle: handle.reboot(0))
                await self._until(lambda: self._is_through(domain, heard.is_set))
        finally:
            stop_listening()
        if await domain.is_off():
            await domain.do(start)
            return "the guest shut down: started again"
        if heard.is_set():
            await domain.do(unmark)
            return "the guest rebooted by itself"
        await domain.do(reset)
        return f"the guest did not reboot within {self._grace.total_seconds():g} seconds: reset"

    async def _is_through(self, domain: Domain, is_heard: Callable[[], bool]) -> bool:
        return is_heard() or await domain.is_off()

    async def _stop(self, order: ImpactRequest, domain: Domain) -> str:
        """Shut down within the grace, else made to."""
        if await domain.is_off():
            return "it did not run"
        with suppress(LibvirtRefused):  # no way to ask this guest: it is made to
            await domain.do(lambda handle: handle.shutdown())
            if await self._until(domain.is_off):
                return "the guest shut down by itself"
        if not await domain.is_off():
            await domain.do(lambda handle: handle.destroy())
        return (
            f"the guest did not shut down within {self._grace.total_seconds():g} seconds: stopped"
        )

    async def _remove(self, order: ImpactRequest, domain: Domain) -> str:
        how = await self._stop(order, domain)
        await domain.undefine(keep_nvram=False)
        return f"{how}, undefined"

    async def _move(self, order: ImpactRequest, domain: Domain) -> ImpactResult:
        """To another host than the fleet names; where there is no other, stopped and started."""
        is_elsewhere = self._libvirts.uri(domain.host) != self._libvirts.uri(order.vm.host)
        if is_elsewhere:  # an earlier try has moved it, or somebody else did
            return await self._settle(order, domain)
        target = another_host(order.vm.host, self._others(order.vm.host), self._wanted())
        if not target:
            return ImpactResult(detail=await self._move_stopped(order, domain, domain.host))
        try:
            return ImpactResult(host=target, detail=await self._migrate(domain, target))
        except LibvirtRefused as refused:
            if refused.number not in CANNOT_MIGRATE and not await domain.is_off():
                raise
        return ImpactResult(host=target, detail=await self._move_stopped(order, domain, target))

    async def _settle(self, order: ImpactRequest, domain: Domain) -> ImpactResult:
        """It is where it should be: let it run if it did, and forget what was left behind."""
        is_off = await domain.is_off()
        if is_off and (order.cause in STARTS or await domain.is_marked(order.event_id)):
            await domain.do(start)
            is_off = False
        left = await self._look(order, order.vm.host) if self._libvirts.uri(order.vm.host) else None
        if left is not None and await left.is_off():
            await left.undefine(keep_nvram=True)
        return ImpactResult(
            host=domain.host, detail=f"it {'does not run' if is_off else 'runs'} on {domain.host}"
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
            domain.see_through(lambda handle: handle.abortJob())
            raise
        return f"migrated live to {target}"

    async def _move_stopped(self, order: ImpactRequest, domain: Domain, target: str) -> str:
        """Stop it here and start it there.

        Where it does not start there, it is started here again, and the try has failed.
        """
        is_to_run = (
            order.cause in STARTS
            or not await domain.is_off()
            or await domain.is_marked(order.event_id)
        )
        if is_to_run:  # the definition takes the mark along
            await domain.do(lambda handle: mark(handle, order.event_id))
        xml = await domain.definition()
        there = await self._libvirts.define(target, xml)
        how = await self._stop(order, domain)
        if not is_to_run:
            how += ", and stays so"
        try:
            if is_to_run:
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

    async def _until(self, is_so: Callable[[], Awaitable[bool]]) -> bool:
        """Whether it became so within the grace."""
        end = self._clock.now() + self._grace
        while not await is_so():  # ends with the grace
            now = self._clock.now()
            if now >= end:
                return False
            await self._clock.sleep_until(min(now + LOOK_EVERY, end))
        return True
