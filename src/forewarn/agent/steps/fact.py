"""What an event says, as the words that commands, bodies and lines get: `EVENT_ID` in an
environment, `{event_id}` in a text.

The names are those that scripts in the field already read. What the endpoint says is never trusted:
each place that a fact is put into has its own way to escape it.
"""

import difflib
import json
import re
from collections.abc import Callable
from datetime import UTC

from forewarn.agent.step import Occasion
from forewarn.agent.steps.spec import Spec

NAMES = (
    *(
        "event_id",
        "event_type",
        "event_status",
        "event_source",
        "event_notbefore",
        "event_resources",
        "event_resourcetype",
    ),
    *("event_duration", "event_description", "event_phase", "event_deadline_seconds", "event_vm"),
)
NOT_BEFORE = "%a, %d %b %Y %H:%M:%S GMT"
FACT_BYTES_MAX = 4096  # Linux runs no command with 128 KiB in one variable
RESOURCES_BYTES_MAX = 64 * 1024
NUMBERS = ("event_duration", "event_deadline_seconds")

_PLACE = re.compile(r"\{(event_[a-z_]*)\}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def facts(occasion: Occasion) -> dict[str, str]:
    """NotBefore is as the endpoint writes it, empty for now;

    Resources are joined by spaces. What is too long is cut.
    """
    event = occasion.event
    said = {
        "event_id": event.id,
        "event_type": event.type,
        "event_status": event.status,
        "event_source": event.source,
        "event_notbefore": event.not_before.astimezone(UTC).strftime(NOT_BEFORE)
        if event.not_before
        else "",
        "event_resources": " ".join(event.resources),
        "event_resourcetype": event.resource_type,
        "event_duration": str(event.duration_seconds),
        "event_description": event.description,
        "event_phase": occasion.phase.value,
        "event_deadline_seconds": str(int(occasion.seconds_left)),
        "event_vm": occasion.name,
    }
    return {
        name: _cut(name, value.replace("\0", "").encode("utf-8", "replace"))
        for name, value in said.items()
    }


def _cut(name: str, value: bytes) -> str:
    """Resources have more room, and are cut between two names: half a name may be another VM's."""
    if name != "event_resources":
        return value[:FACT_BYTES_MAX].decode("utf-8", "ignore")
    return (
        value
        if len(value) <= RESOURCES_BYTES_MAX
        else value[:RESOURCES_BYTES_MAX].rpartition(b" ")[0]
    ).decode()


def environment(occasion: Occasion) -> dict[str, str]:
    return {name.upper(): value for name, value in facts(occasion).items()}


def fill(template: str, values: dict[str, str], escape: Callable[[str], str]) -> str:
    """The template with each `{event_…}` replaced.

    Other braces are left: they are JSON's, or somebody else's.
    """
    return _PLACE.sub(lambda found: escape(values[found[1]]), template)


def check(spec: Spec, member: str, template: str) -> str:
    """The template, if it names only facts that there are."""
    for name in _PLACE.findall(template):
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"did you mean {{{near[0]}}}?" if near else f"{', '.join(NAMES)}"
            raise spec.refused(member, f"facts that an event has ({{{name}}} is none; {hint})")
    return template


def in_json(value: str) -> str:
    """For inside the quotes of a JSON text."""
    return json.dumps(value)[1:-1]


def in_line(value: str) -> str:
    """For one line: what would end it, or move a terminal's cursor, becomes a space."""
    return _CONTROL.sub(" ", value)
