"""Servers and a host daemon under a seed: lost requests and responses, restarts, changed servers.

The event loop has no real time: when all tasks wait, the clock jumps to the next of them. The seed
decides everything.
"""

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from forewarn.core.command import Seen
from forewarn.engine.clock import RealClock
from forewarn.engine.entry import Entry
from forewarn.errors import Error, ImpactFailed, Unavailable
from forewarn.hostd.control import ControlLoop
from forewarn.hostd.inventory import Inventory, ListedVm, Report
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import Request, Response, ServerLost, Upstream
from forewarn.hostd.worker import ImpactRunner
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.remote import WorkRequest
from forewarn.store.memory import MemoryStore
from tests.builders import NOON
from tests.history import entries_of
from tests.rules import Broken
from tests.unit.engine.hostd_world import Server, vm_id

VMS = ("web-0", "web-1", "db-0")
HOST = "host-a"
FAULTS_SECONDS = 200.0
END_SECONDS_MAX = 7200.0


class JumpingSelector(selectors.SelectSelector):
    """Never waits; `on_wait` gets how long it should have waited."""

    def __init__(self, on_wait: Callable[[float], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._on_wait(timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumped_to = 0.0
        super().__init__(JumpingSelector(self._jump))

    def time(self) -> float:
        return self._jumped_to

    def _jump(self, seconds: float) -> None:
        self._jumped_to += seconds


class Machine:
    """What is done to the VMs, by all runs of the daemon. Each run of a call has a number."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.active: Counter[str] = Counter()
        self.outcomes: dict[str, tuple[str, str, bool]] = {}
        self._numbers = count(1)

    def start(self, request: ImpactRequest) -> str:
        vm = request.vm.name
        if self.active[vm]:
            raise Broken(f"two platform calls for {vm} at a time")
        self.active[vm] += 1
        return f"call-{next(self._numbers)}"


class SimulatedHypervisor:
    """The platform of one run of the daemon. A killed one does nothing any more."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._mine: Counter[str] = Counter()
        self.is_killed = False
        self.problem: Broken | None = None

    def kill(self) -> None:
        self.is_killed = True
        self._machine.active.subtract(self._mine)

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        machine, vm = self._machine, request.vm.name
        try:
            number = machine.start(request)
        except Broken as broken:
            self.problem = broken
            raise
        self._mine[vm] += 1
        try:
            await asyncio.sleep(machine.chance.uniform(0.1, 9))
            is_done = machine.chance.random() < 0.7
            machine.outcomes[number] = request.event_id, vm, is_done
            if not is_done:
                raise ImpactFailed(number)
            return ImpactResult(detail=number, is_back=machine.chance.random() < 0.5)
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):  # it takes a while to end
                await asyncio.sleep(machine.chance.uniform(0, 4))
            raise
        finally:
            if not self.is_killed:
                machine.active[vm] -= 1
                self._mine[vm] -= 1

    async def wait_until_back(self, request: ImpactRequest) -> None:
        await asyncio.sleep(self._machine.chance.uniform(0.1, 20))


class LossyNetwork(Upstream):
    """The way to the servers, which loses requests and responses while `loss` is not 0."""

    def __init__(self, world: "HostdWorld") -> None:
        super().__init__([])
        self._world = world
        self._first = 0
        self.is_dead = False

    @property
    def current(self) -> str:
        return f"server {self._first}"

    @property
    def count(self) -> int:
        return 2

    def skip(self) -> None:
        self._first = 1 - self._first

    async def send(self, request: Request) -> Response:
        for number in (self._first, 1 - self._first):
            try:
                response = await self._send_to(number, request)
            except ServerLost:
                continue
            if response.status != 503:
                self._first = number
                return response
        raise ServerLost("no server can be reached")

    async def _send_to(self, number: int, request: Request) -> Response:
        world, chance = self._world, self._world.chance
        await asyncio.sleep(chance.uniform(0.001, 0.2))
        server = world.servers[number]
        if self.is_dead or server is None or chance.random() < world.loss:
            await asyncio.sleep(chance.choice((0, 3)))
            raise ServerLost("the request is lost")
        assert request.body is not None
        sent = msgspec.json.decode(request.body, type=WorkRequest)
        handler = asyncio.ensure_future(server.hosts.work(HOST, sent, by="token"))
        world.handlers.add(handler)
        handler.add_done_callback(world.handlers.discard)
        try:
            work = await asyncio.shield(handler)  # it goes on if the daemon has gone
        except Unavailable:
            return Response(503, [], b"{}")
        except Error as error:
            body = msgspec.json.encode({"error": error.code, "message": error.message})
            return Response(409, [], body)
        if self.is_dead or world.servers[number] is not server or chance.random() < world.loss:
            raise ServerLost("the response is lost")
        return Response(200, [], msgspec.json.encode(work))

    def close(self) -> None:
        """Nothing to close."""


class OneSource:
    def __init__(self) -> None:
        self.woken = asyncio.Event()

    async def list_vms(self) -> Report:
        vms = (ListedVm(name=name, id=vm_id(name), scope=name) for name in VMS)
        return Report(1 << 36, tuple(vms))


class RunningDaemon:
    """One run of the daemon."""

    def __init__(self, world: "HostdWorld", session: str) -> None:
        self.platform = SimulatedHypervisor(world.machine)
        self.network = LossyNetwork(world)
        self.runner = world.make_runner(self.platform, 2, world.clock, HOST)
        inventory = Inventory(OneSource(), 3600, list)
        token = HostToken(HOST, "", b"")
        control = ControlLoop(
            self.network, HOST, token, inventory, self.runner, session, chance=world.chance.random
        )
        self.tasks = [asyncio.create_task(work) for work in (inventory.run(), control.run())]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.check()

    async def kill(self) -> None:
        self.platform.kill()
        self.network.is_dead = True
        await self.stop()

    def check(self) -> None:
        if self.platform.problem:
            raise self.platform.problem


class HostdWorld:
    """Two servers on one store, one daemon with three VMs, and an operator."""

    def __init__(self, seed: int, make_runner: type[ImpactRunner] = ImpactRunner) -> None:
        self.make_runner = make_runner
        self.chance = random.Random(seed)
        self.loss = 0.2
        self.machine = Machine(self.chance)
        self.store = MemoryStore()
        self.servers: list[Server | None] = [None, None]
        self.handlers: set[asyncio.Future[Any]] = set()
        self._numbers = count(1)
        self._stopped: list[Server] = []

    def run(self) -> list[Entry]:
        """The history. Raises Broken if a promise was."""
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            return runner.run(self._run())

    async def _run(self) -> list[Entry]:
        loop = asyncio.get_running_loop()
        self.clock = RealClock(wall=lambda: NOON.timestamp() + loop.time(), steady=loop.time)
        for number in (0, 1):
            await self._start_server(number)
        self._daemon = RunningDaemon(self, "s0")
        await self._wait(lambda: len(self._any().board.vms) == len(VMS), 60)
        await self._disturb(loop.time() + FAULTS_SECONDS)
        self.loss = 0.0
        for number in (0, 1):
            if self.servers[number] is None:
                await self._start_server(number)
        await self._wait(self._is_over, END_SECONDS_MAX)
        self._daemon.check()
        await self._daemon.stop()
        history = list(await entries_of(self.store))
        for server in [*self.servers, *self._stopped]:
            if server is not None:
                await server.stop()
                await server.engine.close()
                await server.client.aclose()
        self._check(history)
        return history

    async def _disturb(self, until: float) -> None:
        loop, steps = asyncio.get_running_loop(), (self._operate, self._operate, self._restart_one)
        while loop.time() < until:
            await asyncio.sleep(self.chance.uniform(0.1, 12))
            self._daemon.check()
            with suppress(Error):
                await self.chance.choice(steps)()

    async def _operate(self) -> None:
        server, vm = self._any(), self.chance.choice(VMS)
        if self.chance.random() < 0.5:
            await server.engine.submit(vm, Seen(), by="guest")
        scope = server.scope(vm)
        if scope.events and self.chance.random() < 0.6:
            act = self.chance.choice((server.operations.approve, server.operations.complete))
            await act(scope.events[0].id, by="ann")
            with suppress(Error):
                await server.operations.fail(HOST, by="ann")
        else:
            await server.operations.restart(vm, by="ann")

    async def _restart_one(self) -> None:
        number = self.chance.randrange(4)
        if number >= 2:
            await (self._daemon.kill() if number == 2 else self._daemon.stop())
            self._daemon = RunningDaemon(self, f"s{next(self._numbers)}")
        elif (server := self.servers[number]) is None:
            await self._start_server(number)
        elif self.servers[1 - number] is not None:
            self.servers[number] = None
            await server.stop()
            self._stopped.append(server)

    async def _start_server(self, number: int) -> None:
        server = Server(self.store, self.clock, f"server-{next(self._numbers)}")
        await server.start()
        self.servers[number] = server

    def _any(self) -> Server:
        return next(server for server in self.servers if server is not None)

    async def _wait(self, is_true: Callable[[], bool], seconds_max: float) -> None:
        async with asyncio.timeout(seconds_max):
            while not is_true():
                await asyncio.sleep(0.5)

    def _is_over(self) -> bool:
        """Whether all impacts have ended, and the daemon knows it."""
        scopes = [published.scope for published in self._any().board.scopes.values()]
        is_open = any(not impact.is_over for scope in scopes for impact in scope.impacts)
        return not is_open and not self._daemon.runner.running()

    def _check(self, history: list[Entry]) -> None:
        """Every result in the history is that of one call, for this impact and this outcome."""
        used: Counter[str] = Counter()
        for entry in history:
            is_done = entry.what in ("impacted", "restarted")
            if not entry.detail.startswith("call-") or not (is_done or "impact" in entry.what):
                continue
            used[entry.detail] += 1
            if self.machine.outcomes[entry.detail] != (entry.event, entry.vm, is_done):
                raise Broken(f"{entry.detail} is recorded as {entry}")
        twice = [number for number, times in used.items() if times > 1]
        if twice:
            raise Broken(f"a result was used for two tries: {twice}")
        done = [entry for entry in history if entry.what == "impacted" and not entry.detail]
        completed = [entry for entry in history if entry.what == "completed" and entry.by == "ann"]
        if {entry.event for entry in done} - {entry.event for entry in completed}:
            raise Broken("an impact is recorded as done that was not")
