"""The agent: reads documents, gives each event that a rule matches to a Workflow, and approves.

Threads: the caller's reads documents; one sends approvals; each workflow that has work gets one,
WORKERS_MAX at a time and the rest in the order of NotBefore. A workflow that waits for another
document has no thread.
"""

import threading
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from datetime import UTC, datetime

from forewarn.agent.approver import Approver
from forewarn.agent.journal import Journal, JournalLost
from forewarn.agent.participants import Participants
from forewarn.agent.progress import EntryKind
from forewarn.agent.rules import Rule, first_match, seconds_to_not_before
from forewarn.agent.settings import AgentSettings
from forewarn.agent.status import AgentStatus, Counters
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.agent.workflow import AgentContext, Workflow
from forewarn.client import (
    Change,
    Client,
    ClientClock,
    Document,
    EndpointError,
    Event,
    Kind,
    Watcher,
)
from forewarn.client.backoff import pause_seconds
from forewarn.client.watcher import LOOKS_MIN
from forewarn.errors import Unavailable
from forewarn.log import log

WORKERS_MAX = 64
RETRY_SECONDS = 1.0
IDLE_SECONDS = 60.0
STOP_SECONDS_MAX = 30.0
ONCE_APPROVAL_SECONDS_MAX = 5.0
"""This VM may never become the leader, and the scope may never be quiet."""
ONCE_CHECK_SECONDS = 0.05
CLOCK = ClientClock()
LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(eq=False)
class Agent:
    """One agent of one VM, run once. `reload` and `status` may be called from any thread.

    `is_once`: read one document, do what is due, and return. `config_error` is why the last reload
    was rejected.
    """

    settings: AgentSettings
    client: Client
    journal: Journal
    _: KW_ONLY
    programs: Participants = field(default_factory=Participants)
    clock: ClientClock = CLOCK
    is_dry_run: bool = False
    is_once: bool = False
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        self.config_error = ""
        self._context = AgentContext(
            self.settings.name,
            self.journal,
            self.programs,
            self.clock,
            Counters(),
            wait_for_others=not self.is_once,
        )
        self._document: Document | None = None  # the last one, and None after an error
        self._last_contact: datetime | None = None
        self._last_problem = ""
        self._workflows: dict[str, Workflow] = {}
        self._workers: dict[str, threading.Thread] = {}
        self._approved: set[str] = set()
        self._unknown_status: set[str] = set()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._last_error = ""

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. To end a pending request, close the client too.

        With `is_once`, raises what kept it from doing what is due.
        """
        self._find_name(stop)
        if stop.is_set():
            return
        watcher = Watcher(
            [] if self.is_dry_run else self._resume(),
            approved=self._approved,
            looks_min=1 if self.is_once else LOOKS_MIN,
        )
        approver = threading.Thread(
            target=self._run_approver, args=(stop, watcher), name="forewarn-approve", daemon=True
        )
        approver.start()
        try:
            if self.is_once:
                self._read(self.client.document(), watcher)
                self._finish_due_work(stop)
            else:
                self._follow(stop, watcher)
        finally:
            stop.set()
            self._end(approver)

    def reload(self, settings: AgentSettings) -> None:
        """New rules apply to events that appear from now on. Current events keep their rule, but
        are not approved if it now holds them or no longer exists. Other settings need a restart.
        """
        old = self.settings
        self.settings = replace(old, rules=settings.rules, hooks=settings.hooks)
        self.config_error = ""
        log.info("rules loaded", rules=len(settings.rules))
        changed = [
            one.name
            for one in fields(settings)
            if one.name not in ("rules", "hooks")
            and getattr(old, one.name) != getattr(settings, one.name)
        ]
        if changed:
            log.warning("these settings need a restart", settings=", ".join(changed))

    def status(self) -> AgentStatus:
        with self._lock:
            workflows = [self._workflows[key] for key in sorted(self._workflows)]
        return AgentStatus(
            name=self._context.vm,
            settings=self.settings,
            last_contact=self._last_contact,
            last_problem=self._last_problem,
            workflows=tuple(workflow.status() for workflow in workflows),
            programs=self._context.programs.names(),
            config_error=self.config_error,
            counters=self._context.counters.values(),
            now=self._context.clock.now(),
        )

    def _find_name(self, stop: threading.Event) -> None:
        """Without this VM's name, the agent cannot know which events affect it."""
        failures = 0
        while not (self._context.vm or stop.is_set()):
            try:
                self._context = replace(self._context, vm=self.client.name())
            except EndpointError as error:
                if self.is_once:
                    raise
                if stop.is_set():
                    return
                failures += 1
                self._handle_error(error)
                stop.wait(pause_seconds(failures, error, self._context.clock.chance()))

    def _resume(self) -> list[Event]:
        """Create the workflows that the journal knows, and return their events.

        Each waits until a document shows its event, or shows that it is over.
        """
        rules = {rule.name: rule for rule in self.settings.rules}
        progresses = self._context.journal.progress
        for key, progress in progresses.items():
            if EntryKind.APPROVING in progress.marks:
                self._approved.add(key)
            if progress.is_done:
                continue
            rule = rules.get(progress.rule)
            if rule is None:
                message = "the rule of an event no longer exists: not approved, no recover steps"
                log.warning(message, event=key, rule=progress.rule)
                rule = Rule(progress.rule, hold=True)
            self._workflows[key] = Workflow(rule, progress.event, self._context)
        self._start_workers()
        return [progress.event for progress in progresses.values() if not progress.is_finished]

    def _follow(self, stop: threading.Event, watcher: Watcher) -> None:
        results = self.client.documents(
            stop=stop,
            wait_seconds=self.settings.wait_seconds,
            period_seconds=self.settings.poll_seconds,
            may_wait=lambda: not watcher.is_in_doubt,
        )
        for result in results:
            if isinstance(result, EndpointError):
                self._handle_error(result)
            else:
                self._read(result, watcher)

    def _read(self, document: Document, watcher: Watcher) -> None:
        """Apply a document. An event resumed from the journal is not reported as a change by the
        watcher, so it is updated here when a document first shows it.
        """
        now = self._context.clock.now()
        changes = watcher.update(document, now)
        self._document, self._last_contact = document, now
        if self._last_problem:
            log.info("endpoint responds again")
        self._last_problem = ""
        for event in document.events:
            workflow = self._workflows.get(event.key)
            if workflow is not None and workflow.seconds_left is None:
                workflow.update(event)
        for change in changes:
            self._apply(change)
        self._start_workers()

    def _handle_error(self, error: EndpointError) -> None:
        """A repeated error is counted, not logged again."""
        self._document = None
        self._context.counters.add("endpoint_problems")
        if error.message != self._last_problem:
            log.warning("endpoint failed", problem=error.message)
        self._last_problem = error.message

    def _apply(self, change: Change) -> None:
        event = change.event
        log.info("event changed", change=change.kind, event=event.key, type=event.type)
        workflow = self._workflows.get(event.key)
        is_over = change.kind in (Kind.FINISHED, Kind.CANCELED)
        if workflow is not None and is_over:
            workflow.finish()
        elif workflow is not None:
            workflow.update(event)
        elif change.kind is Kind.APPEARED or event.key in self._unknown_status:
            self._unknown_status.discard(event.key)
            if not is_over:
                self._add(event)

    def _add(self, event: Event) -> None:
        """An event that is done, shown again by a lagging endpoint, has no work and is dropped.

        An event with an unknown status is left alone until its status is known.
        """
        context = self._context
        if not (event.is_scheduled or event.is_started):
            self._unknown_status.add(event.key)
            log.warning("event has an unknown status", event=event.key, status=event.status)
            return
        lead_seconds = seconds_to_not_before(event, context.clock.now())
        rule = first_match(self.settings.rules, event, vm=context.vm, lead_seconds=lead_seconds)
        context.counters.add("events", matched="no" if rule is None else "yes")
        if rule is None:
            log.info("no rule matches this event", event=event.key, type=event.type)
        elif self.is_dry_run:
            _log_dry_run(event, rule)
        else:
            workflow = Workflow(rule, event, context)
            workflow.update(event)
            with self._lock:
                self._workflows[event.key] = workflow

    def _start_workers(self) -> None:
        """Start a thread for each workflow that has work and no thread, up to the limit. Where no
        thread can be started, the next call tries again.
        """
        with self._lock:
            self._workflows = {
                key: workflow
                for key, workflow in self._workflows.items()
                if key in self._workers or not workflow.progress.is_done
            }
            self._approved.intersection_update(self._workflows)
            waiting = [
                workflow
                for key, workflow in self._workflows.items()
                if key not in self._workers and workflow.has_work
            ]
            waiting.sort(key=lambda one: (one.event.not_before or LONG_AGO, one.event.key))
            for workflow in waiting[: WORKERS_MAX - len(self._workers)]:
                key = workflow.event.key
                worker = threading.Thread(
                    target=self._work, args=(workflow,), name=f"forewarn-event-{key}", daemon=True
                )
                try:
                    worker.start()
                except RuntimeError as error:  # the limit of threads or of memory is reached
                    self._log_failure(error)
                    break
                self._workers[key] = worker
        self._wake.set()

    def _work(self, workflow: Workflow) -> None:
        try:
            while workflow.has_work:  # ends when the journal can be written, or with the agent
                try:
                    workflow.run()
                except Exception as error:
                    self._log_failure(error)
                    workflow.pause(self.retry_seconds)
        finally:
            with self._lock:
                del self._workers[workflow.event.key]
            self._start_workers()

    def _run_approver(self, stop: threading.Event, watcher: Watcher) -> None:
        approver = Approver(self._context, self.client, self._approved)
        is_waiting = False
        while not stop.is_set():
            self._wake.wait(self.retry_seconds if is_waiting else IDLE_SECONDS)
            self._wake.clear()
            with self._lock:
                workflows = list(self._workflows.values())
            document = None if watcher.is_in_doubt else self._document
            try:
                is_waiting = approver.turn(workflows, document, self.settings.rules)
            except Exception as error:
                self._log_failure(error)
                is_waiting = True

    def _end(self, approver: threading.Thread) -> None:
        """A step that does not stop in time is left behind, as after a crash."""
        with self._lock:
            for workflow in self._workflows.values():
                workflow.stop()
            threads = [approver, *self._workers.values()]
        self._wake.set()
        deadline = self._context.clock.monotonic() + STOP_SECONDS_MAX
        for thread in threads:
            thread.join(max(0.0, deadline - self._context.clock.monotonic()))

    def _finish_due_work(self, stop: threading.Event) -> None:
        """Wait until nothing is left to run, and a while longer for approvals."""
        monotonic = self._context.clock.monotonic
        idle_since = monotonic()
        while not stop.is_set():
            self._start_workers()  # again, where no thread could be started
            if self._context.counters.values()["forewarn_agent_journal_problems_total"]:
                # A running agent would retry forever.
                raise Unavailable("the journal is not writable, so work is left; see the log")
            with self._lock:
                workflows = tuple(self._workflows.values())
                is_busy = bool(self._workers) or any(one.has_work for one in workflows)
            if is_busy:
                idle_since = monotonic()
            is_patient = monotonic() - idle_since <= ONCE_APPROVAL_SECONDS_MAX
            if not is_busy and not (is_patient and any(one.wants_approval for one in workflows)):
                return
            stop.wait(ONCE_CHECK_SECONDS)

    def _log_failure(self, error: Exception) -> None:
        """The disk is full, no thread can be started, or there is a bug: logged once, and retried.
        Nothing was done that is not in the journal.
        """
        is_journal = isinstance(error, JournalLost)
        if is_journal:
            self._context.counters.add("journal_problems")
        if str(error) == self._last_error:
            return
        self._last_error = str(error)
        message = "journal not writable, retrying" if is_journal else "unexpected error, retrying"
        log.error(message, problem=self._last_error, exc_info=None if is_journal else error)


def _log_dry_run(event: Event, rule: Rule) -> None:
    steps = [
        f"{phase}: {one.step.describe()}" for phase in WorkflowPhase for one in rule.steps(phase)
    ]
    approve = rule.approve if rule.may_approve else "never"
    message = "dry run: this would be done"
    log.info(message, event=event.key, rule=rule.name, steps="; ".join(steps), approve=approve)
