"""Tokens as every server knows them: in the order of the store's revisions, whoever tells first."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

from forewarn.auth.token import Role, Token
from forewarn.auth.tokens import TOKEN_KEY, Tokens
from forewarn.core.timing import Timing
from forewarn.engine.clock import VirtualClock
from forewarn.engine.engine import Engine
from forewarn.errors import Refused
from forewarn.store.base import Record, Snapshot, Store
from forewarn.store.memory import MemoryStore

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
SECRET = "ab" * 32


class Server(NamedTuple):
    engine: Engine
    tokens: Tokens


def server_on(store: Store) -> Server:
    engine = Engine(store, VirtualClock(NOON), Timing())
    return Server(engine, Tokens(engine))


def story(tell: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = server_on(MemoryStore())
        await tell(server)
        await server.engine.close()

    asyncio.run(run())


def test_old_news_brings_no_revoked_token_back() -> None:
    """A server hears of its own writes again, late, from the store it follows."""

    async def tell(server: Server) -> None:
        await server.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        [made] = (await server.engine.store.load("token/")).records
        await server.tokens.revoke("root", by="test")

        server.engine.learn(made)

        assert not server.tokens
        assert server.tokens.holder(f"fw_root_{SECRET}") is None

    story(tell)


def test_a_name_can_be_used_again_and_the_old_text_is_good_no_more() -> None:
    """The name is public; the secret is what counts."""

    async def tell(server: Server) -> None:
        await server.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        await server.tokens.revoke("root", by="test")
        _, text = await server.tokens.create("root", Role.ADMIN, secret="cd" * 32, by="test")

        assert server.tokens.holder(f"fw_root_{SECRET}") is None
        assert server.tokens.holder(text) is not None

    story(tell)


def test_after_the_store_was_lost_only_what_it_holds_is_good() -> None:
    """A revocation that was not heard of while nothing was heard still counts."""

    async def tell(server: Server) -> None:
        other = server_on(server.engine.store)
        await server.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        await other.engine.load()
        await other.tokens.create("ci", Role.VIEWER, secret=SECRET, by="test")
        await other.tokens.revoke("ci", by="test")
        server.engine.learn(Record(TOKEN_KEY.format("ci"), None, 10))
        await server.engine.load()

        assert [token.name for token in server.tokens.all()] == ["root"]
        await other.tokens.revoke("root", by="test")
        await server.engine.load()
        assert server.tokens.all() == []

    story(tell)


class HeldStore(MemoryStore):
    """A store whose loads can be held back: what they give is as old as the moment when they began."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded, self.release = asyncio.Event(), asyncio.Event()
        self.release.set()

    async def load(self, prefix: str = "") -> Snapshot:
        snapshot = await super().load(prefix)
        self.is_loaded.set()
        await self.release.wait()
        return snapshot


def test_a_token_revoked_while_the_store_is_read_again_stays_revoked() -> None:
    """A reload shows the store as it was when it began; it must not bring back what was revoked
    since.
    """

    async def tell() -> None:
        store = HeldStore()
        server = server_on(store)
        await with_two_admins(server)
        store.is_loaded.clear()
        store.release.clear()
        reload = asyncio.create_task(server.engine.load())
        await store.is_loaded.wait()
        await server.tokens.revoke("b", by="test")
        _, new = await server.tokens.create("c", Role.VIEWER, secret="ef" * 32, by="test")
        store.release.set()
        await reload

        assert [token.name for token in server.tokens.all()] == ["a", "c", "ci"]
        assert server.tokens.holder(new) is not None
        await server.engine.close()

    asyncio.run(tell())


def test_two_servers_cannot_make_one_name_twice() -> None:
    """The second would shut the holder of the first out, unnoticed."""

    async def tell(server: Server) -> None:
        other = server_on(server.engine.store)
        await server.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        with pytest.raises(Refused, match="there is a token 'root' already"):
            await other.tokens.create("root", Role.ADMIN, secret="cd" * 32, by="test")

    story(tell)


def test_an_admin_that_has_expired_is_no_admin_who_could_stay() -> None:
    """The last one who can still come in goes last."""

    async def tell(server: Server) -> None:
        clock = server.engine.clock
        assert isinstance(clock, VirtualClock)
        await server.tokens.create(
            "old", Role.ADMIN, secret=SECRET, by="t", expires_in=timedelta(hours=1)
        )
        await server.tokens.create("new", Role.ADMIN, secret="cd" * 32, by="t")
        await clock.advance(timedelta(hours=1))

        with pytest.raises(Refused, match="new is the last admin's token"):
            await server.tokens.revoke("new", by="t")
        await server.tokens.revoke("old", by="t")
        await server.tokens.revoke("new", by="t")

    story(tell)


def test_two_admins_cannot_revoke_each_other_at_once() -> None:
    """Each was not the last when it was asked; together they would lock everybody out."""

    async def tell(server: Server) -> None:
        other = await with_two_admins(server)
        for there in (server, other):
            done = await asyncio.gather(
                server.tokens.revoke("a", by="b"),
                there.tokens.revoke("b", by="a"),
                return_exceptions=True,
            )

            assert [type(one) for one in done] == [Token, Refused]
            assert [token.name for token in there.tokens.all()] == ["b", "ci"]
            await there.tokens.create("a", Role.ADMIN, secret=SECRET, by="test")
            await server.engine.load()

    story(tell)


def test_a_first_token_that_was_an_admins_elsewhere_is_known_to_who_decides_here() -> None:
    """A server that has not heard of a token yet decides again once it has."""

    async def tell(server: Server) -> None:
        other = await with_two_admins(server)
        await server.tokens.create("deploy", Role.VIEWER, secret=SECRET, by="test")
        await other.tokens.create("second", Role.VIEWER, secret=SECRET, by="test")

        assert [token.name for token in other.tokens.all()] == ["a", "b", "ci", "deploy", "second"]

    story(tell)


async def with_two_admins(server: Server) -> Server:
    """Two admins and a viewer, and another server that knows them."""
    other = server_on(server.engine.store)
    for name, role in (("a", Role.ADMIN), ("b", Role.ADMIN), ("ci", Role.VIEWER)):
        await server.tokens.create(name, role, secret=SECRET, by="test")
    await other.engine.load()
    return other
