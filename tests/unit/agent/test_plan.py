"""What a workflow does next, state by state. Pure."""

from dataclasses import replace

import pytest

from forewarn.agent.plan import Sighting, is_outdated, next_phase, wants_approval
from forewarn.agent.progress import EntryKind, Progress
from forewarn.agent.rules import ApproveWhen, Rule
from forewarn.agent.steps.base import WorkflowPhase
from tests.unit.agent.agent_world import reboot, started

RULE = Rule("r", approve=ApproveWhen.WHEN_PREPARED)
SCHEDULED = Sighting(reboot(), is_shown=True)
STARTED = Sighting(started(reboot()), is_shown=True)
OVER = Sighting(reboot(), is_over=True)
NEW = Progress(reboot(), "r", resources=("web-0",))
BEGUN = replace(NEW, begun=frozenset({WorkflowPhase.PREPARE}))
PREPARED = replace(BEGUN, ended=frozenset({WorkflowPhase.PREPARE}))
STOPPED = replace(PREPARED, stopped=frozenset({WorkflowPhase.PREPARE}))
APPROVED = replace(PREPARED, marks=frozenset({EntryKind.APPROVED}))
START_ENDED = replace(PREPARED, ended=frozenset({WorkflowPhase.PREPARE, WorkflowPhase.START}))
RECOVERED = replace(PREPARED, ended=frozenset({WorkflowPhase.PREPARE, WorkflowPhase.RECOVER}))

STATES = {
    "resumed": (BEGUN, Sighting(reboot()), None),
    "unknown status": (NEW, replace(SCHEDULED, event=reboot(status="Completed")), None),
    "preparing": (NEW, SCHEDULED, WorkflowPhase.PREPARE),
    "preparing after a crash": (BEGUN, SCHEDULED, WorkflowPhase.PREPARE),
    "prepared": (PREPARED, SCHEDULED, "approve"),
    "prepare stopped by a failed step": (STOPPED, SCHEDULED, None),
    "approved": (APPROVED, SCHEDULED, None),
    "starting": (BEGUN, STARTED, WorkflowPhase.START),
    "started": (START_ENDED, STARTED, None),
    "recovering": (PREPARED, OVER, WorkflowPhase.RECOVER),
    "over before anything began": (NEW, OVER, None),
    "recovered": (RECOVERED, OVER, None),
}


@pytest.mark.parametrize("state", STATES)
def test_each_state_has_its_action(state: str) -> None:
    """The table at the top of the module."""
    progress, sighting, action = STATES[state]

    phase = next_phase(progress, sighting, [], "web-0")
    approve = "approve" if wants_approval(progress, RULE, sighting) else None
    assert (phase or approve) == action


OTHER = replace(PREPARED, event=reboot("E2"))


@pytest.mark.parametrize(
    ("other", "phase"),
    [
        (OTHER, None),
        (replace(OTHER, begun=frozenset()), WorkflowPhase.RECOVER),
        (replace(OTHER, resources=("web-1",)), WorkflowPhase.RECOVER),
        (replace(OTHER, marks=frozenset({EntryKind.FINISHED})), WorkflowPhase.RECOVER),
    ],
    ids=["active", "not begun", "of a peer", "over"],
)
def test_recover_waits_only_for_active_events_of_this_vm(
    other: Progress, phase: WorkflowPhase | None
) -> None:
    """It would restore what the other event has taken out of service."""
    assert next_phase(PREPARED, OVER, [other], "web-0") == phase


@pytest.mark.parametrize("approve", ApproveWhen)
@pytest.mark.parametrize("progress", [NEW, PREPARED, STOPPED, APPROVED])
def test_held_or_started_event_is_never_approved(approve: ApproveWhen, progress: Progress) -> None:
    rule = Rule("r", approve=approve)

    assert not wants_approval(progress, replace(rule, hold=True), SCHEDULED)
    assert not wants_approval(progress, rule, STARTED)
    assert not wants_approval(progress, rule, replace(SCHEDULED, is_over=True))
    assert not wants_approval(progress, rule, Sighting(reboot()))


def test_at_once_approves_before_prepare_has_ended() -> None:
    assert wants_approval(NEW, Rule("r", approve=ApproveWhen.AT_ONCE), SCHEDULED)
    assert not wants_approval(NEW, RULE, SCHEDULED)


def test_outdated_phases_are_those_that_the_event_has_passed() -> None:
    """Nothing runs late."""
    outdated = [
        [is_outdated(phase, state) for phase in WorkflowPhase]
        for state in (SCHEDULED, STARTED, OVER)
    ]

    assert outdated == [[False, False, False], [True, False, False], [True, True, False]]
