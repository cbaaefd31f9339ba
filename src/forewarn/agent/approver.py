"""Sends approvals, decides about leaders and quiet scopes, and retries. Used by one thread.

An approval is in the journal before it is sent, and is sent again after a crash: approving twice
is the same as approving once. A failed approval is retried with growing pauses until the event has
started or is over.

One request approves all events that are ready, the nearest NotBefore first. An endpoint rejects a
whole request because of one unknown id; then each event is sent alone. A turn ends after
TURN_SECONDS_MAX even if the endpoint hangs, and the rest waits for the next turn. So an event that
becomes ready meanwhile is never delayed by more than that.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from forewarn.agent.progress import EntryKind
from forewarn.agent.rules import ApproveWhen, Rule, is_first, is_quiet
from forewarn.agent.workflow import AgentContext, Workflow
from forewarn.client import Document, EndpointError, HttpError
from forewarn.client.backoff import pause_seconds
from forewarn.log import log

TURN_SECONDS_MAX = 2.0
"""A Preempt keeps 3 seconds for its approval (`rules.TimeBudget`): one is left after the request of
another event has hung for a whole turn.
"""
ATTEMPT_SECONDS_MIN = 1.0
WRITE_SECONDS_MAX = 0.5
"""For journaling the events of one request before it is sent."""
IDS_MAX = 100
"""In one request."""
NOT_ABOUT_AN_ID = (408, 429)


class SendApproval(Protocol):
    def __call__(self, *event_ids: str, timeout_seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ApprovalRetry:
    failures: int
    again_at: float


class Approver:
    """`send` approves event ids, all or none. `approved` gets the key of each event before it is
    sent, because the event may then start immediately.

    `rules` returns the current rules: an event keeps its original rule, but is not approved if that
    rule may no longer approve.
    """

    def __init__(
        self,
        context: AgentContext,
        send: SendApproval,
        *,
        approved: set[str],
        rules: Callable[[], Iterable[Rule]],
    ) -> None:
        self._context = context
        self._send = send
        self._approved = approved
        self._rules = rules
        self._retries: dict[str, ApprovalRetry] = {}

    def turn(self, workflows: Iterable[Workflow], document: Document | None) -> bool:
        """Approve what may be approved. Returns whether to call again soon.

        `document` is None while none can be trusted.
        """
        known = sorted(workflows, key=_urgency)
        may_approve = {rule.name for rule in self._rules() if rule.may_approve}
        errors: list[Exception] = []
        ready: list[Workflow] = []
        for workflow in known:
            try:
                if workflow.rule.name in may_approve and self._is_ready(workflow, document):
                    ready.append(workflow)
            except Exception as error:  # around a loop: a bug with one event must not stop others
                errors.append(error)
        self._approve(ready, errors)
        keys = {workflow.event.key for workflow in known}
        self._retries = {key: one for key, one in self._retries.items() if key in keys}
        if errors:
            raise errors[0]
        return any(workflow.wants_approval for workflow in known)

    def _is_ready(self, workflow: Workflow, document: Document | None) -> bool:
        if not workflow.wants_approval:
            return False
        retry = self._retries.get(workflow.event.key)
        if retry is not None and self._context.clock.monotonic() < retry.again_at:
            return False
        match workflow.rule.approve:
            case ApproveWhen.WHEN_PREPARED_AND_QUIET:
                return document is not None and is_quiet(document, self._context.vm)
            case ApproveWhen.WHEN_PREPARED_AND_LEADER:
                return is_first(workflow.event, self._context.vm)
            case _:
                return True

    def _approve(self, ready: list[Workflow], errors: list[Exception]) -> None:
        """Send requests until all are sent, the turn is over, or the endpoint has a problem that
        is not about one id.
        """
        monotonic = self._context.clock.monotonic
        end = monotonic() + TURN_SECONDS_MAX
        waiting = deque(ready)
        alone: set[str] = set()
        # Each event is in one batch, and perhaps in one more alone.
        while waiting and end - monotonic() >= ATTEMPT_SECONDS_MIN:
            batch = self._next_batch(waiting, alone, errors)
            seconds = end - monotonic()
            if not batch or seconds < ATTEMPT_SECONDS_MIN:
                continue
            ids = [workflow.event.id for workflow in batch]
            try:
                self._send(*ids, timeout_seconds=min(seconds, _attempt_seconds(batch[0])))
            except EndpointError as error:
                if len(batch) > 1 and _is_about_an_id(error):
                    alone.update(workflow.event.key for workflow in batch)
                    waiting.extendleft(reversed(batch))
                    continue
                for workflow in batch:
                    self._handle_failure(workflow, error)
                if not _is_about_an_id(error):
                    return
            except Exception as error:  # around a loop: it is raised when the turn is over
                errors.append(error)
                return
            else:
                for workflow in batch:
                    self._handle_success(workflow, errors)

    def _next_batch(
        self, waiting: deque[Workflow], alone: Container[str], errors: list[Exception]
    ) -> list[Workflow]:
        """The events of one request. Closed early where the disk is slow, because the first of
        them is the most urgent.
        """
        end = self._context.clock.monotonic() + WRITE_SECONDS_MAX
        batch: list[Workflow] = []
        while waiting and len(batch) < IDS_MAX:
            workflow = waiting.popleft()
            if self._journal(workflow, errors):
                batch.append(workflow)
            is_late = self._context.clock.monotonic() >= end
            if batch and (workflow.event.key in alone or is_late):
                break
        return batch

    def _journal(self, workflow: Workflow, errors: list[Exception]) -> bool:
        """Whether the approval is in the journal, so that it may be sent."""
        event = workflow.event
        try:
            self._context.journal.write_event(event, workflow.rule.name)
            self._context.journal.write(event.key, EntryKind.APPROVING)
        except Exception as error:  # around a loop: the others are sent
            errors.append(error)
            return False
        self._approved.add(event.key)
        return True

    def _handle_success(self, workflow: Workflow, errors: list[Exception]) -> None:
        event = workflow.event
        try:
            self._context.journal.write(event.key, EntryKind.APPROVED)
        except Exception as error:  # around a loop: it is sent again, which changes nothing
            errors.append(error)
            return
        self._context.counters.add("approvals", result="sent")
        log.info("event approved", event=event.key, type=event.type, rule=workflow.rule.name)

    def _handle_failure(self, workflow: Workflow, error: EndpointError) -> None:
        clock, key = self._context.clock, workflow.event.key
        failures = self._retries[key].failures + 1 if key in self._retries else 1
        pause = pause_seconds(failures, error, clock.chance())
        self._retries[key] = ApprovalRetry(failures, clock.monotonic() + pause)
        self._context.counters.add("approvals", result="failed")
        if failures == 1:
            log.warning("approval failed, retrying", event=key, problem=error.message)


def _urgency(workflow: Workflow) -> tuple[float, str]:
    seconds_left = workflow.seconds_left
    return (math.inf if seconds_left is None else seconds_left, workflow.event.key)


def _attempt_seconds(most_urgent: Workflow) -> float:
    """Half of the time that is left, so that another attempt fits into the rest."""
    return max(ATTEMPT_SECONDS_MIN, (most_urgent.seconds_left or 0.0) / 2)


def _is_about_an_id(error: EndpointError) -> bool:
    """Whether other ids may be accepted. The protocol does not specify the status of an unknown
    id; Forewarn's is 400.
    """
    if not isinstance(error, HttpError) or error.status in NOT_ABOUT_AN_ID:
        return False
    return 400 <= error.status < 500
