"""Group commit: the commands of a scope that wait for a commit are committed together."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from forewarn.core.change import ChangeKind
from forewarn.core.command import Command, SetMembers
from forewarn.core.fleet import Scope
from forewarn.core.machine import Group, Outcome, decide
from forewarn.engine.replica import SCOPE_KEY, SEEN_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error, Invalid, StoreLost, Unavailable, UnknownScope
from forewarn.store.base import Lease

if TYPE_CHECKING:
    from forewarn.engine.engine import Engine

Result = Outcome | Exception

GROUP_MAX = 256
"""How many commands for one scope are committed together."""
CHANGES_BYTES_MAX = 192 * 1024
"""How large the changes of a group may be, unless it is one command. As history entries they are
nearly twice as large, and with the record of the scope they must fit into a commit.
"""
QUEUE_MAX = 10_000
"""How many commands for one scope may wait."""


class Submission(NamedTuple):
    """A command that waits for its commit, and the future that its submitter awaits.

    `check` raises an Error if the command must not be committed. The commit compares what it reads.
    """

    command: Command
    by: str
    lease: Lease | None
    check: Callable[[Transaction], None] | None
    outcome: asyncio.Future[Outcome]

    def settle(self, result: Result) -> None:
        if self.outcome.done():
            return  # the submitter was cancelled
        if isinstance(result, Exception):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


class CommandQueues:
    """The queue of each scope that has commands waiting.

    Each commit of a scope writes its whole record. So commands that arrive while one commit is in
    progress wait in the scope's queue, are decided one after the other, and are committed as one
    write. A scope has a writer task while its queue is not empty. Cancelling a submitter does not
    affect the commit.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._queues: dict[str, deque[Submission]] = {}
        self._writers: set[asyncio.Task[None]] = set()

    async def submit(
        self,
        scope: str,
        command: Command,
        by: str,
        lease: Lease | None,
        check: Callable[[Transaction], None] | None,
    ) -> Outcome:
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
        outcome = asyncio.get_running_loop().create_future()
        submission = Submission(command, by, lease, check, outcome)
        queue.append(submission)
        return await submission.outcome

    async def _write(self, scope: str, queue: deque[Submission]) -> None:
        """Commit the commands that wait for a scope, group by group, until none is left."""
        group: list[Submission] = []
        try:
            while queue:  # ends: each round settles at least one
                group = [queue.popleft() for _ in range(min(len(queue), GROUP_MAX))]
                group = [one for one in group if not one.outcome.done()]
                left = await self._write_group(scope, group) if group else []
                queue.extendleft(reversed(left))
        finally:
            del self._queues[scope]
            for one in (*group, *queue):
                one.settle(StoreLost(f"{scope}: the engine was closed before the commit ended"))

    async def _write_group(self, scope: str, group: list[Submission]) -> list[Submission]:
        """Decide and commit as many of the group as one commit can hold. Returns the others.

        If the commit fails, those that came before any change still get their result.
        """
        results, unchanged = list[Result](), list[Result]()

        def decide_group(transaction: Transaction) -> None:
            results[:] = unchanged[:] = ()
            for result in self._decide_group(transaction, scope, group):
                results.append(result)
                if not transaction.writes:
                    unchanged.append(result)

        try:
            await self._engine.update([SCOPE_KEY.format(scope)], decide_group, by="")
        except Invalid as error:
            if len(group) > 1:  # together they are too large, or one of them is
                return [*await self._write_group(scope, group[:1]), *group[1:]]
            results = [error]
        except Exception as error:
            results = [*unchanged, *[error] * (len(group) - len(unchanged))]
        for one, result in zip(group, results, strict=False):
            one.settle(result)
        return group[len(results) :]

    def _decide_group(
        self, transaction: Transaction, name: str, group: Sequence[Submission]
    ) -> Iterator[Result]:
        """Apply each command to the result of the one before it.

        Ends early after a command that creates or deletes the scope, and before one whose changes
        would make the commit too large.
        """
        key, engine = SCOPE_KEY.format(name), self._engine
        before: Scope | None = transaction.get(key)
        scope = before or engine.new_scope(name)
        together, changes_bytes = Group(scope), 0
        for one in group:
            try:
                if before is None and not isinstance(one.command, SetMembers):
                    raise UnknownScope(f"there is no scope {name!r}", scope=name)
                self._check(transaction, one)
                outcome = decide(scope, one.command, transaction.now, engine.timing, together)
                if any(each.what is ChangeKind.EXECUTED_SILENTLY for each in outcome.changes):
                    transaction.get(SEEN_KEY.format(name))  # compared: a poll may be unknown here
            except Exception as error:  # a refusal, or a bug that concerns only this submitter
                if isinstance(error, Error) and not transaction.is_confirmed:
                    raise
                yield error
                continue
            size = len(msgspec.json.encode(outcome.changes))
            if changes_bytes and changes_bytes + size > CHANGES_BYTES_MAX:
                return
            if outcome.is_gone or outcome.scope != scope or before is None:
                transaction.put(key, None if outcome.is_gone else outcome.scope)
                transaction.record(*outcome.changes, scope=name, by=one.by)
            yield outcome
            scope = outcome.scope
            changes_bytes += size
            if before is None or outcome.is_gone:
                return

    def _check(self, transaction: Transaction, one: Submission) -> None:
        """Refuse a command that must not be committed. The commit compares why it may be."""
        if one.lease is not None:
            self._engine.require(transaction, one.lease)
        if one.check is not None:
            one.check(transaction)
        self._engine.check_announcement(transaction, one.command)

    async def close(self) -> None:
        """Settle what still waits. Call it after closing the store."""
        for writer in list(self._writers):
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)
