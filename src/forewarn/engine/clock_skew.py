"""How this server's clock compares with those of the other servers on its store.

While other servers hold a lease, each server writes its time into the record `clock/{server}`, and
compares the records of the others with its own clock as they arrive. All write when a lease
appears, so that a server that starts knows within milliseconds. A lone server writes nothing.

The reference is the lower median of all clocks: of two servers the one that is ahead is off,
because an event that starts late breaks no promise.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from forewarn.engine.clock import wait_for
from forewarn.engine.engine import CLOCK_SKEW_SECONDS_MAX, Engine
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
"""How long a server that starts waits for the others: one may hang, or be of an older version."""
OFFSETS_MAX = 3
"""A record that arrives late makes an offset larger, so the least of the latest ones counts."""


class ClockSkew:
    """States:  COMPARING -> RIGHT <-> OFF. A server ticks and claims impacts while RIGHT.

    COMPARING ends when the clock of every other server is known, or after COMPARE_FOR_MAX. Then
    `clock_compared` of the engine is set: the commands of a server that starts wait for it.
    `on_change` is called when the state may have changed.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None], *, every: timedelta) -> None:
        self._engine = engine
        self._every = every
        self._on_change = on_change
        self._server = ""
        self._compare_until = engine.clock.now()
        self._offsets: dict[str, deque[float]] = {}
        self._leases_changed = asyncio.Event()
        engine.on_change("clock", self._compare)
        engine.on_change("lease", lambda before, after: self._leases_changed.set())

    def is_right(self) -> bool:
        return not self._engine.is_clock_off and not self._is_comparing()

    def _is_comparing(self) -> bool:
        is_time_left = self._engine.clock.now() < self._compare_until
        return is_time_left and any(server not in self._offsets for server in self._others())

    async def run(self, server: str, lease: Lease) -> None:
        """Write this server's time while there are others to read it, until cancelled."""
        clock, key = self._engine.clock, CLOCK_KEY.format(server)
        self._server, self._compare_until = server, clock.now() + COMPARE_FOR_MAX
        while True:  # ends when cancelled
            self._leases_changed.clear()
            self._evaluate()
            others, pause = self._others(), RETRY
            with suppress(Error):
                if others:
                    await self._engine.update([key], self._write, by=server, lease=lease)
                pause = RETRY if self._is_comparing() else self._every
            self._evaluate()  # the time for comparing may have passed meanwhile
            await wait_for(clock, self._leases_changed, clock.now() + pause if others else None)

    def _others(self) -> list[str]:
        """The other servers that hold a lease."""
        prefix, own = lease_key(""), lease_key(self._server)
        keys = (key for key, _ in self._engine.records.values("lease"))
        return [key.removeprefix(prefix) for key in keys if key.startswith(prefix) and key != own]

    def _write(self, transaction: Transaction) -> None:
        """Write the record, and delete those of servers that have no lease any more."""
        reading = ClockReading(self._server, self._engine.clock.now())
        transaction.put(CLOCK_KEY.format(self._server), reading)
        live = {self._server, *self._others()}
        for key, known in self._engine.records.values("clock"):
            if known.server not in live:
                transaction.put(key, None)

    def _compare(self, _: ClockReading | None, reading: ClockReading | None) -> None:
        """Compare a record as it arrives. What is read after a loss of the store is too old."""
        if reading is None or reading.server == self._server or not self._engine.is_ready:
            return
        offset = (self._engine.clock.now() - reading.at).total_seconds()
        self._offsets.setdefault(reading.server, deque(maxlen=OFFSETS_MAX)).append(offset)
        self._evaluate()

    def _evaluate(self) -> None:
        engine, was_off = self._engine, self._engine.is_clock_off
        self._offsets = {one: self._offsets[one] for one in self._others() if one in self._offsets}
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
