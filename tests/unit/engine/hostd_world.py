"""Servers on one store, host daemons that call their control API, and a clock that tests move."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import count
from typing import Any

import httpx
import msgspec

from forewarn.auth.tokens import Role
from forewarn.config import Config
from forewarn.core.command import Seen
from forewarn.core.fleet import Scope, Vm
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock
from forewarn.engine.entry import Entry
from forewarn.errors import ImpactFailed, StoreLost
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult, Platform
from forewarn.server import make_workers
from forewarn.store.base import Store, Write
from forewarn.store.memory import MemoryStore
from forewarn.web.control.app import make_app
from forewarn.web.service import build_service
from tests.history import entries_of
from tests.unit.web.control_world import make_client

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
GIB = 1 << 30
SETTLE_TURNS = 200
"""How often other tasks run before a test looks again. Nothing here waits for real time."""


def vm_id(name: str) -> str:
    return f"00000000-0000-4000-8000-{int.from_bytes(name.encode()[-6:], 'big'):012x}"


def reported(name: str, **more: Any) -> dict[str, Any]:
    """A VM as a daemon reports it."""
    vm: dict[str, Any] = {"name": name, "id": vm_id(name), "power": "running", "memory_bytes": GIB}
    empty: dict[str, Any] = {
        "macs": [],
        "addresses": [],
        "scope": "",
        "kind": None,
        "update_domain": None,
    }
    return vm | empty | more


def encoded(*vms: Any) -> list[msgspec.Raw]:
    """VMs as they are in a request."""
    return [msgspec.Raw(msgspec.json.encode(vm)) for vm in vms]


class LocalPlatform:
    """What the server itself can do: it notes what it was asked for, and fails with `problem`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.problem = ""

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        self.asked.append(request.vm.name)
        if self.problem:
            raise ImpactFailed(self.problem)
        return ImpactResult()


class SlowStore:
    """A store as one server sees it: its watch and its commits may be late."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, asyncio.Event] = {}
        self.watches, self.commits = asyncio.Event(), asyncio.Event()
        self.watches.set()
        self.commits.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def hold_next(self, key: str) -> asyncio.Event:
        """Only the next commit that writes this key waits for this."""
        return self._held.setdefault(key, asyncio.Event())

    async def watch(self, after: int) -> AsyncIterator[Any]:
        async for batch in self._store.watch(after):
            await self.watches.wait()
            yield batch

    async def commit(self, writes: Sequence[Write], *arguments: Any, **more: Any) -> int:
        for key in [write.key for write in writes if write.key in self._held]:
            await self._held.pop(key).wait()
        await self.commits.wait()
        return await self._store.commit(writes, *arguments, **more)


class Path:
    """One server's way to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut and name in ("get", "commit", "load", "lease"):
            return self._refuse
        return getattr(self._store, name)

    async def watch(self, after: int) -> AsyncIterator[Any]:
        async for batch in self._store.watch(after):
            if self.is_cut:
                await self._refuse()
            yield batch

    async def _refuse(self, *_: object, **__: object) -> None:
        raise StoreLost("cut off")


class Server:
    """One server: its engine, its workers and its control API."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        name: str,
        timing: Timing = Timing(),  # noqa: B008
        make_id: Callable[[], str] | None = None,
        *,
        is_confirming: bool = False,
        platform: Platform | None = None,
    ) -> None:
        """`is_confirming`: it confirms what VMs can read, so that only that is notice.

        `platform` is what it can do itself, instead of `local`.
        """
        numbers = count(1)
        self.name = name
        self.service = build_service(
            store,
            clock,
            timing,
            make_id or (lambda: f"{name[-1] * 8}-0000-4000-8000-{next(numbers):012X}"),
        )
        self.engine, self.operations = self.service.engine, self.service.operations
        self.hosts, self.board = self.service.hosts, self.service.engine.board
        self.local = LocalPlatform()
        self._platform = platform or self.local
        self._is_confirming = is_confirming
        self.is_serving = True
        self._tasks: list[asyncio.Task[None]] = []

    @cached_property
    def client(self) -> httpx.AsyncClient:
        """Of its control API."""
        return make_client(make_app(self.service, delay_seconds=0))

    async def start(self) -> None:
        await self.engine.load()
        is_serving = (lambda: self.is_serving) if self._is_confirming else None
        works = make_workers(Config(), self.service, self._platform, self.name, is_serving)
        self._tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        """Stop working, as a process that is told to; its lease is released."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def has_ended(self) -> bool:
        """Whether some of its work ended, which ends the process."""
        return any(task.done() for task in self._tasks)

    def scope(self, name: str) -> Scope:
        return self.board.scopes[name].scope

    def vm(self, name: str) -> Vm:
        return self.board.find_vm(name)[1]

    def is_unreachable(self, host: str) -> bool:
        return self.hosts.managed.is_unreachable(host)


