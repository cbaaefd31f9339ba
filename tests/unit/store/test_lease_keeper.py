"""Leases are renewed for as long as the process runs."""

import asyncio
from collections.abc import Collection, Sequence

import pytest

from forewarn.store.base import Lease, Write
from forewarn.store.lease_keeper import LeaseKeeper
from tests.unit.web.instant_loop import EagerLoop

TTL = 9.0


class Keeper(LeaseKeeper):
    """Its renewals raise what no store should, until the test says otherwise."""

    is_broken = True

    async def commit(self, writes: Sequence[Write]) -> int:
        raise NotImplementedError

    async def _renew(self, leases: Sequence[Lease], now: float) -> Collection[Lease]:
        if self.is_broken:
            raise ValueError("a malformed reply")
        return leases

    def acquire(self, name: str) -> Lease:
        return self._keep(name, 1, TTL, since=self._monotonic())


def test_renewals_continue_after_an_unexpected_exception(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else every later lease would be lost after two thirds of its ttl, without a log line."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        keeper = Keeper(monotonic=loop.time)
        first = keeper.acquire("server/a")
        await asyncio.sleep(TTL)
        assert not first.is_held()

        keeper.is_broken = False
        second = keeper.acquire("server/a-2")
        await asyncio.sleep(10 * TTL)

        assert second.is_held()
        assert {line.message for line in caplog.records} == {"bug while renewing leases"}
        await keeper._release_all()

    with asyncio.Runner(loop_factory=EagerLoop) as runner:
        runner.run(run())
