"""What every command shares: exit codes, and how a command line that makes no sense is answered."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from forewarn.errors import Error, NotFound, StoreDenied, Unavailable


class Exit(IntEnum):
    """What the exit code says. `docs/cli.md` promises these."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


class Usage(typer.TyperException):
    """The command line, a variable or the config file says what cannot be."""

    exit_code = Exit.USAGE


def exit_of(problem: Error) -> Exit:
    if isinstance(problem, NotFound):
        return Exit.NOT_FOUND
    if isinstance(problem, StoreDenied):
        return (
            Exit.USAGE
        )  # a matter of configuration: trying again does not help, and systemd is told not to
    return Exit.UNREACHABLE if isinstance(problem, Unavailable) else Exit.REFUSED


@contextmanager
def needs_server_parts(command: str) -> Iterator[None]:
    """Imports that only an extra brings.

    Without it the rest of the CLI works, and this says what is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("forewarn"):
            raise
        extra = "libvirt" if error.name == "libvirt" else "server"
        raise Error(
            f"`forewarn {command}` needs {error.name}; pip install 'forewarn[{extra}]' brings it"
        ) from error
