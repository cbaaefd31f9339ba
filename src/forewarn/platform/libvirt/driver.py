"""The libvirt platform.

Each try inspects the domain first and does only what is left to do, so a try after a crash
continues: a marker in the domain's metadata records what an earlier try began. A guest gets
`grace` to shut down or reboot by itself before it is forced. Steps are short calls with waits in
between, so no thread is blocked while a guest takes its time.

A migration outlives the call that began it, if libvirt does not abort it on request: until it has
ended, nothing acts on the VM. Nor while a call that outlived its time limit has not ended: it may
still act.

A VM that is off on its host is acted on only if the target in its marker, and each host that
reports it running, answer: it may run there. Moves are in `mover.py`.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import libvirt
from msgspec.structs import replace

from forewarn.core.event import DURATION_SECONDS, Cause, EventType
from forewarn.core.fleet import Vm
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, ImpactResult, Sleeper
from forewarn.platform.file_systems import MountTable
from forewarn.platform.libvirt import marker
from forewarn.platform.libvirt.connection import OFF, UNSUPPORTED, Domain, LibvirtError
from forewarn.platform.libvirt.mover import Mover
from forewarn.platform.libvirt.power import PowerControl, has_begun, should_start
from forewarn.platform.libvirt.targets import Targets
from forewarn.platform.threads import LAST_CALL_SECONDS, run_to_completion

PING_EVERY = timedelta(seconds=2)
AGENT_SECONDS_MAX = 10.0
"""libvirt itself gives up after 5 seconds on a guest agent that does not react at all."""
SUSPENDED_BY_USER = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER)
GONE_IS_DONE = (EventType.PREEMPT, EventType.TERMINATE)


@dataclass
class LibvirtPlatform:
    """Acts on the domains of the fleet's hosts.

    `read_mounts` says which file systems only their host has, if this process runs there.
    """

    targets: Targets
    clock: Sleeper
    grace: timedelta
    read_mounts: Callable[[], MountTable] = MountTable

    def __post_init__(self) -> None:
        self.libvirts = self.targets.libvirts
        # The call in progress cannot be canceled, and one more may leave the VM in a good state.
        self.stop_seconds = self.libvirts.call_seconds_max + LAST_CALL_SECONDS
        self.power = PowerControl(self.clock, self.grace)
        self.mover = Mover(self.targets, self.power, self.read_mounts)

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        found = await self.targets.find(request)
        if not found:
            hosts = ", ".join(filter(None, (request.vm.host, *self.targets.others(request))))
            problem = f"no domain {request.vm.id or request.vm.name} on {hosts}"
            if request.type in GONE_IS_DONE:
                return ImpactResult(detail=f"{problem}: nothing to do")
            raise ImpactFailed(problem, vm=request.vm.name)
        domain = found[0]
        await _refuse_migrating(domain, may_hang=request.type in GONE_IS_DONE)
        await self._resume_left(request, domain)
        if request.moves:
            return await self.mover.move(request, domain)
        if request.type is EventType.REBOOT:
            result = await self._reboot(request, domain)
        elif request.type is EventType.FREEZE:
            result = ImpactResult(detail=await self._freeze(request, domain))
        elif request.type is EventType.PREEMPT:
            await domain.do(marker.unmark)  # whatever an earlier event has begun, it stays off
            result = ImpactResult(detail=await self.power.stop(domain))
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
                    await self._ping(domain)
                    return
            except ImpactFailed as error:
                if error.facts.get("number") in UNSUPPORTED:
                    await asyncio.Event().wait()
            await self.clock.sleep_until(self.clock.now() + PING_EVERY)

    async def _ping(self, domain: Domain) -> None:
        """Ask the guest agent. The VM's next impact does not wait for an answer."""
        await domain.ask(lambda handle: handle.getTime(), AGENT_SECONDS_MAX)

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
            begun = await domain.ask(marker.read)
            is_ours = begun.event == event_id and begun.host in ("", host)
            if domain.host == host and is_ours:
                await _refuse_migrating(domain)
                state = await domain.state()
                if state == SUSPENDED_BY_USER:
                    await domain.do(marker.resume)
                    return f"the VM was suspended: resumed; {await self._set_clock(domain)}"
                is_off, is_paused = state[0] in OFF, state[0] == libvirt.VIR_DOMAIN_PAUSED
                # A guest that runs may still shut down, as the impact has asked it to.
                if not (is_off or is_paused) and await self.power.wait_until_off(domain):
                    return await self.recover(
                        host, event_id, vm, may_start=True, may_run_on=may_run_on
                    )
                await domain.do(marker.start if may_start and is_off else marker.unmark)
                if is_off:
                    return "the VM was off: started" if may_start else "the VM is off and stays off"
        return "nothing was left to do"

    async def _resume_left(self, request: ImpactRequest, domain: Domain) -> None:
        """Resume a VM that an earlier event has suspended and left so. It would stay suspended: the
        marker of this event hides that, and a live migration keeps the state.
        """
        suspended_by = (await domain.ask(marker.read)).suspended_by
        is_left = suspended_by not in ("", request.event_id)
        if is_left and await domain.state() == SUSPENDED_BY_USER:
            await domain.do(marker.resume)
            await self._set_clock(domain)

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
            if not await has_begun(request, domain):
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
            # The guest decides how long this takes, and the time is right whenever it is set.
            await domain.ask(lambda handle: handle.setTime(None, sync), AGENT_SECONDS_MAX)
        except ImpactFailed as error:
            if error.facts.get("number") in (*UNSUPPORTED, libvirt.VIR_ERR_AGENT_UNRESPONSIVE):
                return "no guest agent sets its clock"
            return f"the guest agent did not set its clock: {error}"
        return "the guest agent set its clock"

    async def _suspend(self, event_id: str, domain: Domain, duration: timedelta) -> None:
        """Suspend the VM for a while. It is resumed whatever happens.

        If we give up before the suspend call has ended, its own thread resumes the VM. If we are
        canceled, we end when it is resumed. If the process ends as well, it waits for that. If we
        give up before the thread has begun, the VM is left alone: its owner may have suspended it.
        """
        has_given_up, has_ended = threading.Event(), threading.Event()
        first = threading.Lock()  # held by the thread if it has begun before we gave up, else by us

        def suspend_or_give_up(handle: Any) -> None:
            if has_given_up.is_set() or not first.acquire(blocking=False):
                return
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
            await domain.do(suspend_or_give_up, on_cancel=has_given_up.set)
            await self.clock.sleep_until(self.clock.now() + duration)
            await domain.do(marker.resume)
        except asyncio.CancelledError:
            if not first.acquire(blocking=False):
                await asyncio.wrap_future(run_to_completion(resume_at_last))
            raise
        except ImpactFailed:
            has_given_up.set()
            if not first.acquire(blocking=False):
                run_to_completion(resume_at_last)
            raise

    async def _reboot(self, request: ImpactRequest, domain: Domain) -> ImpactResult:
        should_run = await should_start(request, domain)
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
                await self.power.wait_until_off(domain, rebooted.is_set)
        if await domain.is_off():
            await domain.do(marker.start)
            return "the guest shut down: started again"
        if rebooted.is_set():
            await domain.do(marker.unmark)
            return "the guest rebooted by itself"
        await domain.do(marker.reset)
        return f"the guest did not reboot within {self.grace.total_seconds():g} seconds: reset"

    async def _remove(self, domain: Domain) -> str:
        how = await self.power.stop(domain)
        await domain.undefine(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)
        return f"{how}, undefined"


async def _refuse_migrating(domain: Domain, *, may_hang: bool = False) -> None:
    """ImpactFailed while a migration holds the VM, of an earlier try or of an operator.

    QEMU may hang, and libvirt does not know then. `may_hang`: the VM is to be destroyed, which
    works all the same.
    """
    try:
        is_migrating = await domain.is_migrating()
    except LibvirtError as error:
        if may_hang and error.facts["number"] == libvirt.VIR_ERR_OPERATION_TIMEOUT:
            return
        raise
    if is_migrating:
        raise ImpactFailed(f"a migration is in progress on {domain.host}", host=domain.host)
