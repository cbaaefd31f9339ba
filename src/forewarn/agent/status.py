"""The state of a running agent as others see it: `forewarn agent status`, the HTTP port,
Prometheus and systemd. Pure, apart from the lock of the counters.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from forewarn import __version__
from forewarn.agent.progress import event_to_json, for_journal
from forewarn.agent.settings import AgentSettings
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event
from forewarn.log import escape

COUNTER_NAMES = (
    *(
        f'forewarn_agent_steps_total{{phase="{phase}",result="{result}"}}'
        for phase in WorkflowPhase
        for result in ("done", "failed", "cut")
    ),
    *(f'forewarn_agent_events_total{{matched="{matched}"}}' for matched in ("yes", "no")),
    *(f'forewarn_agent_approvals_total{{result="{result}"}}' for result in ("sent", "failed")),
    "forewarn_agent_late_total",
    "forewarn_agent_endpoint_problems_total",
    "forewarn_agent_journal_problems_total",
)


class Counters:
    """By the name and labels that Prometheus sees. All start at zero."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(COUNTER_NAMES, 0)

    def add(self, name: str, **labels: str) -> None:
        """Count one more of `forewarn_agent_{name}_total`."""
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        with self._lock:
            self._values[f"forewarn_agent_{name}_total" + (f"{{{shown}}}" if shown else "")] += 1

    def values(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True, slots=True)
class WorkflowStatus:
    """`phase` and `step` are "" while it waits. `seconds_left` to NotBefore is None if unknown."""

    event: Event
    rule: str
    phase: str
    step: str
    seconds_left: float | None
    is_prepared: bool
    is_approved: bool
    is_late: bool
    is_held: bool

    @property
    def doing(self) -> str:
        if self.phase:
            return self.phase
        if self.event.is_started:
            return "started"
        if self.is_approved:
            return "approved"
        return "prepared" if self.is_prepared else "waiting"


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """`last_problem` is "" while the endpoint works. `config_error` is why the file was rejected
    when it was last reloaded.
    """

    name: str
    settings: AgentSettings
    last_contact: datetime | None
    last_problem: str
    workflows: tuple[WorkflowStatus, ...]
    programs: tuple[str, ...]
    config_error: str
    counters: Mapping[str, int]
    now: datetime

    @property
    def problems(self) -> int:
        return self.counters["forewarn_agent_endpoint_problems_total"]

    @property
    def contact_seconds(self) -> float | None:
        """How long ago the endpoint last responded. None if never."""
        if self.last_contact is None:
            return None
        return max(0.0, (self.now - self.last_contact).total_seconds())

    @property
    def is_drained(self) -> bool:
        """From the notice of an event that affects this VM, and that a rule matches, until it is
        recovered from.
        """
        return any(workflow.event.concerns(self.name) for workflow in self.workflows)

    @property
    def unready(self) -> str:
        """Why the agent cannot do its work. "" if it can."""
        seconds = self.contact_seconds
        if seconds is None or seconds > self.settings.quiet_seconds_max:
            return self.last_problem or "no recent response from the endpoint"
        return self.config_error


def to_line(status: AgentStatus) -> str:
    """One line, for systemd."""
    doing = (f"{workflow.event.type} {workflow.doing}" for workflow in status.workflows[:3])
    problem = f"; {status.unready}" if status.unready else ""
    return escape(f"{status.name or 'name unknown'}: {', '.join(doing) or 'no events'}{problem}")


def to_json(status: AgentStatus) -> dict[str, object]:
    seconds = status.contact_seconds
    return {
        "name": status.name,
        "version": __version__,
        "endpoint": status.settings.endpoint,
        "contact_seconds": None if seconds is None else round(seconds, 1),
        "last_problem": status.last_problem,
        "problems": status.problems,
        "unready": status.unready,
        "is_drained": status.is_drained,
        "rules": [rule.name for rule in status.settings.rules],
        "applications": list(status.programs),
        "workflows": [_workflow_to_json(workflow) for workflow in status.workflows],
    }


def _workflow_to_json(status: WorkflowStatus) -> dict[str, object]:
    left = None if status.event.is_started else status.seconds_left
    return {
        **asdict(status),
        "event": event_to_json(for_journal(status.event)),
        "doing": status.doing,
        "seconds_left": None if left is None else round(max(0.0, left), 1),
    }


def to_text(status: Mapping[str, Any]) -> Iterator[str]:
    """The output of `to_json` as lines for a terminal. The endpoint chooses names and ids: a line
    end would forge a line, an escape sequence would reach the terminal.
    """
    return map(escape, _lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    seconds = status.get("contact_seconds")
    contact = "no response yet" if seconds is None else f"last response {seconds} s ago"
    yield f"{status.get('name') or 'name unknown'}, forewarn agent {status.get('version')}"
    yield f"endpoint: {status.get('endpoint')}, {contact}"
    for name in ("unready", "last_problem"):
        if status.get(name):
            yield f"{name.replace('_', ' ')}: {status[name]}"
    for name in ("rules", "applications"):
        yield f"{name}: {', '.join(status.get(name) or ()) or 'none'}"
    workflows = status.get("workflows")
    for workflow in workflows or ():
        event, left = workflow["event"], workflow["seconds_left"]
        step = f", {workflow['step']}" if workflow["step"] else ""
        when = "" if left is None else f", {left} s left"
        subject = f"{event['type']} {event['id']} of {' '.join(event['resources'])}"
        yield f"{subject}: {workflow['doing']}{step}{when} (rule {workflow['rule']})"
    if not workflows:
        yield "no events"


def to_prometheus(status: AgentStatus) -> str:
    """In Prometheus' text format. No event ids: their number has no bound."""
    lines, family = [], ""
    for name, value in sorted({**status.counters, **_gauges(status)}.items()):
        if name.partition("{")[0] != family:
            family = name.partition("{")[0]
            lines.append(f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}")
        # Not rounded: rounding would hide small increments of a large counter.
        lines.append(f"{name} {int(value) if value == int(value) else repr(value)}")
    return "\n".join(lines) + "\n"


def _gauges(status: AgentStatus) -> dict[str, float]:
    phases = Counter(workflow.phase for workflow in status.workflows)
    deadlines = [
        max(0.0, workflow.seconds_left)
        for workflow in status.workflows
        if workflow.seconds_left is not None and not workflow.event.is_started
    ]
    gauges = {
        f'forewarn_agent_version{{version="{__version__}"}}': 1,
        "forewarn_agent_applications": len(status.programs),
        "forewarn_agent_drained": status.is_drained,
        "forewarn_agent_ready": not status.unready,
        "forewarn_agent_settings_refused": bool(status.config_error),
        "forewarn_agent_contact_age_seconds": status.contact_seconds,
        "forewarn_agent_next_deadline_seconds": min(deadlines, default=None),
    }
    for phase in (*WorkflowPhase, ""):
        gauges[f'forewarn_agent_workflows{{phase="{phase or "waiting"}"}}'] = phases[phase]
    return {name: round(value, 3) for name, value in gauges.items() if value is not None}
