"""Chosen changes told to other programs, as signed CloudEvents. The history is the outbox; a
receiver's place in it is a record.

At least once, in order, each receiver for itself: one that does not answer delays nobody. Of
several servers one delivers to a receiver at a time: it claims the record until a moment, as an
impact is claimed. A claim is not renewed while there is nothing to tell, so another server may take
over without asking.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

import msgspec
from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.engine.clock import Clock, within
from forewarn.engine.entry import Entry, decode_all, last_number, position_of
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Conflict, Error
from forewarn.history.cloudevents import cloud_event, encode, headers
from forewarn.history.feed import HistoryFeed
from forewarn.store.base import HistoryValue, Store, Write

log = logging.getLogger("forewarn")

KEY = "webhook/{}/"
IDENTITY_KEY = "identity"
BATCH = 50
"""How many notes are told before the place is written down: after a crash so many may be told
twice.
"""
FIRST_PAUSE, PAUSE_MAX = timedelta(seconds=1), timedelta(minutes=5)
MARGIN = timedelta(seconds=5)
SAVED_EVERY = timedelta(minutes=1)
LOOK_EVERY = timedelta(seconds=15)
REFUSED = (400, 413, 422)
"""What says that this very message is not wanted, now or ever."""
REFUSALS_MAX = 10


class Cursor(msgspec.Struct, frozen=True):
    """Where a receiver is: all up to `number` is told. Claimed by a worker until `due_at`; by
    nobody: not tried before then.

    `tries` failed since the last success; of these the last `refusals` without a break refused the
    next message.
    """

    number: int
    due_at: datetime
    claimed_by: str = ""
    tries: int = 0
    refusals: int = 0


class Box(Protocol):
    """Where messages are posted to; `name` is what may be shown of it."""

    name: str

    def post(self, body: bytes, headers: Mapping[str, str]) -> Awaitable[int]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Office:
    """What all receivers of a server share.

    `worker` names it in claims; `limit` is how long a call may take.
    """

    store: Store
    clock: Clock
    tail: HistoryFeed
    worker: str
    identity: str
    changes: Collection[ChangeKind]
    secrets: Sequence[bytes] = field(repr=False)
    limit: timedelta
    chance: Callable[[], float]


class Receiver:
    """One webhook. The counters are for whoever shows how the service is doing."""

    def __init__(self, url: str, box: Box, office: Office) -> None:
        self.name = box.name
        self.delivered = self.failed = self.refused = self.lost = 0
        self.is_failing = False
        self._key = KEY.format(hashlib.sha256(url.encode()).hexdigest()[:32])
        self._box, self._office = box, office
        self._store, self._clock, self._tail = office.store, office.clock, office.tail
        self._trouble = ThrottledLog(office.clock)
        self._cursor, self._revision = Cursor(0, office.clock.now()), 0
        self._seen, self._saved_at = 0, office.clock.now()
        self._first_seen: tuple[int, datetime] = 0, office.clock.now()

    async def enter(self) -> None:
        """Write down where a new receiver begins: after all that has happened so far."""
        if await self._read():
            return
        try:
            await self._write(Cursor(await self._tail.last(), self._clock.now()))
        except Conflict:
            await self._read()  # another server was faster

    async def run(self) -> None:
        """Tell what happens until cancelled; then let go, so that another goes on at once."""
        try:
            while True:  # ends when cancelled
                bell = self._tail.changed
                until = await self._attempt()
                await self._wait(bell, until)
        finally:
            self._box.close()
            await self._let_go()

    async def _attempt(self) -> datetime | None:
        try:
            return await self.turn()
        except Conflict:
            return (
                self._clock.now() + FIRST_PAUSE
            )  # another server was faster: its claim is there to be seen
        except Error as problem:  # the store's; the receiver's are its own affair
            self._trouble.warn(
                "webhook waits for the store", receiver=self.name, problem=problem.message
            )
        except Exception:  # a bug that one receiver meets must not stop the others
            log.exception("webhook broken", extra={"facts": {"receiver": self.name}})
        return self._clock.now() + LOOK_EVERY

    async def _wait(self, bell: asyncio.Event, until: datetime | None) -> None:
        await asyncio.sleep(0)  # others have their turn
        if until is not None:
            await self._clock.sleep_until(until)
            return
        try:
            await within(self._clock, LOOK_EVERY, bell.wait())
        except TimeoutError:
            return

    async def turn(self) -> datetime | None:
        """Tell what can be told now.

        Gives the moment before which there is nothing to do; None: when something happens.
        """
        await self._read()
        now = self._clock.now()
        free_at = self._free_at(now)
        if free_at > now and self._cursor.claimed_by != self._office.worker:
            return free_at
        self._seen = max(self._seen, self._cursor.number)
        notes = await self._store.history(position_of(self._seen + 1) - 1, BATCH)
        if not notes:
            return None
        await self._count_lost()
        if any(self._chosen(note) for note in notes):
            return await self._tell(notes)
        self._seen = last_number(notes[-1].position)
        if now >= self._saved_at + SAVED_EVERY:
            await self._write(replace(self._cursor, number=self._seen))
        return now

    def _free_at(self, now: datetime) -> datetime:
        """When another's claim, or the pause after a failure, is over: at `due_at`, and not later
        than its length after we first saw it so. A server whose clock is far ahead may write any
        `due_at`, and die.
        """
        if self._first_seen[0] != self._revision:
            self._first_seen = self._revision, now
        longest = self._claim_length if self._cursor.claimed_by else PAUSE_MAX
        return min(self._cursor.due_at, self._first_seen[1] + longest)

    async def _tell(self, notes: Sequence[HistoryValue]) -> datetime:
        for note in notes:
            for shown in self._chosen(note):
                if not await self._deliver(shown):
                    return self._cursor.due_at
                self._seen = shown.number
            self._seen = last_number(note.position)
        await self._write(
            Cursor(self._seen, self._clock.now() + self._claim_length, self._office.worker)
        )
        return self._clock.now()

    async def _deliver(self, shown: Entry) -> bool:
        await self._hold()
        event = cloud_event(self._office.identity, shown)
        body = encode(event)
        try:
            status = await self._box.post(
                body, headers(event.id, body, self._clock.now(), self._office.secrets)
            )
            problem = "" if 200 <= status < 300 else f"it answered {status}"
        except Error as raised:
            status, problem = 0, raised.message
        if not problem:
            self.delivered += 1
            self.is_failing = False
            self._cursor = replace(self._cursor, tries=0, refusals=0)
            return True
        self.failed += 1
        refusals = self._cursor.refusals + 1 if status in REFUSED else 0
        if refusals >= REFUSALS_MAX:
            self.refused += 1
            log.error(
                "webhook refused",
                extra={"facts": {"receiver": self.name, "note": shown.number, "problem": problem}},
            )
            self._cursor = replace(self._cursor, tries=0, refusals=0)
            return True
        await self._retreat(problem, refusals)
        return False

    async def _hold(self) -> None:
        """A claim that outlasts the next call.

        While it does, nobody else tells this receiver anything.
        """
        now, cursor = self._clock.now(), self._cursor
        if (
            cursor.claimed_by != self._office.worker
            or cursor.due_at < now + self._office.limit + MARGIN
        ):
            await self._write(
                replace(
                    cursor,
                    number=self._seen,
                    claimed_by=self._office.worker,
                    due_at=now + self._claim_length,
                )
            )

    @property
    def _claim_length(self) -> timedelta:
        return 2 * self._office.limit + MARGIN

    async def _retreat(self, problem: str, refusals: int) -> None:
        """Try again later, whoever it is then: longer each time, and not all receivers at one
        moment.
        """
        tries = self._cursor.tries + 1
        pause = min(FIRST_PAUSE * 2 ** min(tries - 1, 20), PAUSE_MAX) * (
            0.5 + self._office.chance() / 2
        )
        self.is_failing = True
        self._trouble.warn("webhook failed", receiver=self.name, problem=problem, tries=tries)
        await self._write(
            Cursor(self._seen, self._clock.now() + pause, tries=tries, refusals=refusals)
        )

    async def _count_lost(self) -> None:
        """Report entries that were trimmed before they could be delivered."""
        if oldest := await self._tail.gap_after(self._seen):
            self.lost += 1
            self._seen = oldest - 1
            log.error("webhook lost entries", extra={"facts": {"receiver": self.name}})

    def _chosen(self, value: HistoryValue) -> list[Entry]:
        return [
            entry
            for entry in decode_all(value)
            if entry.number > self._seen and entry.what in self._office.changes
        ]

    async def _read(self) -> bool:
        found = next(
            (one for one in (await self._store.load(self._key)).records if one.key == self._key),
            None,
        )
        if found is None or found.value is None:
            self._revision = 0
            return False
        self._cursor, self._revision = msgspec.json.decode(found.value, type=Cursor), found.revision
        return True

    async def _write(self, cursor: Cursor) -> None:
        self._revision = await self._store.commit(
            [Write(self._key, msgspec.json.encode(cursor), self._revision)]
        )
        self._cursor, self._saved_at = cursor, self._clock.now()

    async def _let_go(self) -> None:
        """Whoever comes next goes on at once, and where we were."""
        cursor = self._cursor
        if cursor.claimed_by == self._office.worker:
            cursor = Cursor(self._seen, self._clock.now())
        elif not cursor.claimed_by:
            cursor = replace(cursor, number=max(self._seen, cursor.number))
        if cursor != self._cursor:
            with suppress(Error, TimeoutError):  # a claim lapses by itself
                await asyncio.wait_for(self._write(cursor), 1)


async def identity_of(store: Store, make_id: Callable[[], str]) -> str:
    """What tells this store from all others, made when it is first asked for."""
    for _ in range(2):
        found = next(
            (one for one in (await store.load(IDENTITY_KEY)).records if one.key == IDENTITY_KEY),
            None,
        )
        if found is not None and found.value is not None:
            return found.value.decode()
        try:
            await store.commit([Write(IDENTITY_KEY, make_id().lower().encode(), 0)])
        except Conflict:
            continue
    raise AssertionError("an identity that is written is there")
