"""The store as this server knows it: every scope on the board, every other record decoded.

A replica only reads. It loads everything once, follows what any server commits, and catches up on
request. Each record is replaced only by a newer revision, so updates may arrive late or more than
once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from forewarn.engine.board import Board, PublishedScope
from forewarn.engine.clock import Clock
from forewarn.engine.entry import Commit, Note
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.engine.metrics import Metrics
from forewarn.engine.record import SCOPE, RecordCodec
from forewarn.errors import (
    Error,
    EventEnded,
    NotFound,
    RecordUnreadable,
    StoreUnusable,
    Unavailable,
)
from forewarn.log import log
from forewarn.store.base import Record, Snapshot, Store

T = TypeVar("T")

SCOPE_KEY = "scope/{}/"
"""The closing slash keeps `web` from being a prefix of `web-2`."""
CATCH_UP_SECONDS_MAX = 2.0
UNREADABLE_LOGGED_MAX = 20
"""How many unreadable records are named in the log; all are counted in the metrics."""
POLLS_PASS_EVERY = 200
"""How many records, hosts or list entries are handled before yielding to the event loop."""
NO_KEY = "nothing"
"""A key that no record has: getting it gives the revision of the store."""
RELOAD_PAUSE = timedelta(seconds=1)

OnChange = Callable[[str, Any, int], None]
"""Called with the key, the value (None: deleted) and the revision of a record that changed."""


class Unreadable(NamedTuple):
    """A record that this version cannot decode, as of a revision, and the reason."""

    revision: int
    problem: str


class Versioned(NamedTuple):
    """A decoded value (None: absent or deleted) and the revision that a write must name."""

    value: Any
    revision: int


ABSENT = Versioned(None, 0)


class RecordKind(NamedTuple):
    codec: RecordCodec[Any]
    is_cached: bool
    callbacks: list[OnChange]


class Records:
    """The decoded records of all cached kinds except scopes, by key.

    Deletions are remembered until nothing older can arrive any more.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Versioned]] = {}
        self._deleted: dict[str, int] = {}

    def get(self, key: str) -> Versioned:
        return self._kinds.get(kind_of(key), {}).get(key, ABSENT)

    def values(self, kind: str) -> Iterator[tuple[str, Any]]:
        """The key and value of every record of a kind."""
        for key, record in self._kinds.get(kind, {}).items():
            yield key, record.value

    def keys(self) -> Iterator[str]:
        for records in self._kinds.values():
            yield from records

    def is_news(self, key: str, revision: int) -> bool:
        return not self.is_known_after(key, revision - 1)

    def is_known_after(self, key: str, revision: int) -> bool:
        """Whether the record is known to have changed after a revision."""
        return max(self.get(key).revision, self._deleted.get(key, 0)) > revision

    def set(self, key: str, value: Any, revision: int) -> None:
        records = self._kinds.setdefault(kind_of(key), {})
        if value is None:
            records.pop(key, None)
            self._deleted[key] = revision
        else:
            records[key] = Versioned(value, revision)

    def drop_deleted(self, revision: int) -> None:
        """Forget deletions up to this revision."""
        if self._deleted:
            self._deleted = {key: at for key, at in self._deleted.items() if at > revision}


