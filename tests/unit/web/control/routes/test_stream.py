"""The stream: every change as it happens, resumable, bounded, and over when it must be."""

import asyncio
import json
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

from forewarn.auth.tokens import Role
from forewarn.engine.entry import first_number, last_number
from forewarn.errors import StoreLost
from forewarn.history.feed import HistoryFeed
from forewarn.history.query import EntryFilter
from forewarn.store.base import HistoryValue
from forewarn.store.memory import MemoryStore
from forewarn.web.control.routes.fleet import app
from forewarn.web.control.routes.stream import (
    STREAMS_MAX,
    STREAMS_PER_CALLER_MAX,
    frames,
    permission,
)
from tests.unit.web.control_world import PLAIN_FLEET, World, story

SECRET = "5" * 64
Frames = AsyncGenerator[bytes, None]
NUMBERS = [4096, 4097, 4098, 4099, 8192, 12288]
"""The entries of `PLAIN_FLEET`: four VMs in one commit, two scopes that were enabled."""


def parsed(chunk: bytes) -> list[dict[str, str]]:
    """The messages of a chunk, each by its fields; a comment is under the name of nothing."""
    messages = [message for message in chunk.decode().split("\n\n") if message]
    return [
        {name: value for name, _, value in (line.partition(": ") for line in one.splitlines())}
        for one in messages
    ]


async def told(stream: Frames) -> list[tuple[int, str]]:
    """Number and change of what comes next."""
    return [
        (int(one["id"]), json.loads(one["data"])["what"])
        for one in parsed(await anext(stream))
        if "data" in one
    ]


def test_a_stream_begins_now_and_tells_each_change_with_its_number() -> None:
    async def tell(world: World) -> None:
        stream = frames(world.service.feed, EntryFilter(), None)
        assert parsed(await anext(stream)) == [{"retry": "2000", "id": str(last_number(3))}]
        waiting = asyncio.ensure_future(told(stream))
        await world.told("POST", "/api/v1/vms/web-0/restart")

        assert await waiting == [(first_number(4), "scheduled")]
        shown = await world.told("GET", "/api/v1/history?limit=1")
        again = frames(world.service.feed, EntryFilter(), last_number(3))
        await anext(again)
        assert json.loads(parsed(await anext(again))[0]["data"]) == shown["history"][0]

    story(tell, PLAIN_FLEET)


def test_a_stream_goes_on_after_the_number_it_is_told() -> None:
    """A console that lost its connection for a minute missed nothing."""

    async def tell(world: World) -> None:
        stream = frames(world.service.feed, EntryFilter(), NUMBERS[2])
        assert parsed(await anext(stream))[0]["id"] == str(NUMBERS[2])
        assert [number for number, _ in await told(stream)] == NUMBERS[3:]
        everything = frames(world.service.feed, EntryFilter(), 0)
        await anext(everything)
        assert [number for number, _ in await told(everything)] == NUMBERS

    story(tell, PLAIN_FLEET)


def test_what_is_not_kept_any_more_is_told_as_a_gap() -> None:
    """Whoever shows what the stream tells must know that something is missing."""

    async def tell(world: World) -> None:
        await world.engine.store.trim(3)
        stream = frames(world.service.feed, EntryFilter(), NUMBERS[1])
        await anext(stream)

        assert parsed(await anext(stream)) == [
            {"event": "gap", "data": '{"after":4097,"next":12288}'}
        ]
        assert [number for number, _ in await told(stream)] == NUMBERS[5:]

    story(tell, PLAIN_FLEET)


def test_the_numbers_of_another_store_are_a_gap_and_all_of_this_one_is_new() -> None:
    """A service whose store is in memory was started again."""

    async def tell(world: World) -> None:
        stream = frames(world.service.feed, EntryFilter(), 100_000)
        await anext(stream)

        assert parsed(await anext(stream)) == [
            {"event": "gap", "data": '{"after":100000,"next":4096}'}
        ]
        assert [number for number, _ in await told(stream)] == NUMBERS

    story(tell, PLAIN_FLEET)


