"""The agent: watches, gives each event that a rule is for to a Handling, and approves.

Threads: the caller's watches; one approves; one keeps the lease, if there is one; one works for
each handling that has something to do, WORKING_MAX of them at once and the rest in the order of
NotBefore. A handling that only waits for news has no thread.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Protocol

from forewarn.agent.approver import Approver
from forewarn.agent.journal import Journal, JournalLost
from forewarn.agent.lease import Keeper, Lease
from forewarn.agent.metrics import Tally
from forewarn.agent.progress import What
from forewarn.agent.rules import Rule, first_match
from forewarn.agent.settings import Settings
from forewarn.agent.step import Phase
from forewarn.agent.workflow import (
    Applications,
    Handling,
    HandlingStatus,
    Here,
    NoApplications,
    lead,
)
from forewarn.client import Change, Clock, Document, EndpointError, Event, Kind, Watcher
from forewarn.client.backoff import PERIOD_SECONDS, pause_seconds
from forewarn.client.client import Stop
from forewarn.client.watcher import LOOKS_MIN

log = logging.getLogger("forewarn.agent")

WORKING_MAX = 64
AGAIN_SECONDS = 1.0
IDLE_SECONDS = 60.0
END_SECONDS_MAX = 30.0
CLOCK = Clock()
LONG_AGO = datetime.min.replace(tzinfo=UTC)


class Endpoint(Protocol):
    """What the agent asks of a client, and `forewarn.client.Client` does."""

    def name(self) -> str: ...

    def approve(self, *event_ids: str, timeout_seconds: float) -> None: ...

    def watch(
        self,
        *,
        stop: Stop | None,
        on_error: Callable[[EndpointError], object],
        wait_seconds: float,
        watcher: Watcher | None,
        sleep: Callable[[float], object] | None,
    ) -> Iterator[Change]: ...


@dataclass(frozen=True, slots=True)
class Status:
    """What is going on, for people and programs.

    `last_problem` is "" while the endpoint answers as it should.
    """

    name: str
    endpoint: str
    last_contact: datetime | None
    problems: int
    last_problem: str
    rules: tuple[str, ...]
    handlings: tuple[HandlingStatus, ...]


class Agent:
    """One agent of one VM, run once. `reload`, `status` and `counts` may be called from any thread
    at any time.

    `is_once`: there is one look only, so what it shows is believed and nothing waits for a later
    one.
    """

    def __init__(
        self,
        settings: Settings,
        client: Endpoint,
        journal: Journal,
        *,
        applications: Applications | None = None,
        clock: Clock = CLOCK,
        is_dry_run: bool = False,
        is_once: bool = False,
        again_seconds: float = AGAIN_SECONDS,
    ) -> None:
        self._settings = settings
        self._client = client
        self._is_dry_run = is_dry_run
        self._again_seconds = again_seconds
        self._is_once = is_once
        self._here = Here(
            settings.name,
            journal,
            applications or NoApplications(),
            clock,
            Tally(),
            is_patient=not is_once,
        )
        self._handlings: dict[str, Handling] = {}
        self._working: dict[str, threading.Thread] = {}
        self._approved: set[str] = set()
        self._odd: set[str] = set()
        self._last: Change | None = None
        self._turn = threading.RLock()
        self._wake = threading.Event()
        self._contact = Contact(self._here)
        self._trouble = ""

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set.

        Whoever sets it closes the client too: that ends a wait for the endpoint.
        """
        self._find_name(stop)
        if stop.is_set():
            return
        known = [] if self._is_dry_run else self._resume()
        watcher = Lookout(
            known,
            approved=self._approved,
            on_look=self._look,
            looks_min=1 if self._is_once else LOOKS_MIN,
        )
        approving = threading.Thread(
            target=self._keep_approving, args=(stop, watcher), name="forewarn-approve", daemon=True
        )
        approving.start()
        more_seconds = self._settings.poll_seconds - PERIOD_SECONDS
        try:
            for change in self._client.watch(
                stop=stop,
                on_error=self._contact.failed,
                wait_seconds=self._settings.wait_seconds,
                watcher=watcher,
                sleep=lambda seconds: stop.wait(seconds + more_seconds if seconds else 0),
            ):
                self._take(change)
        finally:
            stop.set()
            self._end(approving)

    def reload(self, settings: Settings) -> None:
        """Rules for the events that appear from now on; those in hand keep theirs, but are held if
        it now holds them or is gone.

        The rest of the file needs a new start.
        """
        same = {"rules", "hooks"}
        old, self._settings = (
            self._settings,
            replace(self._settings, rules=settings.rules, hooks=settings.hooks),
        )
        names = [one.name for one in fields(settings) if one.name not in same]
        waiting = [name for name in names if getattr(old, name) != getattr(settings, name)]
        log.info("rules loaded", extra={"facts": {"rules": len(settings.rules)}})
        if waiting:
            log.warning(
                "these settings are used after the next start",
                extra={"facts": {"settings": ", ".join(waiting)}},
            )

    def status(self) -> Status:
        with self._turn:
            handlings = [self._handlings[key] for key in sorted(self._handlings)]
        return Status(
            name=self._here.name,
            endpoint=self._settings.endpoint,
            last_contact=self._contact.last,
            problems=self._contact.problems,
            last_problem=self._contact.problem,
            rules=tuple(rule.name for rule in self._settings.rules),
            handlings=tuple(handling.status() for handling in handlings),
        )

    def counts(self) -> Mapping[str, int]:
        """The counters, by name and labels as Prometheus has them."""
        return self._here.tally.counts()

    def _find_name(self, stop: threading.Event) -> None:
        """Without our own name nobody knows whom an event hits, so this is asked until it is
        answered.
        """
        failures = 0
        while not (self._here.name or stop.is_set()):  # ends with an answer, or with the agent
            try:
                self._here = replace(self._here, name=self._client.name())
            except EndpointError as problem:
                if stop.is_set():
                    return
                failures += 1
                self._contact.failed(problem)
                stop.wait(pause_seconds(failures, problem, self._here.clock.chance()))

    def _resume(self) -> list[Event]:
        """Take up what an earlier life left.

        Each waits until a document shows its event, or that it is over.
        """
        rules = {rule.name: rule for rule in self._settings.rules}
        for key, progress in self._here.journal.progress.items():
            for (phase, index), seconds in progress.took.items():
                self._here.took[progress.rule, phase, index] = seconds
            if What.APPROVING in progress.marks:
                self._approved.add(key)
            if progress.is_done:
                continue
            rule = rules.get(progress.rule)
            if rule is None:
                facts = {
                    "event": key,
                    "rule": progress.rule,
                    "so": "it is held, and recover has no steps",
                }
                log.warning("the rule of an event in hand is gone", extra={"facts": facts})
            self._handlings[key] = Handling(
                rule or Rule(progress.rule, hold=True), progress.event, self._here
            )
        self._pump()
        return [
            one.event
            for one in self._here.journal.progress.values()
            if What.FINISHED not in one.marks
        ]

    def _look(self, document: Document, changes: list[Change]) -> None:
        """A document came that we understood.

        What an earlier life left is no news, and is read when it is first shown again.
        """
        self._contact.made(document)
        self._last = changes[-1] if changes else None
        with self._turn:
            left = [event for event in document.events if self._is_left(event)]
            for event in left:
                self._handlings[event.key].read(event)
        if left:
            self._pump()

    def _is_left(self, event: Event) -> bool:
        handling = self._handlings.get(event.key)
        return handling is not None and not handling.is_shown

    def _take(self, change: Change) -> None:
        event = change.event
        handling = self._handlings.get(event.key)
        log.info(
            "news of an event",
            extra={"facts": {"news": change.kind, "event": event.key, "type": event.type}},
        )
        if handling is None and (change.kind is Kind.APPEARED or event.key in self._odd):
            self._odd.discard(event.key)
            if change.kind not in (Kind.FINISHED, Kind.CANCELED):
                self._appeared(event)
        elif handling is not None and change.kind in (Kind.FINISHED, Kind.CANCELED):
            handling.finish()
        elif handling is not None:
            handling.read(event)
        if change is self._last:
            self._pump()

    def _appeared(self, event: Event) -> None:
        """One that is over and recovered from, shown again by an endpoint that lags, has nothing to
        do and is dropped at once.

        One with a status that is new to us waits until it has one that we know.
        """
        if not (event.is_scheduled or event.is_started):
            self._odd.add(event.key)
            log.warning(
                "the status of an event is unknown",
                extra={"facts": {"event": event.key, "status": event.status}},
            )
            return
        lead_seconds = lead(event, self._here.clock.now())
        rule = first_match(
            self._settings.rules, event, name=self._here.name, lead_seconds=lead_seconds
        )
        self._here.tally.add("events", matched="no" if rule is None else "yes")
        if rule is None:
            log.info(
                "no rule is for this event",
                extra={"facts": {"event": event.key, "type": event.type}},
            )
        elif self._is_dry_run:
            steps = [
                f"{phase}: {one.step.describe()}" for phase in Phase for one in rule.steps(phase)
            ]
            approve = rule.approve if rule.may_approve else "never"
            facts = {
                "event": event.key,
                "rule": rule.name,
                "steps": "; ".join(steps),
                "approve": approve,
            }
            log.info("dry run: this would be done", extra={"facts": facts})
        else:
            handling = Handling(rule, event, self._here)
            handling.read(event)
            with self._turn:
                self._handlings[event.key] = handling

    def _pump(self) -> None:
        """Give a thread to each handling that has work and none, as far as they go."""
        with self._turn:
            self._handlings = {
                key: one
                for key, one in self._handlings.items()
                if key in self._working or not one.is_done
            }
            self._approved.intersection_update(self._handlings)
            waiting = [
                one
                for key, one in self._handlings.items()
                if key not in self._working and one.has_work
            ]
            waiting.sort(key=lambda one: (one.event.not_before or LONG_AGO, one.event.key))
            for handling in waiting[: WORKING_MAX - len(self._working)]:
                thread = threading.Thread(
                    target=self._work,
                    args=(handling,),
                    name=f"forewarn-event-{handling.event.key}",
                    daemon=True,
                )
                self._working[handling.event.key] = thread
                thread.start()
        self._wake.set()

    def _work(self, handling: Handling) -> None:
        try:
            while handling.has_work:  # ends when the journal can be written, or with the agent
                try:
                    handling.work()
                except Exception as problem:
                    self._turn_failed(problem)
                    handling.rest(self._again_seconds)
        finally:
            with self._turn:
                del self._working[handling.event.key]
            self._pump()

    def _keep_lease(self, stop: threading.Event) -> Keeper | None:
        if self._settings.lease is None:
            return None
        monotonic = self._here.clock.monotonic
        lease = Lease(self._settings.lease, self._here.name, monotonic=monotonic)
        keeper = Keeper(lease, monotonic=monotonic, on_word=self._wake.set)
        threading.Thread(
            target=keeper.keep, args=(stop,), name="forewarn-lease", daemon=True
        ).start()
        return keeper

    def _keep_approving(self, stop: threading.Event, watcher: Watcher) -> None:
        lease = self._keep_lease(stop)
        approver = Approver(
            self._here,
            self._client.approve,
            lease=lease,
            approved=self._approved,
            rules=lambda: self._settings.rules,
        )
        is_waiting = False
        while not stop.is_set():  # ends with the agent
            self._wake.wait(self._again_seconds if is_waiting else IDLE_SECONDS)
            self._wake.clear()
            with self._turn:
                handlings = list(self._handlings.values())
            try:
                is_waiting = approver.turn(
                    handlings, None if watcher.is_in_doubt else self._contact.document
                )
            except Exception as problem:
                self._turn_failed(problem)
                is_waiting = True
        if lease is not None:
            lease.wake()

    def _turn_failed(self, problem: Exception) -> None:
        """The disk is full, or we have a bug: said once, and tried again.

        Nothing was done that is not in the journal.
        """
        is_disk = isinstance(problem, JournalLost)
        if is_disk:
            self._here.tally.add("journal_problems")
        if str(problem) != self._trouble:
            self._trouble = str(problem)
            facts = {"problem": self._trouble}
            log.error(
                "nothing can be done for now",
                extra={"facts": facts},
                exc_info=None if is_disk else problem,
            )

    def _end(self, approving: threading.Thread) -> None:
        """Steps are told to stop, and are waited for; one that does not is left behind, as a crash
        would leave it.
        """
        with self._turn:
            for handling in self._handlings.values():
                handling.end()
            threads = [approving, *self._working.values()]
        self._wake.set()
        deadline = self._here.clock.monotonic() + END_SECONDS_MAX
        for thread in threads:
            thread.join(max(0.0, deadline - self._here.clock.monotonic()))


class Contact:
    """What is known of the endpoint.

    `document` is the last one, and None from a problem to the next document.
    """

    def __init__(self, here: Here) -> None:
        self._here = here
        self.document: Document | None = None
        self.last: datetime | None = None
        self.problems = 0
        self.problem = ""

    def made(self, document: Document) -> None:
        self.document, self.last = document, self._here.clock.now()
        if self.problem:
            log.info("the endpoint answers again")
        self.problem = ""

    def failed(self, problem: EndpointError) -> None:
        """The same again is counted, not repeated."""
        self.document = None
        self.problems += 1
        self._here.tally.add("endpoint_problems")
        if problem.message != self.problem:
            log.warning("the endpoint has a problem", extra={"facts": {"problem": problem.message}})
        self.problem = problem.message


class Lookout(Watcher):
    """A watcher that also says that it looked."""

    def __init__(
        self,
        known: list[Event],
        *,
        approved: set[str],
        looks_min: int,
        on_look: Callable[[Document, list[Change]], None],
    ) -> None:
        super().__init__(known, approved=approved, looks_min=looks_min)
        self._on_look = on_look

    def update(self, document: Document, now: datetime) -> list[Change]:
        changes = super().update(document, now)
        self._on_look(document, changes)
        return changes
