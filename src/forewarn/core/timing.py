"""Every notice, duration and timeout of the rules, in one table.

A rate divides them all; the clock is not affected.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType

import msgspec

from forewarn.core.event import EventType

NOTICE: Mapping[EventType, timedelta] = MappingProxyType(
    {
        EventType.FREEZE: timedelta(minutes=15),
        EventType.REBOOT: timedelta(minutes=15),
        EventType.REDEPLOY: timedelta(minutes=10),
        EventType.PREEMPT: timedelta(seconds=30),
        EventType.TERMINATE: timedelta(minutes=5),
    }
)
"""The minimum notice by type. Terminate's is the default of a setting of the scope."""

TERMINATE_NOTICE_MIN = timedelta(minutes=5)
TERMINATE_NOTICE_MAX = timedelta(minutes=15)

DURATION: Mapping[EventType, timedelta] = MappingProxyType(
    {
        EventType.FREEZE: timedelta(minutes=5),
        EventType.REBOOT: timedelta(minutes=10),
        EventType.REDEPLOY: timedelta(minutes=10),
        EventType.PREEMPT: timedelta(seconds=30),
        EventType.TERMINATE: timedelta(minutes=1),
    }
)
"""How long a simulated impact takes: the medians observed on Azure (protocol 6.3)."""

RETRY_WINDOW = timedelta(seconds=300)
BACK_LIMIT = timedelta(minutes=5)


class Timing(msgspec.Struct, frozen=True):
    """The durations that the rules use.

    A scope is enabled for `enabled_for` after a poll; polls are recorded once per `seen_interval`.
    A failed impact is retried after `retry`, then after twice as long each time, up to `retry_max`,
    until `retry_window` has passed since its first failure. Retries are between servers and
    platforms, so a rate does not change them. A VM that was restarted has `back_limit` to come
    back; 0: nothing waits for it.

    A time of at least `gap_min` in which an event could not be read does not count as notice; for
    a Preempt, `gap_min_preempt`. While an event is Scheduled, a server confirms every `shown_every`
    that VMs can read it; while a Preempt is, every `shown_every_preempt`. These are between servers
    and hosts, too, so a rate does not change them.
    """

    notice: Mapping[EventType, timedelta] = NOTICE
    duration: Mapping[EventType, timedelta] = DURATION
    degraded_notice: timedelta = timedelta(days=7)
    enabled_for: timedelta = timedelta(hours=24)
    seen_interval: timedelta = timedelta(hours=1)
    rate: float = 1.0
    retry: timedelta = timedelta(seconds=5)
    retry_max: timedelta = timedelta(seconds=60)
    retry_window: timedelta = RETRY_WINDOW
    back_limit: timedelta = BACK_LIMIT
    gap_min: timedelta = timedelta(seconds=15)
    gap_min_preempt: timedelta = timedelta(seconds=3)
    shown_every: timedelta = timedelta(seconds=5)
    shown_every_preempt: timedelta = timedelta(seconds=1)

    def gap_min_of(self, type_: EventType) -> timedelta:
        """The shortest time without a readable document that does not count as notice."""
        return self.gap_min_preempt if type_ is EventType.PREEMPT else self.gap_min

    @classmethod
    def at_rate(
        cls,
        rate: float,
        *,
        retry_window: timedelta = RETRY_WINDOW,
        back_limit: timedelta = BACK_LIMIT,
    ) -> "Timing":
        """The standard durations divided by the rate: at 60, 15 minutes of notice take 15 s."""
        return cls(
            notice={type_: notice / rate for type_, notice in NOTICE.items()},
            duration={type_: duration / rate for type_, duration in DURATION.items()},
            degraded_notice=timedelta(days=7) / rate,
            enabled_for=timedelta(hours=24) / rate,
            seen_interval=timedelta(hours=1) / rate,
            rate=rate,
            retry_window=retry_window,
            back_limit=back_limit / rate,
        )


def round_up_to_second(time: datetime) -> datetime:
    """NotBefore has no fractions on the wire, and must never be early."""
    rounded = time.replace(microsecond=0)
    return rounded if rounded == time else rounded + timedelta(seconds=1)