def test_a_filter_tells_only_what_is_wanted_and_heartbeats_tell_how_far_it_is() -> None:
    """So that who resumes does not look through everything again."""

    async def tell(world: World) -> None:
        stream = frames(world.service.feed, EntryFilter(vm="web-1"), 0, heartbeat_seconds=0.05)
        await anext(stream)
        assert await told(stream) == [(NUMBERS[1], "joined")]

        assert parsed(await anext(stream)) == [{"": "still here", "id": str(last_number(3))}]

    story(tell, PLAIN_FLEET)


def test_a_stream_ends_at_once_when_the_server_stops() -> None:
    async def tell(world: World) -> None:
        stream = frames(world.service.feed, EntryFilter(), None)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        world.service.feed.stop()
        async with asyncio.timeout(5):
            assert await waiting is None
        assert world.service.feed.followers == 0

    story(tell, PLAIN_FLEET)


def test_a_stream_ends_when_the_store_is_lost_and_the_client_comes_again() -> None:
    class Lost(MemoryStore):
        async def history(self, after: int = 0, limit: int = 1000) -> tuple[HistoryValue, ...]:
            raise StoreLost("gone")

    async def tell() -> None:
        stream = frames(HistoryFeed(Lost()), EntryFilter(), 0)
        assert len([chunk async for chunk in stream]) == 1

    asyncio.run(tell())


def test_a_stream_ends_when_its_token_is_revoked() -> None:
    """Revoked means now, not when the connection happens to break."""

    async def tell(world: World) -> None:
        tokens = world.service.tokens
        assert permission(tokens, "")()
        without = permission(tokens, "")
        _, text = await tokens.create("boss", Role.ADMIN, secret=SECRET, by="test")
        assert not without()
        _, text = await tokens.create("ci", Role.VIEWER, secret=SECRET, by="test")
        stream = frames(
            world.service.feed, EntryFilter(), None, is_allowed=permission(tokens, f"Bearer {text}")
        )
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        await tokens.revoke("ci", by="test")
        async with asyncio.timeout(5):
            told_last = await waiting
            assert told_last is None or await anext(stream, None) is None

    story(tell, PLAIN_FLEET)


