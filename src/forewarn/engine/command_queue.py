"""Group commit: the commands of a scope that wait for a commit are committed together."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from forewarn.core.command import Command, SetMembers
from forewarn.core.fleet import Scope
from forewarn.core.machine import Group, Outcome, decide
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error, StoreLost, Unavailable, UnknownScope
from forewarn.store.base import Lease

if TYPE_CHECKING:
    from forewarn.engine.engine import Engine

Result = Outcome | Exception

GROUP_MAX = 256
"""How many commands for one scope are committed together."""
ENTRIES_BYTES_MAX = 256 * 1024
"""A group ends early when its history entries are larger than this: the store has a limit."""
QUEUE_MAX = 10_000
"""How many commands for one scope may wait."""


class Submission(NamedTuple):
    """A command that waits for its commit, and the future that its submitter awaits."""

    command: Command
    by: str
    lease: Lease | None
    outcome: asyncio.Future[Outcome]

    def settle(self, result: Result) -> None:
        if self.outcome.done():
            return  # the submitter was cancelled
        if isinstance(result, Exception):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


class Decided(NamedTuple):
    """The result of each command of a group, and the index of the first that needs a commit."""

    results: list[Result]
    first_change: int


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

    async def submit(self, scope: str, command: Command, by: str, lease: Lease | None) -> Outcome:
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
        submission = Submission(command, by, lease, asyncio.get_running_loop().create_future())
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
        """Decide and commit as many of the group as one commit can hold, and settle them.

        Returns the others. If the commit fails, those that need no commit still get their result.
        """
        decided = Decided([], 0)

        def decide_all(transaction: Transaction) -> Decided:
            nonlocal decided
            decided = self._decide_group(transaction, scope, group)
            return decided

        try:
            await self._engine.update([SCOPE_KEY.format(scope)], decide_all, by="")
        except Exception as error:  # every submitter of the group gets the error
            settle(group, decided.results[: decided.first_change])
            for one in group:
                one.settle(error)
            return []
        settle(group, decided.results)
        return group[len(decided.results) :]

    def _decide_group(
        self, transaction: Transaction, scope: str, group: Sequence[Submission]
    ) -> Decided:
        """Apply each command to the result of the one before it.

        Ends early after a command that deletes the scope, and where the history entries of one
        commit get too large.
        """
        key = SCOPE_KEY.format(scope)
        before: Scope | None = transaction.get(key)
        if before is None and not isinstance(group[0].command, SetMembers):
            results: list[Result] = [UnknownScope(f"there is no scope {scope!r}", scope=scope)]
        else:
            results = self._decide_each(transaction, before or self._engine.new_scope(scope), group)
        refusal = next((result for result in results if isinstance(result, Error)), None)
        if refusal is not None and not transaction.is_confirmed:
            raise refusal
        first = next(
            (index for index, result in enumerate(results) if has_changed(before, result)),
            len(results),
        )
        for one, result in zip(group[first:], results[first:], strict=False):
            if isinstance(result, Outcome):
                transaction.put(key, None if result.is_gone else result.scope)
                transaction.record(*result.changes, scope=scope, by=one.by)
        return Decided(results, first)

    def _decide_each(
        self, transaction: Transaction, scope: Scope, group: Sequence[Submission]
    ) -> list[Result]:
        together, results, entries_bytes = Group(scope), list[Result](), 0
        for one in group if transaction.get(SCOPE_KEY.format(scope.name)) else group[:1]:
            try:
                if one.lease is not None:
                    self._engine.require(transaction, one.lease)
                outcome = decide(scope, one.command, transaction.now, self._engine.timing, together)
            except Exception as error:  # a refusal, or a bug that concerns only this submitter
                results.append(error)
                continue
            results.append(outcome)
            scope = outcome.scope
            entries_bytes += len(msgspec.json.encode(outcome.changes))
            if outcome.is_gone or entries_bytes > ENTRIES_BYTES_MAX:
                break
        return results

    async def close(self) -> None:
        """Settle what still waits. Call it after closing the store."""
        for writer in list(self._writers):
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)


def settle(group: Sequence[Submission], results: Sequence[Result]) -> None:
    """Give each submitter its own result. Either may be longer."""
    for one, result in zip(group, results, strict=False):
        one.settle(result)


def has_changed(before: Scope | None, result: Result) -> bool:
    """Whether a result differs from the scope before, so that it needs a commit."""
    return isinstance(result, Outcome) and (result.is_gone or result.scope != before)
