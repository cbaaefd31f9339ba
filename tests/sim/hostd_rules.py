"""What must be true of servers and daemons: at every commit, and when all is quiet again."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.core.fleet import Power, Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.timing import Timing
from forewarn.engine.entry import Entry, decode_all
from forewarn.engine.record import SCOPE, SEEN
from forewarn.store.base import HistoryValue, Write
from tests.rules import Broken, check_step
from tests.sim.hypervisors import Hypervisors, State
from tests.sim.simulated_hypervisor import Outcomes
from tests.unit.engine.hostd_world import Server

OPERATOR = "ann"
DONE = (ChangeKind.IMPACTED, ChangeKind.RESTARTED)


class CommitChecker:
    """Sees every commit in order, whoever made it."""

    def __init__(
        self, vms: Hypervisors, outcomes: Outcomes, now: Callable[[], datetime], timing: Timing
    ) -> None:
        self._vms, self._outcomes, self._now, self._timing = vms, outcomes, now, timing
        self._scopes: dict[str, Scope] = {}
        self._seen: dict[str, datetime | None] = {}
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
        except Exception as problem:
            self._vms.problem = self._vms.problem or problem

    def _check_scope(self, name: str, value: bytes | None) -> None:
        before = self._scopes.pop(name, None)
        if value is not None:
            after = self._scopes[name] = SCOPE.decode(value)
            if before is not None:
                check_step(before, after, self._now())

    def _check_entry(self, entry: Entry) -> None:
        if entry.what in (ChangeKind.STARTED, ChangeKind.EXECUTED_SILENTLY):
            self._vms.started.add(entry.event)
        if entry.what is ChangeKind.FAILED or (
            entry.what is ChangeKind.COMPLETED and entry.by == OPERATOR
        ):
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

    Nobody starts a VM that an impact has stopped if its event ended while its daemon was away.
    """
    for name in sorted(server.board.vms):
        known = server.vm(name)
        places = vms.places(name)
        states = [vms.copies[host][name].state for host in places]
        vms.must(State.SUSPENDED not in states, "no VM is left suspended", name)
        if places or name in vms.left_off:
            vms.must(
                len(places) == (name not in vms.left_off), "a VM runs once", name, places, known
            )
        else:
            actor, event = vms.stopped_by[name]
            vms.must(
                actor.has_ended and event in ended_early,
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
