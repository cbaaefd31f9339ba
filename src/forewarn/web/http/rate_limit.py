"""How often a VM may call: so many requests a second, and no more than one second's worth at once."""

VMS_MIN = 1_000
JITTER_SECONDS = 1e-6
"""Fractions of a second do not add up exactly; a request is never refused for less than this."""


class TokenBucket:
    """Remembers for each VM the moment when its bucket is full again.

    Those that are full are forgotten now and then.
    """

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second
        self._span = max(1.0, self._interval) + JITTER_SECONDS
        self._full_at: dict[str, float] = {}
        self._vms_max = VMS_MIN

    def admits(self, vm: str, now: float) -> bool:
        full_at = max(self._full_at.get(vm, now), now) + self._interval
        if full_at > now + self._span:
            return False
        if len(self._full_at) >= self._vms_max:
            self._full_at = {name: moment for name, moment in self._full_at.items() if moment > now}
            self._vms_max = max(VMS_MIN, 2 * len(self._full_at))
        self._full_at[vm] = full_at
        return True
