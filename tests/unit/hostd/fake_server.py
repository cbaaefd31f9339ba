"""The route of a server for a daemon, with a state that tests change."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from forewarn.hostd.control import ControlLoop
from forewarn.hostd.inventory import Inventory, ListedVm, Report
from forewarn.hostd.refusals import Refusals
from forewarn.hostd.settings import HostToken
from forewarn.hostd.unconfirmed import Unconfirmed
from forewarn.hostd.upstream import Upstream
from forewarn.hostd.worker import ImpactRunner
from forewarn.platform.base import ImpactRequest, ImpactResult, Platform
from tests.builders import guid
from tests.unit.hostd.http_server import HttpServer, Request, serving
from tests.unit.platform.instant_clock import InstantClock

TOKEN = HostToken("host-a", "fw_host-a_" + "0" * 64, b"key")
LOOK_SECONDS = 0.005


class FakeServer:
    """`wanted` are the impacts to hand out; `refusal` answers every call instead.

    A result for a wanted impact is recorded, unless `is_recording` is False, and the impact is
    then cancelled, unless its VM boots.
    """

    def __init__(self) -> None:
        self.http: HttpServer | None = None
        self.wanted: dict[tuple[str, str], dict[str, Any]] = {}
        self.cancelled: list[tuple[str, str]] = []
        self.inventories: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.running: list[dict[str, Any]] = []
        self.polls = self.abandoned = 0
        self.numbers: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.latest: dict[str, Any] = {}
        self.problems: list[str] = []
        self.unconfirmed: list[int] = []
        self.sessions_ended = 0
        self.refusal: tuple[int, Any] | None = None
        self.inventory_refusal: tuple[int, Any] | None = None
        self.is_recording = self.is_merging = True

    @property
    def url(self) -> str:
        assert self.http is not None
        return self.http.url

    def want(self, vm: str = "web-0", *, event: int = 1, tries: int = 1, **more: Any) -> None:
        self.wanted[guid(event), vm] = {
            "event_id": guid(event),
            "scope": "web",
            "vm": {
                "name": vm,
                "id": guid(5).lower(),
                "host": "host-a",
                "power": "running",
                "colour": "of a newer server",
            },
            "type": "Reboot",
            "cause": "user-restart",
            "tries": tries,
            "duration_seconds": -1,
            "targets": ["host-b"],
        } | more

    async def answer(self, request: Request) -> tuple[int, Any]:
        if self.refusal is not None:
            return self.refusal
        assert request.headers["authorization"] == f"Bearer {TOKEN.text}"
        assert (request.method, request.path) == ("POST", "/api/v1/hosts/host-a/work")
        body = json.loads(request.body)
        assert (body.pop("session"), body.pop("machine")) == ("session-1", "machine-1")
        self.numbers.append(body["number"])
        self.requests.append(body)
        self.latest = body
        self.problems.append(body.get("problem", ""))
        if body.get("is_leaving"):
            self.sessions_ended += 1
        if "inventory" in body:
            if self.inventory_refusal is not None:
                return self.inventory_refusal
            assert 0 <= body["inventory"].pop("age_seconds") < 60
            self.inventories.append(body["inventory"])
        self.polls += 1
        self.running = body.get("running", [])
        for one in self.running:
            self._record(one)
        self.unconfirmed.append(body.get("unconfirmed_seconds", 0))
        seconds = 5 if body.get("wait") and self.polls > 1 else 0
        return 200, await self._work(seconds) | {"is_merged": self.is_merging}

    def _record(self, one: dict[str, Any]) -> None:
        """Every result that is new, or repeated with other `tries`."""
        key = one["event_id"], one["vm"]
        result = one.get("result")
        if result is None or one in self.results:
            return
        self.results.append(one)
        if self.is_recording:
            self.wanted.pop(key, None)
            if result.get("is_back", True):
                self.cancelled.append(key)

    async def _work(self, wait_seconds: float) -> dict[str, Any]:
        running = {(one["event_id"], one["vm"]): one["tries"] for one in self.running}
        poll = self.polls
        for _ in range(1 + int(wait_seconds / LOOK_SECONDS)):
            if self.polls != poll:
                self.abandoned += 1  # the daemon has something new
                break
            new = [
                impact for key, impact in self.wanted.items() if running.get(key) != impact["tries"]
            ]
            cancel = [
                {"event_id": key[0], "vm": key[1], "tries": running[key]}
                for key in self.cancelled
                if key in running
            ]
            if new or cancel:
                return {"impacts": new, "cancel": cancel}
            await asyncio.sleep(LOOK_SECONDS)
        return {"impacts": [], "cancel": []}


class FakePlatform:
    """Impacts end when the test says so: `release` sets the result, or the error."""

    def __init__(self) -> None:
        self.started: list[ImpactRequest] = []
        self.cancelled: list[str] = []
        self.outcomes: asyncio.Queue[ImpactResult | Exception] = asyncio.Queue()
        self.back = asyncio.Event()
        self.watched: list[ImpactRequest] = []

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        self.started.append(request)
        try:
            outcome = await self.outcomes.get()
        except asyncio.CancelledError:
            self.cancelled.append(request.vm.name)
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def wait_until_back(self, request: ImpactRequest) -> None:
        self.watched.append(request)
        await self.back.wait()


class FakeSource:
    def __init__(self, *names: str) -> None:
        self.woken = asyncio.Event()
        self.problem: Exception | None = None
        self.listings = 0
        self.vms: tuple[ListedVm, ...] = ()
        self.list(*names)

    def list(self, *names: str) -> None:
        self.vms = tuple(
            ListedVm(name=name, id=guid(number), ports=(f"vnet{number}",))
            for number, name in enumerate(names, start=1)
        )
        self.woken.set()

    async def list_vms(self) -> Report:
        self.listings += 1
        if self.problem is not None:
            raise self.problem
        return Report(1 << 30, self.vms)


class Daemon:
    """What a daemon consists of, between a fake platform and fake servers."""

    def __init__(
        self, *servers: FakeServer, platform: Platform | None = None, relays: bool = True
    ) -> None:
        self.platform = FakePlatform()
        self.source = FakeSource("web-0")
        self.inventory = Inventory(self.source, 3600)
        self.runner = ImpactRunner(platform or self.platform, 2, InstantClock(), "host-a")
        upstream = Upstream([server.url for server in servers])
        self.seconds = 0.0
        self.refusals = Refusals(lambda: self.seconds)
        self.unconfirmed = Unconfirmed(lambda: self.seconds)
        self.control = ControlLoop(
            upstream,
            "host-a",
            TOKEN,
            self.inventory,
            self.runner,
            "session-1",
            "machine-1",
            LOOK_SECONDS,
            refusals=self.refusals,
            unconfirmed=self.unconfirmed,
            relays=relays,
        )


@asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[list[asyncio.Task[None]]]:
    async with running_together(daemon.inventory.run(), daemon.control.run()) as tasks:
        yield tasks


@asynccontextmanager
async def running_together(
    *works: Coroutine[Any, Any, None],
) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


@asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    async with serving(fake.answer) as http:
        fake.http = http
        yield fake


async def until(is_true: Callable[[], object]) -> None:
    """The test has a limit."""
    while not is_true():
        await asyncio.sleep(LOOK_SECONDS)
