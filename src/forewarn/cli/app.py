"""The commands of `forewarn`, put together with typer."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import typer

from forewarn import __version__
from forewarn.cli import campaign, config, fleet, history, lab, resource, serve, store, token
from forewarn.cli.api import connect_to
from forewarn.cli.conform import run_conform
from forewarn.cli.exit_codes import Exit, Usage
from forewarn.cli.lookup import did_you_mean
from forewarn.cli.options import ClientConfig, RootFile, with_options
from forewarn.cli.resource import EventType

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

WORDING = (
    (r"\. Did you mean", "; did you mean"),
    (r"Missing option ('.*')\. Choose from:\s*", r"expected \1, one of "),
    # Typer shows choices in lower case; documents and docs write event types with a capital.
    *((rf"(?s)(one of .*)\b{each.lower()}\b", rf"\1{each}") for each in get_args(EventType)),
    (r" \(Possible options: (.*)\)$", r"; did you mean \1?"),
    ("Value error, ", ""),
    (r"Input should be a valid (\w+),.*", r"expected a valid \1"),
    ("Input should be", "expected a number"),
)
"""What typer says, and what is printed."""

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP)


def print_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(f"forewarn {__version__}")
        raise typer.Exit


# fmt: off
Version = Annotated[bool, typer.Option(
    "--version", callback=print_version, is_eager=True, help="Print the version.")]
# fmt: on


@app.callback()
@with_options(ClientConfig)
def root(*, file: RootFile = None, version: Version = False) -> None:
    """Scheduled Events for any fleet: give VMs notice before they are frozen, rebooted, moved,
    evicted or deleted, and let them approve.

    Try `forewarn demo`. Run a service with `forewarn serve`.
    """


for command in (serve.demo, serve.serve, config.config, history.history, history.watch):
    app.command()(command)


@app.command(context_settings=PASS_ON)
def agent(context: typer.Context) -> int:
    """Run the agent inside a VM: prepare, approve, recover. See `forewarn agent --help`.

    Example: forewarn agent check
    """
    from forewarn.agent.__main__ import main

    return main(context.args, program="forewarn agent")


@app.command(context_settings=PASS_ON)
def hostd(context: typer.Context) -> int:
    """Run the daemon of a hypervisor host. See `forewarn hostd --help`.

    Example: forewarn hostd --host host-a --server http://10.0.0.1:8081
    """
    from forewarn.cli.hostd import run_hostd

    return run_hostd(context.args)


@app.command(context_settings=PASS_ON)
def conform(context: typer.Context) -> int:
    """Check any endpoint against the Scheduled Events protocol. See `forewarn conform --help`.

    Example: forewarn conform http://127.0.0.1:8080
    """
    return run_conform(context.args, lambda url: connect_to(context, url))


for name, commands in {
    "fleet": fleet.app,
    "scope": resource.scope,
    "vm": resource.vm,
    "host": resource.host,
    "event": resource.event,
    "campaign": campaign.app,
    "token": token.app,
    "store": store.app,
    "lab": lab.app,
}.items():
    app.add_typer(commands, name=name)


def run_app(arguments: Sequence[str]) -> int:
    """Run a command. What typer rejects is raised as Usage, with the source of the value."""
    try:
        code = app(arguments, prog_name="forewarn", standalone_mode=False)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            return Exit.USAGE
        raise Usage(_describe(error)) from error
    return code if isinstance(code, int) else Exit.DONE


def _describe(error: typer.TyperException) -> str:
    message, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    for wrong, better in WORDING:
        message = re.sub(wrong, better, message)
    inputs = getattr(error.__cause__, "errors", list[Any])()
    if inputs and "expected" in message:
        message += f", got {inputs[0]['input']!r}"
    if match := re.search(r"'([^']*)' is not one of '(.*)'", message):
        message += did_you_mean(match[1], match[2].split("', '"))
    option = getattr(error, "option_name", "")
    if context and any(option in each.opts for each in context.find_root().command.params):
        return f"{message.partition(';')[0]}; put it before the command: forewarn {option} …"
    if not context:
        return message
    separator = " Try" if message.endswith("?") else "; try"
    return f"{message}{separator} '{context.command_path} --help'"
