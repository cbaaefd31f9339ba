"""`forewarn`: the entry point.

`forewarn agent` and `forewarn conform` run on a bare `pip install forewarn`, so this module does
not import typer. All other commands are in `app.py`.
"""

import importlib.util
import sys
from collections.abc import Sequence

from forewarn import __version__
from forewarn.cli.exit_codes import EXTRAS, Exit, Usage, exit_of
from forewarn.error_report import run_command
from forewarn.errors import Error

# Those that need an extra.
COMMANDS = (*EXTRAS, "campaign", "config", "event", "fleet", "history", "host", "scope", "token",
    "vm", "watch")  # fmt: skip
BARE_HELP = f"""Usage:
  forewarn agent      Run the agent inside a VM: prepare, approve, recover.
  forewarn conform    Check any endpoint against the Scheduled Events protocol.
  forewarn --version  Print the version.
pip install 'forewarn[cli]' adds the commands for a running service, 'forewarn[server]' all:
{", ".join(sorted(COMMANDS))}."""


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    return run_command("forewarn", lambda: _dispatch(arguments), exit_of)


def _dispatch(arguments: Sequence[str]) -> int:
    command, *rest = arguments or [""]
    if command == "agent":
        from forewarn.agent.__main__ import main as run_agent

        return run_agent(rest, program="forewarn agent")
    if command == "hostd":
        from forewarn.cli.hostd import run_hostd

        return run_hostd(rest)
    if importlib.util.find_spec("typer") is not None:
        from forewarn.cli.app import run_app

        return run_app(arguments)
    if command == "conform":
        from forewarn.cli.conform import run_conform

        return run_conform(rest)
    if command == "--version":
        print(f"forewarn {__version__}")
        return Exit.DONE
    if command in ("-h", "--help", ""):
        print(BARE_HELP)
        return Exit.DONE if command else Exit.USAGE
    if command in COMMANDS or command.startswith("-"):
        raise Error(
            f"this command needs pip install 'forewarn[{EXTRAS.get(command, 'cli')}]'; "
            "without it there are `forewarn agent` and `forewarn conform`"
        )
    raise Usage(f"No such command {command!r}; try 'forewarn --help'")
