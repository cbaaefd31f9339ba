"""The files that options of the server name. Reads them; opens neither a store nor a listener."""

from pathlib import Path

from forewarn.config import Config
from forewarn.errors import Invalid
from forewarn.fleetfile import parser as fleet
from forewarn.fleetfile.files import read_sources
from forewarn.history.cloudevents import parse_secrets
from forewarn.web.http.tls import Certificate


def check_inputs(config: Config) -> None:
    """Refuse a file that cannot be used before a store is opened, so that no database is left."""
    read_file(config.proxy_key_file, "proxy key file")
    if config.webhook:
        read_secrets(config)


def check_fleet(config: Config) -> None:
    """The same for the fleet file, which only a new store needs.

    An existing one may have this fleet already, and a large file takes a while to read.
    """
    if config.fleet:
        fleet.parse_all(read_sources(config.fleet))


def read_secrets(config: Config) -> tuple[bytes, ...]:
    """The secrets that sign webhooks."""
    path = config.webhook_secret_file
    return parse_secrets(read_file(path, "webhook secret file"), str(path))


def read_certificate(config: Config) -> Certificate | None:
    if config.control_certificate_file is None or config.control_key_file is None:
        return None
    return Certificate(config.control_certificate_file, config.control_key_file)


def read_file(path: Path | None, what: str) -> bytes:
    """The content of a file that an option names; nothing if it does not."""
    try:
        return path.read_bytes() if path else b""
    except OSError as error:
        reason = error.strerror or error
        raise Invalid(f"cannot read the {what} {path}: {reason}", file=str(path)) from error
