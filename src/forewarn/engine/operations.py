"""What operators can do to VMs, hosts, events and the fleet.

Finds the scopes, makes ids, submits commands.
"""

from collections.abc import Callable, Coroutine
from copy import copy
from datetime import datetime
from typing import Any, NamedTuple

from forewarn.core import command as ask
from forewarn.core.event import Cause, EndReason, Event, EventType, NoEvent, ended_before
from forewarn.core.fleet import Scope, Vm
from forewarn.core.machine import Outcome
from forewarn.core.scheduling import event_ids_of
from forewarn.engine.board import PublishedScope
from forewarn.engine.engine import Engine
from forewarn.engine.fleet_apply import Difference as Difference
from forewarn.engine.fleet_apply import FleetApplier
from forewarn.engine.transaction import Transaction
from forewarn.errors import (
    AlreadyPending,
    EventEnded,
    NotFound,
    RecordUnreadable,
    UnknownEvent,
    UnknownScope,
)

Check = Callable[[Transaction], None]


class ScopedEvent(NamedTuple):
    """An event and its scope."""

    scope: Scope
    event: Event


def _make_operation(
    kind: type[ask.Operation],
) -> Callable[..., Coroutine[Any, Any, ScopedEvent | None]]:
    async def run(
        self: "Operations", vm: str, *, by: str, not_before: datetime | None = None
    ) -> ScopedEvent | None:
        """None if it runs now, without an event."""
        placed = await self.operate(kind, vm, by=by, not_before=not_before)
        return placed if isinstance(placed, ScopedEvent) else None

    run.__name__ = kind.__name__.lower()
    return run


