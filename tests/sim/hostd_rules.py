"""What must be true of servers and daemons: at every commit, and when all is quiet again."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.core.fleet import Power, Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.timing import Timing
from forewarn.engine.entry import Entry, decode_all
from forewarn.engine.host_removal import WAS_FORGOTTEN
from forewarn.engine.lease import TTL_SECONDS
from forewarn.engine.managed_hosts import MANAGED_HOST, ManagedHost
from forewarn.engine.record import SCOPE, SEEN
from forewarn.store.base import HistoryValue, Write
from tests.rules import Broken, check_step
from tests.sim.hypervisors import Hypervisors, State
from tests.sim.simulated_hypervisor import Outcomes
from tests.unit.engine.hostd_world import Server, vm_id

OPERATOR = "ann"
POLLS_KNOWN_SECONDS = 60.0
POLLS_RECENT_SECONDS = 10.0
"""A VM polls if it did before its event was announced, long enough that every server knows it."""
NOTICED_SECONDS = TTL_SECONDS + 1.0
"""A gap that is longer by this is noticed, even if the server of the daemon dies at the same time,
and another run of the daemon connects before the lease of that server ends.
"""
NOTICE_SLACK_SECONDS = 2.0
DONE = (ChangeKind.IMPACTED, ChangeKind.RESTARTED)


class Readers:
    """When the guest of a VM could not read what its host's daemon has, as it was.

    Only while the fleet has the VM where it is: no server can know it otherwise.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._places: dict[str, tuple[str, float]] = {}
        self._since: dict[str, float] = {}
        self._gaps: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._polled_at: dict[str, tuple[float, float]] = {}

    def observe(self, vm: str, place: str, *, is_readable: bool) -> None:
        if self._places.get(vm, ("", 0))[0] != place:
            self._places[vm] = place, self._now()
        since = self._since.get(vm)
        if is_readable and since is not None:
            self._gaps[vm].append((self._since.pop(vm), self._now()))
        elif not is_readable and since is None:
            self._since[vm] = self._now()

    def poll(self, vm: str) -> None:
        first, _ = self._polled_at.get(vm, (self._now(), 0.0))
        self._polled_at[vm] = first, self._now()

    def hear(self, host: str) -> None:
        """A request of the host has arrived, maybe late, from a daemon that has ended since.

        The servers take the host for readable then: what comes after it is another gap.
        """
        for vm, (place, _) in self._places.items():
            if place == host and vm in self._since:
                self._gaps[vm].append((self._since[vm], self._now()))
                self._since[vm] = self._now()

    def unread_seconds(self, vm: str, created_at: float, gap_min: float) -> float:
        """How long an event could not be read, in gaps that every server must have noticed."""
        place, placed_at = self._places.get(vm, ("", 0))
        first, last = self._polled_at.get(vm, (self._now(), 0.0))
        is_polling = (
            first < created_at - POLLS_KNOWN_SECONDS and last > created_at - POLLS_RECENT_SECONDS
        )
        if not place or placed_at > created_at or not is_polling:
            return 0.0
        within = [(max(since, created_at), until) for since, until in self._gaps[vm]]
        unread = sum(until - since for since, until in within if until - since >= gap_min)
        since = self._since.get(vm)
        if since is not None and self._now() - since >= gap_min:  # however old the event is
            unread += self._now() - max(since, created_at)
        return unread


