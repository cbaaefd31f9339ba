"""Webhooks: chosen changes arrive in order, at least once; a dead receiver delays no other."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Entry, encode_all, make_entry
from forewarn.errors import StoreLost, Unavailable
from forewarn.history.feed import HistoryFeed
from forewarn.history.webhook_sender import WebhookSender
from forewarn.history.webhooks import (
    REJECTIONS_MAX,
    Cursor,
    Webhook,
    WebhookContext,
    get_identity,
    register_records,
)
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import Lease, Record
from forewarn.store.memory import MemoryStore
from tests.builders import NOON

URL = "https://example.org/hook?key=hidden"
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


class Receiver(WebhookSender):
    """Accepts everything, or does what the test sets."""

    name = "https://example.org"

    def __init__(self) -> None:
        self.received: list[str] = []
        self.grid: list[tuple[Any, dict[str, str]]] = []
        self.attempts = 0
        self.status = 200
        self.problem = ""
        self.rejects = self.fails_at = ""
        self.is_hanging = self.has_bug = False

    async def post(self, body: bytes, headers: Mapping[str, str]) -> int:
        self.attempts += 1
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.has_bug:
            raise KeyError("a bug")
        if self.problem:
            raise Unavailable(self.problem)
        message = json.loads(body)
        if isinstance(message, list):  # as Event Grid sends it
            self.grid.append((message[0], dict(headers)))
            return self.status
        detail = message["data"]["detail"]
        if self.rejects == detail:
            return 422
        if self.fails_at == detail:
            return 503
        if 200 <= self.status < 300:
            self.received.append(detail)
        return self.status

    async def close(self) -> None: ...


class Server:
    """One server on the store: an engine, and the webhooks that it delivers."""

    def __init__(self, store: MemoryStore, clock: VirtualClock) -> None:
        self.engine = Engine(store, clock, Timing())
        register_records(self.engine)
        self.feed = HistoryFeed(store)
        self.engine.subscribe(lambda commit: self.feed.notify())
        self.lease: Lease | None = None
        self.work: list[asyncio.Task[None]] = []

    def webhook(
        self,
        receiver: Receiver,
        *,
        url: str = URL,
        random: float = 1.0,
        is_event_grid: bool = False,
    ) -> Webhook:
        context = WebhookContext(
            engine=self.engine,
            feed=self.feed,
            identity="7b1c",
            changes={ChangeKind.STARTED, ChangeKind.COMPLETED},
            secrets=[b"x" * 32],
            is_event_grid=is_event_grid,
            random=lambda: random,
        )
        return Webhook(url, receiver, context)

    async def start(self, webhook: Webhook) -> None:
        if self.lease is None:
            await self.engine.load()
            self.lease = await self.engine.store.lease("webhooks", 10)
        assert self.lease is not None
        await webhook.register()
        self.work.append(asyncio.create_task(webhook.run(self.lease)))

    async def stop(self) -> None:
        for task in self.work:
            task.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)
        if self.lease is not None:
            await self.lease.release()


class World:
    """A store, a clock that the test moves, and any number of servers."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.clock = VirtualClock(NOON)
        self.servers: list[Server] = []

    def server(self) -> Server:
        self.servers.append(Server(self.store, self.clock))
        return self.servers[-1]

    async def start(self, receiver: Receiver, **options: Any) -> Webhook:
        """A webhook on a server of its own."""
        server = self.server()
        webhook = server.webhook(receiver, **options)
        await server.start(webhook)
        return webhook

    async def happens(self, *details: str, what: ChangeKind = ChangeKind.STARTED) -> None:
        """Each change in a commit of its own."""
        for detail in details:
            await self.store.commit([], entries=encode_all([entry(detail, what)]))
        await self.notify()

    async def notify(self) -> None:
        for server in self.servers:
            server.feed.notify()
        await self.wait(timedelta(0))

    async def wait(self, duration: timedelta) -> None:
        await self.clock.advance(duration)


def entry(detail: str, what: ChangeKind = ChangeKind.STARTED) -> Entry:
    return make_entry(Change(what=what, event="E1", detail=detail), at=NOON, by="ann", scope="web")


