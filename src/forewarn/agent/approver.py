"""When an event is approved, and that it is: leaders, quiet, and trying again. One thread asks.

Approving is written down before it is sent, and sent again after a crash: approving twice is
approving once. What fails is tried again, later and later, until the event has started or is over.

One request approves all events that are ready, the nearest NotBefore first. An endpoint refuses all
of them for one id that it does not know; then each is sent alone. A turn ends after
TURN_SECONDS_MAX whatever the endpoint does, and what is left waits for the next turn: an event that
becomes ready meanwhile is never held back for longer than that.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from forewarn.agent.lease import Leadership
from forewarn.agent.progress import What
from forewarn.agent.rules import Approve, Leader, Rule, is_first, is_quiet
from forewarn.agent.workflow import Handling, Here
from forewarn.client import Document, EndpointError, HttpError
from forewarn.client.backoff import pause_seconds

log = logging.getLogger("forewarn.agent")

TURN_SECONDS_MAX = 2.0
"""The reserve of a Preempt for its approval is 3 seconds (`budget.py`): after a request of others
that hangs, one is left.
"""
ATTEMPT_SECONDS_MIN = 1.0
WRITE_SECONDS_MAX = 0.5
"""For writing down the events of one request before it is sent."""
IDS_MAX = 100
"""In one request."""
NOT_ABOUT_AN_ID = (408, 429)


class Send(Protocol):
    def __call__(self, *event_ids: str, timeout_seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Failed:
    count: int
    again_at: float


class Approver:
    """`send` approves event ids, all or none. `approved` gets the key of each event before it is
    sent: it may run at once then.

    `rules` are those of now: an event keeps the rule that it began with, but what that rule may no
    longer do is not done.
    """

    def __init__(
        self,
        here: Here,
        send: Send,
        *,
        lease: Leadership | None,
        approved: set[str],
        rules: Callable[[], Iterable[Rule]],
    ) -> None:
        self._here = here
        self._send = send
        self._lease = lease
        self._approved = approved
        self._rules = rules
        self._failed: dict[str, Failed] = {}

    def turn(self, handlings: Iterable[Handling], document: Document | None) -> bool:
        """Approve what may be; whether to come back for more soon.

        `document` is None while none can be trusted.
        """
        known = sorted(handlings, key=_urgency)
        may = {rule.name for rule in self._rules() if rule.may_approve}
        problems: list[Exception] = []
        ready: list[Handling] = []
        for handling in known:
            try:
                if (
                    handling.wants_approval
                    and self._is_time(handling)
                    and handling.rule.name in may
                    and self._may(handling, document)
                ):
                    ready.append(handling)
            except (
                Exception
            ) as problem:  # around a loop: trouble with one event is none of the others
                problems.append(problem)
        self._approve(ready, problems)
        self._failed = {
            one.event.key: self._failed[one.event.key]
            for one in known
            if one.event.key in self._failed
        }
        is_leading = self._keep_lease(known)
        if problems:
            raise problems[0]
        return is_leading or any(one.wants_approval for one in known)

    def _is_time(self, handling: Handling) -> bool:
        failed = self._failed.get(handling.event.key)
        return failed is None or self._here.clock.monotonic() >= failed.again_at

    def _may(self, handling: Handling, document: Document | None) -> bool:
        rule = handling.rule
        if rule.approve is Approve.WHEN_PREPARED_AND_QUIET:
            return document is not None and is_quiet(document, self._here.name)
        if rule.approve is not Approve.WHEN_PREPARED_AND_LEADER:
            return True
        if rule.leader is Leader.FIRST:
            return is_first(handling.event, self._here.name)
        return self._lease is not None and self._lease.hold()

    def _keep_lease(self, handlings: Iterable[Handling]) -> bool:
        """The lease is ours until all that we approved by it is over, for as long as we can renew
        it.

        What was sent may have arrived, whatever became of the answer.
        """
        if self._lease is None:
            return False
        if any(needs_lease(one) and may_be_approved(one) and not one.is_done for one in handlings):
            return self._lease.hold()
        if not any(needs_lease(one) and one.wants_approval for one in handlings):
            self._lease.release()
        return False

    def _approve(self, ready: list[Handling], problems: list[Exception]) -> None:
        """Send what is ready, until all is sent, the turn's time is up, or the endpoint has a
        problem that is not about an id.
        """
        monotonic = self._here.clock.monotonic
        end = monotonic() + TURN_SECONDS_MAX
        waiting = deque(ready)
        alone: set[str] = set()
        while (
            waiting and end - monotonic() >= ATTEMPT_SECONDS_MIN
        ):  # each event is in one batch, and may be in one more alone
            batch = self._next_batch(waiting, alone, problems)
            seconds = end - monotonic()
            if not batch or seconds < ATTEMPT_SECONDS_MIN:
                continue
            try:
                self._send(
                    *(one.event.id for one in batch),
                    timeout_seconds=min(seconds, _attempt_seconds(batch[0])),
                )
            except EndpointError as problem:
                if len(batch) > 1 and _is_about_an_id(problem):
                    alone.update(one.event.key for one in batch)
                    waiting.extendleft(reversed(batch))
                    continue
                for one in batch:
                    self._note_failure(one, problem)
                if not _is_about_an_id(problem):
                    return
            except Exception as bug:  # around a loop: the lease is still looked after
                problems.append(bug)
                return
            else:
                for one in batch:
                    self._note_success(one, problems)

    def _next_batch(
        self, waiting: deque[Handling], alone: Container[str], problems: list[Exception]
    ) -> list[Handling]:
        """The events of one request.

        It is closed early where the disk is slow: the first of them is the most urgent.
        """
        end = self._here.clock.monotonic() + WRITE_SECONDS_MAX
        batch: list[Handling] = []
        while waiting and len(batch) < IDS_MAX:  # ends: one less each time
            handling = waiting.popleft()
            if self._write_down(handling, problems):
                batch.append(handling)
            if batch and (handling.event.key in alone or self._here.clock.monotonic() >= end):
                break
        return batch

    def _write_down(self, handling: Handling, problems: list[Exception]) -> bool:
        """Whether it may be sent: it is in the journal."""
        event = handling.event
        try:
            self._here.journal.see(event, handling.rule.name)
            self._here.journal.write(event.key, What.APPROVING)
        except (
            Exception
        ) as problem:  # around a loop: what cannot be written is not sent, the others are
            problems.append(problem)
            return False
        self._approved.add(event.key)
        return True

    def _note_success(self, handling: Handling, problems: list[Exception]) -> None:
        event = handling.event
        try:
            self._here.journal.write(event.key, What.APPROVED)
        except Exception as problem:  # around a loop: it is sent again, which changes nothing
            problems.append(problem)
            return
        self._here.tally.add("approvals", result="sent")
        log.info(
            "approved",
            extra={"facts": {"event": event.key, "type": event.type, "rule": handling.rule.name}},
        )

    def _note_failure(self, handling: Handling, problem: EndpointError) -> None:
        here, key = self._here, handling.event.key
        count = self._failed[key].count + 1 if key in self._failed else 1
        self._failed[key] = Failed(
            count, here.clock.monotonic() + pause_seconds(count, problem, here.clock.chance())
        )
        here.tally.add("approvals", result="failed")
        if count == 1:
            log.warning(
                "the approval failed", extra={"facts": {"event": key, "problem": problem.message}}
            )


def _urgency(handling: Handling) -> tuple[float, str]:
    seconds_left = handling.seconds_left
    return (math.inf if seconds_left is None else seconds_left, handling.event.key)


def _attempt_seconds(most_urgent: Handling) -> float:
    """Half of the time that is left, so that another attempt fits into the rest."""
    return max(ATTEMPT_SECONDS_MIN, (most_urgent.seconds_left or 0.0) / 2)


def _is_about_an_id(problem: EndpointError) -> bool:
    """Whether other ids may be accepted.

    Which status an unknown one gets is not specified; ours is 400.
    """
    return (
        isinstance(problem, HttpError)
        and 400 <= problem.status < 500
        and problem.status not in NOT_ABOUT_AN_ID
    )


def may_be_approved(handling: Handling) -> bool:
    progress = handling.progress
    return progress is not None and What.APPROVING in progress.marks


def needs_lease(handling: Handling) -> bool:
    return (
        handling.rule.approve is Approve.WHEN_PREPARED_AND_LEADER
        and handling.rule.leader is Leader.LEASE
    )
