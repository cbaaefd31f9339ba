"""Applying a fleet: what changes, and how it is divided into commits."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from sortedcontainers import SortedList

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Command, Retire, SetMembers, UpdateMembers
from forewarn.core.fleet import Scope, Vm
from forewarn.core.machine import decide
from forewarn.core.membership import merge_vm
from forewarn.engine.engine import DECLARED_KEY, FLEET_KEY, Engine
from forewarn.engine.record import Hosts
from forewarn.engine.record_cache import ABSENT, kind_of
from forewarn.engine.replica import SCOPE_KEY, SEEN_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import FleetChanged, Invalid, Unavailable
from forewarn.fleetfile.parser import (
    FieldChange,
    Fleet,
    compare_fields,
    compute_etag,
    dump_json,
)
from forewarn.steps import WorkCounter
from forewarn.store.base import COMMIT_BYTES_MAX, VALUE_BYTES_MAX, WRITES_MAX

VMS_PER_TURN_MAX = 300
"""How many VMs are compared before polls run. A VM counts 1, a scope 3 more."""
VMS_PER_COMMIT_MAX = 500
"""How many VMs are committed and published before polls run; one scope may have more."""
BYTES_PER_COMMIT_MAX = COMMIT_BYTES_MAX // 4
"""How large these scopes and the new definitions of their VMs may be: history needs space too."""
STATE_BYTES = 150 * 1024
STATE_BYTES_PER_VM = 475
"""What events may add to the record of a scope, and for each VM, besides four times its name and
the name of its host: in an impact that fails, in Resources, in approvals and in a move that failed.
"""
RECORDS_PER_COMMIT_MAX = WRITES_MAX - 3
"""How many records of scopes and their polls: the fleet, declared hosts and the floor are three."""
RECORDS_PER_MERGE_MAX = 30
"""Of a host's report, which any host may send at any time: polls run after a few milliseconds."""
HOSTS_PER_RECORD = 500
DETAILS_MAX = 1_000

Commands = list[tuple[str, Command]]


class Batch(NamedTuple):
    """What one commit of an apply changes: scopes, numbered records of declared hosts, history."""

    commands: Sequence[tuple[str, Command]] = ()
    declared: Sequence[tuple[int, tuple[str, ...] | None]] = ()
    changes: Sequence[Change] = ()


class ChangedItem(msgspec.Struct, frozen=True):
    """What changes about a scope that stays, or about a VM of it; `vm` is empty for the scope."""

    scope: str
    vm: str
    fields: tuple[FieldChange, ...]


