"""The options of `forewarn serve`, each declared once.

A field of `Config` is an option: its name, type and default, and in `Option(...)` its section, how
its text is parsed and what it does. The flag, the FOREWARN_* variable, the key in `forewarn.toml`
and the row in docs/configuration.md are derived from it by `cli/options.py`.

A Config is a plain value: making one opens nothing. Standard library only.
"""

import ipaddress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from forewarn import option_kind as kind
from forewarn.errors import Invalid
from forewarn.option_kind import Address, ExecCommand, HostUri, OptionKind, SimulatedDuration

# fmt: off
WEBHOOK_CHANGES = (
    "executed-silently", "scheduled", "extended", "started", "impact-failed", "completed",
    "canceled", "failed",
)
# fmt: on


class Identify(StrEnum):
    """How a client of the metadata endpoint is identified as a VM."""

    ADDRESS = "address"
    PATH = "path"
    PROXY = "proxy"


class NotBeforeFormat(StrEnum):
    CAPTURED = "captured"
    DOCUMENTED = "documented"


class WebhookFormat(StrEnum):
    CLOUDEVENTS = "cloudevents"
    EVENT_GRID = "event-grid"


class PlatformName(StrEnum):
    """What carries out impacts."""

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


class Option(NamedTuple):
    """The declaration of an option. `options` fills in the name and the default."""

    section: str
    kind: OptionKind
    help: str
    variable: str = ""
    is_secret: bool = False
    name: str = ""
    default: Any = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_repeatable(self) -> bool:
        return type(self.default) is tuple

    def parse(self, given: Any, source: str) -> Any:
        """The value. Invalid names the option, where the value came from and what was expected."""
        if self.is_repeatable:
            parts = [part for text in given for part in self.kind.split(text)]
            if self.default and not parts:  # without any, nothing works
                raise self.reject(parts, source)
            return tuple(self._parse_one(part, source) for part in parts)
        return self._parse_one(given, source)

    def _parse_one(self, given: Any, source: str) -> Any:
        try:
            return self.kind.parse(given)
        except Invalid as error:
            raise Invalid(f"{self.name} (from {source}): {error}", option=self.name) from error
        except (ValueError, KeyError, OverflowError) as error:
            raise self.reject(given, source) from error

    def reject(self, given: Any, source: str) -> Invalid:
        shown = repr(given)[:200]
        if self.is_secret or "@" in shown:  # a URL may contain a password
            shown = "another value"
        return Invalid(
            f"{self.name} (from {source}): expected {self.kind.expects}, got {shown}",
            option=self.name,
        )


def options(config_class: type[Any]) -> list[Option]:
    """The options of a config class, in the order of declaration.

    `VARIABLES` of the class is how its environment variables begin. `SHARED` are the options that
    it has from the class that it extends.
    """
    prefix = getattr(config_class, "VARIABLES", "FOREWARN_")
    hints = get_type_hints(config_class, include_extras=True)
    defaults = {each.name: each.default for each in fields(config_class)}
    return [
        declared._replace(
            name=name,
            default=defaults[name],
            variable=declared.variable or f"{prefix}{name.upper()}",
        )
        for name in (*config_class.__annotations__, *getattr(config_class, "SHARED", ()))
        if name in defaults
        for declared in get_args(hints[name])[1:]
    ]


def require(config: Any, *uses: tuple[str, object, str]) -> None:
    """Refuse an option that is used without another one that it needs."""
    for option, is_used, needed in uses:
        if is_used and not getattr(config, needed):
            (spec,) = (each for each in options(type(config)) if each.name == needed)
            expected = f"{spec.flag} or {spec.variable}"
            message = f"{option} needs {needed}, which is not set; expected {expected}"
            raise Invalid(message, option=needed)


