"""The errors that guests get from the relay: how many, why, and which guests get nothing else.

The daemon passes them to its server (`control.py`), because an operator looks there and not into
the log of each host.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from forewarn.errors import Error, Forbidden, Unavailable
from forewarn.hostd.upstream import ServerLost
from forewarn.platform.remote import REFUSED_GUESTS_MAX, RefusalReason, RefusedGuest

LASTING_SECONDS = 40.0
"""A guest is reported after this time. The server shows it after a minute."""
FORGET_SECONDS = 300.0
"""A guest that has stopped asking gets no errors: servers notice that it is silent."""
GUESTS_MAX = 1024
REFUSED_STATUSES = (401, 403, 429)


class ErrorRun(NamedTuple):
    """The polls of a guest that got errors, without one that got its document in between."""

    first_at: float
    last_at: float
    reason: RefusalReason


class Refusals:
    """`counts` grows for as long as the daemon runs."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[RefusalReason] = Counter()
        self._now = now
        self._runs: dict[str, ErrorRun] = {}

    def add(self, guest: str, reason: RefusalReason, *, is_poll: bool) -> None:
        """A guest got an error. A request that is not a poll may be wrong in any way."""
        if not is_poll and reason is RefusalReason.BAD_REQUEST:
            return
        self.counts[reason] += 1
        if not is_poll or not guest:
            return
        now = self._now()
        run = self._runs.pop(guest, None)
        first_at = run.first_at if run and now - run.last_at <= FORGET_SECONDS else now
        if len(self._runs) >= GUESTS_MAX:
            del self._runs[next(iter(self._runs))]  # whose last error is the oldest
        self._runs[guest] = ErrorRun(first_at, now, reason)

    def end(self, guest: str) -> None:
        """A guest got its document."""
        self._runs.pop(guest, None)

    def lasting(self) -> list[RefusedGuest]:
        """The guests that have got nothing but errors for some time, the longest time first."""
        now = self._now()
        lasting = [
            RefusedGuest(guest, run.reason, int(now - run.first_at))
            for guest, run in self._runs.items()
            if run.last_at - run.first_at >= LASTING_SECONDS and now - run.last_at <= FORGET_SECONDS
        ]
        return sorted(lasting, key=lambda each: -each.seconds)[:REFUSED_GUESTS_MAX]


def reason_of(error: Error) -> RefusalReason:
    """Why the relay itself refuses a request."""
    if isinstance(error, ServerLost):
        return RefusalReason.NO_SERVER
    if isinstance(error, Forbidden):
        return RefusalReason.NOT_A_VM
    return RefusalReason.IN_DOUBT if isinstance(error, Unavailable) else RefusalReason.BAD_REQUEST


def reason_of_status(status: int) -> RefusalReason:
    """Why a server has refused a request."""
    if status in REFUSED_STATUSES:
        return RefusalReason.SERVER_REFUSED
    return RefusalReason.SERVER_ERROR if status >= 500 else RefusalReason.BAD_REQUEST
