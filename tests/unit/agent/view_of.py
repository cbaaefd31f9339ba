"""Views of an agent, to be looked at."""

from datetime import UTC, datetime, timedelta

from forewarn.agent.agent import Status
from forewarn.agent.metrics import Tally
from forewarn.agent.status import View
from forewarn.agent.workflow import HandlingStatus
from forewarn.client import Event

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
REBOOT = Event(
    "E1", "Reboot", "Scheduled", "User", ("web-0",), not_before=NOON + timedelta(minutes=15)
)
STARTED = Event("E2", "Freeze", "Started", "Platform", ("web-0",))
PEERS = Event(
    "E3", "Reboot", "Scheduled", "User", ("web-1",), not_before=NOON + timedelta(minutes=15)
)


def handling(
    event: Event = REBOOT,
    *,
    phase: str = "",
    step: str = "",
    is_prepared: bool = False,
    is_approved: bool = False,
) -> HandlingStatus:
    return HandlingStatus(
        event, "all", phase, step, 812.34, is_prepared, is_approved, is_late=False, is_held=False
    )


def view_of(
    *handlings: HandlingStatus,
    heard_seconds: float | None = 1.5,
    last_problem: str = "",
    settings_problem: str = "",
) -> View:
    """A VM web-0 at noon, whose agent may be 70 seconds without news."""
    last = None if heard_seconds is None else NOON - timedelta(seconds=heard_seconds)
    status = Status("web-0", "http://127.0.0.1", last, 0, last_problem, ("all",), handlings)
    return View(status, Tally().counts(), NOON, 70.0, ("db",), settings_problem)
