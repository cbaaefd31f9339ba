"""Since when no server has confirmed what guests read, although they asked.

Such time does not count as notice, so the daemon passes it to its server (`control.py`). A guest
that gets its last document, with `Age`, or an error because no server answers, asked in vain; so
did one that got its answer only after seconds, and the daemon itself, if its server was lost. What
a server that is cut off from its store has answered confirms nothing, see `doubt`. The time ends
with the next response of a server, or when no guest asks any more: that delays nothing.

The VMs of a bridge that is not served cannot even ask, whatever the guests of other bridges get.
Their time ends when the bridge is served, or has no VMs any more.

    CONFIRMED -> FAILING     nothing was answered for LASTING_SECONDS, or a server that answered was
                             cut off from its store (`doubt`)
    FAILING -> ENDED         a server has answered a guest; the time goes on until one knows of it
    ENDED -> CONFIRMED       a server has answered a request that says so; the next one says 0
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from forewarn.platform.base import PROBLEM_LENGTH_MAX
from forewarn.platform.remote import (
    BRIDGES_MAX,
    UNCONFIRMED_SECONDS_MAX,
    UNMARKED_SECONDS_MAX,
    UnservedBridge,
)

LASTING_SECONDS = 3.0
"""Less is nothing: a single poll may fail because its server has just been stopped."""
FORGET_SECONDS = 300.0
BEAT_SECONDS = 1.0
"""How often the process notes that it runs."""


class Unconfirmed:
    """`on_change` is called when a server answers again, when one knows of what has ended, and when
    there is something new about a bridge.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._now = now
        self._confirmed_at = now()
        self._first_at: float | None = None
        self._last_at = 0.0
        self._ended_first_at: float | None = None
        self._bridges: dict[str, UnservedBridge] = {}
        self._unserved_since: dict[str, float] = {}  # by bridge, if it has VMs

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Notice when this process was suspended, until cancelled. Its guests got no answers."""
        while True:  # ends when cancelled
            before = self._now()
            await sleep(BEAT_SECONDS)
            seconds = self._now() - before
            if seconds >= BEAT_SECONDS + LASTING_SECONDS:
                self._end(self._now() - seconds)

    def fail(self, asked_at: float) -> None:
        """No server has answered a guest that asked at this time."""
        now = self._now()
        if self._first_at is None or now - self._last_at > FORGET_SECONDS:
            self._first_at = max(asked_at, self._confirmed_at)
        self._last_at = now

    def note_lost_wait(self, since: float) -> None:
        """A guest's long poll got no response, because its server has not answered since then.

        Responses of other servers to other guests do not change that.
        """
        if self._now() - since >= LASTING_SECONDS:
            self._end(since)

    def confirm(self, asked_at: float | None = None) -> None:
        """A server has answered a guest with the document, or that it has not changed.

        The guest asked at this time; None if its poll was to wait.
        """
        now = self._now()
        if asked_at is not None and now - asked_at >= LASTING_SECONDS:
            self.fail(asked_at)
        lasting_since = self._lasting_since()
        self._confirmed_at, self._first_at = now, None
        if lasting_since is not None:
            self._end(lasting_since)

    def doubt(
        self, ages_seconds: Sequence[float], asked_at: float, *, is_confirmed: bool = False
    ) -> None:
        """Servers that a guest asked at this time had been cut off from their store for so long.

        What they answered before they marked their documents confirms nothing. `is_confirmed`:
        another server has answered this guest. Then any guest could read since the marking, because
        a poll that gets a marked document goes to the next server. So only the time before that
        counts, and what this guest waited. It is counted as if it had ended now: no server can have
        written a gap for it before, and one that ends later covers as much of each event. If no
        other server has answered, all the time counts.

        A server counts only if nothing was confirmed since its marking: that was another server.
        """
        unmarked = UNMARKED_SECONDS_MAX + LASTING_SECONDS  # the response may have taken so long
        now = self._now()
        doubtful = sorted(age for age in ages_seconds if now - age + unmarked >= self._confirmed_at)
        if not doubtful:
            if ages_seconds:
                self.fail(asked_at)
            return
        seconds = doubtful[-1]
        if is_confirmed:  # several may have been asked in turn, each before it was marked
            pairs = pairwise((0.0, *doubtful))
            seconds = sum(min(older - newer, UNMARKED_SECONDS_MAX) for newer, older in pairs)
        since = asked_at - seconds
        self._confirmed_at = min(self._confirmed_at, since)
        self.fail(since)
        self._first_at = min(self._first_at or since, since)

    def miss(self, seconds: float) -> None:
        """The daemon was without a server for so long, and now it has one.

        Guests that get no answer are no better off: their polls may go to other servers.
        """
        now = self._now()
        since = max(now - seconds, self._confirmed_at)
        if now - since >= LASTING_SECONDS:
            self._end(since)

    def set_bridge(self, bridge: str, problem: str, vms: int = 0) -> None:
        """Why a bridge is not served; empty if it is. `vms` are plugged into it."""
        if problem and vms:
            self._unserved_since.setdefault(bridge, self._now())
        else:
            since = self._unserved_since.pop(bridge, None)
            if since is not None and self._now() - since >= LASTING_SECONDS:
                self._end(since)
        known = self._bridges.pop(bridge, None)
        new = UnservedBridge(bridge, problem[:PROBLEM_LENGTH_MAX], vms) if problem else None
        if new is not None:
            self._bridges[bridge] = new
        if new != known:
            self.on_change()

    def list_bridges(self) -> list[UnservedBridge]:
        """The bridges that are not served."""
        return sorted(self._bridges.values(), key=lambda each: each.bridge)[:BRIDGES_MAX]

    def _end(self, since: float) -> None:
        known = self._ended_first_at
        self._ended_first_at = since if known is None else min(since, known)
        self.on_change()

    @property
    def has_ended(self) -> bool:
        """Whether a server has to know of a time that is over."""
        return self._ended_first_at is not None

    def report(self, seconds: int) -> None:
        """A server has answered a request that says how long this lasts."""
        if seconds and self.has_ended:
            self._ended_first_at = None
            self.on_change()

    @property
    def seconds(self) -> int:
        """How long this lasts; 0 if a server answers, or has not failed for long."""
        now = self._now()
        unserved = (each for each in self._unserved_since.values() if now - each >= LASTING_SECONDS)
        times = (self._lasting_since(), self._ended_first_at, *unserved)
        since = min((each for each in times if each is not None), default=None)
        return 0 if since is None else min(int(now - since), UNCONFIRMED_SECONDS_MAX)

    def _lasting_since(self) -> float | None:
        first_at = self._first_at
        if first_at is None or self._now() - self._last_at > FORGET_SECONDS:
            return None
        return first_at if self._last_at - first_at >= LASTING_SECONDS else None
