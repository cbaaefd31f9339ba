"""Every option once: a field, and from it the flag, the variable, the key of `forewarn.toml` and
the line of the reference page.

A config is a value: it opens nothing and knows no rules. Flag beats variable beats file beats
default. Standard library only.
"""

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

from forewarn.config_platform import (
    EVENT_TYPES,
    ExecCommand,
    HealthCommand,
    HostUri,
    exec_command,
    health_command,
    host_uri,
)
from forewarn.errors import Invalid

C = TypeVar("C")
DEFAULT = "default"
FILE_NAME, FILE_VARIABLE, FILE_BYTES_MAX = "forewarn.toml", "FOREWARN_CONFIG", 1 << 20
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
SIMULATED_MAX = timedelta(hours=24)
WEBHOOK_CHANGES = (
    "executed_silently",
    "scheduled",
    "extended",
    "started",
    "impact-failed",
    "completed",
    "canceled",
    "failed",
)
YES_NO = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


class Identify(StrEnum):
    """How a caller of the metadata endpoint is known."""

    ADDRESS = "address"
    PATH = "path"
    PROXY = "proxy"


class NotBeforeFormat(StrEnum):
    CAPTURED = "captured"
    DOCUMENTED = "documented"


class PlatformName(StrEnum):
    """What carries impacts out."""

    SIMULATED = "simulated"
    EXEC = "exec"
    LIBVIRT = "libvirt"