class Replica:
    """Keeps the board and the records up to date with the store.

    States:  NOT LOADED -> FOLLOWING <-> RELOADING. `is_ready` is true while FOLLOWING.
    """

    def __init__(self, store: Store, clock: Clock, board: Board) -> None:
        self.store = store
        self.clock = clock
        self.board = board
        self.metrics = Metrics(board)
        self.records = Records()
        self.unreadable: dict[str, Unreadable] = {}
        self.is_ready = False
        self.throttled_log = ThrottledLog(clock)
        self._kinds: dict[str, RecordKind] = {}
        self._subscribers: list[Callable[[Commit], None]] = []
        self._catching_up = asyncio.Lock()
        self._catch_ups_requested = self._catch_ups_done = 0
        self._has_caught_up = False
        self._caught_up_to = 0
        self.register("scope", SCOPE)
        self.subscribe_entries(self.metrics.count)

    def register(
        self,
        kind: str,
        codec: RecordCodec[Any],
        on_change: OnChange | None = None,
        *,
        cached: bool = True,
    ) -> None:
        """Handle records `kind` and `kind/...` with this codec. Call it before `load`.

        Records that are not cached are read from the store by each `update`.
        """
        assert kind not in self._kinds or self._kinds[kind].codec is codec, kind
        self._kinds[kind] = RecordKind(codec, cached, [on_change] if on_change else [])

    def on_change(self, kind: str, callback: OnChange) -> None:
        """Call this too for each record of a registered kind that changes."""
        self._kinds[kind].callbacks.append(callback)

    def subscribe(self, callback: Callable[[Commit], None]) -> None:
        """Call this after each commit of this server, and when others have committed."""
        self._subscribers.append(callback)

    def subscribe_entries(self, callback: Callable[[Note], None]) -> None:
        """Call this with each history entry of this server's commits."""

        def call_for_each(commit: Commit) -> None:
            for entry in commit.entries:
                callback(entry)

        self.subscribe(call_for_each)

    def publish(self, commit: Commit) -> None:
        """A failing subscriber does not affect the commit."""
        for callback in self._subscribers:
            try:
                callback(commit)
            except Exception as error:  # a callback that is not ours
                self.throttled_log.warn("subscriber failed", problem=repr(error))

    async def load(self) -> None:
        """Replace the cache with the contents of the store.

        Also recovers after the store was lost.
        """
        self._learn_all(snapshot := await self.store.load(), "")
        for number, record in enumerate(snapshot.records):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
            self.learn(record)
        self.board.sort()
        self._pass_revision(snapshot.revision)

    def _learn_all(self, snapshot: Snapshot, prefix: str) -> None:
        """Learn the deletion of every known record that a snapshot of a prefix lacks."""
        held = {record.key for record in snapshot.records}
        known = [*self.records.keys(), *map(SCOPE_KEY.format, self.board.scopes), *self.unreadable]
        for key in known:
            if key.startswith(prefix) and key not in held:
                self.learn(Record(key, None, snapshot.revision))

    async def refresh(self, key: str) -> None:
        """Read one record again, or every record of a kind if the key is `kind/`."""
        if key.endswith("/") and key.count("/") == 1:
            snapshot = await self.store.load(key)
            self._learn_all(snapshot, key)
            for record in snapshot.records:
                self.learn(record)
        else:
            self.learn(await self.store.get(key))

    def learn(self, record: Record) -> None:
        """Show a record as the store holds it, unless a newer revision is shown.

        A record that cannot be decoded stays as it was last known, and read-only: changing it
        could undo what a newer server did. It does not affect other records.
        """
        key, revision = record.key, record.revision
        known = self.unreadable.get(key)
        try:
            self._learn(record)
        except StoreUnusable as error:
            newest = max(revision, known.revision if known else 0)
            self.unreadable[key] = Unreadable(newest, error.message)
            if known is None and len(self.unreadable) <= UNREADABLE_LOGGED_MAX:
                log.error(
                    "a record is from a newer version, or damaged: it is read-only here",
                    record=describe(key),
                    problem=error.message,
                )
        else:
            if known is not None and revision > known.revision:
                del self.unreadable[key]

    def _learn(self, record: Record) -> None:
        kind_name, _, name = record.key.rstrip("/").partition("/")
        kind = self._kinds.get(kind_name)
        if kind is None or not kind.is_cached:
            return
        if kind_name == "scope":
            if self.board.is_news(name, record.revision):
                self._learn_scope(name, record)
            return
        if self.records.is_news(record.key, record.revision):
            value = None if record.value is None else kind.codec.decode(record.value)
            self.show(record.key, value, record.revision)

    def _learn_scope(self, name: str, record: Record) -> None:
        if record.value is None:
            self.board.withdraw(name, record.revision)
        else:
            scope = SCOPE.decode(record.value)
            self.metrics.compare(scope, self.clock.now())
            self.board.publish(scope, record.revision)

    def show(self, key: str, value: Any, revision: int) -> None:
        """Show a decoded record that was committed at a revision."""
        kind = self._kinds[kind_of(key)]
        if kind_of(key) == "scope":
            if value is None:
                self.board.withdraw(name_of(key), revision)
            else:
                self.board.publish(value, revision)
        elif kind.is_cached and self.records.is_news(key, revision):
            self.records.set(key, value, revision)
            for callback in kind.callbacks:
                callback(key, value, revision)

    def read(self, key: str) -> Versioned:
        """A cached record as a write must name it: revision 0 if it is absent or deleted."""
        if kind_of(key) == "scope":
            published = self.board.scopes.get(name_of(key))
            return Versioned(published.scope, published.revision) if published else ABSENT
        return self.records.get(key)

    def is_cached(self, key: str) -> bool:
        return self._kinds[kind_of(key)].is_cached

    def codec(self, key: str) -> RecordCodec[Any]:
        return self._kinds[kind_of(key)].codec

    def check_readable(self, key: str) -> None:
        """Refuse to change what could not be decoded."""
        unreadable = self.unreadable.get(key)
        if unreadable is not None:
            raise RecordUnreadable(
                f"{describe(key)} was written by a newer version of Forewarn, or is damaged, and"
                " cannot be changed by this server; upgrade this server."
                f" ({unreadable.problem})",
                record=describe(key),
            )

    def find_scope(self, name: str) -> PublishedScope:
        """The scope by its name; RecordUnreadable if it exists but was never decoded."""
        if name not in self.board.scopes:
            self.check_readable(SCOPE_KEY.format(name))
        return self.board.find_scope(name)

    async def look_up(self, find: Callable[[], T]) -> T:
        """What `find` finds in this replica.

        NotFound is believed only after catching up: another server may have created it.
        """
        try:
            return find()
        except EventEnded:
            raise  # an ended event stays ended
        except NotFound:
            has_caught_up = await self.catch_up()
        try:
            return find()
        except NotFound:
            if has_caught_up:
                raise
        raise Unavailable(
            "the store does not answer, and another server may have created this; try again"
        )

    async def catch_up(self) -> bool:
        """Show all that any server had committed when this was called.

        Costs one small read if there is nothing new. Concurrent callers share the next read, not
        the one in progress: that may have begun before what they look for was committed. False if
        the store did not answer in time.
        """
        self._catch_ups_requested += 1
        mine = self._catch_ups_requested
        async with self._catching_up:
            if self._catch_ups_done < mine:
                sharing = self._catch_ups_requested
                self._has_caught_up = False
                with suppress(Unavailable, TimeoutError, StopAsyncIteration):
                    await self._read_changes()
                    self._has_caught_up = True
                self._catch_ups_done = sharing
            return self._has_caught_up

    async def _read_changes(self) -> None:
        async with asyncio.timeout(CATCH_UP_SECONDS_MAX):
            present = (await self.store.get(NO_KEY)).revision
        after = max(self.board.revision, self._caught_up_to)
        if present <= after:
            return
        async with aclosing(self.store.watch(after)) as batches:
            while after < present:  # ends: each batch has a later revision
                async with asyncio.timeout(CATCH_UP_SECONDS_MAX):
                    batch = await anext(batches)
                for number, record in enumerate(batch.records, start=1):
                    if number % POLLS_PASS_EVERY == 0:
                        await asyncio.sleep(0)
                    self.learn(record)
                after = self._caught_up_to = batch.revision

    async def follow(self) -> None:
        """Show what other servers commit, until cancelled.

        When the store is lost, read everything again as soon as it is back.
        """
        while True:  # ends when cancelled
            self.is_ready = True
            await self._attempt("follow", self._watch)
            self.is_ready, is_loaded = False, False
            while not is_loaded:  # ends when the store answers
                await self.clock.sleep_until(self.clock.now() + RELOAD_PAUSE)
                is_loaded = await self._attempt("reload", self.load)

    async def _watch(self) -> None:
        async with aclosing(self.store.watch(self.board.revision)) as batches:
            async for batch in batches:
                for record in batch.records:
                    self.learn(record)
                self._pass_revision(batch.revision)
                self.publish(Commit(batch.revision))

    def _pass_revision(self, revision: int) -> None:
        """Everything up to this revision is known: nothing older can arrive any more."""
        self.board.caught_up(revision)
        self.records.drop_deleted(revision)

    async def _attempt(self, step: str, work: Callable[[], Awaitable[None]]) -> bool:
        try:
            await work()
        except Error as error:
            self.throttled_log.warn("store error", during=step, problem=error.message)
            return False
        return True


def kind_of(key: str) -> str:
    return key.partition("/")[0]


def name_of(key: str) -> str:
    return key.rstrip("/").partition("/")[2]


def describe(key: str) -> str:
    """A record's key in words, for people."""
    kind, _, name = key.rstrip("/").partition("/")
    return f"{kind} {name}" if name else f"the {kind} record"