async def open_stream(
    world: World, query: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
) -> Any:
    """The first two messages that the application sends, as a server would see them; then the
    client leaves.
    """
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    is_gone = asyncio.Event()
    requests = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        for request in requests:
            return request
        await is_gone.wait()
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/api/v1/stream",
        "raw_path": b"/api/v1/stream",
        "query_string": query,
    }
    scope |= {
        "headers": [(b"host", b"127.0.0.1"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8081),
    }
    scope |= {
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
        "asgi": {"version": "3.0"},
        "extensions": {},
    }
    application: Any = app(world.service)
    serving = asyncio.ensure_future(application(scope, receive, sent.put))
    async with asyncio.timeout(5):
        start, first = await sent.get(), await sent.get()
        is_gone.set()
        await serving
    return start, first["body"]


def test_a_client_that_leaves_ends_its_stream() -> None:
    async def tell(world: World) -> None:
        start, first = await open_stream(world)

        assert start["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        assert parsed(first)[0]["id"] == str(last_number(3))
        await asyncio.sleep(0)
        assert world.service.feed.followers == 0

    story(tell, PLAIN_FLEET)


def test_a_browser_resumes_by_the_last_id_it_saw() -> None:
    """The header is newer than the address, which a browser asks for again as it was."""

    async def tell(world: World) -> None:
        _, first = await open_stream(world, b"after=1", ((b"last-event-id", b"3"),))
        assert parsed(first)[0]["id"] == "3"
        _, first = await open_stream(world, b"after=1")
        assert parsed(first)[0]["id"] == "1"

    story(tell, PLAIN_FLEET)


def test_what_makes_no_sense_is_refused() -> None:
    async def tell(world: World) -> None:
        for query in (
            "after=-1",
            "after=x",
            f"after={2**63}",
            "what=statred",
            "since=2030-01-31T12:00:00Z",
        ):
            assert (await world.refused("GET", f"/api/v1/stream?{query}"))[:2] == (400, "invalid")
        assert (await world.refused("GET", "/api/v1/stream", headers={"last-event-id": "x"}))[
            :2
        ] == (400, "invalid")

    story(tell, PLAIN_FLEET)


def test_the_head_of_a_stream_is_refused_however_its_path_is_written() -> None:
    """A HEAD that is answered as the GET would hold one of the places for ever."""

    async def tell(world: World) -> None:
        for path in (
            "/api/v1/stream",
            "/api/v1/stream/",
            "//api/v1/stream",
            "/api//v1///stream//",
            "/api/v1/%73tream",
        ):
            async with asyncio.timeout(5):
                assert (await world.ask("HEAD", f"http://127.0.0.1:8081{path}")).status_code == 405

    story(tell)


def test_there_is_a_limit_to_the_number_of_streams() -> None:
    async def tell(world: World) -> None:
        streams = [
            frames(world.service.feed, EntryFilter(), None, by=f"token {number}")
            for number in range(STREAMS_MAX)
        ]
        for stream in streams:
            await anext(stream)
        status, code, message = await world.refused("GET", "/api/v1/stream")
        assert (status, code, message) == (
            503,
            "unavailable",
            "100 streams are open; at most 100 are accepted",
        )
        assert [chunk async for chunk in frames(world.service.feed, EntryFilter(), None)] == []
        await streams[0].aclose()
        assert (await open_stream(world))[0]["status"] == 200

    story(tell, PLAIN_FLEET)


def test_one_token_cannot_take_the_streams_of_all() -> None:
    """A viewer's token, or a script that never closes its streams, must leave room for the
    operators.
    """

    async def tell(world: World) -> None:
        tokens = world.service.tokens
        await tokens.create("boss", Role.ADMIN, secret=SECRET, by="test")
        viewer, text = await tokens.create("ci", Role.VIEWER, secret="6" * 64, by="test")
        bearer = {"authorization": f"Bearer {text}"}
        streams = [
            frames(world.service.feed, EntryFilter(), None, by=viewer.digest)
            for _ in range(STREAMS_PER_CALLER_MAX)
        ]
        for stream in streams:
            await anext(stream)

        why = "this client already has 10 open streams; the limit is 10"
        assert await world.refused("GET", "/api/v1/stream", headers=bearer) == (
            503,
            "unavailable",
            why,
        )
        assert [
            chunk
            async for chunk in frames(world.service.feed, EntryFilter(), None, by=viewer.digest)
        ] == []
        boss = (b"authorization", f"Bearer fw_boss_{SECRET}".encode())
        assert (await open_stream(world, headers=(boss,)))[0]["status"] == 200
        await streams[0].aclose()
        assert (
            await open_stream(
                world, headers=((b"authorization", bearer["authorization"].encode()),)
            )
        )[0]["status"] == 200

    story(tell, PLAIN_FLEET)


def test_a_long_history_is_told_in_pieces() -> None:
    """A client that reads slowly holds one piece in memory, not all of it."""

    async def tell(world: World) -> None:
        for _ in range(300):
            await world.operations.restart("web-0", by="x" * 1000)
            await world.operations.cancel(
                (await world.told("GET", "/api/v1/events"))["events"][0]["id"], by="y" * 1000
            )
            await world.clock.advance(timedelta(seconds=1))
        stream = frames(world.service.feed, EntryFilter(), 0)
        await anext(stream)
        numbers: list[int] = []
        while len(numbers) < 606:
            chunk = await anext(stream)
            assert len(chunk) < 40_000
            numbers += [int(one["id"]) for one in parsed(chunk)]

        assert numbers == sorted(set(numbers))
        assert numbers[:6] == NUMBERS

    story(tell, PLAIN_FLEET)
