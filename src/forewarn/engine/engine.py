"""The one way to change anything: command, decide, commit if nobody was faster, publish.

Lost the race? All over again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from forewarn.auth.tokens import KINDS as TOKEN_KINDS
from forewarn.auth.tokens import Tokens
from forewarn.campaign.cache import KINDS, CampaignCache
from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Command, Seen, SetMembers
from forewarn.core.fleet import Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.machine import Group, Outcome, decide
from forewarn.core.timing import Timing
from forewarn.engine import entry as note
from forewarn.engine import record
from forewarn.engine.board import Board, PublishedScope
from forewarn.engine.clock import Clock
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.engine.metrics import Metrics
from forewarn.errors import (
    Conflict,
    Error,
    EventEnded,
    NotFound,
    RecordUnreadable,
    StoreLost,
    StoreUnusable,
    Unavailable,
    UnknownScope,
)
from forewarn.history.feed import HistoryFeed
from forewarn.store.base import WRITES_MAX, Record, Store, Write

log = logging.getLogger("forewarn")

T = TypeVar("T")

SCOPE_KEY = "scope/{}/"
"""The closing slash keeps `web` from being a prefix of `web-2`: reading one scope again reads one
record.
"""
FLEET_KEY = "fleet"
FLOOR_KEY = "floor"
TRIES_MAX = 10
LOSSES_MAX = 2
GROUP_MAX = 256
"""How many commands for one scope are committed together."""
QUEUE_MAX = 10_000
"""How many commands for one scope may wait."""
WELL_AGAIN = timedelta(seconds=15)
"""So long after a commit that the store did not take we say that we cannot serve, unless another
one was taken since.
"""
CATCH_UP_SECONDS_MAX = 2.0
NO_RECORDS = "nothing/"
"""A prefix that no key has: loading it tells the revision and nothing else."""
UNREADABLE_LOGGED_MAX = 20
"""How many records that cannot be read are named in the log; all are counted in the metrics."""
SEEN_SECONDS_MAX = 2.0
SEEN_AGAIN_SECONDS = 5.0
POLLS_PASS_EVERY = 200
"""How many records are read, or entries of a page made, before polls get their turn."""


LEVEL = {
    ChangeKind.CLAIMED: logging.DEBUG,
    ChangeKind.JOINED: logging.DEBUG,
    ChangeKind.LEFT: logging.DEBUG,
    ChangeKind.UPDATED: logging.DEBUG,
    ChangeKind.IMPACT_FAILED: logging.WARNING,
    ChangeKind.FAILED: logging.ERROR,
}
"""How loudly a change is told in the log; a whole fleet may join at once.

