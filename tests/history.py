"""The history of a store, decoded."""

from forewarn.engine.entry import Entry, decode_all
from forewarn.store.base import HistoryValue, Store


async def entries_of(store: Store) -> list[Entry]:
    """All entries, oldest first."""
    return [entry for value in await store.history(limit=10**6) for entry in decode_all(value)]


def entries_in(value: bytes | None) -> list[Entry]:
    """The entries of one commit."""
    return decode_all(HistoryValue(1, value)) if value else []
