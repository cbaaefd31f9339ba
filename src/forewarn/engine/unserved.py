"""VMs that ask for their document and do not get it: they would miss the notice of an event.

    errors    it polls, and has got nothing but errors for a minute, at a server or at the daemon of
              a host
    moved     it polled in the hour before it moved to another host, and not in the minute after

A VM is unserved until it gets its document, no longer runs, or leaves the fleet. That is kept in
`unserved/SCOPE/`, so that every server shows it, and is written only when it changes:

    (served) -> SUSPECTED    a server has seen it for 45 seconds
    SUSPECTED -> (served)    the VM polls at another server: nothing is shown
    SUSPECTED -> CONFIRMED   a minute has passed: it is shown, counted, and in the history
    CONFIRMED -> (served)    in the history, too
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import Time
from forewarn.core.fleet import Scope, Vm
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Entry
from forewarn.engine.isolation import isolated
from forewarn.engine.record import RecordCodec
from forewarn.engine.record_cache import name_of
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error
from forewarn.platform.remote import RefusalReason, RefusedGuest, WorkRequest
from forewarn.steps import WorkCounter

T = TypeVar("T")

UNSERVED_KEY = "unserved/{}/"
SUSPECTED_AFTER = timedelta(seconds=45)
SHOWN_AFTER = timedelta(seconds=60)
CONFIRMED_AFTER = timedelta(seconds=10)
"""After it was suspected: how long the other servers have to object."""
DROPPED_AFTER = timedelta(minutes=10)
"""A suspicion that no server confirms; also how long one that was wrong is not repeated."""
FORGOTTEN_AFTER = timedelta(minutes=5)
"""After its last error, or its move."""
LOOK_EVERY = timedelta(seconds=5)
VMS_MAX = 4096
"""How many VMs are remembered for each reason."""
SCOPES_PER_LOOK_MAX = 100
DETAIL_LENGTH_MAX = 200
TEXT = {
    RefusalReason.NOT_A_VM: "it is not a VM of that host",
    RefusalReason.IN_DOUBT: "its port at the bridge is in doubt",
    RefusalReason.TOO_MANY: "a limit of connections is reached",
    RefusalReason.NO_SERVER: "no server answers that host",
    RefusalReason.SERVER_REFUSED: "the servers refuse it",
    RefusalReason.SERVER_ERROR: "the servers respond with errors",
    RefusalReason.BAD_REQUEST: "its requests are not valid",
}


class UnservedReason(StrEnum):
    ERRORS = "errors"
    MOVED = "moved"


class Unserved(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Why a VM does not get its document, and since when; `suspected_at` is when it was written."""

    since: Time
    reason: UnservedReason
    detail: str
    suspected_at: Time | None = None
    is_confirmed: bool = False

    def __str__(self) -> str:
        at = f"{self.since:%Y-%m-%dT%H:%M:%SZ}"
        is_refused = self.reason is UnservedReason.ERRORS
        words = "has received only errors" if is_refused else "has not polled"
        return f"{words} since {at}: {self.detail}"


UNSERVED: RecordCodec[dict[str, Unserved]] = RecordCodec("unserved VMs", dict[str, Unserved])


