"""The store that a URL names, as `--store` takes it."""

from forewarn.errors import Invalid
from forewarn.store.base import Store, Upgrade
from forewarn.store.memory import MemoryStore
from forewarn.store.sqlite import SqliteStore

SQLITE = "sqlite:///"
ACCEPTED = "memory, sqlite:///relative.db or sqlite:////absolute/path.db"


async def open_store(url: str, upgrade: Upgrade | None = None) -> Store:
    """Open the store. `upgrade` rewrites the values of an older one.

    An error repeats only the scheme of the URL: the rest may hold a secret.
    """
    if url == "memory":
        return MemoryStore()
    path = path_of(url)
    if path:
        return await SqliteStore.open(path, upgrade=upgrade)
    scheme = url.partition(":")[0]
    if scheme == "etcd":
        raise Invalid(
            f"the etcd store is not part of this version; {ACCEPTED} is accepted", scheme=scheme
        )
    raise Invalid(f"unknown store scheme {scheme!r}; {ACCEPTED} is accepted", scheme=scheme)


def path_of(url: str) -> str:
    """The file of an SQLite store; empty for other stores."""
    return url.removeprefix(SQLITE) if url.startswith(SQLITE) else ""
