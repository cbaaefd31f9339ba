"""A store's URL, as `--store` takes it, and the store it names."""

from forewarn.errors import Invalid
from forewarn.store.base import Store
from forewarn.store.memory import MemoryStore
from forewarn.store.sqlite import SqliteStore

SQLITE = "sqlite:///"
ACCEPTED = "memory, sqlite:///relative.db or sqlite:////absolute/path.db"


async def open_store(url: str) -> Store:
    """Opens the store that the URL names.

    Of a URL that is refused only the scheme is repeated: the rest may hold a secret.
    """
    if url == "memory":
        return MemoryStore()
    path = path_of(url)
    if path:
        return await SqliteStore.open(path)
    scheme = url.partition(":")[0]
    if scheme == "etcd":
        raise Invalid(
            f"The store etcd is not built in this version; {ACCEPTED} is accepted", scheme=scheme
        )
    raise Invalid(
        f"No store is named by a URL of scheme {scheme!r}; {ACCEPTED} is accepted", scheme=scheme
    )


def path_of(url: str) -> str:
    """The file of an SQLite store; empty for a store that is no file."""
    return url.removeprefix(SQLITE) if url.startswith(SQLITE) else ""
