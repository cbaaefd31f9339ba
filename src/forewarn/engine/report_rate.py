"""How often the report of a host is merged: a merge takes CPU time that polls need.

Each host has an allowance of VMs, which grows by VMS_PER_SECOND up to VMS_MAX_AT_ONCE. A report
uses as much of it as it has VMs, and REPORT_COST in any case. A daemon sends a report when
something has changed, once a second at most: hosts of common size never reach the limit.
"""

from datetime import datetime, timedelta

from forewarn.engine.clock import Clock
from forewarn.platform.remote import VMS_MAX

REPORT_COST = 50
VMS_PER_SECOND = 200
VMS_MAX_AT_ONCE = 2 * (VMS_MAX + REPORT_COST)
HOSTS_MAX = 10_000


class ReportRate:
    """What hosts have used of their allowance, each as the time at which it is whole again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._whole_at: dict[str, datetime] = {}

    def admits(self, host: str, vms: int) -> bool:
        """Whether a report with so many VMs is merged now. If it is, it uses the allowance."""
        now = self._clock.now()
        whole_at = max(self._whole_at.get(host, now), now)
        used = (whole_at - now).total_seconds() * VMS_PER_SECOND + REPORT_COST + vms
        if used > VMS_MAX_AT_ONCE:
            return False
        if len(self._whole_at) >= HOSTS_MAX:
            self._whole_at = {name: at for name, at in self._whole_at.items() if at > now}
        self._whole_at[host] = now + timedelta(seconds=used / VMS_PER_SECOND)
        return True