class CommitChecker:
    """Sees every commit in order, whoever made it."""

    def __init__(
        self, vms: Hypervisors, outcomes: Outcomes, now: Callable[[], datetime], timing: Timing
    ) -> None:
        self._vms, self._outcomes, self._now, self._timing = vms, outcomes, now, timing
        self._scopes: dict[str, Scope] = {}
        self._hosts: dict[str, ManagedHost] = {}
        self._seen: dict[str, datetime | None] = {}
        self.readers = Readers(lambda: vms.now)
        self.ended_early: set[str] = set()
        """Events that an operator ended, or that failed, so that nobody carries on."""

    def committed(self, writes: Sequence[Write], entries: bytes | None) -> None:
        """What is wrong is remembered: a server would log it, or take it for a lost store."""
        try:
            for entry in decode_all(HistoryValue(0, entries or b"[]")):
                self._check_entry(entry)
            for write in writes:
                kind, _, name = write.key.strip("/").partition("/")
                if kind == "seen":
                    self._seen[name] = None if write.value is None else SEEN.decode(write.value)
                elif kind == "scope":
                    self._check_scope(name, write.value)
                elif kind == "hostd":
                    self._check_host(name, write.value)
        except Exception as problem:
            self._vms.problem = self._vms.problem or problem

    def _check_scope(self, name: str, value: bytes | None) -> None:
        before = self._scopes.pop(name, None)
        if value is not None:
            after = self._scopes[name] = SCOPE.decode(value)
            if before is not None:
                check_step(before, after, self._now())
                self._check_notice(before, after)

    def _check_host(self, name: str, value: bytes | None) -> None:
        """A daemon that replaces one that has not ended may be on a clone: its reports wait."""
        before = self._hosts.pop(name, None)
        if value is None:
            return
        after = self._hosts[name] = MANAGED_HOST.decode(value)
        self._vms.note_served(after.host, after.session)
        if before is not None and before.server and before.session and after.server:
            is_same = before.session == after.session
            is_held = after.merge_at is not None and after.merge_at > self._now()
            self._vms.must(is_same or is_held, "reports of a new daemon wait", before, after)

    def _check_notice(self, before: Scope, after: Scope) -> None:
        """An event has had its notice only if its VMs could read it for so long."""
        old = {event.id: event for event in before.events}
        for event in after.events:
            was = old.get(event.id)
            if was is None or was.has_had_notice or not event.has_had_notice:
                continue  # it may start later, while it cannot be read: that is after its notice
            age = (self._now() - event.created_at).total_seconds()
            gap_min = self._timing.gap_min_of(event.type).total_seconds() + NOTICED_SECONDS
            for vm in event.resources:
                unread = self.readers.unread_seconds(vm, self._vms.now - age, gap_min)
                self._vms.must(
                    age - unread >= event.notice.total_seconds() - NOTICE_SLACK_SECONDS,
                    "an event starts only if its VMs could read it for its notice",
                    event,
                    vm,
                    age,
                    unread,
                )

    def _check_entry(self, entry: Entry) -> None:
        if entry.what in (ChangeKind.STARTED, ChangeKind.EXECUTED_SILENTLY):
            self._vms.started.add(entry.event)
        if entry.what is ChangeKind.COMPLETED and entry.by == OPERATOR:
            self._vms.completed.add(entry.event)
            self.ended_early.add(entry.event)
        is_canceled = entry.what is ChangeKind.CANCELED and entry.detail.endswith("was deallocated")
        is_abandoned = entry.detail.endswith(WAS_FORGOTTEN)
        if is_abandoned:
            self._vms.abandoned.add(entry.event)
        if entry.what is ChangeKind.FAILED or is_canceled or is_abandoned:
            self.ended_early.add(entry.event)
        if entry.what in DONE and entry.by != OPERATOR:
            self._check_done(entry)

    def _check_done(self, entry: Entry) -> None:
        vms, event, vm = self._vms, entry.event, entry.vm
        if entry.detail.startswith("found running on"):
            return  # the daemon that has moved it is unreachable, and may still clean up
        is_acting = event in [of for _, of in vms.actors(vm)]
        vms.must(not is_acting, "what is recorded as done is done", entry)
        if entry.what is ChangeKind.IMPACTED and self._is_awaited(entry):
            at = vms.restarted_at[event, vm]
            is_back = any(boot.was_up(at, vms.now) for boot in vms.boots[vm])
            vms.must(is_back, "an event is over when its VM is back", entry)

    def _is_awaited(self, entry: Entry) -> bool:
        """Whether the impact has restarted the VM, which has to be back then.

        Nobody waits where no VM polls, nor any longer for one that is late, or whose operator has
        started it elsewhere.
        """
        call, scope = self._outcomes.by_number.get(entry.detail), self._scopes[entry.scope]
        if call is not None:
            seen = replace(scope, seen_at=self._seen.get(scope.name))
            return not call.is_back and is_enabled(seen, self._now(), self._timing)
        return entry.detail in ("polled again", "guest agent answers")


def check_history(history: Sequence[Entry], outcomes: Outcomes) -> None:
    """Every result in the history is that of one call, for this impact and this outcome."""
    used: Counter[str] = Counter()
    for entry in history:
        number = entry.detail.rpartition("\n")[2]
        if entry.what not in (*DONE, ChangeKind.IMPACT_FAILED) or not number.startswith("call-"):
            continue
        used[number] += 1
        if outcomes.by_number[number][:3] != (entry.event, entry.vm, entry.what in DONE):
            raise Broken(f"{number} is recorded as {entry}")
    twice = [number for number, times in used.items() if times > 1]
    if twice:
        raise Broken(f"a result was used for two tries: {twice}")


def check_quiet(server: Server, vms: Hypervisors, ended_early: set[str]) -> None:
    """Long after the last fault: every VM runs that should, and the fleet says so.

    Nobody starts a VM that an impact has stopped if its event ended while its daemon was away, or
    because its host was forgotten, or if an operator has completed an eviction of it since.
    """
    vms.must(server.board.vms.keys() == vms.boots.keys(), "every VM is in the fleet", server)
    for record in server.hosts.managed.connected():
        vms.must(not record.not_accepted, "every VM is accepted", record)
    doubles = [vm for vm in vms.boots if server.hosts.duplicates.hosts_of(vm_id(vm))]
    vms.must(not doubles, "no VM is a duplicate that runs once", doubles)
    for name in sorted(server.board.vms):
        known = server.vm(name)
        places = vms.places(name)
        states = [vms.copies[host][name].state for host in places]
        vms.must(State.SUSPENDED not in states, "no VM is left suspended", name)
        if places or name in vms.left_off:
            vms.must(
                len(places) == (name not in vms.left_off), "a VM runs once", name, places, known
            )
        elif known.power is not Power.DEALLOCATED:
            actor, event = vms.stopped_by[name]
            vms.must(
                (actor.has_ended or event in vms.abandoned) and event in ended_early,
                "a VM that an impact has stopped is started",
                name,
                actor,
                event,
            )
        is_running = known.power is Power.RUNNING
        vms.must(is_running == bool(places), "the fleet knows the power", known, places)
        defined = [host for host, copies in vms.copies.items() if name in copies]
        vms.must(known.host in (places or defined), "the fleet knows the host", known, places)
    scopes = [published.scope for published in server.board.scopes.values()]
    open_events = [event for scope in scopes for event in (*scope.events, *scope.impacts)]
    vms.must(not open_events, "every event ends", open_events)
