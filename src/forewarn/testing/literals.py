"""The words of the test API as types, so that an editor completes them and mypy finds a typo."""

from typing import Literal

EventStatus = Literal["Scheduled", "Started", "Completed", "Canceled", "Failed"]
EventKind = Literal["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]
EventSource = Literal["Platform", "User"]
MaintenanceKind = Literal["Freeze", "Reboot", "Redeploy"]
MaintenanceCause = Literal["maintenance", "infrastructure", "live-migration"]
FaultKind = Literal[
    "first-call", "latency", "refuse", "status", "short-notice", "no-started", "skew", "stale",
    "incarnation-reset", "no-events", "text-plain", "empty", "truncate", "reset", "lapse",
]  # fmt: skip