class UnservedVms:
    """`refusals` has what the daemons that are connected to this server have counted, by host."""

    def __init__(self, engine: Engine) -> None:
        self.refusals: dict[str, Mapping[RefusalReason, int]] = {}
        self._engine = engine
        self._errors: dict[str, tuple[Unserved, datetime]] = {}  # with the time of the last one
        self._reported: dict[str, dict[str, Unserved]] = {}  # by host
        self._moved: dict[str, Unserved] = {}
        self._quiet_until: dict[str, datetime] = {}
        self._members: dict[str, tuple[Scope, dict[str, Vm]]] = {}  # VMs by scope and name
        self._changed = asyncio.Event()
        engine.register("unserved", UNSERVED)
        engine.on_change("unserved", self._on_record)
        engine.subscribe_entries(self._on_entry)

    def find(self, scope: str, vm: str) -> Unserved | None:
        """Why a VM gets no document; None if it does."""
        found: Unserved | None = self._read(scope).get(vm)
        return found if found is not None and found.is_confirmed else None

    def counts(self) -> dict[UnservedReason, int]:
        found = (each for _, vms in self._records() for each in vms.values() if each.is_confirmed)
        counts = Counter(each.reason for each in found)
        return {reason: counts[reason] for reason in UnservedReason}

    # --- what is noticed

    def add_error(self, vm: str, status: int, problem: str) -> None:
        """A poll of a VM got an error at this server."""
        now, detail = self._engine.clock.now(), f"status {status}, {problem[:DETAIL_LENGTH_MAX]}"
        run, last_at = self._errors.pop(vm, (None, now))
        if run is None or self._polled(vm) > last_at.timestamp() or now - last_at > FORGOTTEN_AFTER:
            run = Unserved(now, UnservedReason.ERRORS, detail)
        self._remember(self._errors, vm, (run, now))

    def add_refused_connection(self, address: str) -> None:
        """A limit of connections refused one of a VM, if the address is a VM's.

        What it would have asked for is not read, so it counts as a poll.
        """
        vm = self._engine.board.addresses.get(address)
        if vm:
            self.add_error(vm, 503, TEXT[RefusalReason.TOO_MANY])

    def report(self, host: str, request: WorkRequest) -> None:
        """What the relay of a host has refused."""
        self.refusals[host] = request.refusals
        # A VM that is there by its id and by its address counts by its id, which comes first.
        reported = dict(self._name_guests(host, request.refused[::-1]))
        if reported or host in self._reported:
            self._reported[host] = reported
            self._changed.set()

    def forget(self, host: str) -> None:
        """Its daemon is not connected to this server any more."""
        self.refusals.pop(host, None)
        self._reported.pop(host, None)

    def _name_guests(
        self, host: str, refused: list[RefusedGuest]
    ) -> Iterator[tuple[str, Unserved]]:
        """VMs by id, or by an address that is no other VM's: a guest may ask the wrong host."""
        board, now = self._engine.board, self._engine.clock.now()
        for each in refused:
            name = board.ids.get(each.guest.lower()) or board.addresses.get(each.guest, "")
            detail = f"the daemon of {host} refuses its polls because {TEXT[each.reason]}"
            since = now - timedelta(seconds=each.seconds)
            if name:
                yield name, Unserved(since, UnservedReason.ERRORS, detail)

    def _on_entry(self, entry: Entry) -> None:
        """A VM that polled until it moved should poll again."""
        if entry.what is not ChangeKind.MOVED or entry.vm not in self._engine.board.vms:
            return
        published, interval = self._engine.board.vms[entry.vm], self._engine.timing.seen_interval
        here, stored = self._polled(entry.vm), self._engine.last_polls.times(published.scope)
        oldest = (entry.at - interval).timestamp()
        is_stored = stored.get(entry.vm, 0) >= oldest - interval.total_seconds()  # once an hour
        if here >= oldest or is_stored:
            detail = f"it polled before it moved from {entry.host_before} to {entry.host}"
            moved = Unserved(entry.at, UnservedReason.MOVED, detail)
            self._remember(self._moved, entry.vm, moved)

    def _on_record(
        self, before: dict[str, Unserved] | None, after: dict[str, Unserved] | None
    ) -> None:
        """Suspect a VM that polls elsewhere not again for some time."""
        now, gone = self._engine.clock.now(), (before or {}).keys() - (after or {}).keys()
        for name in gone:
            is_wrong = not before[name].is_confirmed if before else False
            self._remember(
                self._quiet_until, name, now + (DROPPED_AFTER if is_wrong else LOOK_EVERY)
            )
        self._changed.set()

    def _remember(self, known: dict[str, T], name: str, value: T) -> None:
        if len(known) >= VMS_MAX:
            del known[next(iter(known))]
        known.pop(name, None)
        known[name] = value
        self._changed.set()

    # --- what is written

    async def run(self) -> None:
        """Write what changes, until cancelled. Sleeps while there is nothing to look at."""
        clock = self._engine.clock
        while True:  # ends when cancelled
            await self._changed.wait()
            self._changed.clear()
            with isolated(self._engine.throttled_log, "bug while looking for unserved VMs"):
                await self.look()
            if self._errors or self._reported or self._moved or any(self._records()):
                self._changed.set()
            await clock.sleep_until(clock.now() + LOOK_EVERY)

    async def look(self) -> None:
        """Suspect, confirm and clear what is due, in a limited number of scopes."""
        now, suspects = self._engine.clock.now(), dict[str, dict[str, Unserved]]()
        turns, due = WorkCounter(POLLS_PASS_EVERY), 0
        self._members.clear()
        for name, each in self._list_suspects(now):
            scope = self._engine.board.vms[name].scope.name
            suspects.setdefault(scope, {})[name] = each
            await turns.pass_after(1)
        for name in {**suspects, **{name_of(key): {} for key, _ in self._records()}}:
            await turns.pass_after(1 + len(self._read(name)) + len(suspects.get(name, ())))
            with isolated(
                self._engine.throttled_log, "bug while looking at unserved VMs", scope=name
            ):
                try:
                    due += await self._write(name, suspects.get(name, {}))
                except Error as error:
                    due, throttled = due + 1, self._engine.throttled_log
                    throttled.warn("unserved VMs not recorded", scope=name, problem=error.message)
            if due == SCOPES_PER_LOOK_MAX:
                break

    def _list_suspects(self, now: datetime) -> Iterator[tuple[str, Unserved]]:
        """The VMs that have got no document for some time, those with errors last."""
        self._errors = {
            name: run for name, run in self._errors.items() if now - run[1] <= FORGOTTEN_AFTER
        }
        self._moved = {name: each for name, each in self._moved.items() if self._is_due(name, each)}
        self._reported = {host: vms for host, vms in self._reported.items() if vms}
        errors = {name: run for name, (run, last_at) in self._errors.items() if last_at > run.since}
        reported = (vms for vms in self._reported.values())
        for name, each in [
            *self._moved.items(),
            *(pair for vms in reported for pair in vms.items()),
            *errors.items(),
        ]:
            begin = max(each.since, self._quiet_until.get(name, each.since))
            is_long = now - begin >= SUSPECTED_AFTER
            if is_long and self._is_served(name, each) is None:
                yield name, each

    def _is_due(self, name: str, moved: Unserved) -> bool:
        """Whether a move is not too long ago. A VM that boots polls later."""
        return self._is_booting(name) or self._engine.clock.now() - moved.since <= FORGOTTEN_AFTER

    def _is_booting(self, name: str) -> bool:
        published = self._engine.board.vms.get(name)
        return published is not None and name in (published.booting or ())

    async def _write(self, name: str, suspects: Mapping[str, Unserved]) -> bool:
        """Whether something is due in a scope. If so, it is written."""
        key, known = UNSERVED_KEY.format(name), self._read(name)
        if self._next(name, known, suspects, self._engine.clock.now()) == known:
            return False

        def decide(transaction: Transaction) -> None:
            before: dict[str, Unserved] = transaction.get(key) or {}
            after = self._next(name, before, suspects, transaction.now)
            if after != before:
                transaction.put(key, after or None)
                transaction.record(*self._list_changes(before, after), scope=name)

        await self._engine.update([key], decide, by="service")
        return True

    def _next(
        self,
        scope: str,
        before: Mapping[str, Unserved],
        suspects: Mapping[str, Unserved],
        now: datetime,
    ) -> dict[str, Unserved]:
        """The states at the top."""
        after = {
            name: replace(each, suspected_at=now)
            for name, each in suspects.items()
            if name not in before
        }
        for name, each in before.items():
            suspect = suspects.get(name)
            published = self._engine.board.vms.get(name)
            is_here = published is not None and published.scope.name == scope
            if not is_here or self._is_served(name, each) is not None:
                continue
            is_old = now - (each.suspected_at or now) >= CONFIRMED_AFTER
            if each.is_confirmed:
                # Errors explain more than a move. The server that has seen the move may not see
                # the errors, so it must not replace them.
                is_errors = suspect is not None and suspect.reason is UnservedReason.ERRORS
                is_new = is_errors and each.reason is not UnservedReason.ERRORS
                after[name] = replace(suspect, is_confirmed=True) if suspect and is_new else each
            elif suspect and is_old and now - suspect.since >= SHOWN_AFTER:
                after[name] = replace(suspect, is_confirmed=True)
            elif now - (each.suspected_at or now) <= DROPPED_AFTER:
                after[name] = each
        return after

    def _is_served(self, name: str, each: Unserved) -> str | None:
        """Why the VM is not unserved, or not any more; None if it is."""
        vm = self._find_vm(name)
        if vm is None or vm.power.is_off:
            return "it does not run"
        if self._is_booting(name):
            return "it boots"
        return "it got its document" if self._polled(name) > each.since.timestamp() else None

    def _find_vm(self, name: str) -> Vm | None:
        """Each scope is searched once in a look, however many of its VMs are unserved."""
        published = self._engine.board.vms.get(name)
        if published is None:
            return None
        scope = published.scope
        searched, members = self._members.get(scope.name, (None, {}))
        if searched is not scope:
            members = {vm.name: vm for vm in scope.vms}
            self._members[scope.name] = scope, members
        return members.get(name)

    def _list_changes(
        self, before: Mapping[str, Unserved], after: Mapping[str, Unserved]
    ) -> Iterator[Change]:
        for name in sorted(before.keys() | after.keys()):
            old, new, vm = before.get(name), after.get(name), self._find_vm(name)
            host = vm.host if vm is not None else ""
            if new is not None and new.is_confirmed and new != old:
                yield Change(ChangeKind.UNSERVED, vm=name, host=host, detail=str(new))
            elif old is not None and old.is_confirmed and new is None:
                detail = self._is_served(name, old) or "it is in another scope"
                yield Change(ChangeKind.SERVED, vm=name, host=host, detail=detail)

    def _polled(self, name: str) -> float:
        """When the VM last polled at this server, in seconds since the epoch."""
        return self._engine.board.polled.get(name, 0.0)

    def _read(self, scope: str) -> Mapping[str, Unserved]:
        return self._engine.records.get(UNSERVED_KEY.format(scope)).value or {}

    def _records(self) -> Iterator[tuple[str, dict[str, Unserved]]]:
        return self._engine.records.values("unserved")
