"""The stream: every change as it happens, resumable and bounded."""

import asyncio
import json
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

from litestar.response import ServerSentEventMessage

from forewarn.auth.tokens import Role
from forewarn.engine.entry import first_number, last_number
from forewarn.errors import StoreLost
from forewarn.history.feed import HistoryFeed
from forewarn.history.query import EntryFilter
from forewarn.store.base import POSITION_MAX, HistoryValue
from forewarn.store.memory import MemoryStore
from forewarn.web.control.app import make_app
from forewarn.web.control.routes.stream import (
    STREAMS_MAX,
    STREAMS_PER_PRINCIPAL_MAX,
    follow_history,
    make_permission,
)
from tests.history import write_history
from tests.unit.history.test_query import joined
from tests.unit.web.control_world import PLAIN_FLEET, World, main, start

SECRET = "5" * 64
NUMBERS = [4096, 4097, 4098, 4099, 8192, 12288]
"""The entries of `PLAIN_FLEET`: four VMs in one commit, two scopes that were enabled."""
Messages = AsyncGenerator[ServerSentEventMessage, None]


async def next_message(stream: Messages) -> dict[str, str]:
    return parse_message((await anext(stream)).encode())


def parse_message(text: bytes) -> dict[str, str]:
    """The fields of one message; a comment has no name."""
    lines = text.decode().removesuffix("\n\n").split("\n")
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


async def next_entries(stream: Messages, count: int) -> list[tuple[int, str]]:
    """Number and change of the next entries."""
    messages = [await next_message(stream) for _ in range(count)]
    return [(int(one["id"]), json.loads(one["data"])["what"]) for one in messages]


def test_stream_sends_new_entries_with_their_numbers() -> None:
    async def act(world: World) -> None:
        stream = follow_history(world.service.feed, EntryFilter(), None)
        assert await next_message(stream) == {"id": str(last_number(3)), "retry": "2000"}
        waiting = asyncio.ensure_future(next_entries(stream, 1))
        await world.json("POST", "/api/v1/vms/web-0/restart")

        assert await waiting == [(first_number(4), "scheduled")]
        shown = await world.json("GET", "/api/v1/history?limit=1")
        again = follow_history(world.service.feed, EntryFilter(), last_number(3))
        await anext(again)
        assert json.loads((await next_message(again))["data"]) == shown["history"][0]

    main(act, PLAIN_FLEET)


def test_stream_resumes_after_a_number() -> None:
    """A console that lost its connection for a minute missed nothing."""

    async def act(world: World) -> None:
        stream = follow_history(world.service.feed, EntryFilter(), NUMBERS[2])
        assert (await next_message(stream))["id"] == str(NUMBERS[2])
        assert [number for number, _ in await next_entries(stream, 3)] == NUMBERS[3:]
        everything = follow_history(world.service.feed, EntryFilter(), 0)
        await anext(everything)
        assert [number for number, _ in await next_entries(everything, 6)] == NUMBERS

    main(act, PLAIN_FLEET)


def test_trimmed_entries_are_reported_as_a_gap() -> None:
    """A console must know that something is missing."""

    async def act(world: World) -> None:
        await world.engine.store.trim(3)
        stream = follow_history(world.service.feed, EntryFilter(), NUMBERS[1])
        await anext(stream)

        assert await next_message(stream) == {"event": "gap", "data": '{"after":4097,"next":12288}'}
        assert [number for number, _ in await next_entries(stream, 1)] == NUMBERS[5:]

    main(act, PLAIN_FLEET)


def test_a_number_of_another_store_is_a_gap() -> None:
    """A service with a store in memory was restarted: all its entries are new."""

    async def act(world: World) -> None:
        stream = follow_history(world.service.feed, EntryFilter(), 100_000)
        await anext(stream)

        assert await next_message(stream) == {
            "event": "gap",
            "data": '{"after":100000,"next":4096}',
        }
        assert [number for number, _ in await next_entries(stream, 6)] == NUMBERS

    main(act, PLAIN_FLEET)


def test_filtered_stream_sends_heartbeats_with_its_position() -> None:
    """A client that resumes does not scan everything again."""

    async def act(world: World) -> None:
        stream = follow_history(
            world.service.feed, EntryFilter(vm="web-1"), 0, heartbeat_seconds=0.05
        )
        await anext(stream)
        assert await next_entries(stream, 1) == [(NUMBERS[1], "joined")]

        assert await next_message(stream) == {"": "heartbeat", "id": str(last_number(3))}

    main(act, PLAIN_FLEET)


