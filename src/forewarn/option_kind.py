"""What the value of an option may be: the types of values, and how their text is parsed.

Standard library only.
"""

import re
import shlex
from collections.abc import Callable
from configparser import ConfigParser
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from forewarn.duration import parse_duration
from forewarn.errors import Invalid

SIMULATED_MAX = timedelta(hours=24)
PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
# fmt: off
PLACEHOLDERS = (
    "event_id", "event_type", "cause", "tries", "duration_seconds", "scope", "vm", "vm_id",
    "address", "host", "method",
)
# fmt: on
"""What an exec command may use: `{name}` in its words, FOREWARN_NAME in its environment."""
HEALTH_PLACEHOLDERS = ("host", "event_type")
"""The same for the health command of campaigns, which is about a host, not a VM."""


class Address(NamedTuple):
    """The address of a listener. Port 0 takes any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ExecCommand(NamedTuple):
    """The command for an event type; `*` is for every type without a command of its own.

    Without a type it is the health command of campaigns.
    """

    type: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        command = shlex.join(self.words)
        return f"{self.type}={command}" if self.type else command


class HostUri(NamedTuple):
    """The libvirt URI of a host. Without a host it is for all of them and may contain `{host}`."""

    host: str
    uri: str

    def __str__(self) -> str:
        return f"{self.host}={self.uri}" if self.host else self.uri


class SimulatedDuration(NamedTuple):
    """How long an impact of this type takes on the simulated platform."""

    type: str
    duration: timedelta

    def __str__(self) -> str:
        return f"{self.type}={self.duration.total_seconds():g}s"


class OptionKind(NamedTuple):
    """How the text of a value is parsed, and how "expected ..." ends when it cannot be.

    `parse` raises ValueError, or Invalid with a reason that is better than `expects`. `split` is
    for an option that may be repeated: one flag may have several values.
    """

    parse: Callable[[str], Any]
    expects: str
    split: Callable[[str], list[str]] = lambda text: [text]


def parse_text(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError
    return text


def number(least: float, most: float, *, as_type: type[int] | type[float] = float) -> OptionKind:
    def parse(text: str) -> int | float:
        value = as_type(text)
        if not least <= value <= most:
            raise ValueError
        return value

    noun = "a number" if as_type is float else "a whole number"
    return OptionKind(parse, f"{noun} from {least:g} to {most:.0f}")


def integer(least: int, most: int) -> OptionKind:
    return number(least, most, as_type=int)


def choice(choices: type[StrEnum]) -> OptionKind:
    *others, last = choices
    return OptionKind(lambda text: choices(text.lower()), f"{', '.join(others)} or {last}")


def _parse_store(text: str) -> str:
    if text != "memory" and not re.fullmatch(
        r"sqlite:///.+|etcd://[^/@,\s]+(,[^/@,\s]+)*/[\w./-]*\w/?", text
    ):
        raise ValueError
    return text


def _parse_address(text: str) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port is None or parts.netloc != text or "@" in text:
        raise ValueError
    return Address(parts.hostname, parts.port)


def parse_url(text: str) -> str:
    """An http or https URL without user name or fragment."""
    parts = urlsplit(parse_text(text))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError
    if parts.fragment or "@" in parts.netloc or " " in text or not text.isascii():
        raise ValueError
    return text


def _parse_simulated(text: str) -> SimulatedDuration:
    type_, _, length = text.partition("=")
    parsed = parse_duration(length)
    if not type_.isalpha() or parsed > SIMULATED_MAX:
        raise ValueError
    return SimulatedDuration(type_, parsed)


def _parse_exec(text: str) -> ExecCommand:
    type_, _, command = text.partition("=")
    words = split_command(command, PLACEHOLDERS)
    if type_ != "*" and not type_.isalpha():
        raise ValueError
    return ExecCommand(type_, words)


def split_command(command: str, placeholders: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command, split as a shell would. Every placeholder in them is known."""
    words = tuple(shlex.split(command))
    used = [name for word in words for name in PLACEHOLDER.findall(word)]
    if not set(used) <= set(placeholders) or any(map(PLACEHOLDER.search, words[:1])):
        raise Invalid(
            f"{{name}} may be one of {', '.join(placeholders)}, and not in the program's own path"
        )
    if not words or not words[0] or "\0" in command:
        raise ValueError
    return words


def _parse_host_uri(text: str) -> HostUri:
    match = re.fullmatch(r"(?:([A-Za-z0-9_][A-Za-z0-9._-]{0,127})=)?([a-z][a-z0-9+]*://\S*)", text)
    if not match or PLACEHOLDER.findall(match[2]) not in ([], ["host"]):
        raise ValueError
    return HostUri(match[1] or "", match[2])


USER = OptionKind(parse_text, "the name of a user")
VM_NAME = OptionKind(parse_text, "the name of a VM")
BOOLEAN = OptionKind(lambda text: ConfigParser.BOOLEAN_STATES[str(text).lower()], "true or false")
FILE = OptionKind(lambda text: Path(parse_text(text)), "the path of a file")
FILE_OR_FOLDER = OptionKind(FILE.parse, "the path of a file or a folder")
STORE = OptionKind(
    _parse_store,
    "memory, sqlite:///relative.db, sqlite:////absolute/path.db or"
    " etcd://HOST:PORT,HOST:PORT/PREFIX",
)
ADDRESS = OptionKind(_parse_address, "HOST:PORT")
WEBHOOK = OptionKind(parse_url, "http://HOST/PATH or https://HOST/PATH")
CHANGE = OptionKind(parse_text, "the name of a change, such as started")
EXEC = OptionKind(_parse_exec, "TYPE=COMMAND such as Reboot='/usr/sbin/qm reboot {vm}'")
HEALTH = OptionKind(
    lambda text: ExecCommand("", split_command(text, HEALTH_PLACEHOLDERS)),
    "a command such as '/usr/local/bin/is-healthy {host}' ({host} and {event_type} are replaced)",
)
URI = OptionKind(_parse_host_uri, "a libvirt URI, which may contain {host}, or HOST=URI")
SIMULATED = OptionKind(_parse_simulated, "TYPE=DURATION such as Freeze=30s (at most 24h)")