class Difference(msgspec.Struct, frozen=True):
    """What an apply changes: names of scopes, of VMs and of declared hosts.

    `details` has the fields that change, of at most 1,000 scopes and VMs.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    vms_joined: tuple[str, ...]
    vms_left: tuple[str, ...]
    hosts_added: tuple[str, ...]
    hosts_removed: tuple[str, ...]
    details: tuple[ChangedItem, ...]


class FleetApplier:
    """Applies one fleet at a time, and merges one report of a host at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._applying = asyncio.Lock()
        self._merging = asyncio.Lock()
        self._is_changing = False

    def applied_digest(self) -> str:
        """The digest of the fleet file that was applied last; empty if none was."""
        return self._engine.applied.digest

    def fleet(self) -> Fleet:
        """The present fleet, as a fleet file defines it. Safe in a thread: it copies first."""
        published = sorted(self._engine.board.scopes.values(), key=lambda one: one.scope.name)
        return Fleet(
            scopes=tuple(definition(one.scope) for one in published),
            hosts=self._engine.declared_hosts(),
        )

    def definitions(self) -> Iterator[Scope]:
        """The scopes of `fleet`, as they are now, made one at a time.

        To sort and make all at once takes 170 ms for 100,000; only what must be copied is copied.
        """
        board = self._engine.board
        scopes = [board.scopes[name].scope for name in board.scope_names]
        return map(definition, scopes)

    def _compute_etag(self) -> str:
        return compute_etag([dump_json(self.fleet())])

    async def apply(
        self,
        fleet: Fleet,
        *,
        by: str,
        dry_run: bool = False,
        digest: str | None = None,
        tags: Collection[str] = (),
    ) -> Difference:
        """Change the fleet to this. All is checked before the first commit; `dry_run` stops there.

        Large fleets take several commits. If one fails, because an event was announced meanwhile or
        the store was lost, the earlier ones remain, and applying the fleet again does the rest.

        Each commit also writes the fleet record at the revision of the one before, so that two
        concurrent applies cannot mix: the later one fails. `digest` is that of the server's fleet
        file; the last commit writes it, so that a file that was applied in part is applied again.
        With `tags`, the fleet must still have one of them.
        """
        async with self._applying:
            await self._engine.wait_until_clock_compared()
            await self._engine.require_caught_up()  # another server may have changed the fleet
            if tags and await asyncio.to_thread(self._compute_etag) not in tags:
                raise FleetChanged(
                    "the fleet has changed since it was read; read it again and retry"
                )
            self._is_changing = not dry_run
            try:
                async with self._merging:  # a merge that has begun ends before
                    pass
                return await self._apply(fleet, by, dry_run, digest)
            finally:
                self._is_changing = False

    async def merge(self, plan: Callable[[], Awaitable[Commands]], *, by: str) -> None:
        """Carry out the commands that `plan` makes of the present fleet, in their order.

        It does not wait for an apply, which may take long, and does not disturb it: Unavailable.
        """
        async with self._merging:
            if self._is_changing:
                raise Unavailable("the fleet is being changed; try again")
            await self._engine.wait_until_clock_compared()
            await self._engine.require_caught_up()
            applied, revision = self._engine.applied, self._engine.records.get(FLEET_KEY).revision
            commands = await plan()
            if self._engine.records.get(FLEET_KEY).revision != revision:
                raise Unavailable("the fleet has changed meanwhile; try again")
            for batch in await self._batches(commands, RECORDS_PER_MERGE_MAX):
                revision = await self._commit(batch, applied, revision, by)
                await asyncio.sleep(0)

    async def _apply(self, fleet: Fleet, by: str, dry_run: bool, digest: str | None) -> Difference:  # noqa: FBT001
        engine = self._engine
        revision = engine.records.get(FLEET_KEY).revision
        leaving, arriving, difference = await self._compare(fleet, is_file=digest is not None)
        known = engine.applied
        applied = replace(known, names=(), digest=known.digest if digest is None else digest)
        batches = await self._batches(list(dict([*leaving, *arriving]).items()))
        if len(batches) > 1:  # in one commit the order is irrelevant, and the last command enough
            batches = [*await self._batches(leaving), *await self._batches(arriving)]
        for batch in _host_batches(engine.declared_parts(), fleet.hosts, difference):
            last = batches.pop() if batches and not batches[-1].declared else Batch()
            batches.append(batch._replace(commands=last.commands))
        if dry_run or (not batches and applied == known):
            return difference
        for batch in batches[:-1]:
            revision = await self._commit(batch, known, revision, by)
            await asyncio.sleep(0)
        await self._commit(batches[-1] if batches else Batch(), applied, revision, by)
        return difference

    async def _commit(self, batch: "Batch", hosts: Hosts, revision: int, by: str) -> int:
        """Change several scopes and the fleet record, if that still has its revision.

        Returns its new revision. Not while any scope is unreadable: this server does not know
        which VMs are in it, and a VM must not be in two scopes.
        """
        engine = self._engine
        for key in engine.unreadable:
            if kind_of(key) == "scope":
                engine.check_readable(key)

        written: dict[str, Any] = {}

        def decide_all(transaction: Transaction) -> Transaction:
            nonlocal written
            if transaction.revision(FLEET_KEY) != revision:
                if written and all(transaction.get(key) == written[key] for key in written):
                    return transaction  # the reply to the commit was lost
                raise Unavailable("the fleet changed during the apply; apply it again")
            transaction.put(FLEET_KEY, hosts)
            for name, command in batch.commands:
                key = SCOPE_KEY.format(name)
                before: Scope | None = transaction.get(key)
                if before is None and not isinstance(command, SetMembers | UpdateMembers):
                    continue
                is_reported = isinstance(command, UpdateMembers)
                scope = before or engine.new_scope(name, is_reported=is_reported)
                outcome = decide(scope, command, transaction.now, engine.timing)
                transaction.put(key, None if outcome.is_gone else outcome.scope)
                transaction.record(*outcome.changes, scope=name)
            for number, names in batch.declared:
                transaction.put(DECLARED_KEY.format(number), names)
            transaction.record(*batch.changes)
            written = transaction.writes
            return transaction

        keys = [FLEET_KEY, *(SCOPE_KEY.format(name) for name, _ in batch.commands)]
        transaction = await engine.update(keys, decide_all, by=by)
        return transaction.committed_at or transaction.revision(FLEET_KEY)

    async def _compare(
        self, fleet: Fleet, *, is_file: bool
    ) -> tuple[Commands, Commands, Difference]:
        """The commands for scopes that change, and what changes.

        New VMs come first, then scopes lose VMs: an apply that is not completed has rather too
        many. Last come the scopes that get a VM, an address or an id of another scope, so that none
        is ever in two. Before that, such a scope gives up what it loses: it has two commands, and
        the second is complete.
        """
        engine, board, turns = self._engine, self._engine.board, WorkCounter(VMS_PER_TURN_MAX)
        retired, losing, gaining, arriving = (Commands() for _ in range(4))
        added, changed, joined, left = (SortedList() for _ in range(4))
        wanted, coming, details = set[str](), set[str](), list[ChangedItem]()
        for scope in fleet.scopes:
            await turns.pass_after(3 + len(scope.vms))
            wanted.add(scope.name)
            published = board.scopes.get(scope.name)
            before = published.scope if published else Scope(name=scope.name)
            vms = tuple(self._with_state(scope.name, vm, is_file=is_file) for vm in scope.vms)
            command = SetMembers(kind=scope.kind, policy=scope.policy, vms=vms, is_file=is_file)
            after = decide(before, command, engine.clock.now(), engine.timing).scope
            if published is not None and after == before:
                continue
            check_size(before, after)
            (changed if published else added).add(scope.name)
            details += islice(self._details(before, after), DETAILS_MAX - len(details))
            names = {vm.name for vm in vms}
            coming |= names
            joined.update(name for name in names if name not in board.vms)
            free = tuple(self._free(scope.name, vms))
            if free != vms:
                arriving.append((scope.name, command))
                if published is not None:
                    losing.append((scope.name, replace(command, vms=free)))
                continue
            is_losing = any(vm.name not in names for vm in before.vms)
            (losing if is_losing else gaining).append((scope.name, command))
        for name in board.scope_names[:]:
            await turns.pass_after(1)
            if name not in wanted:
                retired.append((name, Retire()))
        for name, _ in (*retired, *losing):
            published = board.scopes.get(name)
            members = published.scope.vms if published else ()
            await turns.pass_after(3 + len(members))
            left.update(vm.name for vm in members if vm.name not in coming)
        declared = {*engine.declared_hosts()}
        difference = Difference(
            added=tuple(added),
            changed=tuple(changed),
            removed=tuple(name for name, _ in retired),
            vms_joined=tuple(joined),
            vms_left=tuple(left),
            hosts_added=tuple(sorted({*fleet.hosts} - declared)),
            hosts_removed=tuple(sorted(declared - {*fleet.hosts})),
            details=tuple(details),
        )
        return [*gaining, *losing, *retired], arriving, difference

    def _details(self, before: Scope, after: Scope) -> Iterator[ChangedItem]:
        """The fields that change, of the scope and of its VMs that exist, also in another scope."""
        board, known = self._engine.board, {vm.name: vm for vm in before.vms}
        if after.name in board.scopes and (fields := compare_fields(before, after)):
            yield ChangedItem(after.name, "", tuple(fields))
        for vm in after.vms:
            old, fields = known.get(vm.name), []
            if old is None and vm.name in board.vms:
                home = board.vms[vm.name].scope
                old, fields = home.vm(vm.name), [FieldChange("scope", home.name, after.name)]
            if old is not None and (fields := [*fields, *compare_fields(old, vm)]):
                yield ChangedItem(after.name, vm.name, tuple(fields))

    def _free(self, scope: str, vms: Sequence[Vm]) -> Iterator[Vm]:
        """The VMs of a scope, without what present VMs of other scopes have."""
        board = self._engine.board

        def is_elsewhere(name: str) -> bool:
            return name in board.vms and board.vms[name].scope.name != scope

        for vm in vms:
            sharing = (board.addresses.holders(vm.address), board.ids.holders(vm.id))
            others = [name for names in sharing if vm.name not in names for name in names]
            if not any(map(is_elsewhere, (vm.name, *others))):
                yield vm
            elif vm.name in board.vms and not is_elsewhere(vm.name):
                yield replace(vm, address="", id="")

    def _with_state(self, scope: str, vm: Vm, *, is_file: bool) -> Vm:
        """The VM as the fleet defines it, with the state that it had in its old scope."""
        published = self._engine.board.vms.get(vm.name)
        if published is None or published.scope.name == scope:
            return vm
        return merge_vm(published.scope.vm(vm.name), vm, is_file=is_file)

    async def _batches(
        self, commands: Commands, records_max: int = RECORDS_PER_COMMIT_MAX
    ) -> list[Batch]:
        """What is committed together: few enough scopes, VMs and bytes for one commit."""
        turns, batches, batch, records, vms, size = (
            WorkCounter(VMS_PER_TURN_MAX),
            list[Batch](),
            Commands(),
            0,
            0,
            0,
        )
        for name, command in commands:
            published = self._engine.board.scopes.get(name)
            joining = command.vms if isinstance(command, SetMembers | UpdateMembers) else ()
            count = max(len(joining), len(published.scope.vms) if published else 0)
            await turns.pass_after(count)
            bytes_ = len(msgspec.json.encode((joining, published and published.scope)))
            is_polled = published is not None or self._engine.read(SEEN_KEY.format(name)) != ABSENT
            needed = 1 + is_polled + (published is not None and len(published.scope.vms) > 1)
            if batch and (
                records + needed > records_max
                or vms + count > VMS_PER_COMMIT_MAX
                or size + bytes_ > BYTES_PER_COMMIT_MAX
            ):
                batches.append(Batch(batch))
                batch, records, vms, size = Commands(), 0, 0, 0
            batch.append((name, command))
            records, vms, size = records + needed, vms + count, size + bytes_
        return [*batches, Batch(batch)] if batch else batches


