"""When an event is approved, and that it is: leaders, quiet, and trying again. One thread asks.

Approving is written down before it is sent, and sent again after a crash: approving twice is approving once. What fails is tried
again, later and later, until the event has started or is over.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forewarn.agent.handling import Handling, Here
from forewarn.agent.lease import Leadership
from forewarn.agent.progress import What
from forewarn.agent.rule import Approve, Leader, Rule, is_first, is_quiet
from forewarn.client import Document, EndpointProblem
from forewarn.client.pace import pause_seconds

log = logging.getLogger("forewarn.agent")


@dataclass(frozen=True, slots=True)
class Failed:
    count: int
    again_at: float


class Approver:
    """`send` approves one event id. `approved` gets the key of each event before it is sent: it may run at once then.

    `rules` are those of now: an event keeps the rule that it began with, but what that rule may no longer do is not done.
    """

    def __init__(
        self,
        here: Here,
        send: Callable[[str], None],
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
        """Approve what may be; whether to come back for more soon. `document` is None while none can be trusted."""
        known = list(handlings)
        may = {rule.name for rule in self._rules() if rule.may_approve}
        problems: list[Exception] = []
        for handling in known:
            try:
                if handling.wants_approval and self._is_time(handling) and handling.rule.name in may:
                    self._approve_if_it_may(handling, document)
            except Exception as problem:  # around a loop: trouble with one event is none of the others
                problems.append(problem)
        self._failed = {one.event.key: self._failed[one.event.key] for one in known if one.event.key in self._failed}
        is_leading = self._keep_lease(known)
        if problems:
            raise problems[0]
        return is_leading or any(one.wants_approval for one in known)

    def _is_time(self, handling: Handling) -> bool:
        failed = self._failed.get(handling.event.key)
        return failed is None or self._here.clock.monotonic() >= failed.again_at

    def _approve_if_it_may(self, handling: Handling, document: Document | None) -> None:
        if self._may(handling, document):
            self._approve(handling)

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
        """The lease is ours until all that we approved by it is over, for as long as we can renew it.

        What was sent may have arrived, whatever became of the answer.
        """
        if self._lease is None:
            return False
        if any(needs_lease(one) and may_be_approved(one) and not one.is_done for one in handlings):
            return self._lease.hold()
        if not any(needs_lease(one) and one.wants_approval for one in handlings):
            self._lease.release()
        return False

    def _approve(self, handling: Handling) -> None:
        here, event = self._here, handling.event
        here.journal.see(event, handling.rule.name)
        here.journal.write(event.key, What.APPROVING)
        self._approved.add(event.key)
        try:
            self._send(event.id)
        except EndpointProblem as problem:
            count = self._failed[event.key].count + 1 if event.key in self._failed else 1
            pause = pause_seconds(count, problem, here.clock.chance())
            self._failed[event.key] = Failed(count, here.clock.monotonic() + pause)
            here.tally.add("approvals", result="failed")
            if count == 1:
                log.warning("the approval failed", extra={"facts": {"event": event.key, "problem": problem.message}})
            return
        here.journal.write(event.key, What.APPROVED)
        here.tally.add("approvals", result="sent")
        log.info("approved", extra={"facts": {"event": event.key, "type": event.type, "rule": handling.rule.name}})


def may_be_approved(handling: Handling) -> bool:
    progress = handling.progress
    return progress is not None and What.APPROVING in progress.marks


def needs_lease(handling: Handling) -> bool:
    return handling.rule.approve is Approve.WHEN_PREPARED_AND_LEADER and handling.rule.leader is Leader.LEASE
