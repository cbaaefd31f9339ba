"""The store as this server knows it: every scope on the board, every other record decoded.

A replica only reads. It loads everything once, follows what any server commits, and catches up on
request. Each record is replaced only by a newer revision, so updates may arrive late or more than
once.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from math import ceil
from typing import Any, NamedTuple, TypeVar

from forewarn.engine.board import Board, PublishedScope
from forewarn.engine.callbacks import Callbacks
from forewarn.engine.clock import Clock
from forewarn.engine.entry import Entry
from forewarn.engine.last_polls import LastPolls
from forewarn.engine.metrics import Metrics
from forewarn.engine.record import POLLED, SCOPE, SEEN, RecordCodec
from forewarn.engine.record_cache import Records, Versioned, describe, kind_of, name_of
from forewarn.errors import (
    Compacted,
    Error,
    EventEnded,
    NotFound,
    RecordUnreadable,
    StoreUnusable,
    Unavailable,
)
from forewarn.log import log
from forewarn.platform.remote import NOTICED_SECONDS_MAX, STALE_SECONDS_MIN
from forewarn.store.base import Lease, Record, Snapshot, Store

T = TypeVar("T")

SCOPE_KEY = "scope/{}/"
"""The closing slash keeps `web` from being a prefix of `web-2`."""
SEEN_KEY = "seen/{}/"
CATCH_UP_SECONDS_MAX = 2.0
UNREADABLE_LOGGED_MAX = 20
"""How many unreadable records are named in the log; all are counted in the metrics."""
POLLS_PASS_EVERY = 200
"""How many records, hosts or list entries are handled before yielding to the event loop."""
NO_KEY = ""
"""A key that no record has: getting it gives the revision of the store."""
FOLLOW_PAUSE = timedelta(seconds=1)
"""The least time between two attempts to follow the store."""

OnChange = Callable[[Any, Any], None]
"""Called with the value before and after a change of a record; one may be None: there is none."""


class Unreadable(NamedTuple):
    """A record that this version cannot decode, as of a revision, and the reason."""

    revision: int
    problem: str


class RecordKind(NamedTuple):
    codec: RecordCodec[Any]
    is_cached: bool
    callbacks: Callbacks[[Any, Any]]


class Replica:
    """Keeps the board and the records up to date with the store.

    States:  NOT FOLLOWING -> FOLLOWING <-> STALE. `is_ready` is true while FOLLOWING; STALE lasts
    from the loss of the store, at `stale_since`, until all that was committed meanwhile is shown.
    A deletion is remembered until everything up to its revision is known.
    """

    def __init__(self, store: Store, clock: Clock, board: Board) -> None:
        self.store = store
        self.clock = clock
        self.board = board
        self.metrics = Metrics(board)
        self.records = Records()
        self.unreadable: dict[str, Unreadable] = {}
        self.is_ready = False
        self.stale_since: datetime | None = None
        self.unusable = ""  # why, while the store answers but cannot be used
        self.throttled_log = board.throttled_log
        self._kinds: dict[str, RecordKind] = {}
        self._subscribers = Callbacks[[Sequence[Entry]]](self.throttled_log)
        self._deleted: dict[str, int] = {}
        self._advanced = asyncio.Event()
        self._loading = asyncio.Lock()
        self.register("scope", SCOPE)
        self.register("seen", SEEN)
        self.register("polled", POLLED)
        self.last_polls = LastPolls(board, self.records)
        self.subscribe_entries(self.metrics.count)

    def register(self, kind: str, codec: RecordCodec[Any], *, cached: bool = True) -> None:
        """Handle records `kind` and `kind/...` with this codec. Call it before `load`.

        Records that are not cached are read from the store by each `update`.
        """
        self._kinds[kind] = RecordKind(codec, cached, Callbacks(self.throttled_log))

    def on_change(self, kind: str, callback: OnChange) -> None:
        """Call this for each record of a registered kind that changes."""
        self._kinds[kind].callbacks.add(callback)

    def subscribe(self, callback: Callable[[Sequence[Entry]], None]) -> None:
        """Call this with the history entries of each commit of this server.

        Also, without entries, when other servers have committed.
        """
        self._subscribers.add(callback)

    def subscribe_entries(self, callback: Callable[[Entry], None]) -> None:
        """Call this with each history entry of this server's commits."""

        def call_for_each(entries: Sequence[Entry]) -> None:
            for entry in entries:
                callback(entry)

        self.subscribe(call_for_each)

    def publish(self, entries: Sequence[Entry] = ()) -> None:
        """Call the subscribers."""
        self._subscribers.call("a commit", entries)

    async def load(self) -> None:
        """Replace the cache with the contents of the store."""
        async with self._loading:
            await self._load_all()

    async def _load_all(self) -> None:
        snapshot = await self._load("")
        self.board.sort()
        self._pass_revision(snapshot.revision)

    async def refresh(self, key: str) -> None:
        """Read one record again, or every record of a kind if the key is `kind/`."""
        if key.endswith("/") and key.count("/") == 1:
            await self._load(key)
        else:
            self.learn(await self.store.get(key))

    async def _load(self, prefix: str) -> Snapshot:
        """Learn every record of a prefix, and the deletion of those that the store lacks."""
        snapshot = await self.store.load(prefix)
        held = {record.key for record in snapshot.records}
        scopes = self.board.scopes
        known = [*self.records.keys(), *map(SCOPE_KEY.format, scopes), *self.unreadable]
        known += [SEEN_KEY.format(name) for name, one in scopes.items() if one.seen_revision]
        for key in known:
            if key.startswith(prefix) and key not in held:
                self.learn(Record(key, None, snapshot.revision))
        await self._learn_each(snapshot.records)
        return snapshot

    async def _learn_each(self, records: Sequence[Record]) -> None:
        for number, record in enumerate(records, start=1):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
            self.learn(record)

    def learn(self, record: Record) -> None:
        """Show a record as the store holds it, unless a newer revision is shown.

        A record that cannot be decoded stays as it was last known, and read-only: changing it
        could undo what a newer server did. It does not affect other records.
        """
        key, revision = record.key, record.revision
        kind = self._kinds.get(kind_of(key))
        # The end of a lease is not a commit: the lease may have been the last one.
        is_expired = record.value is None and self.read(key).revision == revision
        if kind is None or not kind.is_cached:
            return
        if self.is_known_after(key, revision - 1) and not is_expired:
            return
        known = self.unreadable.get(key)
        try:
            value = None if record.value is None else kind.codec.decode(record.value)
        except StoreUnusable as error:
            newest = max(revision, known.revision if known else 0)
            self.unreadable[key] = Unreadable(newest, error.message)
            if known is None and len(self.unreadable) <= UNREADABLE_LOGGED_MAX:
                log.error(
                    "a record is from a newer version, or damaged: it is read-only here",
                    record=describe(key),
                    problem=error.message,
                )
            return
        if known is not None and revision > known.revision:
            del self.unreadable[key]
        self._show(kind, key, value, revision)

    def show(self, key: str, value: Any, revision: int) -> None:
        """Show a decoded record that was committed at a revision, unless a newer one is shown."""
        kind = self._kinds[kind_of(key)]
        if kind.is_cached and not self.is_known_after(key, revision - 1):
            self._show(kind, key, value, revision)

    def _show(self, kind: RecordKind, key: str, value: Any, revision: int) -> None:
        """A bug with one record must not stop the others, nor a commit that has happened."""
        try:
            self._show_value(kind, key, value, revision)
        except Exception as error:
            text = "bug while showing a record"
            self.throttled_log.error(text, error=error, record=describe(key))

    def _show_value(self, kind: RecordKind, key: str, value: Any, revision: int) -> None:
        if value is None:
            self._deleted[key] = revision
        if kind.codec is SCOPE:
            if value is None:
                self.board.withdraw(name_of(key), revision)
            else:
                self.board.publish(value, revision)
                # a poll is in `records` while its scope is not shown, because it was unreadable
                early = self.records.take(SEEN_KEY.format(value.name))
                if early.revision:
                    self.board.see(value.name, early.value, early.revision)
            return
        if kind.codec in (SEEN, POLLED) and name_of(key) in self.board.scopes:
            self._show_polls(kind, key, value, revision)
            return
        before = self.records.get(key).value
        self.records.set(key, value, revision)
        if before is not None or value is not None:  # else it was never readable, or unknown
            kind.callbacks.call(describe(key), before, value)

    def _show_polls(self, kind: RecordKind, key: str, value: Any, revision: int) -> None:
        """Polls of this server that the record misses are recorded when they were due anyway."""
        published = self.board.scopes[name_of(key)]
        due_at, seen_at, seen_revision = (
            published.fresh_until,
            published.scope.seen_at,
            published.seen_revision,
        )
        if kind.codec is SEEN:
            seen_at, seen_revision = value, revision
        else:
            self.records.set(key, value, revision)
        self.board.see(name_of(key), seen_at, seen_revision)
        if self.last_polls.are_behind(published.scope):
            published.fresh_until = min(due_at, published.fresh_until)

    def is_known_after(self, key: str, revision: int) -> bool:
        """Whether the record is known to have changed after a revision.

        A record that is absent, though everything up to the board's revision is known, was deleted
        by then: what an earlier read finds of it is outdated.
        """
        known = self.read(key).revision or max(self._deleted.get(key, 0), self.board.revision)
        return known > revision

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is held, as far as this server knows."""
        return lease.is_held() and not self.is_known_after(lease.key, lease.revision)

    def read(self, key: str) -> Versioned:
        """A cached record as a write must name it: revision 0 if it is absent or deleted."""
        kind, published = kind_of(key), self.board.scopes.get(name_of(key))
        if kind == "scope" and published is not None:
            return Versioned(published.scope, published.revision)
        if kind == "seen" and published is not None and published.seen_revision:
            return Versioned(published.scope.seen_at, published.seen_revision)
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

        Costs one small read if there is nothing new. False if the store did not answer in time.
        """
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS_MAX):
                present = (await self.store.get(NO_KEY)).revision
                while self.board.revision < present and self._is_followed():
                    await self._advanced.wait()  # `follow` advances it
                if self.board.revision < present:
                    async with self._loading:
                        if self.board.revision < present:  # else another load was sufficient
                            await self._load_all()
        except (Unavailable, TimeoutError):
            return False
        return True

    async def require_caught_up(self) -> None:
        """Catch up, so that "already true" can be believed; Unavailable if the store is lost."""
        if not await self.catch_up() and self._is_followed():
            raise Unavailable(
                "the store does not answer, and another server may have changed this; try again"
            )

    def _is_followed(self) -> bool:
        return self.is_ready or self.stale_since is not None

    async def follow(self) -> None:
        """Show what other servers commit, until cancelled.

        After the store was lost, the watch resumes where it ended. Everything is read again only
        if the store no longer knows every change since then: a fleet may have a million VMs.
        """
        self.is_ready, is_compacted = True, False
        while True:  # ends when cancelled
            again_at = self.clock.now() + FOLLOW_PAUSE
            try:
                if is_compacted:
                    await self.load()
                    is_compacted = False
                await self._watch()
                problem = "the watch has ended"
            except Error as error:
                is_compacted = is_compacted or isinstance(error, Compacted)
                problem = error.message
                self.unusable = problem if isinstance(error, StoreUnusable) else ""
            self._begin_stale(problem)
            await self.clock.sleep_until(again_at)

    async def _watch(self) -> None:
        present = (await self.store.get(NO_KEY)).revision
        async with aclosing(self.store.watch(self.board.revision)) as batches:
            self._end_stale(present)
            async for batch in batches:
                await self._learn_each(batch.records)
                self._pass_revision(batch.revision)
                self.publish()
                self._end_stale(present)

    def _begin_stale(self, problem: str) -> None:
        self.is_ready = False
        if self.stale_since is None:
            self.stale_since = self.clock.now()
            log.warning(
                "store not reachable; polls are answered from memory",
                since=self.stale_since.isoformat(timespec="seconds"),
                problem=problem,
            )

    def _end_stale(self, present: int) -> None:
        """Follow again, once all that was committed up to the present revision is shown."""
        if self.stale_since is not None and self.board.revision >= present:
            log.warning("store reachable again", stale_seconds=round(self.stale_seconds, 3))
            self.is_ready, self.stale_since, self.unusable = True, None, ""

    @property
    def stale_seconds(self) -> float:
        """For how long the store has not been followed; 0 while it is."""
        if self.stale_since is None:
            return 0.0
        return (self.clock.now() - self.stale_since).total_seconds()

    @property
    def age_seconds(self) -> int:
        """The age of the documents of this server, at most; 0 while the store is followed."""
        seconds = self.stale_seconds
        return ceil(seconds + NOTICED_SECONDS_MAX) if seconds >= STALE_SECONDS_MIN else 0

    def _pass_revision(self, revision: int) -> None:
        """Everything up to this revision is known."""
        self.board.revision = max(self.board.revision, revision)
        if self._deleted:
            self._deleted = {key: at for key, at in self._deleted.items() if at > revision}
        self._advanced.set()
        self._advanced = asyncio.Event()
