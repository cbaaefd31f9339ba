"""Commands for one scope that wait for each other are committed together: one write, everyone's own
outcome.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from forewarn.core import command as ask
from forewarn.core.event import Status
from forewarn.core.fleet import Approval, Policy, Scope, ScopeKind
from forewarn.core.machine import Outcome
from forewarn.core.timing import Timing
from forewarn.engine.command_queue import GROUP_MAX, QUEUE_MAX
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.errors import (
    AlreadyPending,
    Conflict,
    StoreLost,
    Unavailable,
    UnknownEvent,
    UnknownScope,
)
from forewarn.fleetfile.parser import Fleet
from forewarn.store.base import (
    COMMIT_BYTES_MAX,
    VALUE_BYTES_MAX,
    Record,
    RevisionCheck,
    Snapshot,
    Write,
)
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, approve, guid, maintain, restart, vm
from tests.history import entries_of
from tests.unit.engine.test_engine import World, run_in_world

NAMES = [f"web-{number}" for number in range(GROUP_MAX + 50)]


class GatedStore(MemoryStore):
    """Holds commits back while its gate is closed, and counts commits and reads.

    Fails the next commits as told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.commits = 0
        self.reads = 0
        self.failures: list[Exception] = []

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        await self.gate.wait()
        self.commits += 1
        if self.failures:
            raise self.failures.pop(0)
        return await super().commit(writes, checks, entries)

    async def get(self, key: str) -> Record:
        self.reads += 1
        return await super().get(key)


class NoGate(MemoryStore):
    """Another server's way to the same records."""

    def __init__(self, store: GatedStore) -> None:
        super().__init__()
        self._store = store

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        return await MemoryStore.commit(self._store, writes, checks, entries)

    async def get(self, key: str) -> Record:
        return await MemoryStore.get(self._store, key)

    async def load(self, prefix: str = "") -> Snapshot:
        return await MemoryStore.load(self._store, prefix)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


MANY_OPERATIONS = Policy(user_operations_max=1000)


async def ready(
    world: World, policy: Policy = MANY_OPERATIONS, names: Sequence[str] = NAMES
) -> tuple[Engine, GatedStore]:
    """An engine with one scope that somebody polls, and its store, with the counts at 0."""
    engine = await world.engine()
    scope = Scope(
        name="web", kind=ScopeKind.SCALE_SET, policy=policy, vms=tuple(vm(name) for name in names)
    )
    await Operations(engine, world.make_id).apply(Fleet(scopes=(scope,), hosts=()), by="test")
    await engine.seen(engine.board.scopes["web"])
    store = cast("GatedStore", world.store)
    store.commits = store.reads = 0
    return engine, store


Submitted = list["asyncio.Task[Outcome]"]


async def behind_a_commit(
    engine: Engine, store: GatedStore, commands: Sequence[ask.Command]
) -> Submitted:
    """The first command is being committed, the others wait behind it."""
    store.gate.clear()
    tasks = []
    for number, command in enumerate(commands):
        tasks.append(asyncio.create_task(engine.submit("web", command, by=f"by-{number}")))
        await turns()
    return tasks


def live_gated(main: Callable[[World], object]) -> None:
    async def run() -> None:
        await main(World(GatedStore()))  # type: ignore[misc]

    asyncio.run(run())


def test_commands_that_wait_for_a_commit_are_committed_together() -> None:
    """Each commit writes the whole scope; a thousand VMs that approve at once must not write it a
    thousand times.
    """

    async def main(world: World) -> None:
        engine, store = await ready(world)
        before = len(await entries_of(store))
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[number], number + 1) for number in range(6)]
        )
        store.gate.set()
        outcomes = await asyncio.gather(*tasks)

        assert store.commits == 2
        for number, outcome in enumerate(outcomes):
            assert outcome.scope.event(guid(number + 1)) is not None
            assert [change.event for change in outcome.changes] == [guid(number + 1)]
        entries = (await entries_of(store))[before:]
        assert [(entry.by, entry.event) for entry in entries] == [
            (f"by-{number}", guid(number + 1)) for number in range(6)
        ]
        stored = (await world.engine()).board.scopes["web"].scope
        assert [event.id for event in stored.events] == [guid(number + 1) for number in range(6)]

    live_gated(main)


