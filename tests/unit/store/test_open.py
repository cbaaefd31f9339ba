import asyncio
from pathlib import Path

import pytest

from forewarn.errors import Invalid
from forewarn.store.base import Write
from forewarn.store.memory import MemoryStore
from forewarn.store.open import open_store


def committed(url: str) -> str:
    """Opens the URL, writes one record, and says what kind of store it was."""

    async def main() -> str:
        store = await open_store(url)
        await store.commit([Write("a", b"1", 0)])
        await store.close()
        return type(store).__name__

    return asyncio.run(main())


def test_memory_is_the_store_in_memory() -> None:
    """The demo and the lab start with nothing on the disk."""
    assert committed("memory") == MemoryStore.__name__


def test_sqlite_url_with_four_slashes_is_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same spelling as SQLAlchemy's, so nobody has to learn it."""
    monkeypatch.chdir(tmp_path)

    assert committed("sqlite:///here.db") == "SqliteStore"
    assert committed(f"sqlite:///{tmp_path}/there.db") == "SqliteStore"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.db", "there.db"]


@pytest.mark.parametrize(
    "url",
    ["", "sqlite:///", "sqlite://here.db", "sqlite:here.db", "here.db", "Memory", "memory://"],
)
def test_anything_else_is_refused_with_what_is_accepted(url: str) -> None:
    """A mistyped store must not become an empty one."""
    with pytest.raises(
        Invalid,
        match=r"is not a store URL; .*:////absolute/path.db or etcd://HOST:PORT,HOST:PORT/PREFIX",
    ):
        asyncio.run(open_store(url))


def test_a_refused_url_does_not_repeat_its_password() -> None:
    """Messages go to logs."""
    with pytest.raises(Invalid, match="'postgres:…' is not a store URL") as refusal:
        asyncio.run(open_store("postgres://forewarn:secret@db/forewarn"))
    assert "secret" not in str(refusal.value)
