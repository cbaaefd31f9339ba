"""`forewarn`: the commands put together, and the one place where problems become a line on stderr
and an exit code.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from forewarn import __version__
from forewarn.cli import (
    agent,
    campaign,
    config,
    conform,
    event,
    fleet,
    history,
    host,
    lab,
    scope,
    serve,
    store,
    token,
    vm,
    watch,
)
from forewarn.cli.api import Asked
from forewarn.cli.exit_codes import Exit, exit_of
from forewarn.errors import Error

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command("demo")(config.with_options(serve.demo, config.DEMO))
app.command("serve")(config.with_options(serve.serve))
app.command("agent", context_settings=agent.PASS_ON)(agent.agent)
app.command("config")(config.with_options(config.show))
app.command("conform")(conform.conform)
app.command("history")(history.history)
app.command("watch")(watch.watch)
for noun in (fleet, scope, vm, host, event, campaign, token, store, lab):
    app.add_typer(noun.app, name=noun.__name__.rpartition(".")[2])


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Do what is asked, and tell how it went. No traceback reaches a person."""
    try:
        code = app(arguments, prog_name="forewarn", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as wrong:
        return _refused_usage(wrong)
    except Error as problem:
        return _told(problem.message, exit_of(problem))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _stop_writing()
        return Exit.REFUSED
    except Exception as bug:  # the last line of defence, around every command
        return _told(f"this is a bug in Forewarn: {type(bug).__name__}: {bug}", Exit.REFUSED)
    return code if isinstance(code, int) else Exit.DONE


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forewarn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    *,
    control_url: Annotated[
        str | None, typer.Option(help="Where the service is, else FOREWARN_CONTROL.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--config", help="The file to read instead of ./forewarn.toml.")
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Tell the version.")
    ] = False,
) -> None:
    """Tell VMs in time what is about to happen to them, and let them answer."""
    context.obj = Asked(control_url, file)


def _refused_usage(wrong: typer.TyperException) -> int:
    context, message = getattr(wrong, "ctx", None), wrong.format_message()
    if (
        type(wrong).__name__ == "NoArgsIsHelpError"
    ):  # a noun without a verb: its help has been shown, and is all there is to say
        return Exit.USAGE
    hint = f"; try '{context.command_path} --help'" if context else ""
    return _told(f"{message.rstrip('.')}{hint}", wrong.exit_code)


def _told(message: str, code: int) -> int:
    """One line, whatever the message is made of."""
    typer.echo(f"forewarn: {' '.join(message.split())}", err=True)
    return code


def _stop_writing() -> None:
    """Whoever read our output has gone;

    Python would complain once more when it flushes at the end.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
