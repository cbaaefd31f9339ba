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
from collections.abc import Iterable, Sequence

from forewarn.agent.journal import JournalLost
from forewarn.agent.progress import EntryKind
from forewarn.agent.rules import ApproveWhen, Rule, is_first, is_quiet
from forewarn.agent.workflow import AgentContext, Workflow
from forewarn.client import Client, Document, EndpointError, HttpError
from forewarn.client.backoff import pause_seconds
from forewarn.log import log

TURN_SECONDS_MAX = 2.0
"""A Preempt keeps 3 seconds for its approval (`rules.prepare_deadline`): one is left after the
request of another event has hung for a whole turn.
"""
ATTEMPT_SECONDS_MIN = 1.0
WRITE_SECONDS_MAX = 0.5
"""For journaling the events of one request before it is sent."""
IDS_MAX = 100
"""In one request."""
NOT_ABOUT_AN_ID = (408, 429)


class Approver:
    """`approved` gets the key of each event before it is sent, because the event may then start
    immediately.
    """

    def __init__(self, context: AgentContext, client: Client, approved: set[str]) -> None:
        self._context = context
        self._client = client
        self._approved = approved

    def turn(
        self, workflows: Iterable[Workflow], document: Document | None, rules: Iterable[Rule]
    ) -> bool:
        """Approve what may be approved. Returns whether to call again soon.

        `document` is None while none can be trusted. `rules` are the current ones: an event keeps
        its original rule, but is not approved if that rule may no longer approve.

        Raises JournalLost, after all other events were sent, for an event whose entry could not be
        written. Nothing was sent that is not in the journal.
        """
        may_approve = {rule.name for rule in rules if rule.may_approve}
        known = sorted(workflows, key=_urgency)
        allowed = [workflow for workflow in known if workflow.rule.name in may_approve]
        monotonic = self._context.clock.monotonic
        end = monotonic() + TURN_SECONDS_MAX
        lost: dict[str, JournalLost] = {}  # by the key of the event, which waits for the next turn
        while end - monotonic() >= ATTEMPT_SECONDS_MIN:
            left = [workflow for workflow in allowed if workflow.event.key not in lost]
            ready = self._next_ready(left, document)
            if not ready:
                break
            batch = self._journal(ready, lost)
            if batch and not self._approve(batch, end - monotonic(), lost):
                break
        if lost:
            raise next(iter(lost.values()))
        return any(workflow.wants_approval for workflow in known)

    def _next_ready(
        self, allowed: Iterable[Workflow], document: Document | None
    ) -> Sequence[Workflow]:
        """The events of one request."""
        ready = [workflow for workflow in allowed if self._is_ready(workflow, document)]
        if ready and ready[0].is_approved_alone:
            return ready[:1]
        return [workflow for workflow in ready if not workflow.is_approved_alone][:IDS_MAX]

    def _journal(
        self, ready: Sequence[Workflow], lost: dict[str, JournalLost]
    ) -> Sequence[Workflow]:
        """Those that are in the journal now. Closed early where the disk is slow, because the
        first of them is the most urgent.
        """
        written: list[Workflow] = []
        end = self._context.clock.monotonic() + WRITE_SECONDS_MAX
        for workflow in ready:
            event = workflow.event
            try:
                self._context.journal.write_event(event, workflow.rule.name)
                self._context.journal.write(event.key, EntryKind.APPROVING)
            except JournalLost as error:
                lost[event.key] = error
            else:
                self._approved.add(event.key)
                written.append(workflow)
            if self._context.clock.monotonic() >= end:
                break
        return written

    def _is_ready(self, workflow: Workflow, document: Document | None) -> bool:
        is_paused = self._context.clock.monotonic() < workflow.approve_again_at
        if is_paused or not workflow.wants_approval:
            return False
        match workflow.rule.approve:
            case ApproveWhen.WHEN_PREPARED_AND_QUIET:
                return document is not None and is_quiet(document, self._context.vm)
            case ApproveWhen.WHEN_PREPARED_AND_LEADER:
                return is_first(workflow.event, self._context.vm)
            case _:
                return True

    def _approve(
        self, batch: Sequence[Workflow], seconds_max: float, lost: dict[str, JournalLost]
    ) -> bool:
        """Whether the endpoint may accept another request."""
        # Half of the time that is left, so that another attempt fits into the rest.
        seconds = min(seconds_max, (batch[0].seconds_left or 0.0) / 2)
        ids = [workflow.event.id for workflow in batch]
        try:
            self._client.approve(*ids, timeout_seconds=max(seconds, ATTEMPT_SECONDS_MIN))
        except EndpointError as error:
            is_about_an_id = _is_about_an_id(error)
            for workflow in batch:
                if is_about_an_id and len(batch) > 1:
                    workflow.is_approved_alone = True
                else:
                    self._handle_failure(workflow, error)
            return is_about_an_id
        for workflow in batch:
            event = workflow.event
            try:
                self._context.journal.write(event.key, EntryKind.APPROVED)
            except JournalLost as error:
                lost[event.key] = error
                continue
            self._context.counters.add("approvals", result="sent")
            log.info("event approved", event=event.key, type=event.type, rule=workflow.rule.name)
        return True

    def _handle_failure(self, workflow: Workflow, error: EndpointError) -> None:
        clock = self._context.clock
        workflow.approval_failures += 1
        pause = pause_seconds(workflow.approval_failures, error, clock.chance())
        workflow.approve_again_at = clock.monotonic() + pause
        self._context.counters.add("approvals", result="failed")
        if workflow.approval_failures == 1:
            key = workflow.event.key
            log.warning("approval failed, retrying", event=key, problem=error.message)


def _urgency(workflow: Workflow) -> tuple[float, str]:
    seconds_left = workflow.seconds_left
    return (math.inf if seconds_left is None else seconds_left, workflow.event.key)


def _is_about_an_id(error: EndpointError) -> bool:
    """Whether other ids may be accepted. The protocol does not specify the status of an unknown
    id; Forewarn's is 400.
    """
    if not isinstance(error, HttpError) or error.status in NOT_ABOUT_AN_ID:
        return False
    return 400 <= error.status < 500