class Daemon:
    """The daemon of a host, call by call. `running` is what it says that it carries out."""

    def __init__(self, world: "World", host: str, session: str = "s1", machine: str = "") -> None:
        self._world = world
        self.host, self.session = host, session
        self.machine = machine or f"machine of {host}"
        self.running: list[dict[str, Any]] = []
        self.inventory: dict[str, Any] | None = None
        self.unconfirmed_since: datetime | None = None
        self.problem = ""
        self.relays = True
        self.server = world.servers[0]

    async def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        url = self.url(path)
        return await self.server.client.request(method, url, headers=self.headers, **more)

    def url(self, path: str) -> str:
        return f"/api/v1/hosts/{self.host}/{path}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer fw_{self.host}_{self._world.secret}"}

    async def send(self, **body: Any) -> httpx.Response:
        content = {"session": self.session, "machine": self.machine, "running": self.running} | body
        if self.unconfirmed_since is not None:
            lasts = self._world.clock.now() - self.unconfirmed_since
            content["unconfirmed_seconds"] = int(lasts.total_seconds())
        if self.problem:
            content["problem"] = self.problem
        if not self.relays:
            content["relays"] = False
        return await self.call("POST", "work", json=content)

    async def report(self, *vms: dict[str, Any], memory_bytes: int = 64 * GIB) -> Any:
        """Send the inventory, and keep it for `World.pass_time`."""
        self.inventory = {"memory_bytes": memory_bytes, "vms": vms}
        work = await self.work(inventory=self.inventory)
        await self._world.settle()
        return work["problems"]

    async def work(self, **body: Any) -> Any:
        response = await self.send(**body)
        assert response.status_code == 200, response.text
        return response.json()

    async def take(self) -> dict[str, Any]:
        """The only impact that is handed out; from now on the daemon runs it.

        A server claims what waited for the daemon only when it is connected, and has reported if
        the server asks for that.
        """
        if not (await self.work())["is_merged"]:
            await self.work(inventory=self.inventory)
        await self._world.settle()
        (impact,) = (await self.work())["impacts"]
        self._keep(running_of(impact))
        return dict(impact)

    def _keep(self, running: dict[str, Any]) -> None:
        others = [each for each in self.running if each["event_id"] != running["event_id"]]
        self.running = [*others, running]

    async def finish(self, impact: dict[str, Any], **result: Any) -> bool:
        """Report a result; whether the daemon may drop it, because it is recorded or not wanted."""
        self._keep(running_of(impact) | {"result": result})
        await self.work()
        await self._world.settle()
        cancel = [try_of(each) for each in (await self.work())["cancel"]]
        self.running = [each for each in self.running if try_of(each) not in cancel]
        return running_of(impact) in cancel


def running_of(impact: dict[str, Any]) -> dict[str, Any]:
    return {**{key: impact[key] for key in ("event_id", "tries")}, "vm": impact["vm"]["name"]}


def try_of(running: dict[str, Any]) -> dict[str, Any]:
    return {key: running[key] for key in ("event_id", "tries", "vm")}


class World:
    """Two servers, `server-1` and `server-2`, and daemons that can call either."""

    secret = "5e" * 32

    def __init__(self, *, is_confirming: bool = False, platform: Platform | None = None) -> None:
        self.store, self.clock = MemoryStore(), VirtualClock(NOON)
        more: dict[str, Any] = {"is_confirming": is_confirming, "platform": platform}
        self.servers = [Server(self.store, self.clock, f"server-{n}", **more) for n in (1, 2)]

    async def start(self) -> None:
        for server in self.servers:
            await server.start()
        tokens = self.servers[0].service.tokens
        await tokens.create("root", Role.ADMIN, secret=self.secret, by="test")
        for host in ("host-a", "host-b", "host-c"):
            await tokens.create(host, Role.HOST, secret=self.secret, by="test", host=host)
        await self.settle()

    async def daemon(
        self, host: str, *vms: dict[str, Any], session: str = "s1", server: int = 0
    ) -> Daemon:
        """A daemon that has reported these VMs."""
        daemon = Daemon(self, host, session)
        daemon.server = self.servers[server]
        await daemon.report(*vms)
        return daemon

    async def limit_token(self, host: str, *scopes: str) -> None:
        tokens = self.servers[0].service.tokens
        await tokens.revoke(host, by="test")
        await tokens.create(
            host, Role.HOST, secret=self.secret, by="test", host=host, scopes=scopes
        )
        await self.settle()

    async def settle(self) -> None:
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    async def pass_time(self, duration: timedelta, *alive: Daemon) -> None:
        """Let time pass, second by second, while these daemons ask for work.

        They repeat their inventory once a minute.
        """
        for number in range(int(duration / SECOND)):
            for daemon in alive:
                is_due = daemon.inventory and number % 60 == 59
                await daemon.work(**({"inventory": daemon.inventory} if is_due else {}))
            await self.clock.advance(SECOND)
            await self.settle()

    async def expire(self, server: Server) -> None:
        """Let the server's lease end, as if the process had died."""
        await server.stop()
        await self.settle()

    async def poll(self, *scopes: str) -> None:
        for scope in scopes:
            await self.servers[0].engine.submit(scope, Seen(), by="test")

    async def restart(self, vm: str) -> str:
        """Restart a VM now: nobody polls, so it is an operation without an event."""
        assert await self.servers[0].operations.restart(vm, by="ann") is None
        await self.settle()
        return self.servers[0].board.vms[vm].scope.impacts[-1].event_id

    async def history(self, *kinds: str) -> Sequence[Entry]:
        return [entry for entry in await entries_of(self.store) if entry.what in kinds]


def run(
    test: Callable[[World], Awaitable[None]],
    *,
    is_confirming: bool = False,
    platform: Platform | None = None,
) -> None:
    async def main() -> None:
        world = World(is_confirming=is_confirming, platform=platform)
        async with AsyncExitStack() as stack:
            for server in world.servers:
                await stack.enter_async_context(server.client)
                stack.push_async_callback(server.engine.close)
                stack.push_async_callback(server.stop)
            await world.start()
            await test(world)

    asyncio.run(main())