def with_world(
    test: Callable[[World], Coroutine[Any, Any, None]], store: type[MemoryStore] = MemoryStore
) -> None:
    async def run() -> None:
        world = World(store())
        try:
            await test(world)
        finally:
            for server in world.servers:
                await server.stop()

    asyncio.run(run())


def test_event_grid_receiver_gets_only_changes_of_events() -> None:
    """And the same id again, if it has to be sent again."""

    async def test(world: World) -> None:
        receiver = Receiver()
        await world.start(receiver, is_event_grid=True)
        receiver.status = 503
        silent = entry("silent", ChangeKind.COMPLETED)
        event = replace(entry("event"), resources=("web-0",), duration_seconds=-1)
        await world.store.commit([], entries=encode_all([silent, event]))
        await world.notify()
        receiver.status = 200
        await world.wait(HOUR)

        (first, headers), (second, _) = receiver.grid
        assert first == second
        assert first["id"] == headers["webhook-id"] == "7b1c-12289"
        assert first["data"]["resourceInfo"]["properties"]["EventStatus"] == "Started"
        assert headers["content-type"] == "application/json; charset=utf-8"
        assert headers["aeg-event-type"] == "Notification"
        assert headers["webhook-signature"].startswith("v1,")

    with_world(test)


def test_chosen_changes_arrive_in_order_from_the_beginning_on() -> None:
    async def test(world: World) -> None:
        receiver = Receiver()
        await world.happens("before")
        webhook = await world.start(receiver)
        await world.happens("1", "2")
        await world.happens("not chosen", what=ChangeKind.JOINED)
        await world.happens("3", what=ChangeKind.COMPLETED)

        assert receiver.received == ["1", "2", "3"]
        assert (webhook.delivered, webhook.failed, webhook.lost) == (3, 0, 0)
        assert not webhook.is_failing

    with_world(test)


def test_changes_of_one_commit_are_separate_messages() -> None:
    """One that fails is repeated without those before it."""

    async def test(world: World) -> None:
        receiver = Receiver()
        await world.start(receiver)
        receiver.fails_at = "2"
        entries = [entry("1"), entry("not chosen", ChangeKind.JOINED), entry("2"), entry("3")]
        await world.store.commit([], entries=encode_all(entries))
        await world.notify()
        assert receiver.received == ["1"]
        receiver.fails_at = ""
        await world.wait(SECOND)

        assert receiver.received == ["1", "2", "3"]

    with_world(test)


def test_a_failing_receiver_is_tried_less_often_and_misses_nothing() -> None:
    """After 1, 2, 4 … seconds, at most five minutes."""

    async def test(world: World) -> None:
        receiver = Receiver()
        webhook = await world.start(receiver)
        receiver.status = 503
        await world.happens("1", "2")
        seconds: list[int] = []
        for second in range(16):
            if receiver.attempts > len(seconds):
                seconds.append(second)
            await world.wait(SECOND)
        assert seconds == [0, 1, 3, 7, 15]
        await world.wait(HOUR)
        assert 15 <= receiver.attempts <= 22
        assert (receiver.received, webhook.is_failing, webhook.delivered) == ([], True, 0)

        receiver.status = 204
        await world.wait(timedelta(minutes=5))
        assert (receiver.received, webhook.is_failing) == (["1", "2"], False)

    with_world(test)


def test_after_a_success_the_pauses_start_again() -> None:
    """Yesterday's outage is no reason to be slow today."""

    async def test(world: World) -> None:
        receiver = Receiver()
        await world.start(receiver)
        receiver.problem = "no response"
        await world.happens("1", "2")
        await world.wait(HOUR)
        receiver.problem, receiver.fails_at = "", "2"
        while not receiver.received:  # ends: it is tried every five minutes
            await world.wait(SECOND)
        attempts = receiver.attempts
        await world.wait(4 * SECOND)

        assert receiver.attempts - attempts == 2  # after 1 second, and after 2 more

    with_world(test)


