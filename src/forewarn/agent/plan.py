"""What the workflow of an event does next. Pure: no clock, no input or output.

A workflow's state is not stored. It follows from the journal (`Progress`) and from what the
documents of this process show (`Sighting`), so a restarted agent is in the same state:

    state        when                                          next
    RESUMED      from the journal, not shown yet
    UNKNOWN      the status is neither Scheduled nor Started
    PREPARING    Scheduled, prepare has not ended              run prepare
    PREPARED     Scheduled, prepare has ended                  approve, if the rule may
    STARTING     Started, start has not ended                  run start
    STARTED      Started, start has ended
    POSTPONED    over, another event of this VM is active
    RECOVERING   over, something had begun                     run recover
    DONE         over, recovered from or nothing had begun

    RESUMED -> PREPARING -> PREPARED -> STARTING -> STARTED -> RECOVERING -> DONE

PREPARING goes to STARTING if the event starts early. Every state goes to RECOVERING, or to DONE if
nothing had begun, when the event ends; POSTPONED comes before RECOVERING.

An event only moves forward: Started makes prepare outdated, and its end makes prepare and start
outdated. An outdated phase is interrupted and never runs late.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from forewarn.agent.progress import EntryKind, Progress
from forewarn.agent.rules import ApproveWhen, Rule
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event


@dataclass(frozen=True, slots=True)
class Sighting:
    """What this process knows about an event. `is_shown`: a document of this process showed it.

    `is_over`: it finished, was canceled, or no longer affects this VM.
    """

    event: Event
    is_shown: bool = False
    is_over: bool = False


def next_phase(
    progress: Progress, sighting: Sighting, others: Iterable[Progress], vm: str
) -> WorkflowPhase | None:
    """The phase that is due, if any. `others` are the other events that recover must wait for
    while they affect this VM.
    """
    event = sighting.event
    if sighting.is_over:
        if not progress.begun or WorkflowPhase.RECOVER in progress.ended:
            return None
        if progress.original_event.concerns(vm) and any(is_active(one, vm) for one in others):
            return None
        return WorkflowPhase.RECOVER
    if not sighting.is_shown or not (event.is_scheduled or event.is_started):
        return None
    phase = WorkflowPhase.START if event.is_started else WorkflowPhase.PREPARE
    return None if phase in progress.ended else phase


def wants_approval(progress: Progress, rule: Rule, sighting: Sighting) -> bool:
    """Whether the rule lets this agent approve now. With `at-once` it may during prepare.

    Whether this VM is the leader, or the scope is quiet, is for the approver to decide.
    """
    if not sighting.is_shown or sighting.is_over or not sighting.event.is_scheduled:
        return False
    if not rule.may_approve or EntryKind.APPROVED in progress.marks:
        return False
    return rule.approve is ApproveWhen.AT_ONCE or progress.is_prepared


def is_outdated(phase: WorkflowPhase, sighting: Sighting) -> bool:
    """Whether the event has moved on, so that the phase must not run any more."""
    if phase is WorkflowPhase.RECOVER:
        return False
    return sighting.is_over or (phase is WorkflowPhase.PREPARE and sighting.event.is_started)


def is_active(progress: Progress, vm: str) -> bool:
    """Whether the event affects this VM, has begun here and is not over: what it took out of
    service must stay out.
    """
    is_begun = bool(progress.begun) and not progress.is_finished
    return is_begun and progress.original_event.concerns(vm)
