"""Since when no server has confirmed what guests read, although they asked.

Such time does not count as notice, so the daemon passes it to its server (`control.py`). A guest
that gets its last document, with `Age`, or an error because no server answers, asked in vain; so
did one that got its answer only after seconds, and the daemon itself, if its server was lost. The
time ends with the next response of a server, or when no guest asks any more: that delays nothing.

    CONFIRMED -> FAILING     nothing was answered for LASTING_SECONDS
    FAILING -> ENDED         a server has answered a guest; the time goes on until one knows of it
    ENDED -> CONFIRMED       a server has answered a request that says so; the next one says 0
"""

import time
from collections.abc import Callable

from forewarn.platform.remote import UNCONFIRMED_SECONDS_MAX

LASTING_SECONDS = 3.0
"""Less is nothing: a single poll may fail because its server has just been stopped."""
FORGET_SECONDS = 300.0


class Unconfirmed:
    """`on_end` is called when a server answers again, and when one knows of what has ended."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.on_end: Callable[[], object] = lambda: None
        self._now = now
        self._confirmed_at = now()
        self._first_at: float | None = None
        self._last_at = 0.0
        self._ended_first_at: float | None = None

    def fail(self, asked_at: float) -> None:
        """No server has answered a guest that asked at this time."""
        now = self._now()
        if self._first_at is None or now - self._last_at > FORGET_SECONDS:
            self._first_at = max(asked_at, self._confirmed_at)
        self._last_at = now

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

    def miss(self, seconds: float) -> None:
        """The daemon was without a server for so long, and now it has one.

        Guests that get no answer are no better off: their polls may go to other servers.
        """
        now = self._now()
        since = max(now - seconds, self._confirmed_at)
        if now - since >= LASTING_SECONDS:
            self._end(since)

    def _end(self, since: float) -> None:
        known = self._ended_first_at
        self._ended_first_at = since if known is None else min(since, known)
        self.on_end()

    @property
    def has_ended(self) -> bool:
        """Whether a server has to know of a time that is over."""
        return self._ended_first_at is not None

    def report(self, seconds: int) -> None:
        """A server has answered a request that says how long this lasts."""
        if seconds and self.has_ended:
            self._ended_first_at = None
            self.on_end()

    @property
    def seconds(self) -> int:
        """How long this lasts; 0 if a server answers, or has not failed for long."""
        times = (self._lasting_since(), self._ended_first_at)
        since = min((each for each in times if each is not None), default=None)
        return 0 if since is None else min(int(self._now() - since), UNCONFIRMED_SECONDS_MAX)

    def _lasting_since(self) -> float | None:
        first_at = self._first_at
        if first_at is None or self._now() - self._last_at > FORGET_SECONDS:
            return None
        return first_at if self._last_at - first_at >= LASTING_SECONDS else None