def test_a_group_is_one_change_for_the_guests() -> None:
    """They never see the steps in between, so the incarnation does not count them."""

    async def main(world: World) -> None:
        engine, store = await ready(world)
        tasks = await behind_a_commit(
            engine,
            store,
            [
                restart(NAMES[0], 1),
                restart(NAMES[1], 2),
                approve(NAMES[1], 2),
                restart(NAMES[2], 3),
            ],
        )
        store.gate.set()
        await asyncio.gather(*tasks)

        assert engine.board.scopes["web"].scope.incarnation == 3
        assert [event.status for event in engine.board.scopes["web"].scope.events] == [
            Status.SCHEDULED,
            Status.STARTED,
            Status.SCHEDULED,
        ]

    live_gated(main)


def test_refusal_in_a_group_affects_only_its_submitter() -> None:
    """And it is believed only after the store was read."""

    async def main(world: World) -> None:
        engine, store = await ready(world)
        commands: list[ask.Command]
        commands = [
            restart(NAMES[0], 1),
            restart(NAMES[1], 2),
            restart(NAMES[1], 3),
            approve(NAMES[2], 99),
            restart(NAMES[3], 4),
        ]
        tasks = await behind_a_commit(engine, store, commands)
        store.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(result) for result in results] == [
            Outcome,
            Outcome,
            AlreadyPending,
            UnknownEvent,
            Outcome,
        ]
        assert [event.id for event in engine.board.scopes["web"].scope.events] == [
            guid(1),
            guid(2),
            guid(4),
        ]
        assert (store.commits, store.reads) == (2, 2)  # the scope, and `shown`

    live_gated(main)


def test_group_that_lost_the_race_is_decided_again() -> None:
    """Another server was faster, and has restarted one of the VMs."""

    async def main(world: World) -> None:
        engine, store = await ready(world)
        other = Engine(NoGate(store), world.clock, Timing())
        await other.load()
        store.gate.clear()
        tasks = [
            asyncio.create_task(engine.submit("web", restart(NAMES[number], number + 1), by="ann"))
            for number in range(3)
        ]
        await turns()
        await other.submit("web", restart(NAMES[1], 50), by="other")
        store.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(result) for result in results] == [Outcome, AlreadyPending, Outcome]
        stored = (await world.engine()).board.scopes["web"].scope
        assert [event.id for event in stored.events] == [guid(50), guid(1), guid(3)]
        assert store.commits == 2

    live_gated(main)


@pytest.mark.parametrize("failure", [StoreLost("no answer"), Conflict("somebody was faster")])
def test_group_whose_commit_failed_once_is_retried(failure: Exception) -> None:
    async def main(world: World) -> None:
        engine, store = await ready(world)
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[number], number + 1) for number in range(4)]
        )
        store.failures = [failure]
        store.gate.set()
        await asyncio.gather(*tasks)

        assert len((await world.engine()).board.scopes["web"].scope.events) == 4

    live_gated(main)


def test_lost_store_is_reported_to_the_whole_group() -> None:
    async def main(world: World) -> None:
        engine, store = await ready(world)
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[number], number + 1) for number in range(4)]
        )
        store.failures = [StoreLost("no answer") for _ in range(4)]
        store.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [StoreLost] * 4

        await engine.submit("web", restart(NAMES[9], 10), by="ann")
        assert [event.id for event in engine.board.scopes["web"].scope.events] == [guid(10)]

    live_gated(main)


def test_command_that_is_already_true_needs_no_commit() -> None:
    """Guests approve at every poll; while the store is away that must not become an error for those
    who did.
    """

    async def main(world: World) -> None:
        engine, store = await ready(world, Policy(approval=Approval.ALL))
        await engine.submit("web", restart(NAMES[0], 1), by="ann")
        await engine.submit("web", approve(NAMES[1], 1), by="ann")
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[5], 2), approve(NAMES[1], 1), restart(NAMES[6], 3)]
        )
        store.failures = [StoreLost("no answer") for _ in range(4)]
        store.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(result) for result in results] == [StoreLost, Outcome, StoreLost]

    live_gated(main)


def test_cancelled_submitter_does_not_affect_the_others() -> None:
    """A poll waits two seconds for its record, an HTTP client hangs up; the others in the group
    want their outcome.
    """

    async def main(world: World) -> None:
        engine, store = await ready(world)
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[number], number + 1) for number in range(4)]
        )
        tasks[0].cancel()  # its commit is in progress
        tasks[2].cancel()  # nobody has looked at it yet
        await turns()
        store.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        kinds = [type(result) for result in results]
        assert kinds == [asyncio.CancelledError, Outcome, asyncio.CancelledError, Outcome]
        assert [event.id for event in engine.board.scopes["web"].scope.events] == [
            guid(1),
            guid(2),
            guid(4),
        ]

    live_gated(main)


