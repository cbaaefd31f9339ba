"""`forewarn serve` and `forewarn demo`.

The server's modules are imported when needed: the other commands do without the server extra.
"""

import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from forewarn.cli.config_file import DEFAULT, Resolved
from forewarn.cli.event_loop import run_service
from forewarn.cli.exit_codes import needs_extra
from forewarn.cli.history import SENTENCES, format_entry
from forewarn.cli.options import (
    DEMO,
    ClientConfig,
    File,
    check_store_kind,
    read_config,
    with_options,
)
from forewarn.config import Config, options
from forewarn.errors import Invalid
from forewarn.option_kind import Address

if TYPE_CHECKING:
    from forewarn.engine.entry import Entry

POLL = "/metadata/scheduledevents?api-version=2020-07-01"
HARM = {"store": "replace the fleet in it", "platform": "act on real VMs"}
"""What a demo would do with the values that these options have for a service."""


@with_options(Config)
def serve(context: typer.Context, *, file: File = None) -> None:
    """Run the service until SIGTERM or Ctrl-C.

    Example: forewarn serve --fleet fleet.yaml --store sqlite:///forewarn.db
    """
    resolved = read_config(context, Config)
    check_store_kind(context, resolved)
    config = resolved.config
    scheme = "https" if config.control_certificate_file else "http"

    def print_ready(metadata: Address, control: Address) -> None:
        typer.echo(
            f"forewarn is ready: metadata http://{metadata}, control {scheme}://{control}, "
            f"store {_describe_store(config)}"
        )

    _run("serve", config, print_ready, lambda entry: None)


@with_options(Config, defaults=DEMO)
def demo(context: typer.Context, *, file: File = None) -> None:
    """Run a small fleet, sixty times faster, and show what to try. Takes the flags of `serve`.

    Example: forewarn demo
    """
    usual = {name: getattr(Config, name) for name in ("metadata", "control")}
    free = {name: Address(at.host, 0) for name, at in usual.items() if is_taken(at)}
    config, sources = resolved = read_config(context, Config, {**DEMO, **free})
    refuse_harm(resolved)
    for name in free:
        if sources[name] == DEFAULT:
            typer.echo(f"{usual[name]} is in use: {name} takes a free port", err=True)

    def print_welcome(metadata: Address, control: Address) -> None:
        typer.echo(format_welcome(metadata, control, config.rate, _describe_store(config)))

    _run("demo", config, print_welcome, print_change)


def refuse_harm(resolved: Resolved[Config]) -> None:
    """Refuse a demo that would change a service, because of its variables or its config file.

    A demo is typed anywhere, also in the folder of a service. A flag is typed for the demo itself.
    """
    for option in options(Config):
        if option.name not in HARM:
            continue
        harmless = DEMO.get(option.name, option.default)
        value, source = getattr(resolved.config, option.name), resolved.sources[option.name]
        if value != harmless and source != option.flag:
            raise Invalid(
                f"{option.name} is {value} (from {source}): the demo would {HARM[option.name]}; "
                f"expected {option.flag} {harmless}, or another value of that flag",
                option=option.name,
            )


def format_welcome(metadata: Address, control: Address, rate: float, store: str) -> str:
    """What is running, and three commands to paste into another terminal in the same folder."""
    poll = f"curl -s -H Metadata:true 'http://{metadata}{POLL}'"
    is_default = ClientConfig.control_url == (f"http://{control}",)
    variable = "" if is_default else f"FOREWARN_CONTROL=http://{control} "
    return f"""Console: http://{control}/
forewarn is ready: metadata http://{metadata}, control http://{control}, store {store}
A 15-minute notice takes {900 / rate:g} seconds here. In another terminal, from this folder:

1. As a VM, poll for events (this machine is web-0):
   {poll}
2. As an operator, restart that VM, then poll again:
   {variable}{program()} vm restart web-0
3. As the VM, approve the event:
   {poll} | sed 's/.*\\("EventId":"[^"]*"\\).*/{{"StartRequests":[{{\\1}}]}}/' | {poll} -d @-

Changes are printed here. API reference: http://{control}/api/docs  Stop with Ctrl-C.
"""


def is_taken(address: Address) -> bool:
    """Whether another process listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def print_change(entry: "Entry") -> None:
    """Print a change as it happens."""
    import msgspec  # of the server extra

    if entry.what in SENTENCES:
        typer.echo(format_entry(msgspec.to_builtins(entry)))


def program() -> str:
    """This command as a user would type it here."""
    typed = Path(sys.argv[0])
    path = typed.absolute()
    if shutil.which(typed.name) == str(path):
        return typed.name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _describe_store(config: Config) -> str:
    from forewarn.store.open import describe_url  # of the server extra

    return describe_url(config.store)


def _run(
    command: str,
    config: Config,
    on_ready: Callable[[Address, Address], None],
    on_change: "Callable[[Entry], None]",
) -> None:
    with needs_extra(command):
        import prometheus_client  # noqa: F401 - imported later; the extra lab has all the rest

        from forewarn.server import serve as run

    run_service(config, lambda: run(config, on_ready, on_change))
