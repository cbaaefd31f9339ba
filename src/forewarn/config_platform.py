"""Options of the platforms whose values are more than a text: what they hold, and how they are
read. Standard library only.
"""

import re
import shlex
from typing import NamedTuple

from forewarn.errors import Invalid

EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
PLACEHOLDERS = (
    "event_id",
    "event_type",
    "cause",
    "tries",
    "duration_seconds",
    "scope",
    "vm",
    "vm_id",
    "address",
    "host",
)
"""What a command of the operator's is told:

`{name}` in its words, FOREWARN_NAME in its environment.
"""
HEALTH_PLACEHOLDERS = ("host", "event_type")
"""The same for the health command of campaigns, which is about a host and not about a VM."""


class ExecCommand(NamedTuple):
    """The command for a type of impact; the type `*` stands for every type that has no command of
    its own.
    """

    type: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.type}={shlex.join(self.words)}"


class HealthCommand(NamedTuple):
    """The command that is run after each host of a campaign."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


class HostUri(NamedTuple):
    """Where a host's libvirt answers.

    Without a host it is for all of them, and may hold `{host}`.
    """

    host: str
    uri: str

    def __str__(self) -> str:
        return f"{self.host}={self.uri}" if self.host else self.uri


def exec_command(text: str) -> ExecCommand:
    type_, _, command = text.partition("=")
    words = _words(command, PLACEHOLDERS)
    if type_ not in (*EVENT_TYPES, "*"):
        raise ValueError
    return ExecCommand(type_, words)


def health_command(text: str) -> HealthCommand:
    return HealthCommand(_words(text, HEALTH_PLACEHOLDERS))


def _words(command: str, placeholders: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command, split as a shell would, with nothing in braces that will not be
    replaced.
    """
    words = tuple(shlex.split(command))
    unknown = [
        name for word in words for name in PLACEHOLDER.findall(word) if name not in placeholders
    ]
    if unknown or any(PLACEHOLDER.search(word) for word in words[:1]):
        raise Invalid(
            f"{{name}} may be one of {', '.join(placeholders)}, and not in the program's own path"
        )
    if not words or not words[0] or "\0" in command:
        raise ValueError
    return words


def host_uri(text: str) -> HostUri:
    found = re.fullmatch(r"(?:([A-Za-z0-9_][A-Za-z0-9._-]{0,127})=)?([a-z][a-z0-9+]*://\S*)", text)
    if not found or PLACEHOLDER.findall(found[2]) not in ([], ["host"]):
        raise ValueError
    return HostUri(found[1] or "", found[2])
