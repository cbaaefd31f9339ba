"""How this server's clock compares with those of the other servers on its store.

While other servers hold a lease, each server writes its time into the record `clock/{server}`, and
compares the records of the others with its own clock as they arrive. A server that starts asks the
others to write, so that it knows within milliseconds. A lone server writes nothing.

The reference is the lower median of all clocks: of two servers the one that is ahead is off,
because an event that starts late breaks no promise.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta

from forewarn.engine.clock import wait_for
from forewarn.engine.engine import CLOCK_SKEW_SECONDS_MAX, Engine
from forewarn.engine.isolation import isolated
from forewarn.engine.lease import lease_key
from forewarn.engine.record import ClockReading
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error
from forewarn.log import log
from forewarn.store.base import Lease

CLOCK_KEY = "clock/{}/"
COMPARE_EVERY = timedelta(seconds=30)
RETRY = timedelta(seconds=1)
COMPARE_FOR_MAX = timedelta(seconds=5)
"""How long a server that has asked the others waits: one may hang, or be of an older version."""
OFFSETS_MAX = 3
"""A record that arrives late makes an offset larger, so the least of the latest ones counts."""
DELETED_MAX = 50


class ClockSkew:
    """States:  COMPARING -> RIGHT <-> OFF. A server ticks and claims impacts while RIGHT.

    COMPARING ends when the clock of every other server is known, or COMPARE_FOR_MAX after this
    server has asked. Then `clock_compared` of the engine is set: the commands of a server that
    starts wait for it. A server that is OFF when the others leave stays OFF, but starts events,
    late, by the time that it last knew: nobody else would. `on_change` is called when the state may
    have changed.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None], *, every: timedelta) -> None:
        self._engine = engine
        self._every = every
        self._on_change = on_change
        self._server = ""
        self._compare_until: datetime | None = None
        self._offsets: dict[str, deque[float]] = {}
        self._is_asked = False
        self._write_at = engine.clock.now()
        self._woken = asyncio.Event()
        engine.on_change("clock", self._compare)
        engine.on_change("lease", lambda before, after: self._woken.set())

    def is_right(self) -> bool:
        is_alone = not self._others()
        return is_alone or not (self._engine.is_clock_off or self._is_comparing())

    def _is_comparing(self) -> bool:
        until = self._compare_until
        is_time_left = until is None or self._engine.clock.now() < until
        return is_time_left and any(server not in self._offsets for server in self._others())

    async def run(self, server: str, lease: Lease) -> None:
        """Write this server's time while there are others to read it, until cancelled."""
        clock = self._engine.clock
        self._server, self._compare_until = server, None
        self._write_at = clock.now()
        while True:  # ends when cancelled
            self._woken.clear()
            wake_at: datetime | None = clock.now() + RETRY
            with isolated(self._engine.throttled_log, "bug while comparing clocks"):
                wake_at = await self._write_if_due(lease)
            await wait_for(clock, self._woken, wake_at)

    async def _write_if_due(self, lease: Lease) -> datetime | None:
        """Write the time if it is due. Returns when to look again; None: when others are there."""
        engine, clock, key = self._engine, self._engine.clock, CLOCK_KEY.format(self._server)
        self._evaluate()
        is_due = clock.now() >= self._write_at or self._is_comparing()
        if self._is_wanted() and engine.is_ready and is_due:
            self._is_asked, self._write_at = False, clock.now() + self._every
            try:
                await engine.update([key], self._write, by=self._server, lease=lease)
                self._compare_until = self._compare_until or clock.now() + COMPARE_FOR_MAX
            except Error as error:
                self._is_asked, self._write_at = True, clock.now() + RETRY
                engine.throttled_log.warn("clock not written", problem=error.message)
        self._evaluate()  # the time for comparing may have passed meanwhile
        if not engine.is_ready:  # it cannot be written: what is due stays due
            self._write_at = clock.now() + RETRY
        elif self._is_comparing():
            self._write_at = min(self._write_at, clock.now() + RETRY)
        return self._write_at if self._is_wanted() else None

    def _ask(self) -> None:
        """Write soon: another server asks."""
        self._is_asked, self._write_at = True, self._engine.clock.now()
        self._woken.set()

    def _is_wanted(self) -> bool:
        return self._is_asked or bool(self._others())

    def _others(self) -> list[str]:
        """The other servers that hold a lease."""
        prefix, own = lease_key(""), lease_key(self._server)
        keys = (key for key, _ in self._engine.records.values("lease"))
        return [key.removeprefix(prefix) for key in keys if key.startswith(prefix) and key != own]

    def _write(self, transaction: Transaction) -> None:
        """Write the record, and delete some of servers that have no lease any more."""
        asks = self._is_comparing()
        reading = ClockReading(self._server, self._engine.clock.now(), asks=asks)
        transaction.put(CLOCK_KEY.format(self._server), reading)
        live = {self._server, *self._others()}
        known = self._engine.records.values("clock")
        dead = [key for key, reading in known if reading.server not in live]
        for key in dead[:DELETED_MAX]:
            transaction.put(key, None)

    def _compare(self, _: ClockReading | None, reading: ClockReading | None) -> None:
        """Compare a record as it arrives. What is read after a loss of the store is too old."""
        if reading is None or reading.server == self._server or not self._engine.is_ready:
            return
        if reading.asks:
            self._ask()
        offset = (self._engine.clock.now() - reading.at).total_seconds()
        self._offsets.setdefault(reading.server, deque(maxlen=OFFSETS_MAX)).append(offset)
        self._evaluate()

    def _evaluate(self) -> None:
        engine, was_off = self._engine, self._engine.is_clock_off
        others = self._others()
        self._offsets = {one: self._offsets[one] for one in others if one in self._offsets}
        if others:  # alone, this server knows what it knew before
            clocks = sorted((0.0, *(-min(offsets) for offsets in self._offsets.values())))
            engine.clock_skew_seconds = 0.0 - clocks[(len(clocks) - 1) // 2]
        seconds = round(engine.clock_skew_seconds, 3)
        if engine.is_clock_off and not was_off:
            text = "clock differs from the other servers; no events start here"
            log.error(text, seconds=seconds, seconds_max=CLOCK_SKEW_SECONDS_MAX)
        elif was_off and not engine.is_clock_off:
            log.warning("clock agrees with the other servers again", seconds=seconds)
        if self._server and not self._is_comparing():
            engine.clock_compared.set()
        self._on_change()
