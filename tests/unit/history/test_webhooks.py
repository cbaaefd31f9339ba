"""Webhooks: everything chosen is told, in order, at least once; a dead receiver delays nobody."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any

from forewarn.core.change import Change, ChangeKind
from forewarn.engine.entry import Note, encode_all
from forewarn.errors import StoreLost, Unavailable
from forewarn.history.feed import HistoryFeed
from forewarn.history.webhooks import MARGIN, REFUSALS_MAX, Office, Receiver, identity_of
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import Write
from forewarn.store.memory import MemoryStore
from tests.builders import NOON

URL = "https://example.org/hook?key=hidden"
LIMIT = timedelta(seconds=10)
SECOND = timedelta(seconds=1)
LONG = timedelta(hours=1)


class Box:
    """A receiver's door: takes what comes, or answers what it is told to.

    Where it is told to hang, it does not answer.
    """

    name = "https://example.org"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.tries = 0
        self.status = 200
        self.problem = ""
        self.refuses = self.fails_at = ""
        self.is_hanging = False

    async def post(self, body: bytes, headers: Mapping[str, str]) -> int:
        self.tries += 1
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.problem:
            raise Unavailable(self.problem)
        detail = json.loads(body)["data"]["detail"]
        if self.refuses == detail:
            return 422
        if self.fails_at == detail:
            return 503
        if 200 <= self.status < 300:
            self.told.append(detail)
        return self.status

    def close(self) -> None: ...


class World:
    """A store, a clock that is told, and receivers on any number of servers."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.clock = VirtualClock(NOON)
        self.tails: list[HistoryFeed] = []
        self.work: list[asyncio.Task[None]] = []

    def receiver(
        self, box: Box, *, url: str = URL, worker: str = "w1", chance: float = 1.0
    ) -> Receiver:
        self.tails.append(HistoryFeed(self.store))
        office = Office(
            store=self.store,
            clock=self.clock,
            tail=self.tails[-1],
            worker=worker,
            identity="7b1c",
            changes={ChangeKind.STARTED, ChangeKind.COMPLETED},
            secrets=[b"x" * 32],
            limit=LIMIT,
            chance=lambda: chance,
        )
        return Receiver(url, box, office)

    async def start(self, receiver: Receiver) -> asyncio.Task[None]:
        await receiver.enter()
        self.work.append(asyncio.create_task(receiver.run()))
        return self.work[-1]

    async def happens(self, *details: str, what: ChangeKind = ChangeKind.STARTED) -> None:
        for detail in details:
            await self.store.commit([], entries=entry(detail, what))
        for tail in self.tails:
            tail.notify()
        await self.pass_by(timedelta(0))

    async def pass_by(self, span: timedelta) -> None:
        await self.clock.advance(span)


def entry(detail: str, what: ChangeKind = ChangeKind.STARTED) -> bytes | None:
    return encode_all([Note(NOON, "ann", "web", Change(what=what, event_id="E1", detail=detail))])


def story(
    tell: Callable[[World], Coroutine[Any, Any, None]], store: type[MemoryStore] = MemoryStore
) -> None:
    async def run() -> None:
        world = World(store())
        try:
            await tell(world)
        finally:
            for task in world.work:
                task.cancel()
            await asyncio.gather(*world.work, return_exceptions=True)

    asyncio.run(run())


def test_a_receiver_is_told_of_the_chosen_changes_in_order_from_its_beginning_on() -> None:
    async def tell(world: World) -> None:
        box = Box()
        await world.happens("before")
        one = world.receiver(box)
        await world.start(one)
        await world.happens("1", "2")
        await world.happens("not chosen", what=ChangeKind.JOINED)
        await world.happens("3", what=ChangeKind.COMPLETED)

        assert box.told == ["1", "2", "3"]
        assert (one.delivered, one.failed, one.lost, one.is_failing) == (3, 0, 0, False)

    story(tell)


