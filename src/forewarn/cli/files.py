"""Files that commands read and write. A file that cannot be used is one line on stderr."""

import sys
from pathlib import Path

from forewarn.cli.exit_codes import Usage
from forewarn.errors import Error, Invalid


def read_file(file: str | Path, what: str, bytes_max: int) -> bytes:
    """The content of a file; `-` is standard input."""
    try:
        if str(file) == "-":
            content = sys.stdin.buffer.read(bytes_max + 1)
        else:
            with Path(file).open("rb") as stream:
                content = stream.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Usage(f"cannot read the {what} {file}: {reason}", file=str(file)) from error
    if len(content) > bytes_max:
        raise Invalid(f"{file}: a {what} has at most {bytes_max} bytes", file=str(file))
    return content


def write_file(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or error}", file=str(path)) from error


def check_writable(option: str, path: Path) -> None:
    """Fail before a long run rather than after it. Existing content stays."""
    if path.is_fifo():  # its reader would see the end of the file
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise Usage(f"{option}: cannot write {path}: {error.strerror or error}") from error
