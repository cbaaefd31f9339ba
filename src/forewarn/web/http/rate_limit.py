"""Requests per second and client, with bursts of at most one second's worth."""

CLIENTS_MIN = 1_000
JITTER_SECONDS = 1e-6
"""Floating-point error: a request is never refused for less than this."""


class TokenBucket:
    """Stores for each client when its bucket will be full again, and drops full ones in time."""

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second
        self._burst_seconds = max(1.0, self._interval) + JITTER_SECONDS
        self._full_at: dict[str, float] = {}
        self._clients_max = CLIENTS_MIN

    def admits(self, client: str, now: float) -> bool:
        full_at = max(self._full_at.get(client, now), now) + self._interval
        if full_at > now + self._burst_seconds:
            return False
        if len(self._full_at) >= self._clients_max:
            self._full_at = {name: time for name, time in self._full_at.items() if time > now}
            self._clients_max = max(CLIENTS_MIN, 2 * len(self._full_at))
        self._full_at[client] = full_at
        return True
