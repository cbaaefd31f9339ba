"""A small world under one seed: two servers, one flaky store, a driver that fails and hangs, guests
and operators.

Real engines, loops and boards; only the clock, the store's manners and the platform are made here.
Every commit is checked against the rules at the moment it happens; every page that a server shows
is compared with what any server showed before.
"""

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.change import ChangeKind
from forewarn.core.event import Cause, Event, EventType, Status
from forewarn.core.fleet import Approval, AutoApprove, Policy, Power, Scope, ScopeKind, Vm
from forewarn.core.lifecycle import is_enabled
from forewarn.core.timing import Timing
from forewarn.engine.board import Board, PublishedScope, wait_for_change
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Entry, decode_all
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.lease import TTL_SECONDS
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.engine.operations import Operations, ScopedEvent
from forewarn.engine.readability import Readability
from forewarn.engine.record import SCOPE, SEEN
from forewarn.engine.worker import Worker
from forewarn.errors import Error, ImpactFailed, StoreLost
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import (
    POSITION_MAX,
    HistoryValue,
    HistoryValues,
    Lease,
    Record,
    Snapshot,
    Write,
)
from forewarn.store.memory import MemoryStore
from forewarn.web.http.message import BLANK_LINE
from forewarn.web.metadata.fast_path import render
from forewarn.wire.versions import VERSIONS
from tests.builders import NOON
from tests.rules import Broken, check_domains, check_members, check_state, check_step, must, pages

OPEN_TRIES_MAX = 3
STEPS = 60
HOSTS = ("h1", "h2", "h3")
IMPACT_LIMIT = timedelta(minutes=5)
COMPARE_CLOCKS_EVERY = timedelta(days=1)
"""Rare, because ten simulated days pass until everything has settled."""
TIMING = Timing(shown_every=timedelta(minutes=10), gap_min=timedelta(minutes=40))
"""Servers confirm less often, because days pass. No outage here is long enough to be a gap."""
SPANS = tuple(timedelta(seconds=seconds) for seconds in (0, 1, 5, 20, 60, 300, 900, 3600))
BOOTS = tuple(timedelta(seconds=seconds) for seconds in (0, 5, 40, 120, 290, 400, 10**7))
"""How long a guest is down after the platform has restarted it; the last one never comes back."""
POLL_EVERY = timedelta(seconds=30)
POLLS_AFTER_BOOT = 20
KNOWN_EVERYWHERE = timedelta(minutes=10)
"""After this time every server knows that a scope is polled."""


@dataclass
class Manners:
    """How often things go wrong, each between 0 and 1. All 0: a fine day."""

    refused: float = 0.05
    lost_reply: float = 0.05
    slow: float = 0.3
    broken_watch: float = 0.02
    failed_impact: float = 0.15
    hung_impact: float = 0.05


