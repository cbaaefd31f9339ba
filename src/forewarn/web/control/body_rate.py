"""How many bytes a host may send: a body takes CPU time that polls need, whatever is in it.

A host with 2,000 VMs that reports all of them every second sends less than this, unless their names
are long.
"""

BYTES_PER_SECOND = 1024 * 1024
BYTES_AT_ONCE = 4 * 1024 * 1024
"""As many as the largest body has: the small one after it is not refused."""
HOSTS_MIN = 1_000
LENGTH_DIGITS_MAX = 10


class BodyRate:
    """What hosts have used of their bytes, each as the time at which it has all of them again."""

    def __init__(self) -> None:
        self._whole_at: dict[str, float] = {}
        self._hosts_max = HOSTS_MIN

    def admits(self, host: str, length: str, size_max: int, now: float) -> bool:
        """Whether a body may be read, by its Content-Length. If it may, it uses these bytes.

        One without a length counts as the largest: it may become that.
        """
        is_known = length.isdecimal() and len(length) <= LENGTH_DIGITS_MAX
        size = min(int(length), size_max) if is_known else size_max
        whole_at = max(self._whole_at.get(host, now), now)
        if whole_at >= now + BYTES_AT_ONCE / BYTES_PER_SECOND:
            return False
        if len(self._whole_at) >= self._hosts_max:
            self._whole_at = {name: at for name, at in self._whole_at.items() if at > now}
            self._hosts_max = max(HOSTS_MIN, 2 * len(self._whole_at))
        self._whole_at[host] = whole_at + size / BYTES_PER_SECOND
        return True