class LogFormat(StrEnum):
    HUMAN = "human"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Address(NamedTuple):
    """Where a listener stands. Port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Kind(NamedTuple):
    """How the text of a value is read, and what ends the sentence "expected …" when it cannot be."""

    parse: Callable[[str], Any]
    expects: str


class Option(NamedTuple):
    """What there is to know of an option beside its name, type and default."""

    section: str
    kind: Kind
    help: str
    variable: str = ""
    is_repeatable: bool = False
    is_secret: bool = False


def _text(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError
    return text


def _number(least: float, most: float, *, as_type: type[int] | type[float] = float) -> Kind:
    def parse(text: str) -> int | float:
        number = as_type(text)
        if not least <= number <= most:
            raise ValueError
        return number

    noun = "a number" if as_type is float else "a whole number"
    return Kind(parse, f"{noun} from {least:g} to {most:.0f}")


def _choice(choices: type[StrEnum]) -> Kind:
    *others, last = choices
    return Kind(choices, f"{', '.join(others)} or {last}")


def _store(text: str) -> str:
    if text != "memory" and not re.fullmatch(r"sqlite:///.+", text):
        raise ValueError
    return text


def _address(text: str) -> Address:
    split = urlsplit(f"//{text}")
    if not split.hostname or split.port is None or split.netloc != text or "@" in text:
        raise ValueError
    return Address(split.hostname, split.port)


def _webhook(text: str) -> str:
    split = urlsplit(_text(text))
    is_more = (
        split.port == 0
        or split.fragment
        or "@" in split.netloc
        or " " in text
        or not text.isascii()
    )
    if split.scheme not in ("http", "https") or not split.hostname or is_more:
        raise ValueError
    return text


def _url(text: str) -> str:
    if urlsplit(text).query:
        raise ValueError
    return _webhook(text).rstrip("/")


def _simulated(text: str) -> tuple[str, timedelta]:
    found = re.fullmatch(r"(\w+)=(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)", text)
    duration = found and timedelta(seconds=float(found[2]) * UNIT_SECONDS[found[3]])
    if not found or duration is None or found[1] not in EVENT_TYPES or duration > SIMULATED_MAX:
        raise ValueError
    return found[1], duration


SWITCH = Kind(lambda text: YES_NO[text.lower()], "true or false")
FILE = Kind(lambda text: Path(_text(text)), "the path of a file")
FILE_OR_FOLDER = Kind(FILE.parse, "the path of a file or of a folder")
STORE = Kind(_store, "memory, sqlite:///relative.db or sqlite:////absolute/path.db")
ADDRESS = Kind(_address, "HOST:PORT")
METADATA_DEFAULT, CONTROL_DEFAULT = Address("127.0.0.1", 8080), Address("127.0.0.1", 8081)
RATE = _number(0.001, 100_000)
EXEC = Kind(
    exec_command,
    f"TYPE=COMMAND such as Reboot='/usr/sbin/qm reboot {{vm}}' (types {', '.join(EVENT_TYPES)}, or *)",
)
HEALTH = Kind(
    health_command,
    "a command such as '/usr/local/bin/is-healthy {host}' ({host} and {event_type} are replaced)",
)
URI = Kind(host_uri, "a libvirt URI, which may hold {host}, or HOST=URI")
SIMULATED = Kind(
    _simulated,
    f"TYPE=DURATION such as Freeze=30s (types {', '.join(EVENT_TYPES)}; units ms, s, m, h; at most 24h)",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `forewarn serve` and `forewarn demo` are told."""

    # fmt: off
    fleet: Annotated[Path | None, Option("Service", FILE_OR_FOLDER,
        "Fleet file, YAML or JSON, or a folder of them, applied at startup; without it, the stored fleet is used.")] = None
    store: Annotated[str, Option("Service", STORE,
        "Where scopes and events are kept; `memory` forgets all at the end.")] = "sqlite:///forewarn.db"
    metadata: Annotated[Address, Option("Service", ADDRESS, "Where VMs poll and approve; port 0: a free one.")] = METADATA_DEFAULT
    control: Annotated[Address, Option("Service", ADDRESS, "Where operators and the CLI call; beyond loopback only with tokens.",
        variable="FOREWARN_CONTROL_LISTEN")] = CONTROL_DEFAULT
    control_certificate_file: Annotated[Path | None, Option("Service", FILE,
        "File with the certificate chain, PEM: the control API then speaks TLS only. Read again when it changes.")] = None
    control_key_file: Annotated[Path | None, Option("Service", FILE,
        "File with the certificate's key, PEM, not encrypted.")] = None
    rate: Annotated[float, Option("Service", RATE,
        "Divides every notice, duration and lapse: at 60 a 15-minute notice takes 15 seconds. The clock stays true.")] = 1.0
    identify: Annotated[tuple[Identify, ...], Option("Callers", _choice(Identify),
        "How a VM is known: by source address; by `/as/<vm>/` in the path, which anybody may say; by a proxy's signed header.",
        is_repeatable=True)] = (Identify.ADDRESS,)
    proxy_key_file: Annotated[Path | None, Option("Callers", FILE,
        "File with the key that a proxy signs its header with; `--identify proxy` needs it.")] = None
    wait_seconds_max: Annotated[float, Option("Limits", _number(0, 3600), "The longest `Prefer: wait=N` that is kept.")] = 60.0
    idle_seconds: Annotated[float, Option("Limits", _number(1, 3600), "A connection with nothing on it ends then.")] = 75.0
    header_seconds: Annotated[float, Option("Limits", _number(1, 3600), "A request whose head takes longer is dropped.")] = 10.0
    connections_per_address_max: Annotated[int, Option("Limits", _number(1, 1_000_000, as_type=int),
        "Connections that one address may hold open; less if there are few file descriptors.")] = 4096
    requests_per_second: Annotated[float, Option("Limits", _number(0, 1_000_000),
        "Requests per second and VM before a 429; 0 is off. Azure: 5.")] = 0.0
    first_call_delay_seconds: Annotated[float, Option("Protocol", _number(0, 600),
        "How long a scope's first call is held. Azure: up to 120.")] = 0.0
    not_before_format: Annotated[NotBeforeFormat, Option("Protocol", _choice(NotBeforeFormat),
        "How NotBefore is written up to 2017-11-01: as captured (RFC 1123) or as documented then (ISO 8601).",
        )] = NotBeforeFormat.CAPTURED
    legacy_path: Annotated[bool, Option("Protocol", SWITCH, "Serve `/metadata/latest/scheduledevents` as 2017-03-01.")] = False
    lenient_versions: Annotated[bool, Option("Protocol", SWITCH,
        "Answer an unknown api-version as the newest one before it, not with 400.")] = False
    impacts_max: Annotated[int, Option("Impacts", _number(1, 100_000, as_type=int), "Impacts that a server does at once.")] = 256
    impact_seconds_max: Annotated[float, Option("Impacts", _number(1, 86_400),
        "A driver's call that takes longer counts as failed.")] = 3600.0
    impact_retry_seconds_max: Annotated[float, Option("Impacts", _number(0, 86_400),
        "How long a failed impact is retried after its first failure, with growing pauses; 0: that failure is final.")] = 300.0
    platform: Annotated[PlatformName, Option("Impacts", _choice(PlatformName),
        "What carries impacts out: nothing (it only takes its time), commands of your own, or libvirt.")] = PlatformName.SIMULATED
    exec_command: Annotated[tuple[ExecCommand, ...], Option("Impacts", EXEC,
        "What the exec platform runs for a type, without a shell; `*` stands for every type without a command of its own.",
        is_repeatable=True)] = ()
    exec_seconds_max: Annotated[float, Option("Impacts", _number(0.1, 86_400),
        "A command that runs longer is ended, with all that it started, and has failed.")] = 600.0
    libvirt_uri: Annotated[tuple[HostUri, ...], Option("Impacts", URI,
        "Where libvirt answers: one URI for every host, such as `qemu+ssh://{host}/system`, or one for each host.",
        is_repeatable=True)] = (HostUri("", "qemu:///system"),)
    libvirt_grace_seconds: Annotated[float, Option("Impacts", _number(0, 3600),
        "How long a guest may take to shut down or reboot by itself before it is made to.")] = 120.0
    libvirt_call_seconds_max: Annotated[float, Option("Impacts", _number(0.1, 3600),
        "A call of libvirt that takes longer has failed.")] = 30.0
    campaign_health_command: Annotated[HealthCommand | None, Option("Impacts", HEALTH,
        "Run on the server after each host of every campaign, without a shell; any exit code but 0 pauses the campaign.")] = None
    campaign_health_seconds_max: Annotated[float, Option("Impacts", _number(0.1, 3600),
        "A health command that runs longer is ended and counts as failed.")] = 60.0
    simulate_duration: Annotated[tuple[tuple[str, timedelta], ...], Option("Impacts", SIMULATED,
        "How long the simulated platform takes for a type, to the letter: no rate touches it.", is_repeatable=True)] = ()
    simulate_failure: Annotated[tuple[str, ...], Option("Impacts", Kind(_text, "the name of a VM"),
        "A VM whose impacts fail on the simulated platform.", is_repeatable=True)] = ()
    history_days: Annotated[float, Option("History", _number(0, 36_500), "How long the history is kept; 0: for ever.")] = 90.0
    history_notes_max: Annotated[int, Option("History", _number(0, 1_000_000_000, as_type=int),
        "How many notes of history are kept at most; 0: any number.")] = 1_000_000
    webhook: Annotated[tuple[str, ...], Option("History", Kind(_webhook, "http://HOST/PATH or https://HOST/PATH"),
        "Who is told of changes, as signed CloudEvents.", is_repeatable=True)] = ()
    webhook_changes: Annotated[tuple[str, ...], Option("History", Kind(_text, "the name of a change, such as started"),
        "Which changes webhooks are told of.", is_repeatable=True)] = WEBHOOK_CHANGES
    webhook_secret_file: Annotated[Path | None, Option("History", FILE,
        "File with the secret that webhooks are signed with, `whsec_…` or text, one a line; `--webhook` needs it.")] = None
    webhook_seconds_max: Annotated[float, Option("History", _number(0.1, 60), "A webhook that takes longer has failed.")] = 10.0
    log_format: Annotated[LogFormat, Option("Log", _choice(LogFormat), "How log lines are written.")] = LogFormat.HUMAN
    log_level: Annotated[LogLevel, Option("Log", _choice(LogLevel), "The least level that is written.")] = LogLevel.INFO
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What the other commands are told."""

    # fmt: off
    control_url: Annotated[str, Option("Client", Kind(_url, "http://HOST:PORT"), "Where the service's control API is.",
        variable="FOREWARN_CONTROL")] = "http://127.0.0.1:8081"
    token: Annotated[str, Option("Client", Kind(_text, "a token"), "Sent as a bearer token.", is_secret=True)] = ""
    ca_file: Annotated[Path | None, Option("Client", FILE,
        "File with the certificates, PEM, that the service's own is checked against, instead of the system's.",
        variable="FOREWARN_CA")] = None
    # fmt: on


class Resolved(NamedTuple, Generic[C]):
    """A config, where the value of each of its options came from, and the file that was read."""

    config: C
    origins: Mapping[str, str]
    file: Path | None


def resolve(
    kind: type[C],
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Resolved[C]:
    """The config;

    `defaults` stand in for its own. Invalid names the option, where it came from, what was
    expected, what came.
    """
    path = find_file(environ, file)
    keys = _read(path) if path else {}
    values, origins = dict(defaults or {}), {}
    for name, option in options(kind).items():
        given = {
            flag(name): flags.get(name),
            variable(name, option): environ.get(variable(name, option)) or None,
            f"{name} in {path}": keys.get(name),
        }
        origins[name] = next(
            (origin for origin, value in given.items() if value is not None), DEFAULT
        )
        if origins[name] != DEFAULT:
            values[name] = _parse(name, option, origins[name], given[origins[name]])
    config = kind(**values)
    if (
        isinstance(config, Config)
        and Identify.PROXY in config.identify
        and config.proxy_key_file is None
    ):
        raise Invalid(
            f"identify (from {origins['identify']}): proxy needs proxy_key_file, which is not given",
            option="identify",
        )
    if isinstance(config, Config) and config.webhook and config.webhook_secret_file is None:
        raise Invalid(
            f"webhook (from {origins['webhook']}): needs webhook_secret_file, which is not given",
            option="webhook",
        )
    if isinstance(config, Config) and (config.control_certificate_file is None) != (
        config.control_key_file is None
    ):
        missing = (
            "control_certificate_file"
            if config.control_certificate_file is None
            else "control_key_file"
        )
        raise Invalid(
            f"{missing} is not given; TLS needs both a certificate and its key", option=missing
        )
    return Resolved(config, origins, path)


def options(kind: type) -> dict[str, Option]:
    """The options of a config by name, in their order."""
    return {
        name: get_args(hint)[1] for name, hint in get_type_hints(kind, include_extras=True).items()
    }


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str, option: Option) -> str:
    return option.variable or f"FOREWARN_{name.upper()}"


def find_file(environ: Mapping[str, str], file: Path | None = None) -> Path | None:
    """The file that is asked for, or `forewarn.toml` in this folder if there is one."""
    if file or environ.get(FILE_VARIABLE):
        return file or Path(environ[FILE_VARIABLE])
    return Path(FILE_NAME) if Path(FILE_NAME).is_file() else None


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            keys = tomllib.loads(file.read(FILE_BYTES_MAX).decode())
    except OSError as error:
        raise Invalid(
            f"{path}: cannot be read: {error.strerror or error}", file=str(path)
        ) from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise Invalid(
            f"{path}: is not TOML: {' '.join(str(error).split())}", file=str(path)
        ) from error
    known = [*options(Config), *options(ClientConfig)]
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise Invalid(
                f"{path}: unknown key {key!r}{f'; did you mean {near[0]!r}?' if near else ''}",
                file=str(path),
                key=key,
            )
    return keys


def _parse(name: str, option: Option, origin: str, given: object) -> object:
    several = (
        given.split(",") if isinstance(given, str) else given
    )  # a variable holds several values by commas
    try:
        if not option.is_repeatable:
            return option.kind.parse(_as_text(given))
        return tuple(
            option.kind.parse(_as_text(one))
            for one in (several if isinstance(several, list | tuple) else [several])
        )
    except Invalid as why:
        raise Invalid(f"{name} (from {origin}): {given!r} is refused: {why}", option=name) from why
    except (ValueError, KeyError, OverflowError) as error:
        is_hidden = option.is_secret or "@" in repr(given)  # a URL may hold a password
        shown = "something else" if is_hidden else repr(given)[:200]
        raise Invalid(
            f"{name} (from {origin}): expected {option.kind.expects}, got {shown}", option=name
        ) from error


def _as_text(given: object) -> str:
    if isinstance(given, str | int | float):
        return str(given).lower() if isinstance(given, bool) else str(given)
    raise ValueError
