"""The history as the store's file holds it."""

import sqlite3
from contextlib import closing
from pathlib import Path

from forewarn.core.change import Change
from forewarn.engine.entry import decode


def changes_in(folder: Path, scope: str) -> list[Change]:
    """What became true of the scope of the service in this folder, in its order."""
    with closing(sqlite3.connect(folder / "forewarn.db")) as store:
        notes = [decode(body) for (body,) in store.execute("SELECT body FROM note ORDER BY number")]
    return [note.change for note in notes if note.scope == scope]