METADATA_DEFAULT, CONTROL_DEFAULT = Address("127.0.0.1", 8080), Address("127.0.0.1", 8081)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `forewarn serve` and `forewarn demo`."""

    # fmt: off
    fleet: Annotated[Path | None, Option("Service", kind.FILE_OR_FOLDER,
        "Fleet file, YAML or JSON, or a folder of them, applied at startup; "
        "without it, the stored fleet is used.")] = None
    store: Annotated[str, Option("Service", kind.STORE,
        "Where the state is stored; `memory` loses it at exit.")] = "sqlite:///forewarn.db"
    metadata: Annotated[Address, Option("Service", kind.ADDRESS,
        "The listener that VMs poll and approve on; port 0 takes a free port.")] = METADATA_DEFAULT
    control: Annotated[Address, Option("Service", kind.ADDRESS,
        "The listener for operators and the CLI; outside loopback it needs tokens.",
        variable="FOREWARN_CONTROL_LISTEN")] = CONTROL_DEFAULT
    control_certificate_file: Annotated[Path | None, Option("Service", kind.FILE,
        "PEM file with the certificate chain: the control API then accepts only TLS. "
        "It is read again when it changes.")] = None
    control_key_file: Annotated[Path | None, Option("Service", kind.FILE,
        "PEM file with the certificate's key, not encrypted.")] = None
    reuse_port: Annotated[bool, Option("Service", kind.BOOLEAN,
        "Share the ports of both listeners with other servers of this user on this machine.")
        ] = False
    etcd_ca_file: Annotated[Path | None, Option("etcd", kind.FILE,
        "PEM file with the certificates to verify etcd with; without it, etcd is used without "
        "TLS.")] = None
    etcd_certificate_file: Annotated[Path | None, Option("etcd", kind.FILE,
        "PEM file with this server's certificate, for an etcd that verifies its clients.")] = None
    etcd_key_file: Annotated[Path | None, Option("etcd", kind.FILE,
        "PEM file with the key of that certificate, not encrypted.")] = None
    etcd_user: Annotated[str, Option("etcd", kind.USER,
        "The user of an etcd with authentication.")] = ""
    etcd_password_file: Annotated[Path | None, Option("etcd", kind.FILE,
        "File with the password of that user.")] = None
    etcd_retention_minutes: Annotated[float, Option("etcd", kind.number(0, 100_000),
        "Revisions of etcd older than this are compacted; 0 leaves that to etcd.")] = 60.0
    rate: Annotated[float, Option("Service", kind.number(0.001, 100_000),
        "Divides every notice, duration and timeout: at 60, a 15-minute notice takes 15 seconds. "
        "The clock itself is not changed.")] = 1.0
    identify: Annotated[tuple[Identify, ...], Option("Identity", kind.choice(Identify),
        "How a VM is identified: by its source address; by `/as/<vm>/` in the path, which any "
        "client can claim; by a header that a proxy signs.")] = (Identify.ADDRESS,)
    proxy_key_file: Annotated[Path | None, Option("Identity", kind.FILE,
        "File with the key that signs the proxy's header; required by `--identify proxy`.")] = None
    wait_seconds_max: Annotated[float, Option("Limits", kind.number(0, 3600),
        "The longest `Prefer: wait=N` that is honoured.")] = 60.0
    idle_seconds: Annotated[float, Option("Limits", kind.number(1, 3600),
        "An idle connection is closed after this time.")] = 75.0
    header_seconds: Annotated[float, Option("Limits", kind.number(1, 3600),
        "A connection is dropped if the head of a request takes longer.")] = 10.0
    connections_per_address_max: Annotated[int, Option("Limits", kind.integer(1, 1_000_000),
        "Connections that one address may hold open; less if file descriptors are scarce.")] = 4096
    requests_per_second: Annotated[float, Option("Limits", kind.number(0, 1_000_000),
        "Requests per second and VM before a 429; 0 is off. Azure: 5.")] = 0.0
    first_call_delay_seconds: Annotated[float, Option("Protocol", kind.number(0, 600),
        "How long the first call of a scope is delayed. Azure: up to 120.")] = 0.0
    not_before_format: Annotated[NotBeforeFormat, Option("Protocol",
        kind.choice(NotBeforeFormat),
        "The format of NotBefore up to 2017-11-01: as captured on Azure (RFC 1123), or as "
        "documented (ISO 8601).")] = NotBeforeFormat.CAPTURED
    legacy_path: Annotated[bool, Option("Protocol", kind.BOOLEAN,
        "Serve `/metadata/latest/scheduledevents` as 2017-03-01.")] = False
    lenient_versions: Annotated[bool, Option("Protocol", kind.BOOLEAN,
        "Answer an unknown api-version like the newest one before it, not with 404.")] = False
    impacts_max: Annotated[int, Option("Impacts", kind.integer(1, 100_000),
        "Impacts that are carried out at the same time.")] = 256
    impact_seconds_max: Annotated[float, Option("Impacts", kind.number(1, 86_400),
        "A platform call that takes longer has failed.")] = 3600.0
    impact_retry_seconds_max: Annotated[float, Option("Impacts", kind.number(0, 86_400),
        "How long a failed impact is retried, with growing pauses; 0 means no retry.")] = 300.0
    back_seconds_max: Annotated[float, Option("Impacts", kind.number(0, 86_400),
        "How long the event of a restarted VM waits until the VM polls again or its guest agent "
        "answers; 0 means not at all. Divided by `rate`.")] = 300.0
    platform: Annotated[PlatformName, Option("Impacts", kind.choice(PlatformName),
        "What carries out impacts: nothing (a simulation that only takes time), your own commands, "
        "or libvirt.")] = PlatformName.SIMULATED
    exec_command: Annotated[tuple[ExecCommand, ...], Option("Impacts", kind.EXEC,
        "What the exec platform runs for an event type, without a shell; `*` is for every type "
        "without a command of its own.")] = ()
    exec_seconds_max: Annotated[float, Option("Impacts", kind.number(0.1, 86_400),
        "A command that runs longer is killed with all its children, and has failed.")] = 600.0
    libvirt_uri: Annotated[tuple[HostUri, ...], Option("Impacts", kind.URI,
        "The libvirt connection: one URI for every host, such as `qemu+ssh://{host}/system`, or "
        "one per host.")] = (HostUri("", "qemu:///system"),)
    libvirt_grace_seconds: Annotated[float, Option("Impacts", kind.number(0, 3600),
        "How long a guest may take to shut down or reboot before it is forced to.")] = 120.0
    libvirt_call_seconds_max: Annotated[float, Option("Impacts", kind.number(0.1, 3600),
        "A libvirt call that takes longer has failed.")] = 30.0
    libvirt_migrations_max: Annotated[int, Option("Impacts", kind.integer(1, 4),
        "How many VMs may leave a host at a time for another one, and how many may arrive.")] = 2
    campaign_health_command: Annotated[ExecCommand | None, Option("Impacts", kind.HEALTH,
        "Runs on the server after each host of every campaign, without a shell; "
        "any exit code but 0 pauses the campaign.")] = None
    campaign_health_seconds_max: Annotated[float, Option("Impacts", kind.number(0.1, 3600),
        "A health command that runs longer is killed and has failed.")] = 60.0
    simulate_duration: Annotated[tuple[SimulatedDuration, ...], Option("Impacts", kind.SIMULATED,
        "How long a simulated impact of a type takes; the rate does not apply.")] = ()
    simulate_failure: Annotated[tuple[str, ...], Option("Impacts", kind.VM_NAME,
        "A VM whose impacts fail on the simulated platform.")] = ()
    history_days: Annotated[float, Option("History", kind.number(0, 36_500),
        "How long history is kept; 0 means forever.")] = 90.0
    history_notes_max: Annotated[int, Option("History", kind.integer(0, 1_000_000_000),
        "The history of how many of the newest commits is kept; 0 means no limit.")] = 1_000_000
    webhook: Annotated[tuple[str, ...], Option("History", kind.WEBHOOK,
        "A URL that receives changes, signed.")] = ()
    webhook_format: Annotated[WebhookFormat, Option("History", kind.choice(WebhookFormat),
        "The format of what webhooks receive.")] = WebhookFormat.CLOUDEVENTS
    webhook_changes: Annotated[tuple[str, ...], Option("History", kind.CHANGE,
        "The changes that are sent to webhooks.")] = WEBHOOK_CHANGES
    webhook_secret_file: Annotated[Path | None, Option("History", kind.FILE,
        "File with the secrets that sign webhooks, `whsec_…` or text, one per line; required by "
        "`--webhook`.")] = None
    webhook_seconds_max: Annotated[float, Option("History", kind.number(0.1, 60),
        "A webhook call that takes longer has failed.")] = 10.0
    log_format: Annotated[LogFormat, Option("Log", kind.choice(LogFormat),
        "The format of log lines.")] = LogFormat.HUMAN
    log_level: Annotated[LogLevel, Option("Log", kind.choice(LogLevel),
        "The lowest level that is logged.")] = LogLevel.INFO
    # fmt: on

    def check(self) -> None:
        """Refuse combinations of options that cannot work."""
        require(
            self,
            ("identify proxy", Identify.PROXY in self.identify, "proxy_key_file"),
            ("webhook", self.webhook, "webhook_secret_file"),
            ("control_certificate_file", self.control_certificate_file, "control_key_file"),
            ("control_key_file", self.control_key_file, "control_certificate_file"),
            ("etcd_certificate_file", self.etcd_certificate_file, "etcd_key_file"),
            ("etcd_key_file", self.etcd_key_file, "etcd_certificate_file"),
            ("etcd_certificate_file", self.etcd_certificate_file, "etcd_ca_file"),
            ("etcd_user", self.etcd_user, "etcd_password_file"),
            ("etcd_password_file", self.etcd_password_file, "etcd_user"),
        )
        if 0 < self.etcd_retention_minutes < 1:
            raise Invalid(
                "etcd_retention_minutes is less than a minute, too short for loading a fleet;"
                " expected 0, or at least 1",
                option="etcd_retention_minutes",
            )
        for option, address in (("metadata", self.metadata), ("control", self.control)):
            if self.reuse_port and address.port == 0:
                why = "with reuse_port each server would take another free port"
                expected = "expected a port from 1 to 65535"
                raise Invalid(f"{option} is {address}, but {why}; {expected}", option=option)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
