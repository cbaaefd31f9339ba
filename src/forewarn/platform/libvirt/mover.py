"""Moves a domain to another host: live if libvirt can, else stopped here and started there.

A VM must never run on two hosts: two copies destroy their disk. So a move writes its target into
the marker before the VM can run there, and goes on to another target only when libvirt has refused
to start the VM on the last one. If a start got no answer, the try fails.

A VM is not stopped needlessly: libvirt of the target is asked first whether it can run there
(`obstacles.py`), and an event stops it at most once: the marker records that before the stop. If no
target starts it then, it is started at home. If something else has started it there, it stays.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import libvirt
from msgspec.structs import replace

from forewarn.core.event import Cause
from forewarn.core.fleet import RedeployMethod
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.file_systems import MountTable
from forewarn.platform.libvirt import marker
from forewarn.platform.libvirt.connection import UNSUPPORTED, Domain, LibvirtError
from forewarn.platform.libvirt.obstacles import (
    find_obstacle,
    find_snapshots,
    find_state,
    find_tie,
    has_block_job,
)
from forewarn.platform.libvirt.power import PowerControl, has_begun, should_start
from forewarn.platform.libvirt.targets import Targets
from forewarn.platform.threads import run_to_completion

CANNOT_MIGRATE = (*UNSUPPORTED, libvirt.VIR_ERR_MIGRATE_UNSAFE)
NOT_THE_TARGET = (
    libvirt.VIR_ERR_NO_DOMAIN,
    libvirt.VIR_ERR_OPERATION_ABORTED,
    libvirt.VIR_ERR_OPERATION_INVALID,
    libvirt.VIR_ERR_OPERATION_TIMEOUT,
)
"""Error codes of a move that fails with any target: the domain is not in the right state, another
job holds it, or an operator aborted the migration. See also `_is_refusal`.
"""
TARGETS_MAX = 3
MIGRATION_SECONDS_MAX = 86_400.0
"""`impact_seconds_max`, the limit of every impact, is reached first."""
IN_PLACE = "started again: there is no other host"
RESTARTS_IN_PLACE = (Cause.REDEPLOY, Cause.FAILED)
"""Causes for which a VM without another host is stopped and started where it is: its user wants a
new start, or its host has failed. Maintenance would gain nothing by that.
"""
SECURE_XML = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE


@dataclass
class Mover:
    """`read_mounts` says which file systems only the domains' host has, if this process can tell:
    it does if it runs there.
    """

    targets: Targets
    power: PowerControl
    read_mounts: Callable[[], MountTable] = MountTable

    def __post_init__(self) -> None:
        self.libvirts = self.targets.libvirts

    async def move(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        """Move to another host."""
        begun = await domain.ask(marker.read)
        source = request.vm.host
        if begun.event == request.event_id:
            source = begun.host or source  # the fleet may already know the new host
        if self.libvirts.uri(domain.host) != self.libvirts.uri(source):
            return await self._finish(request, domain, source)
        with suppress(ImpactFailed):  # the VM is here, whether the last target answers or not
            copy = await self.libvirts.find(begun.target, request.vm)
            if copy is not None and copy.host != domain.host:
                await self.targets.discard(copy, begun)
        if await domain.ask(functools.partial(marker.is_stopping, event_id=request.event_id)):
            # An earlier try has asked the guest to shut down.
            await self.power.wait_until_off(domain)
            begun = await domain.ask(marker.read)
        if begun.stopped_by == request.event_id:
            is_off = await domain.is_off()
            if begun.target == domain.host and not is_off:
                await self._settle(domain, None, request.event_id)
                return ImpactResult(detail=IN_PLACE, is_back=False)
            if not (begun.target and is_off):
                if begun.event == request.event_id:
                    await self._run_at_home(request, domain)
                raise ImpactFailed(
                    "it was stopped for this event before, and no other host started it",
                    vm=request.vm.name,
                    is_final=True,
                )
        async with self.targets.leave(request, domain) as targets:
            return await self._leave(request, domain, targets[:TARGETS_MAX])

    async def _run_at_home(
        self, request: ImpactRequest, domain: Domain, xml: str = "", *, stays: bool = True
    ) -> None:
        """Start the VM at home unless it runs. If it stays there, this event gives up its move.

        Else it is restarted in place, and the next try finds that done.
        """
        if not stays:
            await domain.do(marker.ensure_running)
            return
        home = await self.libvirts.define(domain.host, xml, domain.uuid) if xml else domain
        await home.do(functools.partial(marker.stay, event_id=request.event_id))

    async def _leave(
        self, request: ImpactRequest, domain: Domain, targets: Sequence[str]
    ) -> ImpactResult:
        """Move to one of the targets; without any, restart in place where that is wanted."""
        vm, is_live_only = request.vm.name, request.method is RedeployMethod.LIVE_ONLY
        was_off = await domain.is_off()
        if not targets:
            if request.no_target:
                raise ImpactFailed(request.no_target, vm=vm)
            if is_live_only or request.cause not in RESTARTS_IN_PLACE:
                named = ", ".join(request.targets)
                why = f"it has no libvirt_uri for {named}" if named else "there is no other host"
                raise ImpactFailed(f"{domain.host} cannot move {vm}: {why}", vm=vm)
            return await self._restart(request, domain, [domain.host], was_off=was_off)
        xml = await domain.ask(_read_xml)
        mounts = self.read_mounts()
        tie = find_tie(xml, mounts)
        refusals = list[str]()
        if request.method is not RedeployMethod.COLD and not was_off:
            try:
                result = await self._migrate(request, domain, targets, refusals)
            except ImpactFailed as error:
                if not tie or await domain.is_off():
                    raise
                # The tie may be the reason or not, so another try is allowed.
                raise ImpactFailed(f"{error}; {tie}", **error.facts) from error
            if result is not None:
                return result
        if is_live_only and refusals:
            await domain.do(marker.unmark_failed)
            raise cannot_move(request, domain, tie or "; ".join(refusals))
        tie = tie or find_state(xml, mounts) or await domain.ask(find_snapshots)
        result = await self._restart(request, domain, targets, was_off=was_off, tie=tie)
        return replace(result, detail="; ".join((*refusals[:1], result.detail)))

    async def _migrate(
        self, request: ImpactRequest, domain: Domain, targets: Sequence[str], refusals: list[str]
    ) -> ImpactResult | None:
        """Migrate live to the first target that takes the VM.

        None if libvirt cannot do that with any of them; `refusals` say why.
        """
        failures = list[str]()
        for target in targets:
            async with self.targets.arrive(domain, target):
                try:
                    await domain.do(functools.partial(_mark, request, domain.host, target))
                    await self._migrate_to(domain, target)
                except ImpactFailed as error:
                    number = error.facts.get("number")
                    if await self._is_refusal(number, request, domain, target):
                        refusals.append(f"cannot migrate live to {target}: {error}")
                        continue
                    failures.append(f"{target} failed: {error}")
                    may_run_there = await domain.is_off()
                    if may_run_there or number in NOT_THE_TARGET:
                        break
                    continue
                detail = "; ".join((*refusals, *failures, f"migrated live to {target}"))
                return ImpactResult(host=target, detail=detail)
        if not failures:
            return None
        if not await domain.is_off():
            await domain.do(marker.unmark_failed)
        raise ImpactFailed("; ".join((*refusals, *failures)), vm=request.vm.name)

    async def _is_refusal(
        self, number: object, request: ImpactRequest, domain: Domain, target: str
    ) -> bool:
        """Whether a migration failed because libvirt can never do it.

        What QEMU cannot migrate, such as virtiofs, is refused with OPERATION_INVALID. That is also
        the code if the VM is off or runs on the target, or while another migration or a block job
        is in progress: no reason to stop the VM. Neither is a host that does not answer.
        """
        if number != libvirt.VIR_ERR_OPERATION_INVALID:
            return number in CANNOT_MIGRATE
        with suppress(ImpactFailed):
            there = await self.libvirts.find(target, request.vm)
            return (there is None or await there.is_off()) and not (
                await domain.is_off()
                or await domain.is_migrating()
                or await domain.ask(has_block_job)
            )
        return False

    async def _migrate_to(self, domain: Domain, target: str) -> None:
        connection = await self.libvirts.ask(target, lambda connection: connection)

        def work(handle: Any) -> None:
            flags = libvirt.VIR_MIGRATE_LIVE
            if handle.isPersistent():
                flags |= libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
            marker.unmark(handle.migrate3(connection, {}, flags))

        def abort() -> None:
            run_to_completion(domain.handle.abortJob)

        await domain.do(work, MIGRATION_SECONDS_MAX, on_cancel=abort)

    async def _restart(
        self,
        request: ImpactRequest,
        domain: Domain,
        targets: Sequence[str],
        *,
        was_off: bool,
        tie: str = "",
    ) -> ImpactResult:
        """Stop the VM, and start it on the first target that can run it; if none does, at home.

        It is stopped only if there is no `tie`, and when libvirt of a target has defined it there
        and found no obstacle. One that `was_off` and has been started since is not stopped.
        """
        was_begun = await has_begun(request, domain)
        should_run = not was_off or await should_start(request, domain)
        how, xml, failures, is_final = "", "", list[str](), True
        for target in () if tie else targets:
            async with self.targets.arrive(domain, target):
                try:
                    if should_run:
                        await domain.do(functools.partial(_mark, request, domain.host, target))
                    xml = await domain.ask(_read_xml)
                    there = await self.libvirts.define(target, xml, domain.uuid)
                    obstacle = await self._find_obstacle(there, domain, xml)
                except ImpactFailed as error:
                    number = error.facts.get("number")
                    failures.append(f"{target} failed: {error}")
                    is_final = is_final and number in UNSUPPORTED
                    if number in NOT_THE_TARGET:
                        break
                    continue
                if obstacle:
                    failures.append(f"{target} cannot run it: {obstacle}")
                    continue
                how = how or ("the VM was off" if was_off else await self._stop(request, domain))
                await self._check_off(request, there, domain, has_stopped=not was_off)
                refusal = await self._try_start(there, domain) if should_run else ""
                if not refusal:
                    await self._settle(there, domain, request.event_id)
                    how += "" if should_run else " and stays off"
                    has_moved = target != domain.host
                    end = f"moved to {target}" if has_moved else IN_PLACE
                    detail = "; ".join((how, *failures, end))
                    return ImpactResult(target * has_moved, detail, is_back=not should_run)
                failures.append(f"{target} failed: {refusal}")
        is_off, has_stopped = await domain.is_off(), bool(how) and not was_off
        if should_run and (has_stopped or (is_off and (how or was_begun))):
            is_final = domain.host not in targets
            await self._run_at_home(request, domain, xml if is_off else "", stays=is_final)
        elif not is_off:
            await domain.do(marker.unmark_failed)
        if tie:
            raise cannot_move(request, domain, tie)
        raise ImpactFailed("; ".join(failures), vm=request.vm.name, is_final=is_final)

    async def _stop(self, request: ImpactRequest, domain: Domain) -> str:
        """Stop the VM, unless this event has stopped it before. Return what came of it."""
        event_id = request.event_id
        if not await domain.do(functools.partial(marker.mark_stop, event_id=event_id)):
            return "the VM was stopped before"
        return await self.power.stop(
            domain, functools.partial(marker.was_stopped, event_id=event_id)
        )

    async def _find_obstacle(self, there: Domain, domain: Domain, xml: str) -> str:
        """Why the VM cannot run on a target, where it is defined; then it no longer is."""
        if there.host == domain.host:
            return ""
        obstacle = "unknown"
        try:
            obstacle = await self.libvirts.ask(
                there.host, lambda connection: find_obstacle(there.handle, connection, xml)
            )
        finally:
            if obstacle:
                await self._undefine(there)
        return obstacle

    async def _undefine(self, there: Domain) -> None:
        """Undefine what was defined on a target and does not run there.

        In one call: a move that was canceled makes no more than that.
        """
        with suppress(ImpactFailed):
            await there.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM, only_if_off=True)

    async def _check_off(
        self, request: ImpactRequest, there: Domain, domain: Domain, *, has_stopped: bool
    ) -> None:
        """ImpactFailed if something has started a VM at home that was off, or was stopped there.

        To stop it now would break what its owner wants, or stop it twice, and to start it there
        would duplicate it.
        """
        if there.host == domain.host or await domain.is_off():
            return
        await self._undefine(there)
        if has_stopped:
            await self._run_at_home(request, domain)
        problem = f"the VM was started on {domain.host} meanwhile"
        raise ImpactFailed(problem, host=domain.host, is_final=has_stopped)

    async def _try_start(self, there: Domain, domain: Domain) -> str:
        """Start the VM on a target. Return why it does not run there, empty if it does.

        Raises if it may run or not. A guest may take minutes to shut down, and its target may be
        lost meanwhile: that is noticed before the start is sent.
        """
        try:
            await there.is_off()
        except ImpactFailed as error:
            return str(error)
        try:
            await there.do(lambda handle: handle.create())
        except LibvirtError as error:
            if await there.is_off():
                if there.host != domain.host:
                    await self._undefine(there)
                return str(error)
        return ""

    async def _settle(self, there: Domain, left: Domain | None, event_id: str) -> None:
        """Undefine what is left on its old host of a VM that is on its new one."""
        if left is not None and left.host != there.host and await left.is_off():
            await left.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
        await there.do(functools.partial(marker.unmark_moved, event_id=event_id))

    async def _finish(self, request: ImpactRequest, domain: Domain, source: str) -> ImpactResult:
        """Start a moved VM if it should run, and undefine what is left on the old host.

        One that runs may have been started by the last try, and still boot.
        """
        is_off = await domain.is_off()
        if is_off and await should_start(request, domain):
            await domain.do(marker.start)
            is_off = False
        left = await self.libvirts.find(source, request.vm)
        await self._settle(domain, left, request.event_id)
        detail = f"{'off' if is_off else 'running'} on {domain.host}"
        return ImpactResult(host=domain.host, detail=detail, is_back=is_off)


def cannot_move(request: ImpactRequest, domain: Domain, why: str) -> ImpactFailed:
    """Trying again would change nothing."""
    vm = request.vm.name
    return ImpactFailed(f"{vm} cannot leave {domain.host}: {why}", vm=vm, is_final=True)


def _read_xml(handle: Any) -> str:
    return str(handle.XMLDesc(SECURE_XML))


def _mark(request: ImpactRequest, host: str, target: str, handle: Any) -> None:
    marker.mark_move(handle, request.event_id, host, target)
