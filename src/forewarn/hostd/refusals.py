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
    """`counts` grows for as long as the daemon runs.

    VMs of the host are apart from addresses at which none is known, because a guest can make up as
    many of these as it likes.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[RefusalReason] = Counter()
        self._now = now
        self._vms: dict[str, ErrorRun] = {}
        self._addresses: dict[str, ErrorRun] = {}

    def add(self, vm: str, reason: RefusalReason, *, is_poll: bool, address: str = "") -> None:
        """A guest got an error. A request that is not a poll may be wrong in any way.

        `vm` is the id of the VM, or empty if none is known at this address.
        """
        if not is_poll and reason is RefusalReason.BAD_REQUEST:
            return
        self.counts[reason] += 1
        guest, runs = (vm, self._vms) if vm else (address, self._addresses)
        if not is_poll or not guest:
            return
        now = self._now()
        run = runs.pop(guest, None)
        first_at = run.first_at if run and now - run.last_at <= FORGET_SECONDS else now
        if len(runs) >= GUESTS_MAX:
            del runs[next(iter(runs))]  # whose last error is the oldest
        runs[guest] = ErrorRun(first_at, now, reason)

    def end(self, vm: str) -> None:
        """A VM got its document."""
        self._vms.pop(vm, None)

    def lasting(self) -> list[RefusedGuest]:
        """The guests that have got nothing but errors for some time: VMs first, and of both kinds
        the longest time first.
        """
        return [*self._lasting(self._vms), *self._lasting(self._addresses)][:REFUSED_GUESTS_MAX]

    def _lasting(self, runs: dict[str, ErrorRun]) -> list[RefusedGuest]:
        now = self._now()
        lasting = [
            RefusedGuest(guest, run.reason, int(now - run.first_at))
            for guest, run in runs.items()
            if run.last_at - run.first_at >= LASTING_SECONDS and now - run.last_at <= FORGET_SECONDS
        ]
        return sorted(lasting, key=lambda each: -each.seconds)


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
