"""The platform of a simulated daemon: does to the VMs of `Hypervisors` what libvirt's driver does.

Each step is a call that takes a while. A daemon may be killed or cancelled between any two, or
during one, which is carried out all the same.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from random import Random
from typing import NamedTuple

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Power
from forewarn.errors import ImpactFailed
from forewarn.platform.base import STARTS, ImpactRequest, ImpactResult
from tests.sim.hypervisors import HOSTS, Actor, Hypervisors, Marker, State

HAVE_GUEST_AGENTS = ("web-1", "db-0")
MIGRATE_LIVE = ("web-1",)
CALL_SECONDS = 0.01, 0.4
FREEZE_SECONDS = 4.0
GRACE_SECONDS = 5.0


class Outcome(NamedTuple):
    """Of one call."""

    event: str
    vm: str
    is_done: bool
    is_back: bool = True


class Outcomes:
    """Of all calls of all daemons. The number of each goes into the history."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.by_number: dict[str, Outcome] = {}

    def add(self, request: ImpactRequest, *, is_done: bool, is_back: bool = True) -> str:
        number = f"call-{next(self._numbers)}"
        self.by_number[number] = Outcome(request.event_id, request.vm.name, is_done, is_back)
        return number


class SimulatedHypervisor:
    """The platform of one run of the daemon of `host`."""

    def __init__(
        self, vms: Hypervisors, host: str, actor: Actor, outcomes: Outcomes, chance: Random
    ) -> None:
        self._vms, self._host, self._actor, self._outcomes = vms, host, actor, outcomes
        self._chance = chance
        self.failure = 0.15

    # --- the platform

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        is_started = request.event_id in self._vms.started
        self._vms.must(is_started, "nothing is done before its event has started", request)
        with self._vms.acts(self._actor, request.vm.name, request.event_id):
            try:
                host, is_back = await self._run(request)
            except ImpactFailed as error:
                number = self._outcomes.add(request, is_done=False)
                raise ImpactFailed(str(error), output=number) from error
            number = self._outcomes.add(request, is_done=True, is_back=is_back)
            return ImpactResult(host, number, is_back)

    async def wait_until_back(self, request: ImpactRequest) -> None:
        while not (request.vm.name in HAVE_GUEST_AGENTS and self._vms.is_up(request.vm.name)):
            await asyncio.sleep(self._chance.uniform(0.5, 2))

    async def list_begun(self, host: str) -> list[tuple[str, str]]:
        await self._pause()
        return [
            (copy.marker.event, vm)
            for vm, copy in self._vms.copies[host].items()
            if self._vms.has_begun(host, vm)
        ]

    async def recover(
        self, host: str, event_id: str, vm: str, *, may_start: bool, may_run_on: tuple[str, ...]
    ) -> None:
        place = await self._find(vm, host, may_run_on)
        marker = self._marker(host, vm)
        if place != host or marker.event != event_id or marker.host not in ("", host):
            return
        copy, is_wanted = self._vms.copies[host][vm], event_id in self._vms.starting
        state = copy.state
        if state is State.RUNNING:
            self._vms.recovering.add(vm)
            try:
                await asyncio.sleep(GRACE_SECONDS)
            finally:
                self._vms.recovering.discard(vm)
            if copy.state is State.OFF:  # its guest still shut down
                await self.recover(host, event_id, vm, may_start=True, may_run_on=may_run_on)
                return
        if state is State.SUSPENDED or (state is State.OFF and may_start):
            with self._vms.acts(self._actor, vm, event_id):
                await self._do(lambda: self._vms.resume(host, vm))
                await self._do(lambda: self._vms.start(host, vm, is_wanted=is_wanted))
        await self._do(lambda: self._vms.mark(host, vm))

    # --- impacts

    async def _run(self, request: ImpactRequest) -> tuple[str, bool]:
        """Where the VM is, empty if it did not move, and whether it is back."""
        if self._chance.random() < self.failure:
            await self._pause()
            raise ImpactFailed("refused")
        if self._is_wanted(request):
            self._vms.starting.add(request.event_id)
        vm, others = request.vm.name, (*request.targets, *request.may_run_on)
        asked = others if request.moves else request.may_run_on
        place = await self._find(vm, request.vm.host, asked, others)
        if not place:
            raise ImpactFailed("no domain")
        if self._marker(place, vm).event not in ("", request.event_id):
            await self._do(lambda: self._vms.resume(place, vm))
        is_back = True
        if request.moves:
            place, is_back = await self._move(request, place)
        elif request.type is EventType.REBOOT:
            is_back = await self._reboot(request, place)
        elif request.type is EventType.FREEZE:
            await self._freeze(request, place)
        else:
            await self._do(lambda: self._vms.mark(place, vm))
            await self._stop(request, place)
        return "" if place == request.vm.host else place, is_back

    async def _freeze(self, request: ImpactRequest, host: str) -> None:
        vm, vms = request.vm.name, self._vms
        copy = vms.copies[host][vm]
        if copy.state is State.RUNNING:
            await self._do(lambda: vms.mark(host, vm, Marker(request.event_id)))
            try:
                await self._do(lambda: vms.suspend(host, vm))
                await asyncio.sleep(FREEZE_SECONDS)
            except asyncio.CancelledError:
                await self._do(lambda: vms.resume(host, vm))
                await self._do(lambda: vms.mark(host, vm))
                raise
        elif copy.state is State.OFF or copy.marker.event != request.event_id:
            return
        await self._do(lambda: vms.resume(host, vm))
        await self._do(lambda: vms.mark(host, vm))

    async def _reboot(self, request: ImpactRequest, host: str) -> bool:
        vm, vms = request.vm.name, self._vms
        copy, should_run = vms.copies[host][vm], self._should_start(request, host)
        if copy.state is State.OFF and not should_run:
            return True
        if copy.state is not State.OFF:
            await self._do(lambda: vms.mark(host, vm, Marker(request.event_id)))
            if self._chance.random() < 0.5:
                await self._do(lambda: vms.reset(host, vm))
                self._note_restart(request)
                await self._do(lambda: vms.mark(host, vm))
                return False
            await self._stop(request, host)
        if self._chance.random() < self.failure:
            raise ImpactFailed("it does not start")
        await self._start(request, host)
        await self._do(lambda: vms.mark(host, vm))
        return False

    async def _move(self, request: ImpactRequest, place: str) -> tuple[str, bool]:
        vm, vms = request.vm.name, self._vms
        begun = self._marker(place, vm)
        source = begun.host or request.vm.host
        if begun.event != request.event_id:
            source = request.vm.host
        if place != source:
            return await self._finish_move(request, place, source)
        if request.no_target and begun.event != request.event_id:
            raise ImpactFailed(request.no_target)
        copy = vms.copies[place][vm]
        was_off, should_run = copy.state is State.OFF, copy.state is not State.OFF
        should_run = should_run or self._should_start(request, place)
        target = request.targets[0] if request.targets and vms.cut_until <= vms.now else place
        if target != place and (left := vms.find(target, vm)) is not None:
            assert left.marker.event  # else `_find` would have chosen it
            await self._do(lambda: vms.undefine(target, vm))
        marker = Marker(request.event_id, place, target) if should_run else Marker()
        await self._do(lambda: vms.mark(place, vm, marker))
        if target != place and not was_off and vm in MIGRATE_LIVE:
            await asyncio.sleep(self._chance.uniform(0.5, 6))
            await self._do(lambda: vms.move(place, vm, target))
            return target, True
        if target != place:
            await self._do(lambda: vms.define(target, vm, marker))
        if not was_off:
            await self._stop(request, place)
        if should_run:
            await self._start_there(request, place, target)
        if target != place:
            vms.leave(self._actor, vm, request.event_id)
            await self._do(lambda: vms.undefine(place, vm))
        await self._do(lambda: vms.unmark_moved(target, vm, request.event_id))
        return target, not should_run

    async def _start_there(self, request: ImpactRequest, place: str, target: str) -> None:
        """Start it on the target. If that refuses, it runs here again; if it does not answer, the
        VM may run there.
        """
        vm, luck = request.vm.name, self._chance.random()
        if target != place and luck < 0.15:
            await self._do(lambda: self._vms.undefine(target, vm))
            await self._start(request, place)
            await self._do(lambda: self._vms.mark(place, vm))
            raise ImpactFailed("the target refused")
        if target == place or luck < 0.8:
            await self._start(request, target)
        if target != place and luck >= 0.7:
            raise ImpactFailed("the target did not answer")

    async def _finish_move(
        self, request: ImpactRequest, place: str, source: str
    ) -> tuple[str, bool]:
        """An earlier try has moved the VM, or a hand has."""
        vm, vms = request.vm.name, self._vms
        is_off = vms.copies[place][vm].state is State.OFF
        if is_off and self._should_start(request, place):
            await self._start(request, place)
            is_off = False
        elif not is_off:
            self._note_restart(request)
        vms.leave(self._actor, vm, request.event_id)
        await self._do(lambda: vms.undefine(source, vm))
        await self._do(lambda: vms.unmark_moved(place, vm, request.event_id))
        return place, is_off

    async def _start(self, request: ImpactRequest, host: str) -> None:
        is_wanted, vm = self._is_wanted(request), request.vm.name
        await asyncio.sleep(self._chance.uniform(0, 3))
        await self._do(lambda: self._vms.start(host, vm, is_wanted=is_wanted))
        self._note_restart(request)

    async def _stop(self, request: ImpactRequest, host: str) -> None:
        """The guest is asked to shut down, which nobody can cancel, and is forced to if it takes
        long.
        """
        vm, vms = request.vm.name, self._vms
        (*_, boot) = vms.boots[vm]

        def stop() -> None:
            if vms.boots[vm][-1] is not boot or vms.places(vm) not in ([], [host]):
                return  # it was off already, and was started since
            if vms.places(vm):
                vms.stop(host, vm)
                vms.stopped_by[vm] = self._actor, request.event_id
            if request.type is EventType.PREEMPT:
                vms.left_off.add(vm)
                vms.evicted.add(vm)

        if self._chance.random() < 0.5:
            seconds = self._chance.uniform(0, GRACE_SECONDS)
            await self._do(lambda: self._vms.later(seconds, stop))
        await asyncio.sleep(self._chance.uniform(0, GRACE_SECONDS))
        await self._do(stop)

    def _note_restart(self, request: ImpactRequest) -> None:
        """The boot that the guest must be back from, if it is not over."""
        boot = self._vms.boots[request.vm.name][-1]
        self._vms.restarted_at[request.event_id, request.vm.name] = boot.started_at

    def _should_start(self, request: ImpactRequest, host: str) -> bool:
        marker = self._marker(host, request.vm.name)
        return self._is_wanted(request) or marker.event == request.event_id

    def _is_wanted(self, request: ImpactRequest) -> bool:
        """Whether a VM that is off is started even if an impact has not stopped it."""
        is_lost = request.cause is Cause.FAILED and request.vm.power is Power.RUNNING
        return request.cause in STARTS or is_lost

    # --- calls to hypervisors

    def _marker(self, host: str, vm: str) -> Marker:
        copy = self._vms.find(host, vm)
        return copy.marker if copy is not None else Marker()

    async def _find(
        self, vm: str, own: str, asked: tuple[str, ...] = (), others: tuple[str, ...] = ()
    ) -> str:
        """The host on which the VM runs, or else is defined; empty if on none.

        If it does not run on its own host, each that may run it has to answer.
        """
        await self._pause()
        here = self._vms.find(own, vm)
        if here is not None and here.state is not State.OFF:
            return own
        begun = here.marker if here is not None else Marker()
        hosts = {begun.target, *asked, *(others if here is None else ())} - {"", own}
        if hosts and self._vms.cut_until > self._vms.now:
            raise ImpactFailed(f"{vm} may run on {sorted(hosts)}, which does not answer")
        await self._pause()
        places = [host for host in HOSTS if host in hosts and host in self._vms.places(vm)]
        if places:
            return places[0]
        for host in sorted(hosts):
            copy = self._vms.find(host, vm)
            is_ours = begun.event and copy is not None and copy.marker.event == begun.event
            if is_ours and host != begun.host:
                await self._do(lambda host=host: self._vms.undefine(host, vm))  # type: ignore[misc]
            elif copy is not None and here is None:
                return host
        return own if here is not None else ""

    async def _do(self, work: Callable[[], None]) -> None:
        """One call. It is carried out even if the daemon is killed or cancelled meanwhile."""
        actor = self._actor
        if actor.calls_left == 0:
            actor.is_dead = True
        if actor.is_dead:
            raise asyncio.CancelledError
        actor.calls_left -= 1
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def run() -> None:
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        loop.call_later(self._chance.uniform(*CALL_SECONDS), run)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            if not actor.is_dead:
                await done
            raise
        await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.uniform(*CALL_SECONDS))
