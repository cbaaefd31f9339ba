"""The history, read from the file of the store."""

import sqlite3
from contextlib import closing
from pathlib import Path

from forewarn.core.change import Change
from forewarn.engine.entry import decode


def changes_in(folder: Path, scope: str) -> list[Change]:
    """The changes of a scope, in their order."""
    with closing(sqlite3.connect(folder / "forewarn.db")) as store:
        notes = [decode(body) for (body,) in store.execute("SELECT body FROM note ORDER BY number")]
    return [note.change for note in notes if note.scope == scope]
