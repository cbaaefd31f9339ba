"""Where errors become a line on standard error and an exit code, for every command.

Standard library only: the guest uses this module too.
"""

import os
import sys
from collections.abc import Callable

from forewarn.errors import Error

FAILED, INTERRUPTED = 1, 130


def run_command(
    program: str, command: Callable[[], int | None], exit_of: Callable[[Error], int]
) -> int:
    """Run a command and return its exit code. Users never see a traceback."""
    try:
        code = command()
        sys.stdout.flush()
    except Error as error:
        return _report(program, error.message, exit_of(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Without this, Python reports it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as bug:  # the last line of defence, around every command
        return _report(program, f"this is a bug in Forewarn: {type(bug).__name__}: {bug}", FAILED)
    return code or 0


def _report(program: str, message: str, code: int) -> int:
    """One line, even if the message has several."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code
