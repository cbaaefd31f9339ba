"""`forewarn`: the entry point, and the one place where errors become a line on stderr and an exit
code.

`forewarn agent` and `forewarn conform` run on a bare `pip install forewarn`, so this module does
not import typer. All other commands are in `app.py`.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence

from forewarn.cli.exit_codes import Exit, exit_of
from forewarn.errors import Error


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Users never see a traceback."""
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except Error as error:
        return _fail(error.message, exit_of(error))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Without this, Python reports it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.REFUSED
    except Exception as bug:  # the last line of defence, around every command
        return _fail(f"this is a bug in Forewarn: {type(bug).__name__}: {bug}", Exit.REFUSED)
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    command, *rest = arguments or [""]
    if command == "agent":
        from forewarn.agent.__main__ import main as run_agent

        return run_agent(rest, program="forewarn agent")
    if importlib.util.find_spec("typer") is not None:
        from forewarn.cli.app import run_app

        return run_app(arguments)
    if command == "conform":
        from forewarn.cli.conform import run_conform

        return run_conform(rest)
    raise Error(
        "this command needs pip install 'forewarn[cli]'; "
        "without it there are `forewarn agent` and `forewarn conform`"
    )


def _fail(message: str, code: int) -> int:
    print(f"forewarn: {' '.join(message.split())}", file=sys.stderr)  # always one line
    return code