def test_a_receiver_that_fails_is_tried_again_ever_later_and_misses_nothing() -> None:
    """1, 2, 4 … seconds, five minutes at most: a receiver that is down for a night is not flooded,
    and is caught up with.
    """

    async def tell(world: World) -> None:
        box = Box()
        one = world.receiver(box)
        await world.start(one)
        box.status = 503
        await world.happens("1", "2")
        moments: list[int] = []
        for second in range(16):
            if box.tries > len(moments):
                moments.append(second)
            await world.pass_by(SECOND)
        assert moments == [0, 1, 3, 7, 15]
        await world.pass_by(LONG)
        assert 15 <= box.tries <= 22
        assert (box.told, one.is_failing, one.delivered) == ([], True, 0)

        box.status = 204
        await world.pass_by(timedelta(minutes=5))
        assert (box.told, one.is_failing) == (["1", "2"], False)

    story(tell)


def test_after_a_success_the_pauses_begin_anew() -> None:
    """Yesterday's outage is no reason to be slow today."""

    async def tell(world: World) -> None:
        box = Box()
        await world.start(world.receiver(box))
        box.problem = "no answer"
        await world.happens("1", "2")
        await world.pass_by(LONG)
        box.problem, box.fails_at = "", "2"
        while not box.told:  # ends: it is tried every five minutes
            await world.pass_by(SECOND)
        tries = box.tries
        await world.pass_by(4 * SECOND)

        assert box.tries - tries == 2  # after 1 second, and after 2 more

    story(tell)


def test_chance_shortens_a_pause_by_half_at_most() -> None:
    """So that receivers that fell together do not all come back at one moment."""

    async def tell(world: World) -> None:
        box = Box()
        await world.start(world.receiver(box, chance=0.0))
        box.problem = "no answer"
        await world.happens("1")
        await world.pass_by(0.4 * SECOND)
        assert box.tries == 1
        await world.pass_by(0.1 * SECOND)
        assert box.tries == 2

    story(tell)


def test_a_dead_receiver_delays_no_other() -> None:
    async def tell(world: World) -> None:
        dead, hung, good = Box(), Box(), Box()
        dead.problem, hung.is_hanging = "no answer", True
        for number, box in enumerate((dead, hung, good)):
            await world.start(world.receiver(box, url=f"{URL}{number}"))
        await world.happens("1")

        assert good.told == ["1"]

    story(tell)


def test_a_server_that_starts_again_goes_on_where_the_last_one_was() -> None:
    """Also with what happened while there was none."""

    async def tell(world: World) -> None:
        first, second = Box(), Box()
        work = await world.start(world.receiver(first))
        await world.happens("1", "2")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await world.happens("3")
        await world.start(world.receiver(second, worker="w2"))
        await world.pass_by(timedelta(0))

        assert (first.told, second.told) == (["1", "2"], ["3"])

    story(tell)


def test_a_server_that_was_killed_loses_its_claim_by_time_and_nothing_is_lost() -> None:
    """What it was telling may be told again: at least once."""

    async def tell(world: World) -> None:
        killed, other = Box(), Box()
        dying = world.receiver(killed)
        await dying.enter()
        killed.is_hanging = True
        await world.happens("1", "2")
        turn = asyncio.ensure_future(dying.turn())
        await world.pass_by(timedelta(0))
        turn.cancel()
        await world.start(world.receiver(other, worker="w2"))

        await world.pass_by(2 * LIMIT + MARGIN - SECOND)
        assert (killed.tries, other.told) == (1, [])
        await world.pass_by(SECOND)
        assert other.told == ["1", "2"]

    story(tell)


def test_of_two_servers_one_tells_a_receiver_at_a_time() -> None:
    """In order means: not by two at once. Whichever it is, each change is told once."""

    async def tell(world: World) -> None:
        box = Box()
        for worker in ("w1", "w2", "w3"):
            await world.start(world.receiver(box, worker=worker))
        for number in range(20):
            await world.happens(f"{number} a", f"{number} b")
            await world.pass_by(7 * SECOND)
        await world.pass_by(LONG)

        assert box.told == [f"{number} {letter}" for number in range(20) for letter in "ab"]

    story(tell)


