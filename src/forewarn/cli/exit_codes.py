"""Exit codes, and the errors that only a command line has. `docs/cli.md` promises the codes."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

from forewarn.errors import Error, Invalid, NotFound, StoreDenied, Unavailable


class Exit(IntEnum):
    DONE = 0
    REFUSED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


EXTRAS = {"serve": "server", "demo": "server", "store": "server", "lab": "lab", "hostd": "hostd"}
"""The extra that a command needs, where it is not cli."""


class Usage(Error, code="usage"):
    """The command line, a variable or the config file is wrong."""


class Parser(argparse.ArgumentParser):
    """For commands without typer. What it rejects is raised as Usage."""

    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message}; try '{self.prog} --help'")


def exit_of(error: Error) -> Exit:
    # StoreDenied is a wrong configuration: retrying does not help, and systemd must not restart.
    if isinstance(error, Usage | Invalid | StoreDenied):
        return Exit.USAGE
    if isinstance(error, NotFound):
        return Exit.NOT_FOUND
    return Exit.UNREACHABLE if isinstance(error, Unavailable) else Exit.REFUSED


@contextmanager
def needs_extra(command: str, extra: str = "") -> Iterator[None]:
    """Wrap imports that only an extra provides: a missing one becomes a message that names it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("forewarn"):
            raise
        extra = extra or EXTRAS.get(command.split()[0], "server")
        extra = "libvirt" if error.name == "libvirt" else extra
        raise Error(
            f"`forewarn {command}` needs {error.name}; install it with "
            f"pip install 'forewarn[{extra}]'"
        ) from error
