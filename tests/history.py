"""The history of a store, as entries."""

from forewarn.engine.entry import Entry, decode_all, encode_all, first_number
from forewarn.store.base import Store


async def entries_of(store: Store, after: int = 0, limit: int = 1000) -> list[Entry]:
    """All entries of commits after this position, oldest first."""
    return [entry for value in await store.history(after, limit) for entry in decode_all(value)]


async def write_history(store: Store, *entries: Entry) -> list[int]:
    """Commit each entry by itself; their numbers."""
    positions = [await store.commit([], entries=encode_all([entry])) for entry in entries]
    return [first_number(position) for position in positions]
