"""How often a host may report: a merge takes CPU time that polls need, and a change space in the
store.

Each host has an allowance of VMs, which grows by VMS_PER_SECOND up to VMS_MAX_AT_ONCE. A report
uses as much of it as it has VMs, and REPORT_COST in any case. A daemon sends a report when
something has changed, once a second at most: hosts of common size never reach the limit.

A request that changes what is recorded of the daemon itself, such as its session, its problem or
its unserved bridges, uses REPORT_COST and one for each of these bridges. Reports leave
CHANGES_RESERVE to such changes, so that a host with many VMs need not wait with one.
"""

from datetime import datetime, timedelta

from forewarn.engine.clock import Clock
from forewarn.platform.remote import VMS_MAX

REPORT_COST = 50
VMS_PER_SECOND = 200
VMS_MAX_AT_ONCE = 2 * (VMS_MAX + REPORT_COST)
CHANGES_RESERVE = 40 * REPORT_COST
HOSTS_MAX = 10_000


class ReportRate:
    """What hosts have used of their allowance, each as the time at which it is whole again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._whole_at: dict[str, datetime] = {}

    def admits(self, host: str, vms: int) -> bool:
        """Whether a report with so many VMs is merged now. If it is, it uses the allowance."""
        if self._used(host) + REPORT_COST + vms > VMS_MAX_AT_ONCE:
            return False
        self._use(host, vms)
        return True

    def has_room_for_change(self, host: str) -> bool:
        """Whether what is recorded of the daemon may change now."""
        return self._used(host) + REPORT_COST <= VMS_MAX_AT_ONCE + CHANGES_RESERVE

    def add_change(self, host: str, bridges: int) -> None:
        """A change was recorded, of a daemon with so many unserved bridges."""
        self._use(host, bridges)

    def _used(self, host: str) -> float:
        """How much of the allowance is used."""
        now = self._clock.now()
        whole_at = max(self._whole_at.get(host, now), now)
        return (whole_at - now).total_seconds() * VMS_PER_SECOND

    def _use(self, host: str, vms: int) -> None:
        now = self._clock.now()
        if len(self._whole_at) >= HOSTS_MAX:
            self._whole_at = {name: at for name, at in self._whole_at.items() if at > now}
        whole_at = max(self._whole_at.get(host, now), now)
        self._whole_at[host] = whole_at + timedelta(seconds=(REPORT_COST + vms) / VMS_PER_SECOND)
