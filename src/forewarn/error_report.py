"""Where errors become a line on standard error and an exit code, for every command.

FOREWARN_DEBUG=1 prints the traceback too, of expected errors and of bugs. Services log theirs
(`cli/event_loop.py`, `agent/daemon.py`), because their log is closed by now. Standard library only:
the guest uses this module too.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping

from forewarn.errors import Error
from forewarn.log import escape

FAILED, INTERRUPTED = 1, 130
DEBUG_VARIABLE = "FOREWARN_DEBUG"
OFF = ("", "0", "no", "false", "off")


def run_command(
    program: str,
    command: Callable[[], int | None],
    exit_of: Callable[[Error], int],
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Run a command and return its exit code. Users see a traceback only if they ask for it."""
    try:
        code = command()
        sys.stdout.flush()
    except Error as error:
        _show_trace(error, environ)
        return _report(program, error.message, exit_of(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Without this, Python reports it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as bug:  # the last line of defence, around every command
        is_shown = _show_trace(bug, environ)
        hint = "" if is_shown else f"; {DEBUG_VARIABLE}=1 prints the traceback, for a report"
        message = f"this is a bug in Forewarn: {type(bug).__name__}: {bug}{hint}"
        return _report(program, message, FAILED)
    return code or 0


def _show_trace(error: Exception, environ: Mapping[str, str]) -> bool:
    """On standard error, if the variable is set."""
    if environ.get(DEBUG_VARIABLE, "").lower() in OFF:
        return False
    text = "".join(traceback.format_exception(error))
    print("\n".join(map(escape, text.splitlines())), file=sys.stderr)
    return True


def _report(program: str, message: str, code: int) -> int:
    """One line, even if the message has several."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code