class Operations(FleetApplier):
    """Everything that the control API can do.

    `make_id` returns a new GUID each time, `silent_since` since when the VMs of a
    host could not poll; None if they could.
    """

    def __init__(
        self,
        engine: Engine,
        make_id: Callable[[], str],
        silent_since: Callable[[str], datetime | None] = lambda host: None,
    ) -> None:
        super().__init__(engine)
        self._make_id = make_id
        self._silent_since = silent_since

    def new_id(self) -> str:
        """A new id, or that of the request that is being retried."""
        return self._make_id()

    def repeating(self, operation_id: str) -> "Operations":
        """For a retried request: its operation has this id, so that it is recognized."""
        again = copy(self)
        again._make_id = lambda: operation_id
        return again

    restart = _make_operation(ask.Restart)
    redeploy = _make_operation(ask.Redeploy)
    evict = _make_operation(ask.Evict)
    delete = _make_operation(ask.Delete)

    async def operate(
        self, kind: type[ask.Operation], vm: str, *, by: str, not_before: datetime | None = None
    ) -> ScopedEvent | NoEvent:
        """Announce an operation on a VM. The reason, if it runs now or has ended already."""
        engine, event_id = self._engine, self._make_id()

        async def submit(published: PublishedScope, found: Vm) -> Outcome:
            command = kind(
                vm=vm,
                event_id=event_id,
                not_before=not_before,
                silent_since=self._silent_since(found.host),
            )
            return await engine.submit(published.scope.name, command, by)

        placed = await engine.look_up(lambda: engine.board.find_vm(vm))
        try:
            outcome = await submit(*placed)
        except NotFound:  # another server may have moved the VM just now
            await engine.catch_up()
            outcome = await submit(*engine.board.find_vm(vm))
        event = outcome.scope.event(event_id)
        if event is not None:
            return ScopedEvent(outcome.scope, event)
        return outcome.no_event or ended_before(f"this operation on {vm} was requested")

    async def maintain(
        self,
        host: str,
        *,
        type: EventType,
        by: str,
        cause: Cause = Cause.MAINTENANCE,
        duration_seconds: int | None = None,
        description: str | None = None,
        not_before: datetime | None = None,
    ) -> list[ScopedEvent]:
        """Announce maintenance to every VM on the host, one event per scope and update domain."""
        command = ask.Maintain(
            host=host,
            operation_id=self._make_id(),
            type=type,
            cause=cause,
            duration_seconds=duration_seconds,
            description=description,
            not_before=not_before,
        )
        return await self._on_host(command, by)

    def is_repeated(self, host: str) -> bool:
        """Whether the request that is being retried has announced maintenance of this host."""
        operation_id = self.new_id()
        for scope in (each.scope for each in self._engine.board.scopes_on(host)):
            known = {event.id for event in scope.events} | {ended.id for ended in scope.ended}
            if not known.isdisjoint(event_ids_of(operation_id, scope)):
                return True
        return False

    async def degrade(
        self, host: str, *, by: str, not_before: datetime | None = None
    ) -> list[ScopedEvent]:
        return await self._on_host(
            ask.Degrade(host=host, operation_id=self._make_id(), not_before=not_before), by
        )

    async def fail(self, host: str, *, by: str, check: Check | None = None) -> list[ScopedEvent]:
        """Restart the VMs of a host now. `check` may refuse that, for each scope: see `submit`."""
        command = ask.Fail(host=host, operation_id=self._make_id())
        return await self._on_host(command, by, check)

    async def approve(self, *event_ids: str, by: str, vm: str = "") -> ScopedEvent:
        """Approve as an operator, which is enough; or as `vm`, which counts by the policy.

        The events are of one scope. Returns the first.
        """
        ids = tuple(event_id.upper() for event_id in event_ids)
        return await self._change(ids[0], ask.Approve(event_ids=ids, vm=vm), by)

    async def cancel(self, event_id: str, *, by: str) -> ScopedEvent | None:
        """Cancel a Scheduled event. Returns it as it last was; None if it was canceled before."""
        return await self._end(event_id, ask.Cancel(event_id=event_id.upper()), by)

    async def extend(self, event_id: str, *, by: str, not_before: datetime) -> ScopedEvent:
        """Postpone a Scheduled event to a later NotBefore."""
        command = ask.Extend(event_id=event_id.upper(), not_before=not_before)
        return await self._change(event_id, command, by)

    async def complete(self, event_id: str, *, by: str) -> ScopedEvent | None:
        """Complete a Started event. Returns it as it last was; None if it was completed before."""
        return await self._end(event_id, ask.Complete(event_id=event_id.upper()), by)

    async def _end(
        self, event_id: str, command: ask.Cancel | ask.Complete, by: str
    ) -> ScopedEvent | None:
        how = EndReason.CANCELED if isinstance(command, ask.Cancel) else EndReason.COMPLETED
        try:
            return await self._change(event_id, command, by)
        except EventEnded as ended:
            if ended.facts["how"] is how:
                return None
            raise

    async def _change(self, event_id: str, command: ask.Command, by: str) -> ScopedEvent:
        """Submit a command for a live event. Returns the event after it, or as it last was."""
        found = await self.event(event_id)
        outcome = await self._engine.submit(found.scope.name, command, by)
        return ScopedEvent(outcome.scope, outcome.scope.event(found.event.id) or found.event)

    async def event(self, event_id: str) -> ScopedEvent:
        """A live event by its id, even if another server announced it just now."""
        return await self._engine.look_up(lambda: self.find_event(event_id))

    def find_event(self, event_id: str) -> ScopedEvent:
        """A live event that this server shows. The id is not case-sensitive."""
        wanted = event_id.upper()
        board = self._engine.board
        found = board.find_event(wanted)
        if found is not None:
            return ScopedEvent(found[0].scope, found[1])
        past = board.ended.get(wanted)
        for ended in past.scope.ended if past else ():
            if ended.id == wanted:
                raise EventEnded(
                    f"event {wanted} is over: {ended.how} at {ended.at.isoformat()}",
                    event=wanted,
                    how=ended.how,
                )
        raise UnknownEvent(f"there is no event {event_id!r}", event=event_id)

    async def _on_host(
        self, command: ask.HostOperation, by: str, check: Check | None = None
    ) -> list[ScopedEvent]:
        """The events of this operation. Scopes with such events of another operation are skipped.

        So an operation that was half done, because the store failed or a VM arrived later, is
        completed by a retry. It is refused only if there is nothing left to do.
        """
        found: list[ScopedEvent] = []
        refusals: list[AlreadyPending] = []
        unreadable: RecordUnreadable | None = None
        is_known = False
        await self._engine.catch_up()  # the host may have new VMs
        for published in await self._engine.look_up(
            lambda: self._engine.board.scopes_on(command.host)
        ):
            try:
                outcome = await self._engine.submit(published.scope.name, command, by, check=check)
            except AlreadyPending as refusal:
                refusals.append(refusal)
                continue
            except RecordUnreadable as error:  # reported after the other scopes
                unreadable = unreadable or error
                continue
            except UnknownScope:  # it was deleted meanwhile
                continue
            scope = outcome.scope
            ids = event_ids_of(command.operation_id, scope)
            found += [
                ScopedEvent(scope, event) for event in map(scope.event, ids) if event is not None
            ]
            is_known = is_known or not {ended.id for ended in scope.ended}.isdisjoint(ids)
        if unreadable is not None:
            raise unreadable
        if refusals and not found and not is_known:
            raise refusals[0]
        return found
