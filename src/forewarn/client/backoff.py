"""When to poll again.

Never sooner than a second after the last request began. After errors later and later, with random
jitter, so that the guests of a server that was down do not all come back at the same time. The
clock and the random source are arguments.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from forewarn.client.errors import EndpointError, HttpError
from forewarn.client.models import Document
from forewarn.client.protocol import Api, ApiRequest, ConditionalCache

PERIOD_SECONDS = 1.0
PAUSE_SECONDS_MAX = 10.0
"""Short, because a spot VM has only 30 seconds from its notice to its end."""
RETRY_AFTER_SECONDS_MAX = 10.0
"""A longer Retry-After is cut to this: the guest could miss the whole notice of a Preempt."""
WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ClientClock:
    """The wall clock, a monotonic clock, and a random number in [0, 1).

    Everything that a client reads besides its endpoint.
    """

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    monotonic: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random


def pause_seconds(failures: int, error: EndpointError, chance: float) -> float:
    """The pause after so many failures in a row: 1, 2, 4, 8, 10 seconds, and up to half as much
    again at random. A Retry-After makes it longer, up to a limit.
    """
    assert failures >= 1
    pause = min(PERIOD_SECONDS * 2.0 ** min(failures - 1, 10), PAUSE_SECONDS_MAX) * (1 + chance / 2)
    retry_after = error.retry_after_seconds if isinstance(error, HttpError) else None
    return max(pause, min(retry_after or 0.0, RETRY_AFTER_SECONDS_MAX))


@dataclass(eq=False)
class PollSchedule:
    """What to request next and how long to rest before it.

    Send `request()`, report `succeeded` or `failed`, rest for `rest_seconds()`, repeat. An endpoint
    that held the request for a second or longer supports waiting, and is polled again immediately;
    others are polled every `period_seconds`. While `may_wait` returns False, polls do not wait.
    """

    api: Api
    clock: ClientClock
    wait_seconds: float
    period_seconds: float
    may_wait: Callable[[], bool]

    def __post_init__(self) -> None:
        assert self.period_seconds >= PERIOD_SECONDS
        self._cache = ConditionalCache(self.clock.monotonic)
        self._failures = 0
        self._began = 0.0
        self._next = 0.0

    def request(self) -> ApiRequest[Document]:
        self._began = self.clock.monotonic()
        wait_seconds = self.wait_seconds if self.may_wait() else 0.0
        return self.api.wait(wait_seconds, self._cache.document)

    def succeeded(self, document: Document) -> Document:
        self._failures = 0
        was_held = self.clock.monotonic() - self._began >= PERIOD_SECONDS
        self._next = self._began + (PERIOD_SECONDS if was_held else self.period_seconds)
        return self._cache.put(document)

    def failed(self, error: EndpointError) -> EndpointError:
        """The pause counts from the error, so a timeout is not followed by an immediate retry."""
        self._failures += 1
        self._cache.clear()
        pause = pause_seconds(self._failures, error, self.clock.chance())
        self._next = self.clock.monotonic() + max(pause, self.period_seconds)
        return error

    def rest_seconds(self) -> float:
        return max(0.0, self._next - self.clock.monotonic())
