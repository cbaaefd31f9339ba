"""Colours and a status line, for commands that take a while. Standard library only."""

import os
import shutil
import sys

COLOURS = {"red": 31, "green": 32, "yellow": 33}


def paint(text: str, colour: str) -> str:
    """Text in a colour, if stdout is a terminal that shows colours and NO_COLOR is not set."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if is_plain or not sys.stdout.isatty():
        return text
    return f"\033[{COLOURS[colour]}m{text}\033[0m"


def show_status(text: str) -> None:
    """Replace the status line on stderr; empty: remove it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)