def test_stream_ends_when_the_server_stops() -> None:
    async def act(world: World) -> None:
        stream = follow_history(world.service.feed, EntryFilter(), None)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        world.service.feed.stop()
        async with asyncio.timeout(5):
            assert await waiting is None
        assert not world.service.feed.followers

    main(act, PLAIN_FLEET)


def test_stream_ends_when_the_store_is_lost() -> None:
    class Lost(MemoryStore):
        async def history(self, after: int = 0, limit: int = 1000) -> tuple[HistoryValue, ...]:
            raise StoreLost("gone")

    async def act() -> None:
        stream = follow_history(HistoryFeed(Lost()), EntryFilter(), 0)
        assert len([chunk async for chunk in stream]) == 1

    asyncio.run(act())


def test_stream_of_a_lost_store_is_refused() -> None:
    """An empty stream with a 200 is no reason for a client to ask another server."""

    class Lost(MemoryStore):
        is_lost = False

        async def latest(
            self, before: int = POSITION_MAX, limit: int = 1000
        ) -> tuple[HistoryValue, ...]:
            if self.is_lost:
                raise StoreLost("gone")
            return await super().latest(before, limit)

    async def act() -> None:
        store = Lost()
        async with start(PLAIN_FLEET, store=store) as world:
            store.is_lost = True
            assert await world.error("GET", "/api/v1/stream") == (503, "store_lost", "gone")

    asyncio.run(act())


def test_stream_ends_when_its_token_is_revoked() -> None:
    """Revoked means now, not when the connection happens to break."""

    async def act(world: World) -> None:
        tokens = world.service.tokens
        assert make_permission(world.service, "", "")()
        without = make_permission(world.service, "", "")
        _, text = await tokens.create("boss", Role.ADMIN, secret=SECRET, by="test")
        assert not without()
        _, text = await tokens.create("ci", Role.VIEWER, secret=SECRET, by="test")
        stream = follow_history(
            world.service.feed,
            EntryFilter(),
            None,
            is_allowed=make_permission(world.service, f"Bearer {text}", ""),
        )
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        await tokens.revoke("ci", by="test")
        async with asyncio.timeout(5):
            last = await waiting
            assert last is None or await anext(stream, None) is None

    main(act, PLAIN_FLEET)


async def open_stream(
    world: World, query: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
) -> Any:
    """The head and the first chunk of the response; then the client disconnects."""
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
    application: Any = make_app(world.service)
    serving = asyncio.ensure_future(application(scope, receive, sent.put))
    async with asyncio.timeout(5):
        start, first = await sent.get(), await sent.get()
        is_gone.set()
        await serving
    return start, first["body"]


