"""The options of `forewarn hostd`, each declared once, and its token. As `forewarn.config`."""

import hashlib
import hmac
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from forewarn import option_kind as kind
from forewarn.config import Config, Option, PlatformName, options, require
from forewarn.errors import Invalid
from forewarn.option_kind import Address, ExecCommand, HostUri, OptionKind

TOKEN = re.compile(r"fw_([a-z0-9][a-z0-9-]{0,62})_([0-9a-f]{64})")
TOKEN_BYTES_MAX = 4096
MACHINE_ID = re.compile(r"[0-9a-f]{32}")
MACHINE_ID_FILE = Path("/etc/machine-id")
SERVE = {each.name: each._replace(variable="") for each in options(Config)}
LOCAL_LIBVIRT = "qemu:///system"

NAME = OptionKind(kind.parse_text, "the name of a host")
SERVERS = OptionKind(kind.parse_url, "http://HOST:PORT", lambda text: text.split(","))
MACHINE = OptionKind(kind.parse_text, "a text that no other machine has")
BRIDGE = OptionKind(kind.parse_text, "the name of a bridge")
COMMAND = OptionKind(
    lambda text: ExecCommand("", kind.split_command(text, ())), "a command and its arguments"
)


@dataclass(frozen=True, kw_only=True)
class HostdConfig(Config):
    """The options of `forewarn hostd`: its own, and those of the server's that it shares."""

    VARIABLES: ClassVar[str] = "FOREWARN_HOSTD_"
    # fmt: off
    SHARED: ClassVar[tuple[str, ...]] = (
        "impacts_max", "exec_command", "exec_seconds_max", "libvirt_grace_seconds",
        "libvirt_call_seconds_max", "libvirt_migrations_max", "log_format", "log_level",
    )
    host: Annotated[str, Option("Servers", NAME,
        "The name of this host in the fleet, the one that the token is for.")] = ""
    server: Annotated[tuple[str, ...], Option("Servers", SERVERS,
        "The control API of each server. One at a time is used; the next one when it fails.")] = ()
    metadata_server: Annotated[tuple[str, ...], Option("Servers", SERVERS,
        "The metadata listener of each server, for what guests request.")] = ()
    token_file: Annotated[Path | None, Option("Servers", kind.FILE,
        "File with a token of the role `host`.")] = None
    machine: Annotated[str, Option("Servers", MACHINE,
        "Identifies this machine: a host belongs to the machine whose daemon connects first. "
        "By default a hash of /etc/machine-id.")] = ""
    ca_file: Annotated[Path | None, Option("Servers", kind.FILE,
        "PEM file with the certificates to verify the servers with, instead of the system's.")
        ] = None
    bridge: Annotated[tuple[str, ...], Option("Relay", BRIDGE,
        "A bridge whose guests are served; without one, the daemon relays nothing.")] = ()
    listen: Annotated[Address, Option("Relay", kind.ADDRESS,
        "The address that guests request on each bridge; IPv6 guests use fe80::a9fe:a9fe.")
        ] = Address("169.254.169.254", 80)  # noqa: RUF009, a tuple
    inventory_command: Annotated[ExecCommand | None, Option("Inventory", COMMAND,
        "Prints the VMs of this host as JSON; required unless the platform is libvirt, which "
        "knows them.")] = None
    inventory_seconds: Annotated[float, Option("Inventory", kind.number(0.1, 3600),
        "How often the command runs, or libvirt is asked for DHCP leases; domains are reported as "
        "they change.")] = 10.0
    platform: Annotated[PlatformName, SERVE["platform"]] = PlatformName.LIBVIRT
    libvirt_uri: Annotated[tuple[HostUri, ...], SERVE["libvirt_uri"]._replace(
        help="The libvirt of this host, and how to reach those that VMs move to, such as "
        "`qemu+tls://{host}/system`; without that, VMs stay on this host.")] = Config.libvirt_uri
    # fmt: on

    def check(self) -> None:
        """Refuse what cannot work."""
        is_libvirt = self.platform is PlatformName.LIBVIRT
        require(
            self,
            ("hostd", True, "host"),
            ("hostd", True, "server"),
            ("hostd", True, "token_file"),
            ("bridge", self.bridge, "metadata_server"),
            (f"platform {self.platform}", not is_libvirt, "inventory_command"),
        )

    def platform_config(self) -> Config:
        """For the platform: a libvirt URI that is the same for every host is that of this host."""
        plain = [uri.uri for uri in self.libvirt_uri if not uri.host and "{host}" not in uri.uri]
        own = [HostUri(self.host, uri) for uri in (LOCAL_LIBVIRT, *plain)]
        return replace(self, libvirt_uri=(*own, *self.libvirt_uri))


def identify_machine(chosen: str, path: Path = MACHINE_ID_FILE) -> str:
    """A hash that identifies this machine: of the chosen text, or of what systemd has given it.

    The hash is keyed, as machine-id(5) asks for: the id itself is not to leave the machine.
    """
    text = chosen or _read_machine_id(path)
    return hmac.digest(text.encode(), b"forewarn hostd", "sha256").hex()


def _read_machine_id(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror or error}"
    else:
        if MACHINE_ID.fullmatch(text):
            return text
        problem = f"{path} has {text[:40]!r}, which is not a machine id"
    raise Invalid(
        f"machine: {problem}; expected the option machine, or an id as systemd-machine-id-setup"
        " writes it",
        option="machine",
    )


class HostToken(NamedTuple):
    """A token of the role `host`.

    `text` is sent to the control API. `key` signs what guests request: it is the digest that the
    server stores.
    """

    name: str
    text: str
    key: bytes


def read_token(path: Path) -> HostToken:
    try:
        with path.open("rb") as file:
            text = file.read(TOKEN_BYTES_MAX).decode(errors="replace").strip()
    except OSError as error:
        raise Invalid(
            f"token_file: cannot read {path}: {error.strerror or error}", option="token_file"
        ) from error
    match = TOKEN.fullmatch(text)
    if match is None:
        raise Invalid(
            f"token_file: {path} has no valid token; expected what"
            " `forewarn token create NAME --role host --host HOST` prints, fw_NAME_SECRET",
            option="token_file",
        )
    name, secret = match.groups()
    return HostToken(name, text, hashlib.sha256(secret.encode()).hexdigest().encode())