def test_randomness_shortens_a_pause_by_half_at_most() -> None:
    """Receivers that failed together are not all tried at the same time."""

    async def test(world: World) -> None:
        receiver = Receiver()
        await world.start(receiver, random=0.0)
        receiver.problem = "no response"
        await world.happens("1")
        await world.wait(0.4 * SECOND)
        assert receiver.attempts == 1
        await world.wait(0.1 * SECOND)
        assert receiver.attempts == 2

    with_world(test)


def test_a_dead_receiver_delays_no_other() -> None:
    async def test(world: World) -> None:
        dead, hanging, good = Receiver(), Receiver(), Receiver()
        dead.problem, hanging.is_hanging = "no response", True
        server = world.server()
        for number, receiver in enumerate((dead, hanging, good)):
            await server.start(server.webhook(receiver, url=f"{URL}{number}"))
        await world.happens("1")

        assert good.received == ["1"]

    with_world(test)


def test_bug_with_one_webhook_stops_no_other() -> None:
    """All of them are one work of the server, which ends when it ends."""

    async def test(world: World) -> None:
        buggy, receiver = Receiver(), Receiver()
        buggy.has_bug = True
        server = world.server()
        await server.start(server.webhook(buggy, url=f"{URL}&first"))
        await server.start(server.webhook(receiver))
        await world.happens("a", "b")
        assert (buggy.attempts, receiver.received) == (1, ["a", "b"])
        buggy.has_bug = False
        await world.wait(15 * SECOND)
        assert buggy.received == ["a", "b"]

    with_world(test)


def test_the_next_server_continues_where_the_last_one_stopped() -> None:
    """Also with what happened while there was none, and without repeating anything."""

    async def test(world: World) -> None:
        first, second = Receiver(), Receiver()
        await world.start(first)
        first.fails_at = "3"
        await world.happens("1", "2", "3")
        await world.servers[0].stop()
        await world.happens("4")
        await world.wait(SECOND)
        await world.start(second)
        await world.wait(timedelta(0))

        assert (first.received, second.received) == (["1", "2"], ["3", "4"])

    with_world(test)


def test_a_server_that_lost_its_lease_cannot_save_its_cursor() -> None:
    """It may have been paused while another server took over and went on."""

    async def test(world: World) -> None:
        slow, other = Receiver(), Receiver()
        await world.start(slow)
        slow.is_hanging = True
        await world.happens("1", "2")
        await world.store.expire("webhooks")
        await world.start(other)
        await world.wait(timedelta(0))
        assert other.received == ["1", "2"]
        saved = await world.store.load("webhook/")

        await world.servers[0].stop()
        assert (await world.store.load("webhook/")).records == saved.records

    with_world(test)


def test_a_pause_holds_for_the_next_server() -> None:
    async def test(world: World) -> None:
        receiver = Receiver()
        receiver.problem = "no response"
        await world.start(receiver)
        await world.happens("1")
        await world.wait(timedelta(minutes=20))
        attempts = receiver.attempts
        await world.servers[0].stop()
        await world.start(receiver)
        await world.wait(timedelta(minutes=20))

        assert receiver.attempts - attempts <= 5

    with_world(test)


def test_a_pause_by_a_wrong_clock_ends_after_five_minutes() -> None:
    """A server whose clock was far ahead may have saved any time."""

    async def test(world: World) -> None:
        receiver = Receiver()
        server = world.server()
        webhook = server.webhook(receiver)
        await server.engine.load()
        await webhook.register()
        future = Cursor(1, retry_at=NOON + 1000 * HOUR, failures=3)
        await server.engine.update(
            [webhook._key], lambda transaction: transaction.put(webhook._key, future), by="test"
        )
        await server.start(webhook)
        await world.happens("1")
        await world.wait(timedelta(minutes=5))

        assert receiver.received == ["1"]

    with_world(test)


def test_a_message_that_is_always_rejected_is_skipped() -> None:
    """A receiver that cannot handle one event gets the others. The skipped one is counted."""

    async def test(world: World) -> None:
        receiver = Receiver()
        receiver.rejects = "bad"
        webhook = await world.start(receiver)
        await world.happens("1", "bad", "2")
        await world.wait(HOUR)

        assert receiver.received == ["1", "2"]
        assert (webhook.refused, webhook.failed) == (1, REJECTIONS_MAX)

    with_world(test)


