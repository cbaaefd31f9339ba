"""Corrects times in the records of hosts that are ahead of the clock.

A server whose clock was ahead has written them, and was restarted with the right time. What counts
from such a time on would be blocked until then: reports would not count, cloned machines would stay
refused, and a host that is away would seem to be in contact.

Every server looks at all records when it starts and when another one has gone, and the first one
writes. One whose clock is off corrects nothing: if it is behind, the right times seem to be ahead.
A lone server cannot know that its clock is behind. Then it makes the times older, and waits longer.
"""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from forewarn.engine.clock import wait_for
from forewarn.engine.engine import CLOCK_SKEW_SECONDS_MAX, Engine
from forewarn.engine.isolation import isolated
from forewarn.engine.machine_binding import MERGE_AFTER
from forewarn.engine.managed_hosts import ManagedHost
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error
from forewarn.log import log

RETRY = timedelta(seconds=1)
AHEAD_MAX = timedelta(seconds=CLOCK_SKEW_SECONDS_MAX)
"""Of two servers whose clocks are right, one may be ahead by this."""
UNKNOWN = datetime(1970, 1, 1, tzinfo=UTC)


class HostTimes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = asyncio.Event()
        engine.on_change("lease", lambda before, after: self._changed.set())

    async def run(self) -> None:
        """Correct times that are ahead, until cancelled. Sleeps while no server comes or goes."""
        clock = self._engine.clock
        while True:  # ends when cancelled
            self._changed.clear()
            look_at = None if await self._correct_all() else clock.now() + RETRY
            await wait_for(clock, self._changed, look_at)

    async def _correct_all(self) -> bool:
        """Correct all records. False: some are left, so try again in a second."""
        engine, is_done = self._engine, True
        if engine.is_clock_off or not engine.clock_compared.is_set():
            return False
        for key, record in list(engine.records.values("hostd")):
            await asyncio.sleep(0)  # a record may have thousands of VMs
            with isolated(engine.throttled_log, "bug while looking at a host", host=record.host):
                if without_future(record, engine.decision_time()) is not record:
                    is_done &= await self._correct(key, record.host)
        return is_done

    async def _correct(self, key: str, host: str) -> bool:
        """False if the store refused it: try again."""

        def decide(transaction: Transaction) -> bool:
            known: ManagedHost | None = transaction.get(key)
            if known is None or self._engine.is_clock_off:
                return False
            corrected = without_future(known, transaction.now)
            if corrected is known:
                return False  # another server was first
            transaction.put(key, corrected)
            return True

        try:
            if await self._engine.update([key], decide, by="server"):
                log.warning("times of a host corrected: a clock was ahead", host=host)
        except Error as error:  # the other hosts come first
            warn = self._engine.throttled_log.warn
            warn("host not updated", host=host, problem=error.message)
            return False
        return True


def without_future(record: ManagedHost, now: datetime) -> ManagedHost:
    """The record with times until now; the same object if none is ahead.

    If it is not known when its last report was taken, anything may have been moved to it since.
    """
    latest = now + AHEAD_MAX
    is_merge_ahead = record.merge_at is not None and record.merge_at > latest + MERGE_AFTER
    if not is_merge_ahead and all(time <= latest for time in _times_of(record)):
        return record
    is_report_ahead = (record.reported_at or record.since) > latest
    return replace(
        record,
        since=min(record.since, now),
        rivals={each: min(at, now) for each, at in record.rivals.items()},
        merge_at=record.merge_at and min(record.merge_at, now + MERGE_AFTER),
        away_since=record.away_since and min(record.away_since, now),
        unconfirmed_since=record.unconfirmed_since and min(record.unconfirmed_since, now),
        unreported_since=record.unreported_since and min(record.unreported_since, now),
        reported_at=UNKNOWN if is_report_ahead else record.reported_at,
        vms={
            vm_id: vm._replace(
                running_at=vm.running_at and min(vm.running_at, now),
                double_since=vm.double_since and min(vm.double_since, now),
            )
            for vm_id, vm in record.vms.items()
        },
    )


def _times_of(record: ManagedHost) -> Iterator[datetime]:
    """Those that are not to be ahead. `gaps` are checked where they are used."""
    yield record.since
    yield from record.rivals.values()
    since = record.away_since, record.unconfirmed_since, record.unreported_since
    yield from filter(None, (*since, record.reported_at))
    for vm in record.vms.values():
        if vm.running_at is not None:
            yield vm.running_at
        if vm.double_since is not None:
            yield vm.double_since
