"""Servers, two host daemons and their VMs under a seed, which decides everything."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from random import Random
from typing import Any

from forewarn.core.event import EventType
from forewarn.core.fleet import ScopeKind
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.entry import Entry
from forewarn.errors import Error, ImpactFailed
from forewarn.hostd.control import ControlLoop
from forewarn.hostd.inventory import Inventory, ListedVm, Report
from forewarn.hostd.settings import HostToken
from forewarn.hostd.unconfirmed import Unconfirmed
from forewarn.hostd.worker import ImpactRunner
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.memory import MemoryStore
from tests.builders import NOON
from tests.history import entries_of
from tests.sim.hostd_network import LossyNetwork, ServerStore
from tests.sim.hostd_operator import LATE_SECONDS_MAX, Operator
from tests.sim.hostd_rules import CommitChecker, check_history, check_quiet
from tests.sim.hypervisors import HOSTS, Actor, Hypervisors, State
from tests.sim.jumping_loop import JumpingLoop
from tests.sim.simulated_hypervisor import Outcomes, SimulatedHypervisor
from tests.unit.engine.hostd_world import GIB, Server, vm_id

PLACES = {"web-0": "host-a", "web-1": "host-b", "db-0": "host-a"}
RATE = 60
"""The notice of a Reboot is 15 seconds."""
TIMING = Timing.at_rate(RATE, back_limit=RATE * timedelta(minutes=2))
FAULTS_SECONDS = 240.0
QUIET_SECONDS_MAX = 1200.0
SETTLE_SECONDS = 150.0
"""The same inventory is sent again, and VMs are recovered again, after 60 seconds."""
HISTORY_MAX = 100_000
OBSERVE_SECONDS = 0.5
HANDED_OUT_SECONDS_MAX = 45.0
"""An impact that was handed out may reach its daemon, and be begun by it, so much later."""


class ListingSource:
    """The VMs of a host, and a stray domain if there is one; it is woken when they change."""

    def __init__(self, vms: Hypervisors, host: str, strays: Mapping[str, ListedVm]) -> None:
        self._vms, self._host, self._strays = vms, host, strays
        self.woken = asyncio.Event()
        vms.changed[host].append(self.woken)

    async def list_vms(self) -> Report:
        copies = self._vms.copies[self._host]
        listed = [self._list(name, copies[name].state) for name in copies]
        stray = self._strays.get(self._host)
        if stray is not None and stray.name not in copies:
            listed.append(stray)
        return Report(1 << 36, tuple(listed))

    def _list(self, name: str, state: State) -> ListedVm:
        scope = name.partition("-")[0]
        return ListedVm(
            name=name,
            id=vm_id(name),
            scope=scope,
            kind=ScopeKind.AVAILABILITY_SET if scope == "web" else ScopeKind.VM,
            update_domain=int(name[-1]),
            power="stopped" if state is State.OFF else "running",
            memory_bytes=GIB,
        )


class EmptyHost(ListingSource):
    """The machine of a clone: it has other VMs, here none."""

    async def list_vms(self) -> Report:
        return Report(1 << 36, ())


class NoPlatform:
    """Of the servers themselves: only daemons can act."""

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        raise ImpactFailed("it is not here")


class EmptyPlatform:
    """Of a clone without VMs: as with libvirt, one that is to be gone is gone there.

    If it has replaced a daemon that had not ended, it gets nothing to do while that can object.
    """

    def __init__(self, world: "HostdWorld", host: str, session: str) -> None:
        self._world, self._host, self._session = world, host, session

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        vms = self._world.vms
        record = self._world.any_server().hosts.managed.find(self._host)
        if record is not None and record.session == self._session and record.merge_at is not None:
            is_quiet = self._world.clock.now() < record.merge_at
            vms.must(not is_quiet, "a clone gets no impact of the other machine", request)
        if request.type not in (EventType.PREEMPT, EventType.TERMINATE):
            raise ImpactFailed("it is not here")
        return ImpactResult(detail="nothing to do")


class RunningDaemon:
    """One run of the daemon of a host."""

    def __init__(
        self,
        world: "HostdWorld",
        host: str,
        session: str,
        machine: str,
        source: type[ListingSource] = ListingSource,
    ) -> None:
        self._vms, self._host = world.vms, host
        self.actor = Actor(host, session)
        platform = SimulatedHypervisor(
            world.vms, host, self.actor, world.outcomes, world.random(f"platform {session}")
        )
        network = LossyNetwork(world, host, self.actor, world.random(f"network {session}"))
        self.platform = platform
        is_clone = source is EmptyHost
        acting = EmptyPlatform(world, host, session) if is_clone else platform
        self.runner = world.make_runner(acting, 2, world.clock, host)
        self._source = source(world.vms, host, world.strays)
        inventory = Inventory(self._source, 3600, list)
        control = ControlLoop(
            network,
            host,
            HostToken(host, "", b""),
            inventory,
            self.runner,
            session,
            machine,
            chance=world.random(f"control {session}").random,
            unconfirmed=Unconfirmed(asyncio.get_running_loop().time),
        )
        self.tasks = [asyncio.create_task(work) for work in (inventory.run(), control.run())]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.actor.is_dead = self.actor.has_ended = True
        self._vms.changed[self._host].remove(self._source.woken)

    async def kill(self) -> None:
        self.actor.is_dead = True
        await self.stop()


class HostdWorld:
    """Two servers on one store, two daemons with three VMs, their guests, and an operator."""

    def __init__(
        self,
        seed: int,
        make_runner: type[ImpactRunner] = ImpactRunner,
        *,
        has_lock: bool = False,
        is_confirming: bool = True,
        source: type[ListingSource] = ListingSource,
    ) -> None:
        """`is_confirming`: servers know what guests could read."""
        self.seed, self.make_runner = seed, make_runner
        self.is_confirming, self.source = is_confirming, source
        self.strays: dict[str, ListedVm] = {}
        self.loss = 0.0
        self.cut_until: dict[tuple[str, int], float] = {}
        self.vms = Hypervisors(self.random("guests"), has_lock=has_lock)
        self.outcomes = Outcomes()
        self.store = MemoryStore()
        self.servers: list[Server | None] = [None, None]
        self.daemons: dict[str, RunningDaemon | None] = dict.fromkeys(HOSTS)
        self.handlers: dict[asyncio.Task[Any], Server] = {}
        self._double_since: dict[str, float] = {}
        self._numbers, self._ids = count(1), count(1)
        self._stopped: list[Server] = []
        self._stores: dict[Server, ServerStore] = {}

    def random(self, name: str) -> Random:
        """Everybody has one: nobody's chances depend on who comes first."""
        return Random(f"{self.seed} {name}")

    def run(self) -> list[Entry]:
        """The history. Raises Broken if a promise was."""
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            try:
                return runner.run(self._run())
            finally:  # daemons that are canceled now get no response, and no task begins for them
                self.servers = [None, None]

    async def _run(self) -> list[Entry]:
        loop = asyncio.get_running_loop()
        self.clock = RealClock(wall=lambda: NOON.timestamp() + loop.time(), steady=loop.time)
        self.checker = CommitChecker(self.vms, self.outcomes, self.clock.now, TIMING)
        self.vms.is_known_double = self.is_known_double
        for vm, host in PLACES.items():
            self.vms.add(host, vm)
        for number in (0, 1):
            await self.start_server(number)
        for host in HOSTS:
            self.start_daemon(host)
        guests = [asyncio.create_task(self._poll(vm)) for vm in PLACES]
        guests.append(asyncio.create_task(self._observe()))
        operator = Operator(self)
        await self.wait(self._is_ready, 120)
        self.loss = 0.2
        await operator.disturb(loop.time() + FAULTS_SECONDS)
        await operator.heal()
        guests.append(asyncio.create_task(operator.start_missing()))
        await self.wait(self.is_over, QUIET_SECONDS_MAX)
        await self._sleep(SETTLE_SECONDS)
        await self.wait(self.is_over, QUIET_SECONDS_MAX)
        history = list(await entries_of(self.store, limit=HISTORY_MAX))
        for server in filter(None, self.servers):
            check_quiet(server, self.vms, self.checker.ended_early)
        check_history(history, self.outcomes)
        await self._stop(guests)
        return history

    async def _stop(self, guests: list[asyncio.Task[None]]) -> None:
        for daemon in filter(None, self.daemons.values()):
            await daemon.stop()
        for task in (*guests, *self.handlers):
            task.cancel()
        for server in [*filter(None, self.servers), *self._stopped]:
            await server.stop()
            await server.engine.close()
        self.check()

    def check(self) -> None:
        if self.vms.problem:
            raise self.vms.problem

    async def wait(self, is_true: Callable[[], bool], seconds_max: float) -> None:
        until = asyncio.get_running_loop().time() + seconds_max
        while not is_true():
            await self._sleep(0.5)
            self.vms.must(self.vms.now < until, "everything ends", is_true)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.check()

    def _is_ready(self) -> bool:
        board = self.any_server().board
        scopes = [published.scope for published in board.scopes.values()]
        return len(board.vms) == len(PLACES) and all(scope.seen_at for scope in scopes)

    def is_over(self) -> bool:
        """Whether all events have ended, and the daemons know it."""
        scopes = [published.scope for published in self.any_server().board.scopes.values()]
        has_work = any(daemon and daemon.runner.running() for daemon in self.daemons.values())
        return not has_work and not any(scope.events or scope.impacts for scope in scopes)

    def is_cut(self, host: str) -> bool:
        """Whether its daemon reaches no server."""
        now = asyncio.get_running_loop().time()
        return all(self.cut_until.get((host, number), 0) > now for number in (0, 1))

    def is_known(self, vm: str, host: str) -> bool:
        """Whether the servers know that the VM runs on this host."""
        known = [
            server.hosts.managed.running_on(vm_id(vm)) for server in filter(None, self.servers)
        ]
        return all(host in hosts for hosts in known)

    def is_known_double(self, vm: str) -> bool:
        since = self._double_since.get(vm) if vm in self.vms.doubled else None
        return since is not None and self.vms.now - since > HANDED_OUT_SECONDS_MAX

    def is_served(self, host: str) -> bool:
        """Whether its daemon runs and reaches a server."""
        daemon = self.daemons[host]
        is_reached = any(
            server is not None and self.cut_until.get((host, number), 0) <= self.vms.now
            for number, server in enumerate(self.servers)
        )
        return daemon is not None and not daemon.actor.is_dead and is_reached

    def _is_managed(self, host: str) -> bool:
        """Not after it was forgotten: its guests ask the servers themselves then."""
        return self.any_server().hosts.managed.find(host) is not None

    async def _observe(self) -> None:
        """Note what guests can read, and what the servers know of VMs that run twice."""
        while True:  # ends when cancelled
            await asyncio.sleep(OBSERVE_SECONDS)
            servers, readers = [*filter(None, self.servers)], self.checker.readers
            for vm in PLACES:
                known = [server.board.vms.get(vm) for server in servers]
                hosts = {published.scope.vm(vm).host for published in known if published}  # type: ignore[union-attr]
                place = self.vms.places(vm)
                is_there = bool(place) and hosts == {*place}
                is_readable = not is_there or self.is_served(*place) or not self._is_managed(*place)
                readers.observe(vm, place[0] if is_there else "", is_readable=is_readable)
                doubles = [server.hosts.duplicates.hosts_of(vm_id(vm)) for server in servers]
                since = self.vms.doubled.get(vm)
                if since is None or (not all(doubles) and self.vms.now - since < LATE_SECONDS_MAX):
                    self._double_since.pop(vm, None)  # a list from before may have arrived
                elif doubles and all(doubles):
                    self._double_since.setdefault(vm, self.vms.now)

    # --- servers, daemons and guests

    def any_server(self) -> Server:
        return next(server for server in self.servers if server is not None)

    async def start_server(self, number: int) -> None:
        name = f"server-{next(self._numbers)}"
        store = ServerStore(self.store, self.random(name), self.checker)
        server = Server(
            store,
            self.clock,
            name,
            TIMING,
            lambda: f"00000000-0000-4000-8000-{next(self._ids):012X}",
            is_confirming=self.is_confirming,
        )
        self._stores[server] = store
        await server.start()
        server.hosts.local = NoPlatform()
        self.servers[number] = server

    async def stop_server(self, number: int, *, lease_seconds: float | None) -> None:
        """Stop it; or kill it, and its leases last so much longer."""
        server = self.servers[number]
        assert server is not None
        self.servers[number] = None
        self._stopped.append(server)
        store = self._stores[server]
        store.is_dead = lease_seconds is not None
        for handler in [task for task, of in self.handlers.items() if of is server]:
            handler.cancel()
        await server.stop()
        if lease_seconds is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(lease_seconds, lambda: asyncio.ensure_future(self._expire(store)))

    async def _expire(self, store: ServerStore) -> None:
        for lease in list(store.leases):
            await store.expire(lease)

    async def lose_lease(self, number: int) -> None:
        """It could not reach the store for a while."""
        if (server := self.servers[number]) is not None:
            await self._expire(self._stores[server])

    def start_daemon(self, host: str) -> None:
        self.vms.fenced.discard(host)
        self.daemons[host] = self.make_daemon(host)

    def make_daemon(self, host: str, machine: str = "") -> RunningDaemon:
        """One that runs on the machine of the host, or on another one."""
        machine = machine or f"machine of {host}"
        return RunningDaemon(self, host, f"s{next(self._numbers)}", machine, self.source)

    def clone_daemon(self, host: str) -> RunningDaemon:
        """One on a machine with the same id, and without its VMs."""
        session = f"s{next(self._numbers)}"
        self.vms.clones.add(session)
        return RunningDaemon(self, host, session, f"machine of {host}", EmptyHost)

    async def stop_daemon(self, host: str, *, is_killed: bool) -> None:
        daemon = self.daemons[host]
        assert daemon is not None
        self.daemons[host] = None
        await (daemon.kill() if is_killed else daemon.stop())

    async def _poll(self, vm: str) -> None:
        """A guest that polls, through the daemon of its host, while it is up."""
        chance = self.random(f"polls of {vm}")
        while True:  # ends when cancelled
            await asyncio.sleep(chance.uniform(1, 6))
            place = next(iter(self.vms.places(vm)), "")  # of one that runs twice, one polls
            daemon = self.daemons[place] if place else None
            server = self.servers[chance.randrange(2)]
            if daemon is None or server is None or not self.vms.is_up(vm):
                continue
            if (published := server.board.vms.get(vm)) is not None:
                now = self.clock.now().timestamp()
                server.board.polled[vm] = now
                self.checker.readers.poll(vm)
                with suppress(Error):
                    if vm in (published.booting or ()):
                        server.engine.back(published, vm)
                    if server.engine.last_polls.must_store(published, vm, now):
                        await server.engine.seen(published)
