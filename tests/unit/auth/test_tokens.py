"""Tokens on several servers of one store."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest

from forewarn.auth.tokens import TOKEN_KEY, Role, Token, Tokens
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.errors import Error, Refused
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import Record, Snapshot, Store
from forewarn.store.memory import MemoryStore

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
SECRET = "ab" * 32


class Server(NamedTuple):
    engine: Engine
    tokens: Tokens

    async def create(self, name: str, role: Role = Role.ADMIN, **options: Any) -> str:
        """A token; its text."""
        _, text = await self.tokens.create(name, role, secret=SECRET, by="test", **options)
        return text

    def names(self) -> list[str]:
        return [token.name for token in self.tokens.all()]


def server_on(store: Store) -> Server:
    engine = Engine(store, VirtualClock(NOON), Timing())
    return Server(engine, Tokens(engine))


def with_server(test: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = server_on(MemoryStore())
        await test(server)
        await server.engine.close()

    asyncio.run(run())


async def with_two_admins(server: Server) -> Server:
    """Two admins and a viewer, and another server that knows them."""
    await server.create("a")
    await server.create("b")
    await server.create("ci", Role.VIEWER)
    other = server_on(server.engine.store)
    await other.engine.load()
    return other


def test_an_old_record_does_not_bring_a_revoked_token_back() -> None:
    """A server sees its own writes again, late, in its watch."""

    async def test(server: Server) -> None:
        text = await server.create("root")
        [created] = (await server.engine.store.load("token/")).records
        await server.tokens.revoke("root", by="test")

        server.engine.learn(created)

        assert not server.tokens
        assert server.tokens.authenticate(text) is None

    with_server(test)


def test_requests_do_not_copy_all_tokens() -> None:
    """Every request of the control API asks whether a token is required."""

    async def test(server: Server) -> None:
        for number in range(1000):
            token = Token(f"t-{number}", Role.VIEWER, "", NOON)
            server.engine.show(TOKEN_KEY.format(token.name), token, number + 1)
        tracemalloc.start()
        try:
            assert server.tokens
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert peak_bytes < 2000

    with_server(test)


def test_a_new_token_with_an_old_name_has_a_new_secret() -> None:
    """The name is public; the secret is what counts."""

    async def test(server: Server) -> None:
        old = await server.create("root")
        await server.tokens.revoke("root", by="test")
        _, new = await server.tokens.create("root", Role.ADMIN, secret="cd" * 32, by="test")

        assert server.tokens.authenticate(old) is None
        assert server.tokens.authenticate(new) is not None

    with_server(test)


def test_a_reload_drops_tokens_that_were_revoked_meanwhile() -> None:
    """The server may have missed the revocation while the store was lost."""

    async def test(server: Server) -> None:
        other = server_on(server.engine.store)
        await server.create("root")
        await other.engine.load()
        await other.create("ci", Role.VIEWER)
        await other.tokens.revoke("ci", by="test")
        server.engine.learn(Record(TOKEN_KEY.format("ci"), None, 10))
        await server.engine.load()

        assert server.names() == ["root"]
        await other.tokens.revoke("root", by="test")
        await server.engine.load()
        assert server.names() == []

    with_server(test)


class SlowStore(MemoryStore):
    """A store whose loads wait, and then return what was there when they began."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded, self.release = asyncio.Event(), asyncio.Event()
        self.release.set()

    async def load(self, prefix: str = "") -> Snapshot:
        snapshot = await super().load(prefix)
        self.is_loaded.set()
        await self.release.wait()
        return snapshot


def test_a_token_revoked_during_a_reload_stays_revoked() -> None:
    """A reload returns the store as it was at its start."""

    async def run() -> None:
        store = SlowStore()
        server = server_on(store)
        await with_two_admins(server)
        store.is_loaded.clear()
        store.release.clear()
        reload = asyncio.create_task(server.engine.load())
        await store.is_loaded.wait()
        await server.tokens.revoke("b", by="test")
        text = await server.create("c", Role.VIEWER)
        store.release.set()
        await reload

        assert server.names() == ["a", "c", "ci"]
        assert server.tokens.authenticate(text) is not None
        await server.engine.close()

    asyncio.run(run())


def test_two_servers_cannot_create_the_same_name() -> None:
    """The second would lock out the holder of the first."""

    async def test(server: Server) -> None:
        other = server_on(server.engine.store)
        await server.create("root")
        with pytest.raises(Refused, match="token 'root' already exists"):
            await other.tokens.create("root", Role.ADMIN, secret="cd" * 32, by="test")

    with_server(test)


def test_an_expired_admin_does_not_count_as_an_admin() -> None:
    """The last admin who can still log in is revoked last."""

    async def test(server: Server) -> None:
        clock = server.engine.clock
        assert isinstance(clock, VirtualClock)
        await server.create("old", expires_in=timedelta(hours=1))
        await server.create("new")
        await clock.advance(timedelta(hours=1))

        with pytest.raises(Refused, match="new is the last admin token"):
            await server.tokens.revoke("new", by="test")
        await server.tokens.revoke("old", by="test")
        await server.tokens.revoke("new", by="test")

    with_server(test)


def test_two_admins_cannot_revoke_each_other_at_once() -> None:
    """Each would see the other one as the remaining admin."""

    async def test(server: Server) -> None:
        other = await with_two_admins(server)
        for there in (server, other):
            results = await asyncio.gather(
                server.tokens.revoke("a", by="b"),
                there.tokens.revoke("b", by="a"),
                return_exceptions=True,
            )

            assert [type(result) for result in results] == [Token, Refused]
            assert there.names() == ["b", "ci"]
            await there.create("a")
            await server.engine.load()

    with_server(test)


@pytest.mark.parametrize("revoked_first", [True, False])
def test_a_viewer_cannot_be_created_while_the_only_admin_is_revoked(revoked_first: bool) -> None:
    """Otherwise a viewer would be left, and nobody could create or revoke tokens."""

    async def test(server: Server) -> None:
        other = server_on(server.engine.store)
        await server.create("root")
        await other.engine.load()
        revoke = server.tokens.revoke("root", by="test")
        create = other.create("ci", Role.VIEWER)
        calls = [revoke, create] if revoked_first else [create, revoke]
        results = await asyncio.gather(*calls, return_exceptions=True)

        assert [isinstance(result, Error) for result in results] == [False, True]
        await server.engine.load()
        assert server.names() == ([] if revoked_first else ["ci", "root"])

    with_server(test)


def test_a_server_without_news_decides_on_the_current_tokens() -> None:
    """It reads the store before it refuses."""

    async def test(server: Server) -> None:
        other = server_on(server.engine.store)
        await server.create("root")
        await other.create("ci", Role.VIEWER)

        assert other.names() == ["ci", "root"]

    with_server(test)
