"""Builders of an agent's status."""

from datetime import UTC, datetime, timedelta

from forewarn.agent.rules import Rule
from forewarn.agent.settings import AgentSettings
from forewarn.agent.status import AgentStatus, Counters, WorkflowStatus
from forewarn.client import Event

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
IN_15_MINUTES = NOON + timedelta(minutes=15)
REBOOT = Event("E1", "Reboot", "Scheduled", "User", ("web-0",), not_before=IN_15_MINUTES)
STARTED = Event("E2", "Freeze", "Started", "Platform", ("web-0",))
OF_A_PEER = Event("E3", "Reboot", "Scheduled", "User", ("web-1",), not_before=IN_15_MINUTES)


def workflow(
    event: Event = REBOOT,
    *,
    phase: str = "",
    step: str = "",
    is_prepared: bool = False,
    is_approved: bool = False,
) -> WorkflowStatus:
    return WorkflowStatus(
        event, "all", phase, step, 812.34, is_prepared, is_approved, is_late=False, is_held=False
    )


def agent_status(
    *workflows: WorkflowStatus,
    contact_seconds: float | None = 1.5,
    last_problem: str = "",
    config_error: str = "",
) -> AgentStatus:
    """A VM web-0 at noon, whose agent may be 70 seconds without a response."""
    last = None if contact_seconds is None else NOON - timedelta(seconds=contact_seconds)
    return AgentStatus(
        name="web-0",
        settings=AgentSettings(endpoint="http://127.0.0.1", wait_seconds=29, rules=(Rule("all"),)),
        last_contact=last,
        last_problem=last_problem,
        workflows=workflows,
        programs=("db",),
        config_error=config_error,
        counters=Counters().values(),
        now=NOON,
    )
