"""Leases are renewed for as long as the process runs."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import pairwise

import pytest

from forewarn.errors import StoreLost
from forewarn.store.base import Lease, Write
from forewarn.store.lease_keeper import LeaseKeeper
from tests.unit.web.instant_loop import EagerLoop

TTL = 9.0


class Keeper(LeaseKeeper):
    """Its renewals take some time, and then succeed or raise this error."""

    def __init__(self) -> None:
        super().__init__(monotonic=asyncio.get_running_loop().time)
        self.call_seconds = 0.0
        self.error: Exception | None = None
        self.renewals = list[float]()

    async def commit(self, writes: Sequence[Write]) -> int:
        raise NotImplementedError

    async def _renew(self, leases: Sequence[Lease], now: float) -> Collection[Lease]:
        self.renewals.append(now)
        await asyncio.sleep(self.call_seconds)
        if self.error is not None:
            raise self.error
        return leases

    def acquire(self, name: str) -> Lease:
        return self._keep(name, 1, TTL, since=self._monotonic())


def with_keeper(test: Callable[[Keeper], Awaitable[None]]) -> None:
    async def run() -> None:
        keeper = Keeper()
        try:
            await test(keeper)
        finally:
            await keeper._release_all()

    with asyncio.Runner(loop_factory=EagerLoop) as runner:
        runner.run(run())


def test_renewals_continue_after_an_unexpected_exception(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else every later lease would be lost after two thirds of its ttl, without a log line."""

    async def test(keeper: Keeper) -> None:
        keeper.error = ValueError("a malformed reply")
        first = keeper.acquire("server/a")
        await asyncio.sleep(TTL)
        assert not first.is_held()

        keeper.error = None
        second = keeper.acquire("server/a-2")
        await asyncio.sleep(10 * TTL)

        assert second.is_held()
        assert {line.message for line in caplog.records} == {"bug while renewing leases"}

    with_keeper(test)


def test_bug_that_lasts_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried again every second, and each line has a traceback."""

    async def test(keeper: Keeper) -> None:
        keeper.error = ValueError("a malformed reply")
        for number in range(10):
            keeper.acquire(f"server/{number}")
            await asyncio.sleep(TTL)
        assert len(keeper.renewals) > 50
        assert len(caplog.records) == 3  # in 90 seconds

    with_keeper(test)


def test_lease_is_renewed_every_third_of_its_ttl() -> None:
    async def test(keeper: Keeper) -> None:
        keeper.acquire("server/a")
        await asyncio.sleep(TTL + 1)
        assert keeper.renewals == pytest.approx([3, 6, 9])

    with_keeper(test)


@pytest.mark.parametrize("error", [StoreLost("no leader"), ValueError("a malformed reply")])
def test_lease_survives_failed_renewals(error: Exception) -> None:
    """An etcd that elects a leader refuses calls for a second or two."""

    async def test(keeper: Keeper) -> None:
        keeper.error = error
        lease = keeper.acquire("server/a")
        await asyncio.sleep(TTL / 3 + 1.5)
        keeper.error = None
        await asyncio.sleep(TTL)

        assert lease.is_held()
        assert keeper.renewals[:3] == pytest.approx([3, 4, 5])

    with_keeper(test)


def test_lease_survives_a_renewal_that_takes_most_of_the_time_left() -> None:
    """A call to a member of etcd that does not respond takes 2.5 seconds."""

    async def test(keeper: Keeper) -> None:
        keeper.error, keeper.call_seconds = StoreLost("no response"), 2.5
        lease = keeper.acquire("server/a")
        await asyncio.sleep(TTL / 3 + 2.6)
        keeper.error, keeper.call_seconds = None, 0.1
        await asyncio.sleep(TTL)

        assert lease.is_held()

    with_keeper(test)


def test_store_that_is_away_for_long_is_not_asked_without_pause() -> None:
    async def test(keeper: Keeper) -> None:
        keeper.error = StoreLost("gone")
        keeper.acquire("server/a")
        await asyncio.sleep(TTL)
        pauses = [later - sooner for sooner, later in pairwise(keeper.renewals)]

        assert min(pauses) > 0.09
        assert len(pauses) < 15

    with_keeper(test)


def test_lease_that_was_lost_during_its_renewal_is_not_held_again() -> None:
    """Its holder has begun to stop."""

    async def test(keeper: Keeper) -> None:
        keeper.call_seconds = 4
        lease = keeper.acquire("server/a")
        await lease.lost()
        await asyncio.sleep(2)  # the renewal began after 3 seconds, and ends after 7

        assert not lease.is_held()

    with_keeper(test)