def _host_batches(
    before: Sequence[tuple[str, ...]], hosts: Sequence[str], difference: Difference
) -> Iterator[Batch]:
    """The records of declared hosts that change, one in each commit, with their history."""
    details = {host: f"host {host} declared" for host in difference.hosts_added}
    details |= {host: f"host {host} no longer declared" for host in difference.hosts_removed}
    # a declared host is in no scope, so its entry has none
    changes = [
        Change(what=ChangeKind.UPDATED, host=host, detail=detail)
        for host, detail in details.items()
    ]
    starts = range(0, len(hosts), HOSTS_PER_RECORD)
    after = [tuple(hosts[start : start + HOSTS_PER_RECORD]) for start in starts]
    for number, (old, new) in enumerate(zip_longest(before, after)):
        if old != new:
            yield Batch((), [(number, new)], changes[:HOSTS_PER_RECORD])
            del changes[:HOSTS_PER_RECORD]
    while changes:  # ends: each batch takes some
        yield Batch((), (), changes[:HOSTS_PER_RECORD])
        del changes[:HOSTS_PER_RECORD]


def check_size(before: Scope, after: Scope) -> None:
    """Refuse a scope whose record could not hold all that may happen to its VMs.

    One that an earlier version accepted may stay as large as it is.
    """
    size, name = _compute_size_max(after.vms), after.name
    if size > VALUE_BYTES_MAX and size > _compute_size_max(before.vms):
        raise Invalid(
            f"scope {name} with {len(after.vms)} VMs and their events may need {size} bytes; at"
            f" most {VALUE_BYTES_MAX} fit into its record: use fewer VMs, shorter names or less"
            " user data",
            scope=name,
        )


def _compute_size_max(vms: Sequence[Vm]) -> int:
    names_bytes = sum(4 * len(vm.name) + len(vm.host) for vm in vms)
    state_bytes = STATE_BYTES + STATE_BYTES_PER_VM * len(vms) + names_bytes
    return len(msgspec.json.encode(vms)) + state_bytes


def definition(scope: Scope) -> Scope:
    """A scope as its owner defined it, without its state."""
    return Scope(name=scope.name, kind=scope.kind, policy=scope.policy, vms=scope.vms)
