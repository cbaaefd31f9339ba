"""An operator who plans events and does some things by hand, and the faults meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forewarn.core.event import EventType, Status
from forewarn.core.fleet import Power, Scope
from forewarn.engine.managed_hosts import HOST_KEY
from forewarn.errors import Error
from forewarn.hostd.inventory import ListedVm
from tests.sim.hostd_rules import OPERATOR
from tests.sim.hypervisors import HOSTS, Marker, State
from tests.unit.engine.hostd_world import vm_id

if TYPE_CHECKING:
    from tests.sim.hostd_world import HostdWorld, RunningDaemon

Step = Callable[[], Awaitable[object]]
LATE_SECONDS_MAX = 40.0
"""A request may arrive so much later, after its daemon has ended."""
MISSING_SECONDS = 10
REBIND_SECONDS_MAX = 60
DOUBLE_SECONDS = 40
COPY_SECONDS = 120
"""A VM runs twice for so long: longer than an impact may be on its way to its daemon."""
PLAN_SECONDS = 8
STRAY_SECONDS = 25.0
CLONE_SECONDS = 30.0
"""After these times the servers must know that a VM runs twice, has the name of another one, or
that two machines have one id.
"""


class Stable:
    """Whether the same daemons of managed hosts have run and reached a server all the time.

    The report of a host that was forgotten counts some seconds after its daemon is back.
    `has_rivals`: the servers have noticed that two machines with one id run such a daemon.
    """

    def __init__(self, world: "HostdWorld", *hosts: str) -> None:
        self._world, self._hosts = world, hosts
        self._daemons = [world.daemons[host] for host in hosts]
        self._is_so, self.has_rivals = True, False
        self._began_at = world.vms.now

    def look(self) -> None:
        """Called at least every few seconds."""
        is_same = [self._world.daemons[host] for host in self._hosts] == self._daemons
        managed = self._world.any_server().hosts.managed
        records = [managed.find(host) for host in self._hosts]
        is_served = all(map(self._world.is_served, self._hosts))
        self._is_so = self._is_so and is_same and is_served and all(records)
        self.has_rivals = self.has_rivals or any(record and record.rivals for record in records)

    def lasts(self, seconds: float) -> bool:
        self.look()
        return self._is_so and self._world.vms.now - self._began_at > seconds


class Operator:
    def __init__(self, world: "HostdWorld") -> None:
        self._world, self._vms = world, world.vms
        self._chance = world.random("operator")
        self._starting: set[asyncio.Task[None]] = set()
        self._second: RunningDaemon | None = None
        self._second_until = 0.0
        self._clone: tuple[str, RunningDaemon, Stable] | None = None
        self._stray: tuple[str, Stable] | None = None

    async def disturb(self, until: float) -> None:
        steps: Sequence[tuple[Step, int]] = (
            (self._plan, 10),
            (self._decide, 6),
            (self._restart_daemon, 4),
            (self._start_second_daemon, 3),
            (self._kill_within_an_impact, 8),
            (self._restart_server, 3),
            (self._cut, 3),
            (self._lose_lease, 1),
            (self._act_by_hand, 4),
            (self._take_over, 2),
            (self._forget, 3),
            (self._clone_daemon, 1),
            (self._run_copy, 1),
            (self._add_stray, 2),
        )
        chosen, weights = zip(*steps, strict=True)
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(self._chance.uniform(0.1, 5))
            self._world.check()
            await self._bury_the_dead()
            await self._cut_off_after_a_failure()
            for stable in [each[-1] for each in (self._clone, self._stray) if each]:
                stable.look()
            with suppress(Error):
                await self._chance.choices(chosen, weights)[0]()

    async def heal(self) -> None:
        """End all faults."""
        world = self._world
        world.loss, self._vms.cut_until = 0.0, 0.0
        world.cut_until.clear()
        await self._end_clone()
        await self._end_stray()
        if self._second is not None:
            await self._second.stop()
        for daemon in world.daemons.values():
            if daemon is not None:
                daemon.actor.calls_left = -1
        await self._bury_the_dead()
        await asyncio.gather(*self._starting)
        await self._rebind()
        for host in HOSTS:
            daemon = world.daemons[host]
            assert daemon is not None
            daemon.platform.failure = 0.0
        for number in (0, 1):
            if world.servers[number] is None:
                await world.start_server(number)

    async def start_missing(self) -> None:
        """Start the VMs that ran, and that their hosts no longer have, until cancelled.

        One was moved and stopped by hand while an impact had it. Only an operator may start it.
        """
        vms = self._vms
        while True:  # ends when cancelled
            await asyncio.sleep(MISSING_SECONDS)
            server = self._world.any_server()
            for name, published in list(server.board.vms.items()):
                vm = published.scope.vm(name)
                copies = server.hosts.managed.find_copies(vm) if vm else ()
                if copies and not vms.places(name) and not vms.actors(name):
                    self._start_by_hand(name, copies[0])

    async def _rebind(self) -> None:
        """A late request of another machine may have taken a host that was forgotten."""
        for host in HOSTS:
            for _ in range(REBIND_SECONDS_MAX):
                server = self._world.any_server()
                hosts, record = server.hosts, server.engine.records.get(HOST_KEY.format(host)).value
                if record is None or record.machine in ("", f"machine of {host}"):
                    break
                with suppress(Error):
                    power = Power.STOPPED
                    await hosts.removal.forget(host, by=OPERATOR, fail_impacts=True, power=power)
                await asyncio.sleep(1)

    # --- what is asked of the servers

    async def _plan(self) -> None:
        await self._plan_for(self._any_vm(), self._chance.choice(HOSTS))

    async def _plan_for(self, vm: str, host: str) -> None:
        operations, chance = self._world.any_server().operations, self._chance
        luck = chance.random()
        if luck < 0.3:
            await operations.restart(vm, by=OPERATOR)
        elif luck < 0.65:
            await operations.redeploy(vm, by=OPERATOR)
        elif luck < 0.9:
            type_ = chance.choice((EventType.FREEZE, EventType.REBOOT))
            await operations.maintain(host, type=type_, by=OPERATOR)
        elif luck < 0.95:
            await operations.fail(host, by=OPERATOR)
        else:
            await operations.evict(vm, by=OPERATOR)

    async def _decide(self) -> None:
        """Approve, complete or cancel an event."""
        server = self._world.any_server()
        events = [event for scope in self._scopes() for event in scope.events]
        if not events:
            return
        event, operations = self._chance.choice(events), server.operations
        if event.status is Status.STARTED:
            await operations.complete(event.id, by=OPERATOR)
        elif self._chance.random() < 0.8:
            await operations.approve(event.id, by=OPERATOR)
        else:
            await operations.cancel(event.id, by=OPERATOR)

    def _scopes(self) -> list[Scope]:
        return [published.scope for published in self._world.any_server().board.scopes.values()]

    def _any_vm(self) -> str:
        return self._chance.choice(sorted(self._vms.boots))

    # --- what is done by hand

    async def _act_by_hand(self) -> None:
        """Stop, start or move a VM on which nobody acts; move it only as docs/hostd.md says."""
        vm, vms = self._any_vm(), self._vms
        if not vms.is_idle(vm):
            return
        places = vms.places(vm)
        if not places:
            defined_on = [host for host in HOSTS if vm in vms.copies[host]]
            vms.start_by_hand(self._chance.choice(defined_on), vm)
        elif vms.copies[places[0]][vm].state is not State.RUNNING:
            return
        elif self._chance.random() < 0.4:
            vms.stop(places[0], vm)
            vms.left_off.add(vm)
        elif all(self._world.daemons.values()) and not self._has_event(vm):
            vms.move(places[0], vm, other(places[0]))

    async def _take_over(self) -> None:
        """Look after the VMs that impacts have left off, and whose daemons have died since, or are
        cut off.

        The operator completes their events, and leaves them off or starts them on some host.
        """
        vms, world = self._vms, self._world
        for vm in sorted(vms.boots):
            begun_on = [host for host in HOSTS if vms.has_begun(host, vm)]
            is_served = any(world.daemons[host] and not world.is_cut(host) for host in begun_on)
            if vms.places(vm) or not begun_on or is_served or vm in vms.evicted:
                continue
            for event in [event for scope in self._scopes() for event in scope.events]:
                if vm in event.resources and event.type is not EventType.PREEMPT:
                    with suppress(Error):
                        await world.any_server().operations.complete(event.id, by=OPERATOR)
            is_busy = vms.actors(vm) or vm in vms.recovering
            if self._has_impact(vm) or is_busy or vms.places(vm):
                continue
            if any(world.daemons[host] for host in begun_on):
                await self._start_elsewhere(vm, other(begun_on[0]))
                continue
            vms.stopped_by.pop(vm, None)
            if host := self._chance.choice((*HOSTS, "")):
                self._start_by_hand(vm, host)
            else:
                vms.left_off.add(vm)

    async def _start_elsewhere(self, vm: str, host: str) -> None:
        """The other host is cut off, and stays so until the servers know that the VM runs here."""
        world, daemon = self._world, self._world.daemons[host]
        if daemon is None or world.is_cut(host) or self._clone is not None:
            return
        daemon.actor.calls_left = -1
        self._vms.stopped_by.pop(vm, None)
        self._start_by_hand(vm, host)
        while not daemon.actor.is_dead and not world.is_known(vm, host):
            for number in (0, 1):
                world.cut_until[other(host), number] = self._vms.now + 5
            await asyncio.sleep(1)
            world.check()

    def _start_by_hand(self, vm: str, host: str) -> None:
        if vm not in self._vms.copies[host]:
            self._vms.define(host, vm, Marker())
        self._vms.start_by_hand(host, vm)

    def _has_impact(self, vm: str) -> bool:
        return any(impact.vm == vm for scope in self._scopes() for impact in scope.impacts)

    def _has_event(self, vm: str) -> bool:
        events = [event for scope in self._scopes() for event in scope.events]
        return self._has_impact(vm) or any(vm in event.resources for event in events)

    async def _forget(self) -> None:
        """A host whose daemon is away: it is fenced, or only its daemon goes. Both come back."""
        vms, world, host = self._vms, self._world, self._chance.choice(HOSTS)
        managed = world.any_server().hosts.managed
        if managed.find(host) is None or managed.has_contact(host):
            return
        if self._second is not None or vms.now < self._second_until:
            return  # a forgotten host would belong to the machine of a second daemon
        fail_impacts, is_fenced = self._chance.random() < 0.7, self._chance.random() < 0.5
        if is_fenced and world.daemons[host] is not None:
            return
        if is_fenced:
            vms.fenced.add(host)
            for vm, copy in vms.copies[host].items():
                if copy.state is not State.OFF:
                    vms.stop(host, vm)
                    vms.left_off.add(vm)
        power = Power.STOPPED if is_fenced else Power.UNKNOWN
        removal = world.any_server().hosts.removal
        await removal.forget(host, by=OPERATOR, fail_impacts=fail_impacts, power=power)

    async def _run_copy(self) -> None:
        """Run a VM on both hosts, as on disks that are not shared; then plan events for it.

        The servers must have noticed by then.
        """
        vm, vms, world = self._any_vm(), self._vms, self._world
        places = vms.places(vm)
        is_quiet = vms.is_idle(vm) and not self._has_event(vm)
        if len(places) != 1 or not is_quiet or not all(map(world.is_served, HOSTS)):
            return
        if vms.copies[places[0]][vm].state is not State.RUNNING or self._clone or self._stray:
            return
        stable, host = Stable(world, *HOSTS), other(places[0])
        loss, world.loss = world.loss, 0.0  # the promise is about hosts that are connected
        vms.run_copy(host, vm)
        for _ in range(DOUBLE_SECONDS):
            await asyncio.sleep(1)
            stable.look()
        known = [server.hosts.duplicates.hosts_of(vm_id(vm)) for server in world.servers if server]
        is_double = len(vms.places(vm)) > 1 and not self._has_impact(vm)
        vms.must(
            # Late requests of a run that has ended look like those of a clone for some seconds.
            all(known)
            or not is_double
            or not stable.lasts(DOUBLE_SECONDS - 1)
            or stable.has_rivals,
            "a VM that runs twice is noticed",
            vm,
            known,
        )
        for _ in range(DOUBLE_SECONDS, COPY_SECONDS, PLAN_SECONDS):
            with suppress(Error):
                await self._plan_for(vm, self._chance.choice(HOSTS))
                await self._decide()
            vms.notify(host)
            await asyncio.sleep(PLAN_SECONDS)
            world.check()
        vms.end_copy(host, vm)
        world.loss = loss

    async def _add_stray(self) -> None:
        """A domain with the name of a VM on another host, and another id; or it is removed."""
        vm, vms, world = self._any_vm(), self._vms, self._world
        places = vms.places(vm)
        if self._clone is not None:
            return
        if self._stray is not None:
            await self._end_stray()
        elif places and world.is_known(vm, places[0]) and not self._has_event(vm):
            host = other(places[0])
            self._stray = host, Stable(world, host)
            power: Any = self._chance.choice(("running", "stopped"))
            world.strays[host] = ListedVm(name=vm, id=vm_id("stray"), power=power)
            vms.notify(host)

    async def _end_stray(self) -> None:
        if self._stray is None:
            return
        (host, stable), self._stray = self._stray, None
        managed = self._world.any_server().hosts.managed
        records = [managed.find(each) for each in HOSTS]
        name = self._world.strays.pop(host).name
        self._vms.must(
            not stable.lasts(STRAY_SECONDS)
            or stable.has_rivals
            or name in self._vms.copies[host]
            or self._vms.now - self._vms.left_at.get((host, name), 0) < STRAY_SECONDS
            or any(record is not None and record.not_accepted for record in records),
            "a VM with the name of another one is a problem",
            name,
            records,
        )
        self._vms.notify(host)

    # --- faults

    async def _clone_daemon(self) -> None:
        """A daemon on a copy of the machine of a host, which has its id; or it ends."""
        if self._clone is not None:
            await self._end_clone()
            return
        host = self._chance.choice(HOSTS)
        if self._world.is_served(host) and self._second is None and self._stray is None:
            clone, stable = self._world.clone_daemon(host), Stable(self._world, host)
            self._clone = host, clone, stable

    async def _end_clone(self) -> None:
        if self._clone is None:
            return
        (host, clone, stable), self._clone = self._clone, None
        is_stable = stable.lasts(CLONE_SECONDS)
        self._vms.must(
            not is_stable or stable.has_rivals, "two machines with one id are noticed", host
        )
        await clone.stop()

    async def _restart_daemon(self) -> None:
        host = self._chance.choice(HOSTS)
        if self._world.daemons[host] is not None:
            await self._world.stop_daemon(host, is_killed=self._chance.random() < 0.6)
            self._start_later(host)

    def _start_later(self, host: str) -> None:
        async def start() -> None:
            await asyncio.sleep(self._chance.choice((1, 5, 20, 40)))
            self._world.start_daemon(host)

        task = asyncio.create_task(start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_second_daemon(self) -> None:
        """Somebody starts one for a host on another machine, or ends it again."""
        host = self._chance.choice(HOSTS)
        is_managed = self._world.any_server().hosts.managed.find(host) is not None
        if self._second is None and self._clone is None and is_managed:
            self._second = self._world.make_daemon(host, machine="another one")
        elif self._second is not None:
            await self._second.stop()
            self._second = None
            self._second_until = self._vms.now + LATE_SECONDS_MAX

    async def _kill_within_an_impact(self) -> None:
        """Let a daemon die before one of its next calls to a hypervisor."""
        daemon = self._world.daemons[self._chance.choice(HOSTS)]
        if daemon is not None and daemon.actor.calls_left < 0:
            daemon.actor.calls_left = self._chance.randrange(7)

    async def _bury_the_dead(self) -> None:
        for host, daemon in self._world.daemons.items():
            if daemon is not None and daemon.actor.is_dead:
                await self._world.stop_daemon(host, is_killed=True)
                self._start_later(host)
                if self._chance.random() < 0.6:
                    await self._take_over()

    async def _cut_off_after_a_failure(self) -> None:
        """A host is cut off when a try has just failed and left its VM off."""
        vms, world = self._vms, self._world
        for vm in sorted(vms.boots):
            begun_on = [host for host in HOSTS if vms.has_begun(host, vm) and world.daemons[host]]
            is_busy = vms.actors(vm) or vm in vms.recovering
            if begun_on and not vms.places(vm) and not is_busy:
                for number in (0, 1):
                    world.cut_until[begun_on[0], number] = vms.now + 20
                await self._take_over()

    async def _restart_server(self) -> None:
        number, world = self._chance.randrange(2), self._world
        if world.servers[number] is None:
            await world.start_server(number)
        elif world.servers[1 - number] is not None:
            is_killed = self._chance.random() < 0.6
            seconds = self._chance.uniform(3, 10) if is_killed else None
            await world.stop_server(number, lease_seconds=seconds)

    async def _cut(self) -> None:
        """Between a daemon and a server, or both servers, or between the hosts."""
        until = asyncio.get_running_loop().time() + self._chance.choice((2, 8, 20, 40))
        number, host = self._chance.randrange(4), self._chance.choice(HOSTS)
        if number == 3:
            self._vms.cut_until = until
        for each in (0, 1) if number == 2 else (number,):
            self._world.cut_until[host, each] = until

    async def _lose_lease(self) -> None:
        await self._world.lose_lease(self._chance.randrange(2))


def other(host: str) -> str:
    (found,) = {*HOSTS} - {host}
    return found
