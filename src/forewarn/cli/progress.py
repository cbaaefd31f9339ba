"""A progress bar on a terminal. In a pipe there is none."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BAR_WIDTH = 30
"""It stays visible on a terminal of 60 columns."""


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[float, float], None]]:
    """A bar on standard error, below the lines that are printed meanwhile.

    The function that it yields takes how much is done, and of how much.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    is_hidden = not sys.stderr.isatty()
    text = TextColumn("{task.description}", markup=False)
    columns = BarColumn(BAR_WIDTH), TaskProgressColumn(), TimeElapsedColumn(), text
    console, to_screen = Console(stderr=True), sys.stdout.isatty()
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=to_screen, disable=is_hidden
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