def test_stream_ends_when_its_client_disconnects() -> None:
    async def act(world: World) -> None:
        start, first = await open_stream(world)

        assert start["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        assert parse_message(first)["id"] == str(last_number(3))
        await asyncio.sleep(0)
        assert not world.service.feed.followers

    main(act, PLAIN_FLEET)


def test_last_event_id_wins_over_after() -> None:
    """A reconnecting browser sends the header, and the URL as it was."""

    async def act(world: World) -> None:
        _, first = await open_stream(world, b"after=1", ((b"last-event-id", b"3"),))
        assert parse_message(first)["id"] == "3"
        _, first = await open_stream(world, b"after=1")
        assert parse_message(first)["id"] == "1"

    main(act, PLAIN_FLEET)


def test_invalid_parameters_are_rejected() -> None:
    async def act(world: World) -> None:
        for query in (
            "after=-1",
            "after=x",
            f"after={2**63}",
            "what=statred",
            "since=2030-01-31T12:00:00Z",
        ):
            assert (await world.error("GET", f"/api/v1/stream?{query}"))[:2] == (400, "invalid")
        assert (await world.error("GET", "/api/v1/stream", headers={"last-event-id": "x"}))[:2] == (
            400,
            "invalid",
        )

    main(act, PLAIN_FLEET)


def test_head_of_the_stream_is_rejected() -> None:
    """Served as a GET it would hold a stream open for ever, however the path is written."""

    async def act(world: World) -> None:
        for path in (
            "/api/v1/stream",
            "/api/v1/stream/",
            "//api/v1/stream",
            "/api//v1///stream//",
            "/api/v1/%73tream",
        ):
            async with asyncio.timeout(5):
                assert (
                    await world.request("HEAD", f"http://127.0.0.1:8081{path}")
                ).status_code == 405

    main(act)


def test_number_of_streams_is_limited() -> None:
    async def act(world: World) -> None:
        streams = [
            follow_history(world.service.feed, EntryFilter(), None, by=f"token {number}")
            for number in range(STREAMS_MAX)
        ]
        for stream in streams:
            await anext(stream)
        status, code, message = await world.error("GET", "/api/v1/stream")
        assert (status, code, message) == (
            503,
            "unavailable",
            "100 streams are open; at most 100 are accepted",
        )
        assert [
            chunk async for chunk in follow_history(world.service.feed, EntryFilter(), None)
        ] == []
        await streams[0].aclose()
        assert (await open_stream(world))[0]["status"] == 200

    main(act, PLAIN_FLEET)


def test_number_of_streams_per_token_is_limited() -> None:
    """A script that never closes its streams must leave room for operators."""

    async def act(world: World) -> None:
        tokens = world.service.tokens
        await tokens.create("boss", Role.ADMIN, secret=SECRET, by="test")
        viewer, text = await tokens.create("ci", Role.VIEWER, secret="6" * 64, by="test")
        bearer = {"authorization": f"Bearer {text}"}
        streams = [
            follow_history(world.service.feed, EntryFilter(), None, by=viewer.digest)
            for _ in range(STREAMS_PER_PRINCIPAL_MAX)
        ]
        for stream in streams:
            await anext(stream)

        why = "this client already has 10 open streams; the limit is 10"
        assert await world.error("GET", "/api/v1/stream", headers=bearer) == (
            503,
            "unavailable",
            why,
        )
        assert [
            chunk
            async for chunk in follow_history(
                world.service.feed, EntryFilter(), None, by=viewer.digest
            )
        ] == []
        boss = (b"authorization", f"Bearer fw_boss_{SECRET}".encode())
        assert (await open_stream(world, headers=(boss,)))[0]["status"] == 200
        await streams[0].aclose()
        assert (
            await open_stream(
                world, headers=((b"authorization", bearer["authorization"].encode()),)
            )
        )[0]["status"] == 200

    main(act, PLAIN_FLEET)


def test_a_long_history_is_sent_entry_by_entry() -> None:
    """A slow client holds one entry in memory, not the whole history."""

    async def act(world: World) -> None:
        for _ in range(300):
            placed = await world.operations.restart("web-0", by="x")
            assert placed is not None
            await world.operations.cancel(placed.event.id, by="y")
            await world.clock.advance(timedelta(seconds=1))
        stream = follow_history(world.service.feed, EntryFilter(), 0)
        await anext(stream)

        numbers = [number for number, _ in await next_entries(stream, 606)]
        assert numbers == sorted(set(numbers))
        assert numbers[:6] == NUMBERS

    main(act, PLAIN_FLEET)


def test_polls_pass_between_the_entries_of_a_stream() -> None:
    """A viewer may read the whole history again and again."""

    async def run() -> None:
        store = MemoryStore()
        await write_history(store, *(joined(number) for number in range(50)))
        messages = follow_history(HistoryFeed(store), EntryFilter(), 0)
        turns, last = 0, asyncio.Event()

        async def read() -> None:
            for _ in range(51):
                await anext(messages)
            last.set()

        reading = asyncio.create_task(read())
        while not last.is_set():
            await asyncio.sleep(0)
            turns += 1
        await reading
        await messages.aclose()

        assert turns >= 50

    asyncio.run(run())


def test_polls_pass_while_a_stream_finds_nothing() -> None:
    """A filter that matches few entries does not make a stream read a page in one piece."""

    async def run() -> None:
        store, taken = MemoryStore(), 0
        await write_history(store, *(joined(number) for number in range(50)))

        async def take_turn() -> None:
            nonlocal taken
            taken += 1

        values = await store.history()
        for wanted in (EntryFilter(vm="vm-49"), EntryFilter(vm="absent")):
            taken = 0
            assert len([entry async for entry in wanted.select(values, take_turn)]) <= 1
            assert taken == 2  # of 20 values each

    asyncio.run(run())
