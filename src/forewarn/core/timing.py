"""Every notice, duration and lapse, as one table.

A rate shortens them all; the clock itself stays true.
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
"""The least notice by type.

Terminate is set per scope between TERMINATE_NOTICE_MIN and _MAX; here stands its default.
"""

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
"""How long an event stays Started on a simulated platform: the medians seen in the field (protocol
6.3).
"""

RETRY_WINDOW = timedelta(seconds=300)


class Timing(msgspec.Struct, frozen=True):
    """The times that the rules work with.

    `claim` is between servers and the retries are between a server and its platform, so no rate
    touches them. A failed impact is tried again after `retry`, then after twice as long each time,
    up to `retry_max`, until `retry_window` has passed since its first failure.
    """

    notice: Mapping[EventType, timedelta] = NOTICE
    duration: Mapping[EventType, timedelta] = DURATION
    degraded_notice: timedelta = timedelta(days=7)
    lapse: timedelta = timedelta(hours=24)
    seen_interval: timedelta = timedelta(hours=1)
    rate: float = 1.0
    claim: timedelta = timedelta(seconds=15)
    retry: timedelta = timedelta(seconds=5)
    retry_max: timedelta = timedelta(seconds=60)
    retry_window: timedelta = RETRY_WINDOW

    @classmethod
    def at_rate(cls, rate: float, *, retry_window: timedelta = RETRY_WINDOW) -> "Timing":
        """The standard times, each divided by the rate: at 60 a 15-minute notice takes 15 seconds."""
        return cls(
            notice={type_: span / rate for type_, span in NOTICE.items()},
            duration={type_: span / rate for type_, span in DURATION.items()},
            degraded_notice=timedelta(days=7) / rate,
            lapse=timedelta(hours=24) / rate,
            seen_interval=timedelta(hours=1) / rate,
            rate=rate,
            retry_window=retry_window,
        )


def whole_second_after(moment: datetime) -> datetime:
    """The first whole second at or after a moment.

    NotBefore has no fractions on the wire, and may never come early.
    """
    rounded = moment.replace(microsecond=0)
    return rounded if rounded == moment else rounded + timedelta(seconds=1)
