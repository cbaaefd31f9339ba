"""The whole engine under seeds: fifty fixed worlds, and planted faults that must be found."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from forewarn.core.change import ChangeKind
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import Write
from forewarn.store.memory import MemoryStore
from tests.builders import NOON
from tests.history import entries_of
from tests.rules import Broken
from tests.sim.world import Manners, World

SEEDS = 50
SEEDS_TO_FIND_A_FAULT = 20


@pytest.mark.parametrize("seed", range(SEEDS))
def test_invariants_hold_for_every_seed(seed: int) -> None:
    """Refused commits, lost replies, conflicts, restarts, failing and hanging drivers: nothing
    acknowledged is lost.
    """
    world = World(seed)

    asyncio.run(world.run())

    assert len(world.witness.transcript) > 20


@pytest.mark.parametrize("skew_seconds", [30, 3600])
@pytest.mark.parametrize("seed", range(10))
def test_invariants_hold_with_a_third_server_whose_clock_is_ahead(
    seed: int, skew_seconds: float
) -> None:
    """By the true time, which two of the three servers have, nothing starts early.

    No watch breaks: a server that misses a comparison of the clocks has to wait for the next one,
    and here that comes a day later.
    """
    world = World(seed, skew_seconds=skew_seconds, manners=Manners(broken_watch=0))

    asyncio.run(world.run())

    assert len(world.witness.transcript) > 20


def test_simulation_reaches_every_kind_of_change() -> None:
    """A simulation in which nothing happens proves nothing: every kind of change occurs, takeovers
    included.
    """
    elsewhere = {
        ChangeKind.CAMPAIGN,
        ChangeKind.TOKEN_CREATED,
        ChangeKind.TOKEN_REVOKED,
        ChangeKind.RESTORED,
        ChangeKind.UNSERVED,
        ChangeKind.SERVED,
    }
    wanted = set(ChangeKind) - {ChangeKind.RETIRED} - elsewhere
    seen, taken_over = set(), 0
    for seed in range(SEEDS):
        world = World(seed)
        asyncio.run(world.run())
        changes = asyncio.run(entries_of(world.store, limit=10**6))
        seen |= {change.what for change in changes}
        claims = Counter(
            (change.event, change.vm) for change in changes if change.what is ChangeKind.CLAIMED
        )
        failures = Counter(
            (change.event, change.vm)
            for change in changes
            if change.what is ChangeKind.IMPACT_FAILED
        )
        taken_over += sum(claims[key] > failures[key] + 1 for key in claims)
        if seen == wanted and taken_over >= 3:
            break

    assert seen == wanted
    assert taken_over >= 3


def test_same_seed_gives_the_same_simulation() -> None:
    """A finding can be looked at again."""
    stories = []
    for _ in range(2):
        world = World(7)
        asyncio.run(world.run())
        stories.append(world.witness.transcript)

    assert stories[0] == stories[1]


class CarelessStore(MemoryStore):
    """Planted fault: takes any write, whatever revision its writer had read."""

    async def commit(
        self, writes: Sequence[Write], checks: Any = (), entries: bytes | None = None
    ) -> int:
        known = {key: record.revision for key, record in self._records.items()}
        current = [Write(write.key, write.value, known.get(write.key, 0)) for write in writes]
        return await super().commit(current, (), entries)


class ForgetfulStore(MemoryStore):
    """Planted fault: says yes to every seventh commit and does nothing."""

    calls = 0

    async def commit(
        self, writes: Sequence[Write], checks: Any = (), entries: bytes | None = None
    ) -> int:
        self.calls += 1
        if self.calls % 7 == 0:
            return self._revision + 1
        return await super().commit(writes, checks, entries)


class HastyClock(VirtualClock):
    """Planted fault: this server believes that it is later than it is."""

    def __init__(self, true: VirtualClock) -> None:
        super().__init__(NOON)
        self._true = true

    def now(self) -> datetime:
        return self._true.now() + timedelta(minutes=10)

    async def sleep_until(self, moment: datetime) -> None:
        await self._true.sleep_until(moment - timedelta(minutes=10))


def hunt(worlds: Callable[[int], World]) -> None:
    """Live in one world after the other until something is found."""
    for seed in range(SEEDS_TO_FIND_A_FAULT):
        asyncio.run(worlds(seed).run())


@pytest.mark.parametrize("planted", [CarelessStore, ForgetfulStore])
def test_a_store_that_breaks_its_promise_is_found(planted: type[MemoryStore]) -> None:
    """A check that cannot fail is a defect; these show that it can."""
    with pytest.raises(Broken):
        hunt(lambda seed: World(seed, store=planted()))


def test_server_whose_clock_is_ahead_is_detected() -> None:
    """NotBefore and claims are judged by the true time, not by the server's own."""

    def hasty(seed: int) -> World:
        world = World(seed, manners=Manners(0, 0, 0, 0, 0, 0))
        world.server_clock = HastyClock(world.clock)
        return world

    with pytest.raises(Broken, match=r"NotBefore|only when it has lapsed"):
        hunt(hasty)
