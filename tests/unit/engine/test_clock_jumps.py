"""A machine whose clock is set while the service runs:

Forewarn goes on by its own time, and says so.
"""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import pytest

from forewarn.core import command as ask
from forewarn.core.event import Status
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.history.feed import HistoryFeed
from forewarn.history.retention import RetentionWorker
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND, scope_of
from tests.history import entries_of, write_history
from tests.unit.history.test_query import joined

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Machine:
    """Two clocks: the wall clock, which somebody may set, and a steady one that only counts."""

    def __init__(self) -> None:
        self.wall = NOON.timestamp()
        self.steady = 1000.0
        self.clock = RealClock(wall=lambda: self.wall, steady=lambda: self.steady)

    def run(self, span: timedelta) -> None:
        self.wall += span.total_seconds()
        self.steady += span.total_seconds()

    def set(self, span: timedelta) -> None:
        self.wall += span.total_seconds()

    @property
    def shown(self) -> datetime:
        return datetime.fromtimestamp(self.wall, UTC)


def test_time_is_that_of_the_machine() -> None:
    machine = Machine()
    machine.run(HOUR)

    assert machine.clock.now() == NOON + HOUR == machine.shown
    assert machine.clock.jump_seconds == 0


@pytest.mark.parametrize("span", [HOUR, 100 * DAY, 6 * SECOND, -HOUR, -6 * SECOND])
def test_clock_that_is_set_far_off_moves_nothing(span: timedelta) -> None:
    """A promise to a guest is about time that passes, not about what somebody typed."""
    machine = Machine()
    machine.run(MINUTE)
    machine.set(span)
    assert machine.clock.now() == NOON + MINUTE
    machine.run(10 * MINUTE)

    assert machine.clock.now() == NOON + 11 * MINUTE
    assert machine.clock.jump_seconds == span.total_seconds()


@pytest.mark.parametrize("span", [5 * SECOND, SECOND, -SECOND])
def test_small_correction_is_followed(span: timedelta) -> None:
    """So NTP keeps the service's time true, step by step."""
    machine = Machine()
    for _ in range(10):
        machine.set(span)
        machine.run(MINUTE)
        machine.clock.now()

    assert machine.clock.now() == machine.shown == NOON + 10 * MINUTE + 10 * span
    assert machine.clock.jump_seconds == 0


def test_time_never_goes_back() -> None:
    """Else the history would tell things in another order than they happened."""
    machine = Machine()
    seen = [machine.clock.now()]
    for span in (-3 * SECOND, SECOND, -5 * SECOND, -HOUR, HOUR):
        machine.set(span)
        seen.append(machine.clock.now())
        machine.run(SECOND)
        seen.append(machine.clock.now())

    assert seen == sorted(seen)


def test_clock_that_comes_back_is_followed_again(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.set(HOUR)
    machine.clock.now()
    machine.run(65 * SECOND)
    machine.set(-HOUR + SECOND)

    with caplog.at_level(logging.INFO, "forewarn"):
        assert machine.clock.now() == machine.shown == NOON + 66 * SECOND
    assert machine.clock.jump_seconds == 0
    assert caplog.records[-1].getMessage() == "system clock is back in step"


def test_jump_is_logged_at_once_and_then_now_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """The clock is read many times a second."""
    machine = Machine()
    machine.set(HOUR)
    with caplog.at_level(logging.INFO, "forewarn"):
        for _ in range(1000):
            machine.clock.now()
        machine.run(10 * MINUTE)
        machine.clock.now()

    assert len(caplog.records) == 2
    assert caplog.records[0].levelname == "ERROR"
    assert caplog.records[0].__dict__["facts"]["seconds"] == 3600
    assert "restart" in str(caplog.records[0].__dict__["facts"])


def test_service_that_starts_takes_the_time_that_it_finds() -> None:
    """A restart is how an operator says that the new time is right."""
    machine = Machine()
    machine.set(HOUR)

    assert RealClock(wall=lambda: machine.wall, steady=lambda: machine.steady).now() == NOON + HOUR


def test_machine_that_was_asleep_finds_out_what_is_due() -> None:
    """The steady clock counts while the machine is suspended, so waking up is no jump."""
    machine = Machine()
    machine.run(8 * HOUR)

    assert (machine.clock.now(), machine.clock.jump_seconds) == (NOON + 8 * HOUR, 0)


def test_clock_that_jumps_starts_no_event_early() -> None:
    """NotBefore is the promise; here it was broken by 14 minutes."""

    async def main() -> None:
        machine, store, scope = Machine(), MemoryStore(), scope_of()
        engine = Engine(store, machine.clock, Timing())
        await engine.submit(
            "web", ask.SetMembers(kind=scope.kind, policy=scope.policy, vms=scope.vms), by="ann"
        )
        await engine.submit("web", ask.Seen(), by="poll")
        await engine.submit("web", ask.Restart(vm="web-0", event_id="E1"), by="ann")
        machine.run(MINUTE)
        machine.set(HOUR)
        await engine.submit("web", ask.Tick(), by="clock")
        assert engine.board.find_scope("web").scope.events[0].status is Status.SCHEDULED
        machine.run(14 * MINUTE)
        machine.set(-2 * HOUR)
        await engine.submit("web", ask.Tick(), by="clock")
        assert engine.board.find_scope("web").scope.events[0].status is Status.STARTED

        stamps = [entry.at for entry in await entries_of(store)]
        assert stamps == sorted(stamps)
        assert stamps[-1] == NOON + 15 * MINUTE

    asyncio.run(main())


async def kept_after(retention: RetentionWorker, store: MemoryStore) -> int:
    await retention.trim()
    return len(await store.history())


def test_clock_a_hundred_days_ahead_trims_no_history() -> None:
    """It took the whole history, for good, within a minute."""

    async def main() -> None:
        machine, store = Machine(), MemoryStore()
        await write_history(store, *(joined(number) for number in range(10)))
        engine = Engine(store, machine.clock, Timing())
        retention = RetentionWorker(engine, HistoryFeed(store), keep=90 * DAY, commits_max=0)
        machine.run(2 * HOUR)
        machine.set(100 * DAY)
        assert await kept_after(retention, store) == 10
        machine.run(3 * HOUR)
        assert await kept_after(retention, store) == 10

    asyncio.run(main())


def test_wrong_clock_at_start_trims_nothing_for_an_hour() -> None:
    """Nothing can tell a wrong clock from a right one at the start.

    So there is time to notice, and a clock set right helps.
    """

    async def main() -> None:
        machine, store = Machine(), MemoryStore()
        await write_history(store, *(joined(number) for number in range(10)))
        machine.set(100 * DAY)
        machine.clock = RealClock(wall=lambda: machine.wall, steady=lambda: machine.steady)
        engine = Engine(store, machine.clock, Timing())
        retention = RetentionWorker(engine, HistoryFeed(store), keep=90 * DAY, commits_max=0)
        assert await kept_after(retention, store) == 10
        machine.run(59 * MINUTE)
        assert await kept_after(retention, store) == 10

        machine.set(
            -100 * DAY
        )  # set right, but the service goes on with the time that it started with
        machine.run(DAY)
        assert await kept_after(retention, store) == 10

        machine.set(100 * DAY)  # it was right after all
        assert await kept_after(retention, store) < 10

    asyncio.run(main())