def test_a_pause_after_a_failure_holds_for_every_server() -> None:
    async def tell(world: World) -> None:
        box = Box()
        box.problem = "no answer"
        await world.start(world.receiver(box, worker="w1"))
        await world.happens("1")
        await world.pass_by(timedelta(minutes=20))
        tries = box.tries
        await world.start(world.receiver(box, worker="w2"))
        await world.pass_by(timedelta(minutes=20))

        assert box.tries - tries <= 5

    story(tell)


def test_a_message_that_is_refused_for_what_it_is_does_not_stop_those_after_it_for_ever() -> None:
    """A receiver that chokes on one event gets the rest; that one was left out is counted."""

    async def tell(world: World) -> None:
        box = Box()
        box.refuses = "bad"
        one = world.receiver(box)
        await world.start(one)
        await world.happens("1", "bad", "2")
        await world.pass_by(LONG)

        assert (box.told, one.refused, one.failed) == (["1", "2"], 1, REFUSALS_MAX)

    story(tell)


def test_a_refusal_amid_an_outage_loses_no_message() -> None:
    """A receiver that comes up again may refuse once.

    Only refusals in a row say that the message is not wanted.
    """

    async def tell(world: World) -> None:
        box = Box()
        one = world.receiver(box)
        await world.start(one)
        await world.happens("0")
        box.status = 503
        await world.happens("1")
        for status in (503, *[400] * (REFUSALS_MAX - 1), 503, 400, 200):
            box.status, tries = status, box.tries
            for _ in range(301):  # it is tried every five minutes at least
                if box.tries == tries:
                    await world.pass_by(SECOND)

        assert (box.told, one.refused) == (["0", "1"], 0)

    story(tell)


def test_what_retention_took_before_it_could_be_told_is_counted_as_lost() -> None:
    async def tell(world: World) -> None:
        box = Box()
        one = world.receiver(box)
        await world.start(one)
        await world.happens("0")
        box.problem = "no answer"
        await world.happens("1", "2", "3", "4")
        await world.store.trim((await world.store.latest())[0].position)
        await world.pass_by(LONG)
        assert one.lost == 1
        box.problem = ""
        await world.pass_by(LONG)

        assert (box.told, one.lost) == (["0", "4"], 1)

    story(tell)


def test_a_store_that_is_lost_for_a_while_costs_nothing_but_time() -> None:
    class Flaky(MemoryStore):
        is_lost = False

        async def commit(self, writes: Any, checks: Any = (), entries: bytes | None = None) -> int:
            if self.is_lost and entries is None:
                raise StoreLost("gone")
            return await super().commit(writes, checks, entries)

    async def tell(world: World) -> None:
        assert isinstance(world.store, Flaky)
        box = Box()
        await world.start(world.receiver(box))
        world.store.is_lost = True
        await world.happens("1", "2")
        await world.pass_by(timedelta(minutes=1))
        assert box.told == []  # without a claim nobody tells anything
        world.store.is_lost = False
        await world.pass_by(timedelta(minutes=1))

        assert box.told == ["1", "2"]

    story(tell, Flaky)


def test_what_is_not_chosen_costs_a_commit_a_minute_at_most() -> None:
    """A fleet that joins is a thousand notes that nobody asked for; the place is still written down
    now and then.
    """

    async def tell(world: World) -> None:
        await world.start(world.receiver(Box()))
        before = (await world.store.load()).revision
        for _ in range(100):
            await world.happens("x", what=ChangeKind.JOINED)
            await world.pass_by(SECOND)

        own = (await world.store.load()).revision - before - 100
        assert 1 <= own <= 2

    story(tell)


def test_a_store_has_one_identity_whoever_asks_first() -> None:
    async def tell(world: World) -> None:
        ids = iter(["A", "B", "C"])
        found = [await identity_of(world.store, lambda: next(ids)) for _ in range(3)]
        assert found == ["a", "a", "a"]

        class Raced(MemoryStore):
            async def load(self, prefix: str = "") -> Any:
                loaded = await super().load(prefix)
                if not loaded.records:
                    await super().commit([Write(prefix, b"theirs", 0)])
                return loaded

        assert await identity_of(Raced(), lambda: "ours") == "theirs"

    story(tell)