@dataclass
class Witness:
    """Sees every commit in order, whoever made it, and checks it on the spot."""

    now: Callable[[], datetime]
    timing: Timing
    scopes: dict[str, Scope] = field(default_factory=dict)
    seen: dict[str, datetime] = field(default_factory=dict)
    shown: dict[tuple[str, int, int], tuple[bytes, ...]] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    transcript: list[str] = field(default_factory=list)
    begun: set[tuple[str, str, int]] = field(default_factory=set)
    done: set[tuple[str, str]] = field(default_factory=set)
    up_at: dict[tuple[str, str], datetime] = field(default_factory=dict)
    restarted_at: dict[tuple[str, str], datetime] = field(default_factory=dict)
    broken: Broken | None = None

    def must(self, holds: object, rule: str, *facts: object) -> None:
        """As `rules.must`, and remembered: whoever called may swallow what is raised."""
        with self.remembering():
            must(holds, rule, *facts)

    @contextmanager
    def remembering(self) -> Iterator[None]:
        try:
            yield
        except Broken as broken:
            self.broken = self.broken or broken
            raise

    def committed(self, writes: Sequence[Write], entries: bytes | None) -> None:
        outcome = decode_all(HistoryValue(0, entries or b"[]"))
        for one in outcome:
            self._check_entry(one)
        for write in writes:
            if write.key.startswith("seen/"):
                self._saw(write.key.split("/")[1], write.value)
        is_fleet = any(one.by == "fleet" for one in outcome)
        for write in writes:
            if not write.key.startswith("scope/"):
                continue
            name = write.key.split("/")[1]
            before = self.scopes.pop(name, None)
            if write.value is None:
                self.lives[name] = self.lives.get(name, 0) + 1
                self.ended |= {event.id for event in before.events} if before else set()
                self.transcript.append(f"{self.now():%H:%M:%S} {name} gone")
                self.must(name not in self.seen, "a scope takes its polls along", name)
                continue
            after = SCOPE.decode(write.value)
            self.must(after.seen_at is None, "a scope is stored without its polls", name)
            self.must(before or name not in self.seen, "a new scope is unseen", name)
            after = self.scopes[name] = replace(after, seen_at=self.seen.get(name))
            with self.remembering():
                self._check(
                    before or Scope(name=name, kind=after.kind, incarnation=after.incarnation),
                    after,
                )
                if is_fleet and before is not None:
                    check_members(before, after)

    def _check_entry(self, one: Entry) -> None:
        if one.what is ChangeKind.IMPACTED and one.by.startswith("server-"):
            self.must((one.event, one.vm) in self.done, "what is told as done was done", one)
        if one.what is ChangeKind.RESTARTED:
            self.restarted_at[one.event, one.vm] = self.now()
        if one.what is ChangeKind.IMPACTED and one.by != "sim":
            self._check_back(one)
        if one.what is ChangeKind.EXECUTED_SILENTLY:
            scope = self.scopes[one.scope]
            self.must(
                not is_enabled(scope, self.now(), self.timing)
                or self._needs_no_notice(scope, one.vm, one.detail),
                "who polls is given notice",
                one,
            )

    def _check_back(self, done: Entry) -> None:
        """A restart is over when its guest is up, or at the limit; not when it was reset."""
        key, now = (done.event, done.vm), self.now()
        if key not in self.up_at:
            return
        if key in self.restarted_at:
            is_late = now >= self.restarted_at[key] + self.timing.back_limit
            self.must(self.up_at[key] <= now or is_late, "done means back", done)
            return
        scope = self.scopes[done.scope]
        vm, seen_at = scope.vm(done.vm), scope.seen_at
        is_polled = seen_at is not None and seen_at < now - KNOWN_EVERYWHERE
        is_waited_for = (
            is_polled
            and self.timing.back_limit > timedelta(0)
            and is_enabled(scope, now, self.timing)
            and vm is not None
            and vm.power is Power.RUNNING
        )
        self.must(not is_waited_for, "a restarted VM that polls is waited for", done)

    def is_up(self, vm: str) -> bool:
        return all(at <= self.now() for (_, name), at in self.up_at.items() if name == vm)

    def _saw(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.seen.pop(name, None)
        else:
            self.seen[name] = SEEN.decode(value)
        if name in self.scopes:
            self.scopes[name] = replace(self.scopes[name], seen_at=self.seen.get(name))

    def _needs_no_notice(self, scope: Scope, vm: str, type_: str) -> bool:
        """A VM that is down, or a deletion that its policy does not announce."""
        known = scope.vm(vm)
        is_down = known is None or known.power is not Power.RUNNING
        return is_down or (type_ == EventType.TERMINATE and scope.policy.terminate_notice is None)

    def _check(self, before: Scope, after: Scope) -> None:
        check_step(before, after, self.now())
        check_state(after, self.now(), is_ticked=False)
        check_domains(before, after)
        for event in after.events:
            self.check_gaps(event)
        gone = {event.id for event in before.events} - {event.id for event in after.events}
        must(
            gone <= {ended.id for ended in after.ended},
            "what left the document is remembered",
            gone,
        )
        self.ended |= gone | {ended.id for ended in after.ended}
        events = ", ".join(
            f"{event.type} {event.status} {event.resources}" for event in after.events
        )
        self.transcript.append(f"{self.now():%H:%M:%S} {after.name} #{after.incarnation} {events}")

    def check_gaps(self, event: Event) -> None:
        """Some server runs all the time: no event has a gap, see `outage_world.py`. For a Preempt,
        seconds count, and another server needs some to take over.
        """
        is_preempt = event.type is EventType.PREEMPT
        must(is_preempt or not event.gaps, "an event has no gap while servers show it", event)

    def reads(self, place: PublishedScope) -> None:
        """A guest reads a page, as polls do: the same incarnation must always be the same bytes, on
        any server.
        """
        scope = place.scope
        key = (scope.name, self.lives.get(scope.name, 0), scope.incarnation)
        found = tuple(
            render(place, version, is_iso=False).partition(BLANK_LINE)[2] for version in VERSIONS
        )
        must(found == pages(scope), "a page shows the scope as it is", key)
        must(
            self.shown.setdefault(key, found) == found,
            "same incarnation, same bytes on every server",
            key,
        )

    def knows(self, event_id: str) -> bool:
        run_in_world = any(scope.event(event_id) for scope in self.scopes.values())
        silent = any(
            impact.event_id == event_id
            for scope in self.scopes.values()
            for impact in scope.impacts
        )
        return run_in_world or silent or event_id in self.ended

    def has_word(self, event_id: str, vm: str) -> bool:
        """Whether an approval is on record, or the event has moved on anyway."""
        events = [scope.event(event_id) for scope in self.scopes.values()]
        return all(
            event is None or event.status is Status.STARTED or vm in event.approvals
            for event in events
        )


class FlakyStore:
    """One server's way to the store that all share: slow, refusing, losing replies, breaking
    watches.
    """

    def __init__(
        self, inner: MemoryStore, chance: random.Random, manners: Manners, witness: Witness
    ) -> None:
        self._inner, self._chance, self._manners, self._witness = inner, chance, manners, witness
        self.leases: list[Lease] = []
        self.is_dead = False

    async def load(self, prefix: str = "") -> Snapshot:
        await self._dawdle()
        if self._chance.random() < self._manners.refused:
            raise StoreLost("load refused")
        return await self._inner.load(prefix)

    async def commit(
        self, writes: Sequence[Write], checks: Any = (), entries: bytes | None = None
    ) -> int:
        await self._dawdle()
        if self._chance.random() < self._manners.refused:
            raise StoreLost("commit refused")
        revision = await self._inner.commit(writes, checks, entries)
        self._witness.committed(writes, entries)
        if self._chance.random() < self._manners.lost_reply:
            raise StoreLost("reply lost")
        await self._dawdle()
        return revision

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        async for batch in self._inner.watch(after):
            await self._dawdle()
            if self._chance.random() < self._manners.broken_watch:
                raise StoreLost("watch broken")
            yield batch

    async def history(self, after: int = 0, limit: int = 1000) -> HistoryValues:
        return await self._inner.history(after, limit)

    async def latest(self, before: int = POSITION_MAX, limit: int = 1000) -> HistoryValues:
        return await self._inner.latest(before, limit)

    async def trim(self, before: int, limit: int = 1000) -> int:
        return await self._inner.trim(before, limit)

    async def first_of_newest(self, commits: int) -> int:
        return await self._inner.first_of_newest(commits)

    async def get(self, key: str) -> Record:
        await self._dawdle()
        if self._chance.random() < self._manners.refused:
            raise StoreLost("get refused")
        return await self._inner.get(key)

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        """Leases are renewed silently; `expire` says when one is not."""
        await self._dawdle()
        if self._chance.random() < self._manners.refused:
            raise StoreLost("lease refused")
        inner = await self._inner.lease(name, ttl_seconds)
        if inner is None:
            return None
        lease = Lease(
            name,
            inner.revision,
            ttl_seconds=math.inf,
            monotonic=lambda: 0.0,
            delete=self._release,
        )
        self.leases.append(lease)
        return lease

    async def _release(self, lease: Lease) -> None:
        """A dead process releases nothing."""
        if not self.is_dead:
            await self.expire(lease)

    async def expire(self, lease: Lease) -> None:
        """The lease was not renewed for its ttl."""
        if lease in self.leases:
            self.leases.remove(lease)
            lease.end()
            await self._inner.expire(lease.name)

    async def close(self) -> None:
        """The shared store stays open for the others."""

    async def _dawdle(self) -> None:
        if self._chance.random() < self._manners.slow:
            for _ in range(self._chance.randint(1, 5)):
                await asyncio.sleep(0)


class FlakyPlatform:
    """Takes a random time, and fails or hangs now and then.

    Checks that what it is told to do was announced. A restarted guest is down for a while. `boot`
    is called with its name. The first VM of each scope has a guest agent.
    """

    def __init__(
        self,
        clock: VirtualClock,
        chance: random.Random,
        manners: Manners,
        witness: Witness,
        boot: Callable[[str], None],
    ) -> None:
        self._clock, self._chance, self._manners, self._witness = clock, chance, manners, witness
        self._boot = boot

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        scope = self._witness.scopes.get(order.scope)
        event = scope.event(order.event_id) if scope else None
        self._witness.must(
            event is None or event.status is Status.STARTED, "no impact before Started", order
        )
        one_try = (order.event_id, order.vm.name, order.tries)
        self._witness.must(one_try not in self._witness.begun, "one try is one call", order)
        self._witness.begun.add(one_try)
        luck = self._chance.random()
        if luck < self._manners.hung_impact:
            await self._clock.sleep_until(self._clock.now() + timedelta(days=1))
        await self._clock.sleep_until(
            self._clock.now() + timedelta(seconds=self._chance.randint(0, 90))
        )
        if luck > 1 - self._manners.failed_impact:
            raise ImpactFailed("bad luck")
        self._witness.done.add((order.event_id, order.vm.name))
        moves = order.type is EventType.REDEPLOY or order.cause is Cause.FAILED
        is_restarted = order.type in (EventType.REBOOT, EventType.REDEPLOY)
        if is_restarted:
            up_at = self._clock.now() + self._chance.choice(BOOTS)
            self._witness.up_at[order.event_id, order.vm.name] = up_at
            self._boot(order.vm.name)
        host = self._chance.choice(HOSTS) if moves else ""
        return ImpactResult(host=host, is_back=not is_restarted)

    async def wait_until_back(self, request: ImpactRequest) -> None:
        if not request.vm.name.endswith("-0"):
            raise ImpactFailed("no guest agent")
        await self._clock.sleep_until(self._witness.up_at[request.event_id, request.vm.name])


class OffClock(VirtualClock):
    """The clock of a server that is some seconds ahead of the true time, or behind."""

    def __init__(self, true: VirtualClock, seconds: float) -> None:
        super().__init__(NOON)
        self._true = true
        self._off = timedelta(seconds=seconds)

    def now(self) -> datetime:
        return self._true.now() + self._off

    async def sleep_until(self, time: datetime) -> None:
        await self._true.sleep_until(time - self._off)


class Server:
    """One process: an engine with its loops, until it is killed."""

    def __init__(self, world: "World", number: int) -> None:
        self.store = world.flaky()
        self.engine = Engine(self.store, world.clock_of(number), world.timing)
        self.operations = Operations(self.engine, world.make_id)
        self._readability = world.make_readability(self.engine)
        self._world = world
        self._number = number
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for _ in range(100):
            with suppress(StoreLost):
                await self.engine.load()
                break
        world = self._world
        platform = FlakyPlatform(
            world.clock, world.chance, world.manners, world.witness, world.boot
        )
        worker = f"server-{self._number}-{self._world.chance.randint(0, 10**6)}"
        loops = Worker(
            self.engine,
            platform,
            worker=worker,
            impacts_max=3,
            impact_limit=IMPACT_LIMIT,
            compare_clocks_every=COMPARE_CLOCKS_EVERY,
            readability=self._readability,
        )
        self._task = asyncio.create_task(loops.run())

    async def kill(self) -> None:
        """As SIGKILL: it releases nothing, and its lease expires after its ttl."""
        assert self._task is not None
        self.store.is_dead = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._world.expire_later(self.store, timedelta(seconds=TTL_SECONDS))

    async def lose_lease(self) -> None:
        """As a store that did not take renewals: the server stops first, then the lease expires."""
        for lease in self.store.leases:
            lease.end()
        self._world.expire_later(self.store, timedelta(seconds=TTL_SECONDS / 3))

    def check_alive(self) -> None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()


class Alarm(logging.Handler):
    """A bug that a loop survived, and logged, is a finding too."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(logging.ERROR)
        self._witness = witness

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and self._witness.broken is None:
            self._witness.broken = Broken(f"{record.getMessage()}: {record.exc_info[1]!r}")


class World:
    """Everything under one seed.

    `run` tells a story of STEPS steps, then lets the dust settle and looks what is left.
    """

    def __init__(
        self,
        seed: int,
        *,
        store: MemoryStore | None = None,
        manners: Manners | None = None,
        skew_seconds: float = 0,
        timing: Timing | None = None,
    ) -> None:
        self.chance = random.Random(seed)
        self.manners = manners or Manners()
        self.clock = VirtualClock(NOON)
        self.server_clock = self.clock
        self.skew_seconds = skew_seconds
        self.timing = timing or TIMING
        self.witness = Witness(self.clock.now, self.timing)
        self.store = store or MemoryStore()
        self.servers: list[Server] = []
        self.expiries: set[asyncio.Task[None]] = set()
        self.acknowledged: list[str] = []
        self.waits: list[tuple[PublishedScope, int, asyncio.Task[bool]]] = []
        self.guests: set[asyncio.Task[None]] = set()
        self.last_id = ""

    def make_server(self, number: int) -> Server:
        return Server(self, number)

    def make_readability(self, engine: Engine) -> Readability:
        return Readability(engine, HostContacts(engine, ManagedHosts(engine)))

    def boot(self, vm: str) -> None:
        """A guest was restarted: when it is up, it polls some server again and again."""

        async def poll() -> None:
            for _ in range(POLLS_AFTER_BOOT):
                await self.clock.sleep_until(self.clock.now() + POLL_EVERY)
                await self._trying(partial(self._poll, vm))

        self.guests.add(asyncio.create_task(poll()))

    def expire_later(self, store: FlakyStore, delay: timedelta) -> None:
        """Let the present leases of a server expire by the simulated clock."""

        async def expire(leases: list[Lease]) -> None:
            await self.clock.sleep_until(self.clock.now() + delay)
            for lease in leases:
                await store.expire(lease)

        self.expiries.add(asyncio.create_task(expire(list(store.leases))))

    def clock_of(self, number: int) -> VirtualClock:
        """The clock of a third server is off."""
        return self.server_clock if number < 2 else OffClock(self.clock, self.skew_seconds)

    def flaky(self) -> FlakyStore:
        return FlakyStore(self.store, self.chance, self.manners, self.witness)

    def make_id(self) -> str:
        self.last_id = (
            f"{self.chance.getrandbits(32):08X}-0000-4000-8000-{self.chance.getrandbits(48):012X}"
        )
        return self.last_id

    async def run(self) -> None:
        alarm = Alarm(self.witness)
        logging.getLogger("forewarn").addHandler(alarm)
        try:
            await self._run()
        finally:
            logging.getLogger("forewarn").removeHandler(alarm)

    async def _run(self) -> None:
        await self._open()
        for _ in range(STEPS):
            await self._step()
            await self.clock.advance(timedelta(0))  # who was woken gets up
            self._check()
        await self._settle_down()
        for server in self.servers:
            await server.kill()
        for task in (*self.guests, *(task for _, _, task in self.waits)):
            task.cancel()

    async def _open(self) -> None:
        for number in range(3 if self.skew_seconds else 2):
            server = self.make_server(number)
            await server.start()
            self.servers.append(server)
        for _ in range(OPEN_TRIES_MAX):
            await self._trying(lambda: self.servers[0].operations.apply(self._fleet(), by="fleet"))
            await self.clock.advance(timedelta(seconds=5))
            if self.servers[0].engine.board.scopes:
                break

    async def _step(self) -> None:
        deeds: list[Callable[[], Awaitable[object]]] = [
            self._pass_time,
            self._pass_time,
            self._poll,
            self._poll,
            self._approve,
            self._approve,
            self._operate_vm,
            self._operate_vm,
            self._operate_host,
            self._operate_event,
            self._restart_server,
            self._lose_lease,
            self._change_fleet,
            self._crowd,
            self._wait,
        ]
        weights = [6, 6, 4, 4, 4, 4, 4, 4, 4, 2, 1, 1, 1, 3, 2]
        await self._trying(self.chance.choices(deeds, weights)[0])

    async def _trying(self, deed: Callable[[], Awaitable[object]]) -> None:
        """Do it; a Problem is an answer. What was acknowledged is written down."""
        with suppress(Error):
            response = await deed()
            outcome = response if isinstance(response, list) else [response]
            self.acknowledged += [one.event.id for one in outcome if isinstance(one, ScopedEvent)]

    def _server(self) -> Server:
        return self.chance.choice(self.servers)

    def _vm(self) -> str:
        return self.chance.choice(
            [f"{scope}-{number}" for scope in ("web", "db", "one") for number in range(3)]
        )

    async def _pass_time(self) -> None:
        await self.clock.advance(self.chance.choice(SPANS))

    async def _poll(self, name: str = "") -> None:
        server, name = self._server(), name or self._vm()
        if not self.witness.is_up(name):
            return
        place, _ = server.engine.board.find_vm(name)
        if place.booting:
            server.engine.back(place, name)
        await server.engine.seen(place)

    async def _approve(self) -> None:
        server, name = self._server(), self._vm()
        if not self.witness.is_up(name):
            return
        place, _ = server.engine.board.find_vm(name)
        ids = tuple(event.id for event in place.scope.events)[:2]
        if ids:
            await server.engine.submit(
                place.scope.name, ask.Approve(event_ids=ids, vm=name), by=name
            )
            for event_id in ids:
                self.witness.must(
                    self.witness.has_word(event_id, name),
                    "a word that was taken is kept",
                    event_id,
                    name,
                )

    async def _operate_vm(self) -> object:
        service, mine = Operations(self._server().engine, self.make_id), ""
        deed = self.chance.choice(
            [service.restart, service.restart, service.redeploy, service.evict, service.delete]
        )
        task = asyncio.ensure_future(deed(self._vm(), by="sim"))
        await asyncio.sleep(0)  # now its id is made
        mine = self.last_id
        outcome = await task
        self.witness.must(
            outcome is not None or self.witness.knows(mine),
            "a silent operation is not forgotten",
            mine,
        )
        return outcome

    async def _wait(self) -> None:
        """A guest waits for a change instead of polling."""
        place, _ = self._server().engine.board.find_vm(self._vm())
        incarnation = place.scope.incarnation
        self.waits.append(
            (place, incarnation, asyncio.create_task(wait_for_change(place, incarnation, 3600)))
        )

    async def _operate_host(self) -> object:
        service, host = self._server().operations, self.chance.choice(HOSTS)
        luck = self.chance.randint(0, 9)
        if luck == 0:
            return await service.fail(host, by="sim")
        if luck == 1:
            return await service.degrade(host, by="sim")
        type_ = self.chance.choice([EventType.FREEZE, EventType.REBOOT, EventType.REDEPLOY])
        return await service.maintain(host, type=type_, by="sim")

    async def _operate_event(self) -> None:
        server = self._server()
        events = sorted(server.engine.board.events)
        if events:
            service = server.operations
            later = self.clock.now() + timedelta(minutes=self.chance.randrange(1, 40))
            deeds: list[Callable[..., Awaitable[ScopedEvent | None]]]
            deeds = [
                service.cancel,
                service.complete,
                service.approve,
                partial(service.extend, not_before=later),
            ]
            deed = self.chance.choice(deeds)
            await deed(self.chance.choice(events), by="sim")

    async def _crowd(self) -> None:
        """Several at once, on both servers, so that commits collide."""
        deeds = [self._approve, self._operate_vm, self._operate_host, self._poll, self._approve]
        await asyncio.gather(*(self._trying(self.chance.choice(deeds)) for _ in range(4)))

    async def _restart_server(self) -> None:
        number = self.chance.randrange(len(self.servers))
        await self.servers[number].kill()
        if self.chance.random() < 0.5:
            await self.clock.advance(self.chance.choice(SPANS))
        self.servers[number] = self.make_server(number)
        await self.servers[number].start()

    async def _lose_lease(self) -> None:
        await self._server().lose_lease()

    async def _change_fleet(self) -> None:
        await self._server().operations.apply(self._fleet(), by="fleet")

    def _fleet(self) -> Fleet:
        """Three scopes of up to three VMs; some come, some go, some move."""
        return Fleet(scopes=tuple(self._scope(name) for name in ("web", "db", "one")), hosts=HOSTS)

    def _scope(self, name: str) -> Scope:
        count = 1 if name == "one" else self.chance.choice([2, 3, 3, 3])
        vms = tuple(
            Vm(
                name=f"{name}-{number}",
                update_domain=number % 2,
                host=self.chance.choice(HOSTS),
                address="",
            )
            for number in range(count)
        )
        policy = Policy(
            approval=self.chance.choice(list(Approval)),
            auto_approve=tuple(choice for choice in AutoApprove if self.chance.random() < 0.3),
            couple_terminates=self.chance.random() < 0.3,
            user_operations_max=2,
            failed_hardware=self.chance.choice([EventType.REBOOT, EventType.REDEPLOY]),
        )
        kind = ScopeKind.VM if name == "one" else ScopeKind.SCALE_SET
        return Scope(name=name, kind=kind, policy=policy, vms=vms)

    def _check(self) -> None:
        if self.witness.broken is not None:
            raise self.witness.broken
        for server in self.servers:
            server.check_alive()
            self._check_board(server.engine.board)
        for place, incarnation, task in self.waits:
            is_news = place.scope.incarnation != incarnation
            must(
                task.done() or not is_news,
                "who waits is woken by a change",
                place.scope.name,
                incarnation,
            )
        for event_id in self.acknowledged:
            must(self.witness.knows(event_id), "what was acknowledged is not lost", event_id)

    def _check_board(self, board: Board) -> None:
        fresh = Board(seen_interval_seconds=3600)
        fresh.declare_hosts((), tuple(board.declared_hosts))
        for place in board.scopes.values():
            self.witness.reads(place)
            fresh.publish(place.scope, place.revision)
        for index in ("vms", "addresses", "ids", "hosts", "events", "ended"):
            one, other = getattr(board, index), getattr(fresh, index)
            must(
                one.keys() == other.keys(),
                "what is found is what is there",
                index,
                set(one) ^ set(other),
            )
        for name, found in board.vms.items():
            must(
                board.scopes.get(found.scope.name) is found and found.scope.vm(name),
                "a VM is found where it is",
                name,
            )

    async def _settle_down(self) -> None:
        """The weather clears.

        Then everything that was begun must end, and both servers must show the same.
        """
        self.manners.__dict__.update(vars(Manners(0, 0, 0, 0, 0, 0)))
        for _ in range(60):
            await self.clock.advance(timedelta(hours=4))
        self._check()
        for server in self.servers:
            for place in list(server.engine.board.scopes.values()):
                await server.engine.seen(place)
        await self.clock.advance(timedelta(seconds=1))
        for name, scope in self.witness.scopes.items():
            must(is_enabled(scope, self.clock.now(), self.timing), "who polls is enabled", scope)
            must(not scope.impacts, "every impact comes to an end", scope)
            must(not scope.events, "every event comes to an end", scope)
            for server in self.servers:
                shown = server.engine.board.scopes.get(name)
                must(
                    shown is not None and shown.scope == scope,
                    "every server shows what is stored",
                    name,
                )
