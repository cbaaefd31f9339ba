"""The one way to write: read, decide, commit if the revisions still match, publish.

`Engine.update` does it for every kind of record; `Engine.submit` does it for the commands of a
scope, several at a time. No other module calls `store.commit`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from itertools import chain
from typing import TypeVar

from msgspec.structs import replace

from forewarn.core.command import Back, Command, Degrade, Maintain, Operation, Seen
from forewarn.core.fleet import Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.machine import Outcome, booting_impacts, decide
from forewarn.core.timing import Timing
from forewarn.engine.board import Board, PublishedScope
from forewarn.engine.clock import Clock
from forewarn.engine.command_queue import CommandQueues
from forewarn.engine.entry import encode_all, log_all
from forewarn.engine.last_polls import POLLED_KEY
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.engine.record import CLOCK, DECLARED, FLOOR, HOSTS, RAW, SHOWN, Floor, Hosts
from forewarn.engine.record_cache import ABSENT, Versioned, describe, kind_of, name_of
from forewarn.engine.replica import SCOPE_KEY, SEEN_KEY, Replica
from forewarn.engine.transaction import LeaseLost, Transaction
from forewarn.errors import Conflict, Error, Invalid, StoreLost, StoreUnusable, Unavailable
from forewarn.store.base import Lease, RevisionCheck, Store, Write

T = TypeVar("T")

FLEET_KEY = "fleet"
FLOOR_KEY = "floor"
SHOWN_KEY = "shown"
DECLARED_KEY = "declared/{}/"
"""Some of the declared hosts: the size of a record is limited."""
TRIES_MAX = 10
LOSSES_MAX = 2
UPDATE_SECONDS_MAX = 8.0
"""After this time the store counts as lost."""
CLOCK_SKEW_SECONDS_MAX = 5.0
"""How far the clock may be from those of the other servers; see `clock_skew.py`."""
CLOCK_COMPARED_SECONDS_MAX = 6.0
"""How long the commands of a server that starts wait for that comparison."""
UNHEALTHY_FOR = timedelta(seconds=15)
"""How long after a failed commit the server reports itself not ready, unless one succeeds."""
SEEN_SECONDS_MAX = 2.0
SEEN_AGAIN_SECONDS = 5.0


class Engine(Replica):
    """A replica that writes. Any number of engines may share one store; revisions decide races."""

    def __init__(self, store: Store, clock: Clock, timing: Timing) -> None:
        board = Board(timing.seen_interval.total_seconds(), ThrottledLog(clock))
        super().__init__(store, clock, board)
        self.timing = timing
        self.clock_skew_seconds = 0.0
        self.server_lease: Lease | None = None
        self.clock_compared = asyncio.Event()  # commands wait for it
        self.clock_compared.set()
        self._lost_at: datetime | None = None
        self._commands = CommandQueues(self)
        self._background: dict[tuple[str, Command], asyncio.Task[None]] = {}
        declare = self.board.declare_hosts
        self.register(FLEET_KEY, HOSTS)
        self.on_change(FLEET_KEY, lambda old, new: declare(old and old.names, new and new.names))
        self.register("declared", DECLARED)
        self.on_change("declared", declare)
        self.register(FLOOR_KEY, FLOOR)
        self.register("lease", RAW)
        self.register("clock", CLOCK)
        self.register(SHOWN_KEY, SHOWN)

    def retime(self, timing: Timing) -> None:
        """Use other times from now on. Events keep their NotBefore."""
        self.timing = timing
        self.board.seen_interval_seconds = timing.seen_interval.total_seconds()

    def declared_hosts(self) -> tuple[str, ...]:
        """The hosts that the fleet declares, in its order."""
        return (*self.applied.names, *chain(*self.declared_parts()))

    def declared_parts(self) -> list[tuple[str, ...]]:
        """The declared hosts as they are divided into records."""
        parts = dict(self.records.values("declared"))
        keys = map(DECLARED_KEY.format, range(len(parts)))
        return [parts[key] for key in keys if key in parts]

    @property
    def applied(self) -> Hosts:
        """The fleet record, with the digest of the fleet file applied last."""
        hosts: Hosts | None = self.records.get(FLEET_KEY).value
        return hosts or Hosts()

    @property
    def floor(self) -> int:
        """The highest DocumentIncarnation of any deleted scope."""
        floor: Floor | None = self.records.get(FLOOR_KEY).value
        return max(floor.incarnation if floor else 0, self.applied.incarnation_floor)

    @property
    def can_serve(self) -> bool:
        """Whether the store is followed, has refused no commit recently, and the lease is held."""
        has_lost, lease = self._lost_at, self.server_lease
        is_healthy = has_lost is None or self.clock.now() - has_lost > UNHEALTHY_FOR
        return self.is_ready and is_healthy and (lease is None or self.holds(lease))

    @property
    def is_clock_off(self) -> bool:
        """Whether this server's clock is too far from those of the other servers."""
        return abs(self.clock_skew_seconds) > CLOCK_SKEW_SECONDS_MAX

    @property
    def clock_lead(self) -> timedelta:
        """How far this clock is ahead, if it is off."""
        return timedelta(seconds=max(self.clock_skew_seconds if self.is_clock_off else 0.0, 0.0))

    def decision_time(self) -> datetime:
        """The time by which the rules decide.

        Every command starts what is due, too. If this clock is off, nothing is due before it is by
        this clock and by that of the other servers.
        """
        return self.clock.now() - self.clock_lead

    def check_announcement(self, transaction: Transaction, command: Command) -> None:
        """Refuse to announce an event while the clock is off: its notice would begin now.

        The reference time cannot be used instead. It seems to be in the past while records of the
        other servers arrive late, such as after this process was stopped. The commit compares
        `shown`, so that a late one is refused or makes a gap: see `readability.py`.
        """
        if not isinstance(command, Operation | Maintain | Degrade):
            return
        transaction.get(SHOWN_KEY)
        if self.is_clock_off:
            skew = f"{self.clock_skew_seconds:+.1f} s"
            raise Unavailable(
                f"this server announces no events: its clock is {skew} from the other servers'; "
                "use another server",
                seconds=skew,
            )

    async def update(
        self,
        keys: Sequence[str],
        decide: Callable[[Transaction], T],
        *,
        by: str,
        lease: Lease | None = None,
    ) -> T:
        """Run `decide` on current records and commit what it puts; return its result.

        `decide` must be synchronous and pure: after a lost race it runs again. `keys` name what it
        reads, to be read again then; `kind/` stands for all records of a kind. An Error that it
        raises is believed only after reading the store, because another server may know more.
        With a `lease` the commit happens only while this server holds it, else LeaseLost.
        """
        return await _within_limit(self._update(keys, decide, by, lease))

    async def _update(
        self, keys: Sequence[str], decide: Callable[[Transaction], T], by: str, lease: Lease | None
    ) -> T:
        losses, is_confirmed = list[StoreLost](), False
        for _ in range(TRIES_MAX):
            values = {key: await self._get(key) for key in keys if not self.is_cached(key)}
            now = self.decision_time()
            transaction = Transaction(self, values, now, by, is_confirmed=is_confirmed)
            try:
                if lease is not None:
                    self.require(transaction, lease)
                result = decide(transaction)
            except Error as error:
                if is_confirmed or isinstance(error, Invalid):
                    raise
            else:
                if not transaction.writes:
                    return result
                if len(losses) == LOSSES_MAX:
                    raise losses[-1]
                try:
                    await self._commit(transaction)
                    return result
                except Conflict:
                    self.metrics.conflicts += 1
                except StoreLost as error:  # it may have been committed: read before answering
                    losses.append(error)
            await self._read_again(keys, transaction)
            is_confirmed = True
        raise Unavailable(f"too many clients change {describe(keys[0])} at once; try again")

    async def _get(self, key: str) -> Versioned:
        """A record of a kind that is not cached."""
        record = await self.store.get(key)
        if record.value is None:
            return ABSENT
        return Versioned(self.codec(key).decode(record.value), record.revision)

    async def _read_again(self, keys: Sequence[str], transaction: Transaction) -> None:
        for key in dict.fromkeys((*keys, *transaction.reads)):
            if self.is_cached(key):
                await self.refresh(key)

    def require(self, transaction: Transaction, lease: Lease) -> None:
        """Let the transaction commit only under this lease; LeaseLost if it is known to be lost.

        The local check alone is not enough: the store compares the lease's record too.
        """
        if not self.holds(lease):
            raise LeaseLost(f"this server has lost the lease {lease.name}")
        transaction.require(lease)

    async def _commit(self, transaction: Transaction) -> None:
        self._keep_floor(transaction)
        self._keep_seen(transaction)
        reads, writes = transaction.reads, transaction.writes
        encoded = [
            Write(
                key,
                None if value is None else self.codec(key).encode(value),
                reads[key].revision,
            )
            for key, value in writes.items()
        ]
        checks = [
            RevisionCheck(key, read.revision) for key, read in reads.items() if key not in writes
        ]
        entries = transaction.entries
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            revision = await self.store.commit(encoded, checks, encode_all(entries))
        except Conflict:
            raise
        except (StoreLost, StoreUnusable):
            self._lost_at = self.clock.now()
            raise
        self._lost_at = None
        self.metrics.store.add(loop.time() - began)
        transaction.committed_at = revision
        for key, value in writes.items():
            self.show(key, value, revision)
        log_all(entries)
        self.publish(entries)

    def _keep_floor(self, transaction: Transaction) -> None:
        """Keep DocumentIncarnation from repeating when a scope is deleted and created again.

        Otherwise an old ETag would match a new document. Deleting a scope raises the floor, and a
        new scope starts above it. Both write the floor's record, so that two servers cannot miss
        each other. It is a record of its own, because an apply that takes several commits holds
        the fleet's.
        """
        reads, writes = transaction.reads, transaction.writes
        scopes = [(key, reads[key].value, writes[key]) for key in writes if kind_of(key) == "scope"]
        known = self.floor
        gone = (before.incarnation for _, before, after in scopes if before and not after)
        floor = max([known, *gone])
        created = [(key, after) for key, before, after in scopes if before is None and after]
        if floor == known and not created:
            return
        transaction.put(FLOOR_KEY, Floor(floor))
        for key, scope in created:
            incarnation = max(scope.incarnation, floor + 1)
            transaction.put(key, replace(scope, incarnation=incarnation))

    def _keep_seen(self, transaction: Transaction) -> None:
        """Delete the polls of a deleted scope with it, and those that its next scope would find.

        Polls that an earlier version stored in the scope's record get a record of their own,
        because the commit removes them from there. The last poll of a scope with one VM is that of
        the VM: it gets a record when another VM joins.
        """
        for key, after in list(transaction.writes.items()):
            if kind_of(key) != "scope":
                continue
            seen_key = SEEN_KEY.format(name_of(key))
            is_new, is_stored = not transaction.reads[key].revision, self.read(seen_key).revision
            if after is None or (is_new if is_stored else after.seen_at):
                transaction.put(seen_key, after and after.seen_at)
            polled_key = POLLED_KEY.format(name_of(key))
            if after is None and self.read(polled_key).revision:
                transaction.put(polled_key, None)
            before, seen_at = transaction.reads[key].value, self.read(seen_key).value
            if before and after and seen_at and len(before.vms) == 1 < len(after.vms):
                transaction.put(polled_key, {before.vms[0].name: int(seen_at.timestamp())})

    async def submit(
        self,
        scope: str,
        command: Command,
        by: str,
        *,
        lease: Lease | None = None,
        check: Callable[[Transaction], None] | None = None,
    ) -> Outcome:
        """Carry out a command durably, or raise the Error that says why not.

        The returned outcome has been committed and published. `check` may read other records and
        refuse the command; the commit compares them.
        """
        if isinstance(command, Seen):
            return await self._record_poll(scope, by)
        return await _within_limit(self._submit(scope, command, by, lease, check))

    async def _submit(
        self,
        scope: str,
        command: Command,
        by: str,
        lease: Lease | None,
        check: Callable[[Transaction], None] | None,
    ) -> Outcome:
        await self.wait_until_clock_compared()
        return await self._commands.submit(scope, command, by, lease, check)

    async def wait_until_clock_compared(self) -> None:
        """Whatever starts or announces events waits for it."""
        try:
            async with asyncio.timeout(CLOCK_COMPARED_SECONDS_MAX):
                await self.clock_compared.wait()
        except TimeoutError:
            raise Unavailable(
                "this server has not compared its clock with the other servers yet; try again"
            ) from None

    def new_scope(self, name: str, *, is_reported: bool = False) -> Scope:
        return Scope(name=name, incarnation=self.floor + 1, is_reported=is_reported)

    async def seen(self, published: PublishedScope) -> None:
        """Record that a VM of the scope polls, so that the scope is enabled.

        Only a poll that enables the scope waits for the commit. If the store does not answer, the
        poll gets its document anyway, and a later poll tries again.
        """
        task = self.record_poll(published)
        if not is_enabled(published.scope, self.clock.now(), self.timing):
            await asyncio.shield(task)

    def record_poll(self, published: PublishedScope) -> asyncio.Task[None]:
        """Record in the background that VMs of the scope poll."""
        return self._start_recording(published, Seen())

    def back(self, published: PublishedScope, vm: str) -> None:
        """Record in the background that a VM has polled after it was restarted."""
        for impact in booting_impacts(published.scope):
            if impact.vm == vm:
                back = Back(event_id=impact.event_id, vm=vm, detail="polled again")
                self._start_recording(published, back)

    def _start_recording(
        self, published: PublishedScope, command: Seen | Back
    ) -> asyncio.Task[None]:
        """The task that submits what a poll means. Many polls may share one."""
        key = published.scope.name, command
        task = self._background.get(key)
        if task is None:
            task = self._background[key] = asyncio.create_task(self._record(published, command))
            task.add_done_callback(lambda _: self._background.pop(key, None))
        return task

    async def _record(self, published: PublishedScope, command: Seen | Back) -> None:
        try:
            async with asyncio.timeout(SEEN_SECONDS_MAX):
                await self.submit(published.scope.name, command, by="poll")
        except (Error, TimeoutError) as error:
            again_at = self.clock.now().timestamp() + SEEN_AGAIN_SECONDS
            published.fresh_until = published.first_polls_at = again_at
            self.throttled_log.warn(
                "poll not recorded",
                scope=published.scope.name,
                problem=str(error) or "the store is slow",
            )

    async def _record_poll(self, name: str, by: str) -> Outcome:
        """Write the record of the scope's polls. It is read alone: a commit of the scope at the
        same time does not conflict. The rule is given no VMs, so it costs the same for any scope.
        """
        key, scope_key = SEEN_KEY.format(name), SCOPE_KEY.format(name)

        def see(transaction: Transaction) -> Outcome:
            self.check_readable(scope_key)
            if name not in self.board.scopes:
                transaction.get(scope_key)  # read again before it is refused
            scope = self.board.find_scope(name).scope
            bare = Scope(name=name, seen_at=scope.seen_at)
            outcome = decide(bare, Seen(), transaction.now, self.timing)
            seen_at = outcome.scope.seen_at
            is_due = transaction.get(key) != seen_at
            if len(scope.vms) > 1 and (is_due or self.last_polls.are_behind(scope)):
                transaction.put(POLLED_KEY.format(name), self.last_polls.times(scope))
            if is_due:
                transaction.put(key, seen_at)
                transaction.record(*outcome.changes, scope=name)
            return replace(outcome, scope=replace(scope, seen_at=seen_at))

        return await self.update([key], see, by=by)

    async def close(self) -> None:
        for task in list(self._background.values()):
            task.cancel()
        await self.store.close()  # ends the commit in progress
        await self._commands.close()


async def _within_limit(work: Awaitable[T]) -> T:
    """The result of a write. A client waits for it, however many writes wait in front of it."""
    try:
        async with asyncio.timeout(UPDATE_SECONDS_MAX):
            return await work
    except TimeoutError:
        raise StoreLost(f"the store did not answer within {UPDATE_SECONDS_MAX:g} s") from None