def test_a_group_has_a_limit() -> None:
    """A commit of any size would hold the store, and everyone who waits, for any time."""

    async def main(world: World) -> None:
        engine, store = await ready(world)
        commands = [restart(NAMES[number], number + 1) for number in range(GROUP_MAX + 2)]
        tasks = await behind_a_commit(engine, store, commands[:1])
        tasks += [
            asyncio.create_task(engine.submit("web", command, by="ann")) for command in commands[1:]
        ]
        await turns()
        store.gate.set()
        await asyncio.gather(*tasks)

        assert store.commits == 3

    live_gated(main)


def test_history_of_a_group_leaves_room_for_the_scope() -> None:
    """Long problems of many VMs at once, then a failed host with many VMs: the record of the scope
    may take 1 MiB of the commit.
    """
    names = [f"web-{number}".ljust(128, "x") for number in range(600)]

    async def main(world: World) -> None:
        engine, store = await ready(world, names=names)
        await engine.submit("web", maintain("host-a"), by="ann")
        (event,) = engine.board.scopes["web"].scope.events
        await engine.submit("web", ask.Approve(event_ids=(event.id,)), by="ann")
        for name in names[:50]:
            await engine.submit("web", ask.Claim(event_id=event.id, vm=name, worker="w"), by="w")
        commands: list[ask.Command] = [
            ask.Finish(
                event_id=event.id, vm=name, worker="w", tries=1, problem="bad", detail="x" * 4000
            )
            for name in names[:50]
        ]
        failed = ask.Fail(host="host-a", operation_id=guid(7))
        tasks = await behind_a_commit(engine, store, [*commands, failed])
        before = (await store.load()).revision
        store.gate.set()
        await asyncio.gather(*tasks)

        scope = engine.board.scopes["web"].scope
        assert [impact.failures for impact in scope.impacts[:50]] == [1] * 50
        assert len(scope.events) == 2
        sizes = [len(value.value) for value in await store.history(after=before)]
        assert max(sizes) < COMMIT_BYTES_MAX - VALUE_BYTES_MAX < sum(sizes)

    live_gated(main)


def test_the_queue_of_a_scope_has_a_limit() -> None:
    async def main(world: World) -> None:
        engine, store = await ready(world)
        tasks = await behind_a_commit(engine, store, [restart(NAMES[0], 1)])
        tasks += [
            asyncio.create_task(engine.submit("web", approve(NAMES[0], 1), by="ann"))
            for _ in range(QUEUE_MAX)
        ]
        await turns()
        with pytest.raises(Unavailable, match="web"):
            await engine.submit("web", ask.Tick(), by="clock")
        for task in tasks[1:]:  # a slow machine cannot decide all within the limit of a write
            task.cancel()
        store.gate.set()
        await tasks[0]

    live_gated(main)


def test_command_after_the_deletion_of_its_scope_is_unknown_scope() -> None:
    async def main(world: World) -> None:
        engine, store = await ready(world)
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[0], 1), ask.Retire(), approve(NAMES[0], 1), ask.Tick()]
        )
        store.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(result) for result in results] == [
            Outcome,
            Outcome,
            UnknownScope,
            UnknownScope,
        ]
        assert "web" not in (await world.engine()).board.scopes

    live_gated(main)


def test_a_bug_in_one_command_fails_that_command_alone() -> None:
    async def main(world: World) -> None:
        engine, store = await ready(world)
        strange = cast("ask.Command", object())
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[0], 1), strange, restart(NAMES[1], 2)]
        )
        store.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(result) for result in results] == [Outcome, KeyError, Outcome]

    live_gated(main)


def test_closing_the_engine_settles_all_submitters() -> None:
    async def main(world: World) -> None:
        engine, store = await ready(world)
        tasks = await behind_a_commit(
            engine, store, [restart(NAMES[number], number + 1) for number in range(3)]
        )
        await engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(result) for result in results] == [StoreLost] * 3

    live_gated(main)


def test_scopes_do_not_wait_for_each_other() -> None:
    async def main(world: World) -> None:
        engine = await world.engine()
        scopes = tuple(Scope(name=name, kind=ScopeKind.VM, vms=(vm(name),)) for name in ("a", "b"))
        await Operations(engine, world.make_id).apply(Fleet(scopes=scopes, hosts=()), by="test")
        await asyncio.gather(*(engine.submit(name, ask.Seen(), by="poll") for name in ("a", "b")))

        assert [engine.board.scopes[name].scope.seen_at for name in ("a", "b")] == [NOON, NOON]

    run_in_world(main)
