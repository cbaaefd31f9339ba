"""What can be seen of a running agent from outside: for `status`, for the port, and for systemd.

Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from forewarn import __version__
from forewarn.agent.agent import Status
from forewarn.agent.progress import journaled
from forewarn.agent.progress import plain as plain_event
from forewarn.agent.step import Phase
from forewarn.agent.workflow import HandlingStatus


@dataclass(frozen=True, slots=True)
class View:
    """`settings_problem` is why the file was refused when it was read last;

    "" if it was not. `quiet_seconds_max` is how long an agent that is well may be without news from
    its endpoint.
    """

    status: Status
    counts: Mapping[str, int]
    now: datetime
    quiet_seconds_max: float
    applications: tuple[str, ...] = ()
    settings_problem: str = ""

    @property
    def contact_seconds(self) -> float | None:
        """How long ago the endpoint was heard; None if never."""
        last = self.status.last_contact
        return None if last is None else max(0.0, (self.now - last).total_seconds())

    @property
    def is_drained(self) -> bool:
        """From the notice of an event that hits this VM, and that a rule is for, until it is
        recovered from.
        """
        return any(one.event.concerns(self.status.name) for one in self.status.handlings)

    @property
    def unready(self) -> str:
        """Why the agent cannot do its work; "" if it can."""
        contact = self.contact_seconds
        if contact is None or contact > self.quiet_seconds_max:
            return self.status.last_problem or "the endpoint has not been heard lately"
        return self.settings_problem


def words(view: View) -> str:
    """One line."""
    events = (
        ", ".join(
            f"{one.event.type} {one.phase or _waiting(one)}" for one in view.status.handlings[:3]
        )
        or "no events"
    )
    problem = f"; {view.unready}" if view.unready else ""
    return _escaped(f"{view.status.name or 'name not known yet'}: {events}{problem}")


def lines(said: Mapping[str, object]) -> Iterator[str]:
    """What `plain` said, for a person's terminal."""
    return map(_escaped, _lines(said))


def _escaped(line: str) -> str:
    """The endpoint chooses names and ids: a newline in one would forge a line, an escape sequence
    would reach the terminal.
    """
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in line
    )


def _lines(said: Mapping[str, object]) -> Iterator[str]:
    contact = said.get("contact_seconds")
    heard = "not heard yet" if contact is None else f"heard {contact} s ago"
    yield f"{said.get('name') or 'name not known yet'}, forewarn agent {said.get('version')}"
    yield f"endpoint: {said.get('endpoint')}, {heard}"
    for name in ("unready", "last_problem"):
        if said.get(name):
            yield f"{name.replace('_', ' ')}: {said[name]}"
    for name in ("rules", "applications"):
        values = said.get(name)
        yield f"{name}: {', '.join(map(str, values)) if isinstance(values, list) and values else 'none'}"
    handlings = said.get("handlings")
    for one in handlings if isinstance(handlings, list) else ():
        event, left = one["event"], one["seconds_left"]
        when = "" if left is None else f", {left} s left"
        doing = f", {one['step']}" if one["step"] else ""
        yield f"{event['type']} {event['id']} of {' '.join(event['resources'])}: {one['doing']}{doing}{when} (rule {one['rule']})"
    if not handlings:
        yield "no events"


def plain(view: View) -> dict[str, object]:
    """For JSON."""
    contact = view.contact_seconds
    return {
        "name": view.status.name,
        "version": __version__,
        "endpoint": view.status.endpoint,
        "contact_seconds": None if contact is None else round(contact, 1),
        "last_problem": view.status.last_problem,
        "problems": view.status.problems,
        "unready": view.unready,
        "is_drained": view.is_drained,
        "rules": list(view.status.rules),
        "applications": list(view.applications),
        "handlings": [_plain(one) for one in view.status.handlings],
    }


def metrics(view: View) -> str:
    """In Prometheus' text format. No event ids: a label for each would never end."""
    shown = {**view.counts, **_gauges(view)}
    text, family = [], ""
    for name, value in sorted(shown.items()):
        if name.partition("{")[0] != family:
            family = name.partition("{")[0]
            text.append(f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}")
        text.append(f"{name} {_number(value)}")
    return "\n".join(text) + "\n"


def _number(value: float) -> str:
    """Not rounded: a counter that stands still for a while and then jumps tells nothing."""
    return str(int(value)) if value == int(value) else repr(value)


def _gauges(view: View) -> dict[str, float]:
    handlings = view.status.handlings
    in_phase = {phase: sum(one.phase == phase for one in handlings) for phase in (*Phase, "")}
    left = [
        one.seconds_left
        for one in handlings
        if one.seconds_left is not None and not one.event.is_started
    ]
    gauges = {
        f'forewarn_agent_handlings{{phase="{phase or "waiting"}"}}': float(count)
        for phase, count in in_phase.items()
    }
    gauges[f'forewarn_agent_version{{version="{__version__}"}}'] = 1
    gauges["forewarn_agent_applications"] = len(view.applications)
    gauges["forewarn_agent_drained"] = view.is_drained
    gauges["forewarn_agent_ready"] = not view.unready
    gauges["forewarn_agent_settings_refused"] = bool(view.settings_problem)
    if view.contact_seconds is not None:
        gauges["forewarn_agent_contact_age_seconds"] = round(view.contact_seconds, 3)
    if left:
        gauges["forewarn_agent_next_deadline_seconds"] = round(max(0.0, min(left)), 3)
    return gauges


def _plain(one: HandlingStatus) -> dict[str, object]:
    left = None if one.event.is_started else one.seconds_left
    return {
        "event": plain_event(journaled(one.event)),
        "rule": one.rule,
        "doing": one.phase or _waiting(one),
        "step": one.step,
        "seconds_left": None if left is None else round(max(0.0, left), 1),
        "is_prepared": one.is_prepared,
        "is_approved": one.is_approved,
        "is_late": one.is_late,
        "is_held": one.is_held,
    }


def _waiting(one: HandlingStatus) -> str:
    """What a handling without a phase waits for, in a word or two."""
    if one.event.is_started:
        return "started"
    if one.is_approved:
        return "approved"
    return "prepared" if one.is_prepared else "waiting"