The history has them all.
"""


class Unreadable(NamedTuple):
    """A record that this version cannot read, as of a revision; and why."""

    revision: int
    problem: str


class Submission(NamedTuple):
    """A command that waits for its commit, and the outcome that its submitter waits for."""

    command: Command
    by: str
    outcome: asyncio.Future[Outcome]

    def settle(self, result: Outcome | Exception) -> None:
        if self.outcome.done():
            return  # the submitter was cancelled
        if isinstance(result, Exception):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


class Engine:
    """Holds the board true to the store. Any number of engines may work on one store; revisions
    settle who was first.

    Group commit: each commit of a scope writes its whole record, so commands that arrive while one
    is in progress wait in the scope's queue, are decided one after the other, and are committed as
    one write. A scope has a writer task while its queue is not empty. Submitters only wait for
    their own outcome: one that is cancelled breaks no commit.
    """

    def __init__(self, store: Store, clock: Clock, timing: Timing) -> None:
        self.store = store
        self.clock = clock
        self.timing = timing
        self.board = Board(timing.seen_interval.total_seconds())
        self.metrics = Metrics(self.board)
        self.listeners: list[Callable[[note.Note], None]] = [self.metrics.hear]
        self.throttled_log = ThrottledLog(clock)
        self.tail = HistoryFeed(store)
        self.shelf = CampaignCache()
        self.tokens = Tokens(store, clock, self.commit_records)
        self.is_ready = False
        self._lost_at: datetime | None = None
        self.fleet_record = Record(FLEET_KEY, None, 0)
        self.applied = record.Hosts()
        self._floor_record = Record(FLOOR_KEY, None, 0)
        self._floor = record.Floor()
        self.unreadable: dict[str, Unreadable] = {}
        self._catching_up = asyncio.Lock()
        self._catch_ups_asked = self._catch_ups_done = 0
        self._has_caught_up = False
        self._caught_up_to = 0
        self._queues: dict[str, deque[Submission]] = {}
        self._writers: set[asyncio.Task[None]] = set()
        self._background: dict[str, asyncio.Task[None]] = {}

    def retime(self, timing: Timing) -> None:
        """Work with other times from now on; what is announced keeps its NotBefore."""
        self.timing = timing
        self.board.seen_interval_seconds = timing.seen_interval.total_seconds()

    async def load(self) -> None:
        """Show all that the store holds and no more. Also the way back after the store was lost."""
        snapshot = await self.store.load()
        held = {found.key for found in snapshot.records}
        for name in [name for name in self.board.scopes if SCOPE_KEY.format(name) not in held]:
            self.board.withdraw(name, snapshot.revision)
        for key in [key for key in self.unreadable if key not in held]:
            del self.unreadable[key]
        self.tokens.keep_only(held, snapshot.revision)
        for number, found in enumerate(snapshot.records):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
            self.learn(found)
        self.board.sort()
        self.board.caught_up(snapshot.revision)

    def learn(self, found: Record) -> None:
        """Show a record as it stands in the store, unless something newer is shown already.

        A record that cannot be read, because a newer server wrote it, keeps nobody from the others.
        What it holds is shown as it was last known, if it was, and cannot be changed by this
        server: that could undo what the newer one did.
        """
        known = self.unreadable.get(found.key)
        try:
            self._learn(found)
        except StoreUnusable as problem:
            self.unreadable[found.key] = Unreadable(
                max(found.revision, known.revision if known else 0), problem.message
            )
            if kind_of(found.key) == "token":
                self.tokens.hold_unreadable(found)
            if known is None and len(self.unreadable) <= UNREADABLE_LOGGED_MAX:
                facts = {"record": named(found.key), "problem": problem.message}
                log.error(
                    "a record is from a newer version, or damaged: it is read-only here",
                    extra={"facts": facts},
                )
        else:
            if known is not None and found.revision > known.revision:
                del self.unreadable[found.key]

    def check_readable(self, key: str) -> None:
        """Refuse to change what could not be read."""
        found = self.unreadable.get(key)
        if found is not None:
            raise RecordUnreadable(
                f"{named(key)} was written by a newer version of Forewarn, or is damaged, and cannot be changed by this server;"
                f" upgrade this server. ({found.problem})",
                record=named(key),
            )

    def place(self, scope: str) -> PublishedScope:
        """The scope by its name, as it is shown.

        One that exists but could not be read yet is a problem of its own.
        """
        if scope not in self.board.scopes:
            self.check_readable(SCOPE_KEY.format(scope))
        return self.board.place(scope)

    def _learn(self, found: Record) -> None:
        if found.key == FLEET_KEY:
            if found.revision > self.fleet_record.revision:
                self.applied = (
                    record.HOSTS.decode(found.value) if found.value is not None else record.Hosts()
                )
                self.fleet_record = found
                self.board.declared_hosts = self.applied.names
            return
        if found.key == FLOOR_KEY:
            if found.revision > self._floor_record.revision:
                self._floor = (
                    record.FLOOR.decode(found.value) if found.value is not None else record.Floor()
                )
                self._floor_record = found
            return
        kind, _, name = found.key.rstrip("/").partition("/")
        if kind != "scope":
            if kind in TOKEN_KINDS:
                self.tokens.learn(found)
            elif kind in KINDS:
                self.shelf.learn(found)
            return
        if not self.board.is_news(name, found.revision):
            return
        if found.value is None:
            self.board.withdraw(name, found.revision)
        else:
            scope = record.SCOPE.decode(found.value)
            self.metrics.compare(scope, self.clock.now())
            self.board.publish(scope, found.revision)

    async def look_up(self, find: Callable[[], T]) -> T:
        """What `find` finds on the board.

        NotFound is believed only after catching up: another server may have made it.
        """
        try:
            return find()
        except EventEnded:
            raise  # what is over stays over
        except NotFound:
            has_read = await self.catch_up()
        try:
            return find()
        except NotFound:
            if has_read:
                raise
        raise Unavailable(
            "the store does not answer, and another server may have created this; try again"
        )

    async def catch_up(self) -> bool:
        """Show all that any server had committed when this was called, without waiting for the loop
        that follows the store.

        Costs one small read if there is nothing new. All who wait share the next read: not the one
        in progress, which may have begun before what they look for was committed. False if the
        store did not answer in time.
        """
        self._catch_ups_asked += 1
        mine = self._catch_ups_asked
        async with self._catching_up:
            if self._catch_ups_done < mine:
                sharing = self._catch_ups_asked
                self._has_caught_up = False
                with suppress(Unavailable, TimeoutError, StopAsyncIteration):
                    await self._read_changes()
                    self._has_caught_up = True
                self._catch_ups_done = sharing
            return self._has_caught_up

    async def _read_changes(self) -> None:
        async with asyncio.timeout(CATCH_UP_SECONDS_MAX):
            present = (await self.store.load(NO_RECORDS)).revision
        after = max(self.board.revision, self._caught_up_to)
        if present <= after:
            return
        async with aclosing(self.store.watch(after)) as batches:
            while (
                after < present
            ):  # ends: each batch is of a later revision, and every commit has a record
                async with asyncio.timeout(CATCH_UP_SECONDS_MAX):
                    batch = await anext(batches)
                for number, found in enumerate(batch.records):
                    if number % POLLS_PASS_EVERY == POLLS_PASS_EVERY - 1:
                        await asyncio.sleep(0)
                    self.learn(found)
                after = self._caught_up_to = batch.revision

    async def submit(self, scope: str, command: Command, by: str) -> Outcome:
        """Do what is asked, durably, or raise the Problem that says why not.

        What it returns has been committed and published.
        """
        queue = self._queues.get(scope)
        if queue is None:
            queue = self._queues[scope] = deque()
            writer = asyncio.create_task(self._write(scope, queue))
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)
        if len(queue) >= QUEUE_MAX:
            raise Unavailable(
                f"{scope} already has {len(queue)} queued changes; try again", scope=scope
            )
        submission = Submission(command, by, asyncio.get_running_loop().create_future())
        queue.append(submission)
        return await submission.outcome

    async def _write(self, scope: str, queue: deque[Submission]) -> None:
        """Commit what waits for a scope, group by group, until nothing is left."""
        group: list[Submission] = []
        try:
            while queue:  # ends: each turn settles at least one
                group = [queue.popleft() for _ in range(min(len(queue), GROUP_MAX))]
                group = [one for one in group if not one.outcome.done()]
                try:
                    left = await self._write_group(scope, group) if group else []
                except (
                    Exception
                ) as problem:  # whatever broke this group is its submitters' to handle
                    left = []
                    for one in group:
                        one.settle(problem)
                queue.extendleft(reversed(left))
        finally:
            del self._queues[scope]
            for one in (*group, *queue):
                one.settle(StoreLost(f"{scope}: the engine was closed before the commit ended"))

    async def _write_group(self, scope: str, group: list[Submission]) -> list[Submission]:
        """Decide and commit as many of the group as one commit can hold, settle them, and give
        those that are left.

        A refusal is believed only if the store shows the same scope: another server may know more.
        `read` is the revision of the scope when the store was last looked at.
        """
        key, losses, read = SCOPE_KEY.format(scope), 0, None
        for _ in range(TRIES_MAX):
            revision = self._revision(scope)
            before, results = self._decide(scope, group)
            if read != revision and any(isinstance(result, Error) for result in results):
                with suppress(Unavailable):
                    await self._read_again(key)
                read = self._revision(scope)
                if read != revision:
                    continue
            first = next(
                (place for place, result in enumerate(results) if has_changed(before, result)),
                len(results),
            )
            settle(group[:first], results)  # already true, or refused: no commit is needed
            group, results = group[first:], results[first:]
            if not results:
                return group
            try:
                await self._commit_group(scope, group, results, revision)
            except Conflict:
                self.metrics.conflicts += 1
            except StoreLost:  # it may have happened: look, but not for ever
                losses += 1
                if losses == LOSSES_MAX:
                    raise
            else:
                settle(group, results)
                return group[len(results) :]
            await self._read_again(key)
            read = self._revision(scope)
        raise Unavailable(f"{scope} is being changed by too many at once; try again", scope=scope)

    def _decide(
        self, scope: str, group: Sequence[Submission]
    ) -> tuple[Scope | None, list[Outcome | Exception]]:
        """What each command makes of what those before it made of the scope, up to the scope's end;
        and what it was before.
        """
        place = self.board.scopes.get(scope)
        try:
            self.check_readable(SCOPE_KEY.format(scope))
        except RecordUnreadable as problem:
            return None, [problem]
        if place is None and not isinstance(group[0].command, SetMembers):
            return None, [UnknownScope(f"there is no scope {scope!r}", scope=scope)]
        shown = current = place.scope if place else self._new(scope)
        now, together, results = self.clock.now(), Group(shown), list[Outcome | Exception]()
        for one in group if place else group[:1]:
            try:
                outcome = decide(current, one.command, now, self.timing, together)
            except Exception as problem:  # a refusal; or a bug, which is this submitter's alone
                results.append(problem)
                continue
            results.append(outcome)
            current = outcome.scope
            if outcome.is_gone:
                break
        return shown, results

    async def _commit_group(
        self,
        scope: str,
        group: Sequence[Submission],
        results: Sequence[Outcome | Exception],
        revision: int,
    ) -> None:
        now = self.clock.now()
        outcomes = [
            (one.by, result)
            for one, result in zip(group, results, strict=False)
            if isinstance(result, Outcome)
        ]
        notes = [
            note.Note(now, by, scope, change)
            for by, outcome in outcomes
            for change in outcome.changes
        ]
        await self._commit([(outcomes[-1][1], revision)], notes)

    def _revision(self, scope: str) -> int:
        """The revision of a scope as it is shown; 0 where it is not."""
        place = self.board.scopes.get(scope)
        return place.revision if place else 0

    async def submit_all(
        self,
        asked: Sequence[tuple[str, Command]],
        by: str,
        lock: Write,
        changes: Sequence[Change] = (),
    ) -> int:
        """Several scopes in one commit, together with a record that nobody else may have changed
        meanwhile; its new revision.

        Not while any scope cannot be read: nobody here knows which VMs are in it, and a VM must not
        be in two.
        """
        for key in self.unreadable:
            if kind_of(key) == "scope":
                self.check_readable(key)
        for _ in range(TRIES_MAX):
            present = [
                (scope, command)
                for scope, command in asked
                if scope in self.board.scopes or isinstance(command, SetMembers)
            ]
            read = [(*self._read(scope, command), command) for scope, command in present]
            now = self.clock.now()
            try:
                outcomes = [
                    (decide(before, command, now, self.timing), revision)
                    for before, revision, command in read
                ]
                return await self.commit(outcomes, by, lock, changes=changes)
            except (Conflict, StoreLost) as lost:
                self.metrics.conflicts += isinstance(lost, Conflict)
                for scope, _ in asked:
                    await self._read_again(SCOPE_KEY.format(scope))
                await self._read_again(lock.key)
                if self.fleet_revision != lock.revision:
                    break
        raise Unavailable("the fleet changed during the apply; apply it again")

    @property
    def fleet_revision(self) -> int:
        """The revision of the fleet record as a write must name it: 0 where there is none."""
        return self.fleet_record.revision if self.fleet_record.value is not None else 0

    async def commit(
        self,
        outcomes: Sequence[tuple[Outcome, int]],
        by: str,
        *extra: Write,
        changes: Sequence[Change] = (),
    ) -> int:
        """One commit of scopes, and of other records with their changes, each as it was read at its
        revision; then all see it.
        """
        now = self.clock.now()
        notes = [
            note.Note(now, by, outcome.scope.name, change)
            for outcome, _ in outcomes
            for change in outcome.changes
        ]
        notes += [note.Note(now, by, "", change) for change in changes]
        return await self._commit(outcomes, notes, *extra)

    async def _commit(
        self, outcomes: Sequence[tuple[Outcome, int]], notes: Sequence[note.Note], *extra: Write
    ) -> int:
        outcomes, others = self._above_floor(outcomes, extra)
        assert len(outcomes) + len(others) <= WRITES_MAX
        writes = [
            Write(
                SCOPE_KEY.format(outcome.scope.name),
                None if outcome.is_gone else record.SCOPE.encode(outcome.scope),
                revision,
            )
            for outcome, revision in outcomes
        ]
        for write in (*writes, *others):
            self.check_readable(write.key)
        try:
            revision = await self._store([*writes, *others], [note.encode(one) for one in notes])
        except (Conflict, StoreLost):
            if len(others) > len(
                extra
            ):  # the floor may be what has changed; the caller does not know of it
                with suppress(Unavailable):
                    await self._read_again(FLOOR_KEY)
            raise
        for write in others:
            self.learn(Record(write.key, write.value, revision))
        for outcome, _ in outcomes:
            if outcome.is_gone:
                self.board.withdraw(outcome.scope.name, revision)
            else:
                self.board.publish(outcome.scope, revision)
        for one in notes:
            level = LEVEL.get(one.change.what, logging.INFO)
            if log.isEnabledFor(level):
                log.log(level, str(one.change.what), extra={"facts": facts_of(one)})
            self._tell(one)
        self.tail.ring()
        return revision

    def _above_floor(
        self, outcomes: Sequence[tuple[Outcome, int]], extra: Sequence[Write]
    ) -> tuple[list[tuple[Outcome, int]], list[Write]]:
        """Keep DocumentIncarnation from repeating when a scope ends and comes back: else an old
        ETag would fit a new document.

        The commit that removes a scope raises the floor, and a new scope starts above it. Both
        write the floor's record at the revision that was read, so that two servers cannot miss each
        other. It has a record of its own, because an apply that takes several commits holds the
        fleet's. It is done here because every commit of a scope passes here.
        """
        known = self.floor
        floor = max(
            [known, *(outcome.scope.incarnation for outcome, _ in outcomes if outcome.is_gone)]
        )
        if floor == known and all(revision for _, revision in outcomes):
            return list(outcomes), list(extra)
        revision = self._floor_record.revision if self._floor_record.value is not None else 0
        write = Write(FLOOR_KEY, record.FLOOR.encode(record.Floor(floor)), revision)
        return [
            (outcome if read else _started_above(outcome, floor), read)
            for outcome, read in outcomes
        ], [*extra, write]

    @property
    def floor(self) -> int:
        """The highest DocumentIncarnation of any scope that is gone."""
        return max(self._floor.incarnation, self.applied.incarnation_floor)

    async def commit_records(self, writes: Sequence[Write], change: Change, by: str) -> int:
        """Records that are no scope's, with the note of what became true by them."""
        return await self.commit([], by, *writes, changes=(change,))

    async def _store(self, writes: Sequence[Write], notes: Sequence[bytes]) -> int:
        """The store's commit, timed; and known whether it takes any."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            revision = await self.store.commit(writes, notes)
        except (StoreLost, StoreUnusable):
            self._lost_at = self.clock.now()
            raise
        self._lost_at = None
        self.metrics.store.add(loop.time() - began)
        return revision

    @property
    def can_serve(self) -> bool:
        """Whether the store is read, followed, and takes what it is given, as far as anybody has
        tried lately.
        """
        return self.is_ready and (
            self._lost_at is None or self.clock.now() - self._lost_at > WELL_AGAIN
        )

    def _tell(self, one: note.Note) -> None:
        """Whoever listens hears of it; a listener that breaks undoes nothing."""
        for listener in self.listeners:
            try:
                listener(one)
            except Exception as broken:  # a handler that is not ours
                self.throttled_log.warn("listener failed", problem=repr(broken))

    async def seen(self, place: PublishedScope) -> None:
        """Record that somebody polls, so that the scope is enabled. The first time it is awaited, a
        refresh is not.

        A store that does not answer never keeps a poll from its document: it is tried again with a
        later poll.
        """
        name = place.scope.name
        task = self._background.get(name)
        if task is None:
            task = self._background[name] = asyncio.create_task(self._see(place))
            task.add_done_callback(lambda _: self._background.pop(name, None))
        if not is_enabled(place.scope, self.clock.now(), self.timing):
            await asyncio.shield(task)

    async def close(self) -> None:
        for task in list(self._background.values()):
            task.cancel()
        await self.store.close()
        for writer in list(
            self._writers
        ):  # the store has ended what was in progress; what still waits is told so
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)

    async def _see(self, place: PublishedScope) -> None:
        try:
            async with asyncio.timeout(SEEN_SECONDS_MAX):
                await self.submit(place.scope.name, Seen(), by="poll")
        except (Error, TimeoutError) as problem:
            place.fresh_until = self.clock.now().timestamp() + SEEN_AGAIN_SECONDS
            self.throttled_log.warn(
                "poll not recorded",
                scope=place.scope.name,
                problem=str(problem) or "the store is slow",
            )

    def _read(self, scope: str, command: Command) -> tuple[Scope, int]:
        self.check_readable(SCOPE_KEY.format(scope))
        if isinstance(command, SetMembers) and scope not in self.board.scopes:
            return self._new(scope), 0
        place = self.board.place(scope)
        return place.scope, place.revision

    def _new(self, scope: str) -> Scope:
        return Scope(name=scope, incarnation=self.floor + 1)

    async def _read_again(self, key: str) -> None:
        snapshot = await self.store.load(key)
        self.learn(
            next(
                (one for one in snapshot.records if one.key == key),
                Record(key, None, snapshot.revision),
            )
        )


def kind_of(key: str) -> str:
    return key.partition("/")[0]


def named(key: str) -> str:
    """A record's key in words, for people."""
    kind, _, name = key.rstrip("/").partition("/")
    return f"{kind} {name}" if name else f"the {kind} record"


def _started_above(outcome: Outcome, floor: int) -> Outcome:
    """The outcome of a new scope; its document is empty, so its incarnation may be any."""
    return replace(
        outcome, scope=replace(outcome.scope, incarnation=max(outcome.scope.incarnation, floor + 1))
    )


def settle(group: Sequence[Submission], results: Sequence[Outcome | Exception]) -> None:
    """Give each submitter its own result; there may be fewer of these, or of those."""
    for one, result in zip(group, results, strict=False):
        one.settle(result)


def has_changed(before: Scope | None, result: Outcome | Exception) -> bool:
    """Whether a result is another scope than before, so that it needs a commit."""
    return isinstance(result, Outcome) and (result.is_gone or result.scope != before)


def facts_of(one: note.Note) -> dict[str, str]:
    """A note's facts, the empty ones left out."""
    facts = {
        "scope": one.scope,
        "event": one.change.event_id,
        "vm": one.change.vm,
        "detail": one.change.detail,
        "by": one.by,
    }
    return {name: value for name, value in facts.items() if value}
