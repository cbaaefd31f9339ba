"""The history, read from the file of the store."""

import sqlite3
from contextlib import closing
from pathlib import Path

from forewarn.engine.entry import Entry, decode_all
from forewarn.store.base import HistoryValue


def changes_in(folder: Path, scope: str) -> list[Entry]:
    """What became true of the scope of the service in this folder, in its order."""
    with closing(sqlite3.connect(folder / "forewarn.db")) as store:
        rows = store.execute("SELECT position, value FROM history ORDER BY position").fetchall()
    entries = [entry for row in rows for entry in decode_all(HistoryValue(*row))]
    return [entry for entry in entries if entry.scope == scope]