def test_a_rejection_during_an_outage_skips_nothing() -> None:
    """A receiver that starts up may reject once. Only rejections in a row count."""

    async def test(world: World) -> None:
        receiver = Receiver()
        webhook = await world.start(receiver)
        await world.happens("0")
        receiver.status = 503
        await world.happens("1")
        for status in (503, *[400] * (REJECTIONS_MAX - 1), 503, 400, 200):
            receiver.status, attempts = status, receiver.attempts
            for _ in range(301):  # it is tried every five minutes at least
                if receiver.attempts == attempts:
                    await world.wait(SECOND)

        assert (receiver.received, webhook.refused) == (["0", "1"], 0)

    with_world(test)


def test_entries_that_were_trimmed_too_early_are_reported() -> None:
    async def test(world: World) -> None:
        receiver = Receiver()
        await world.start(receiver)
        await world.happens("0")
        await world.servers[0].stop()
        await world.happens("1", "2", "3", "4")
        (newest,) = await world.store.latest(limit=1)
        await world.store.trim(newest.position)
        webhook = await world.start(receiver)
        await world.wait(HOUR)

        assert (receiver.received, webhook.lost) == (["0", "4"], 1)

    with_world(test)


def test_delivery_continues_after_the_store_was_lost() -> None:
    """What was delivered meanwhile is not repeated."""

    class FlakyStore(MemoryStore):
        is_lost = False

        async def commit(self, writes: Any, checks: Any = (), entries: bytes | None = None) -> int:
            if self.is_lost and entries is None:
                raise StoreLost("gone")
            return await super().commit(writes, checks, entries)

    async def test(world: World) -> None:
        assert isinstance(world.store, FlakyStore)
        receiver = Receiver()
        await world.start(receiver)
        world.store.is_lost = True
        await world.happens("1", "2")
        await world.wait(timedelta(minutes=1))
        world.store.is_lost = False
        await world.happens("3")
        await world.wait(timedelta(minutes=1))

        assert receiver.received == ["1", "2", "3"]

    with_world(test, FlakyStore)


def test_unanswered_read_at_the_start_only_delays_delivery() -> None:
    """Servers acquire the lease of webhooks during an outage, and read right after it. Ending the
    task would end the server.
    """

    class SilentStore(MemoryStore):
        is_lost = False

        async def get(self, key: str) -> Record:
            if self.is_lost and key.startswith("webhook/"):
                raise StoreLost("no answer")
            return await super().get(key)

    async def test(world: World) -> None:
        assert isinstance(world.store, SilentStore)
        receiver, server = Receiver(), world.server()
        world.store.is_lost = True
        await server.start(server.webhook(receiver))
        await world.happens("1")
        await world.wait(SECOND)
        assert [task.done() for task in server.work] == [False]
        assert receiver.received == []
        world.store.is_lost = False
        await world.wait(timedelta(minutes=1))

        assert receiver.received == ["1"]

    with_world(test, SilentStore)


def test_changes_that_are_not_chosen_cost_one_commit_a_minute() -> None:
    """A large fleet that joins is many entries that no webhook wants."""

    async def test(world: World) -> None:
        await world.start(Receiver())
        before = (await world.store.load()).revision
        for _ in range(100):
            await world.happens("x", what=ChangeKind.JOINED)
            await world.wait(SECOND)

        commits = (await world.store.load()).revision - before - 100
        assert 1 <= commits <= 2

    with_world(test)


def test_a_store_has_one_identity_for_all_servers() -> None:
    async def test(world: World) -> None:
        ids = iter(["A", "B", "C"])
        servers = [world.server() for _ in range(3)]
        for server in servers:
            await server.engine.load()
        identities = [await get_identity(server.engine, lambda: next(ids)) for server in servers]

        assert identities == ["a", "a", "a"]

    with_world(test)
