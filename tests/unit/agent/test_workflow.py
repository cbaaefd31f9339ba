"""One event from its notice to its end: what runs, in which order, and what the journal knows."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.agent.journal import Journal, JournalLost
from forewarn.agent.participants import Participants
from forewarn.agent.progress import EntryKind, StepRecord
from forewarn.agent.rules import ApproveWhen, Concerns, OnFailure, PlannedStep, Rule
from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepContext, StepFailed, WorkflowPhase, fingerprint
from forewarn.agent.steps.http import HttpStep
from forewarn.agent.workflow import Workflow
from forewarn.client import Event
from tests.unit.agent.agent_world import RecordingStep, World, fail, reboot, started


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


class Killed(BaseException):
    """Like kill -9: nothing after it runs."""


def be_killed(context: StepContext) -> None:
    raise Killed


def marks(world: World, key: str = "E1") -> frozenset[EntryKind]:
    return world.journal.progress[key].marks


def test_event_is_prepared_started_and_recovered_once(world: World) -> None:
    """Each phase runs once, however often `run` is called without a change."""
    workflow = world.workflow(world.rule(), reboot())
    for _ in range(2):
        workflow.run()
    assert world.ran == ["prepare"]
    assert workflow.wants_approval

    workflow.update(started(reboot()))
    for _ in range(2):
        workflow.run()
    assert world.ran == ["prepare", "start"]
    assert not workflow.wants_approval

    workflow.finish()
    for _ in range(2):
        workflow.run()
    assert world.ran == ["prepare", "start", "recover"]
    assert workflow.progress.is_done


def test_canceled_event_is_recovered_without_start(world: World) -> None:
    """What was drained for nothing must come back."""
    workflow = world.workflow(world.rule(), reboot())
    workflow.run()
    workflow.finish()
    workflow.run()

    assert world.ran == ["prepare", "recover"]


def test_event_that_ended_before_any_phase_needs_no_recovery(world: World) -> None:
    """Starting something that was never stopped may do harm."""
    workflow = world.workflow(world.rule(), reboot())
    workflow.finish()
    workflow.run()

    assert world.ran == []
    assert workflow.progress.is_done


def test_event_first_seen_started_skips_prepare(world: World) -> None:
    """The agent came late; prepare is for events that have not started."""
    workflow = world.workflow(world.rule(), started(reboot()))
    workflow.run()
    workflow.finish()
    workflow.run()

    assert world.ran == ["start", "recover"]


def test_step_is_in_the_journal_before_it_runs(world: World) -> None:
    """While a step runs, the disk knows that it began."""
    seen: list[object] = []

    def look(context: StepContext) -> None:
        progress = world.journal.progress["E1"]
        seen.append((progress.event, progress.begun, progress.steps))

    planned = world.step("a", look)
    world.workflow(world.rule(prepare=(planned,)), reboot()).run()

    record = StepRecord(EntryKind.STEP_BEGUN, "a", fingerprint=fingerprint(planned.step))
    assert seen == [(reboot(), {WorkflowPhase.PREPARE}, {(WorkflowPhase.PREPARE, 0): record})]


def test_after_a_crash_only_the_step_in_doubt_runs_again(world: World) -> None:
    """It began and did not end: it may have done anything."""
    rule = world.rule(prepare=(world.step("a"), world.step("b", be_killed), world.step("c")))
    with pytest.raises(Killed):
        world.workflow(rule, reboot()).run()
    world.restart()

    world.workflow(
        replace(rule, prepare=(world.step("a"), world.step("b"), world.step("c"))), reboot()
    ).run()

    assert world.ran == ["a", "b", "b", "c"]


def test_after_the_reboot_recover_runs_once(world: World) -> None:
    """The event rebooted this machine: the next process finds it over."""
    world.workflow(world.rule(), reboot()).run()
    for _ in range(2):
        world.restart()
        workflow = Workflow(world.rule(), reboot(), world.context())
        workflow.finish()
        workflow.run()

    assert world.ran == ["prepare", "recover"]


def test_resumed_workflow_waits_until_its_event_is_shown(world: World) -> None:
    """The time left is not in the journal, and the event may be over."""
    with pytest.raises(Killed):
        world.workflow(
            world.rule(prepare=(world.step("a", be_killed),), approve=ApproveWhen.AT_ONCE), reboot()
        ).run()
    world.restart()
    workflow = Workflow(world.rule(approve=ApproveWhen.AT_ONCE), reboot(), world.context())

    assert not workflow.has_work
    assert not workflow.wants_approval
    workflow.update(reboot())
    assert workflow.has_work
    assert workflow.wants_approval


def test_step_gets_its_share_of_the_time_to_not_before(world: World) -> None:
    """900 seconds less 5 for the approval, shared one to three."""
    steps = (world.step("a"), world.step("b", weight=3))
    world.workflow(world.rule(prepare=steps), reboot()).run()

    deadlines = [
        one.step.contexts[0].deadline for one in steps if isinstance(one.step, RecordingStep)
    ]
    assert deadlines == [1000 + 895 / 4, 1000 + 895]


def test_clock_jump_does_not_move_a_deadline(world: World) -> None:
    """NotBefore is compared with the time of day once; then the monotonic clock counts."""

    def jump(context: StepContext) -> None:
        world.time.now += timedelta(days=1)

    last = world.step("b")
    world.workflow(world.rule(prepare=(world.step("a", jump), last)), reboot()).run()

    assert isinstance(last.step, RecordingStep)
    assert last.step.contexts[0].deadline == 1000 + 895


def test_postponed_event_moves_the_deadline(world: World) -> None:
    """A document with a new NotBefore is a new comparison."""
    workflow: list[Workflow] = []

    def postpone(context: StepContext) -> None:
        workflow[0].update(reboot(lead_seconds=1800))

    last = world.step("b")
    workflow.append(world.workflow(world.rule(prepare=(world.step("a", postpone), last)), reboot()))
    workflow[0].run()

    assert isinstance(last.step, RecordingStep)
    assert last.step.contexts[0].deadline == 1000 + 1795


@pytest.mark.parametrize("event", [reboot(lead_seconds=-60), reboot(not_before=None)])
def test_overdue_event_is_prepared_within_thirty_seconds(world: World, event: Event) -> None:
    """It may start at any time, or the clock is wrong. Doing nothing would be worse."""
    step = world.step("a")
    world.workflow(world.rule(prepare=(step,)), event).run()

    assert isinstance(step.step, RecordingStep)
    assert step.step.contexts[0].deadline == 1000 + 27


def test_preempt_cuts_the_last_steps_and_is_approved_in_time(world: World) -> None:
    """The first step takes all of the 30 seconds that it may, and nothing is left for the rest."""

    def take_all(context: StepContext) -> None:
        world.time.advance(context.seconds_left)

    steps = (
        world.step("a", take_all, weight=1000),
        world.step("b", take_all),
        world.step("c"),
        world.step("d"),
    )
    workflow = world.workflow(world.rule(prepare=steps), reboot(type="Preempt", lead_seconds=30))
    workflow.run()

    assert world.ran == ["a"]
    assert workflow.wants_approval
    assert workflow.status().seconds_left == pytest.approx(3, abs=0.2)
    assert world.journal.progress["E1"].steps[WorkflowPhase.PREPARE, 3].kind is EntryKind.STEP_CUT


def test_limits_that_exceed_the_time_are_reported_early(world: World) -> None:
    """Limits of 100 and 100 seconds do not fit into 60. Reported once."""
    shared = world.context()
    states: list[bool] = []
    workflow: list[Workflow] = []

    def look(context: StepContext) -> None:
        states.append(workflow[0].status().is_late)

    steps = (world.step("a", look, limit_seconds=100), world.step("b", limit_seconds=100))
    workflow.append(world.workflow(world.rule(prepare=steps), reboot(lead_seconds=60), shared))
    workflow[0].run()

    assert states == [True]
    assert EntryKind.LATE in marks(world)
    assert shared.counters.values()["forewarn_agent_late_total"] == 1


def test_past_durations_that_exceed_the_time_are_reported(world: World) -> None:
    """The file has no limit, but the last drain took two minutes."""
    shared = world.context()
    rule = world.rule(prepare=(world.step("drain", lambda context: world.time.advance(120)),))
    world.workflow(rule, reboot("E1"), shared).run()
    world.workflow(
        rule, replace(reboot("E2"), not_before=world.time.now + timedelta(seconds=60)), shared
    ).run()

    assert EntryKind.LATE not in marks(world, "E1")
    assert EntryKind.LATE in marks(world, "E2")


def test_failed_step_does_not_stop_the_rest_by_default(world: World) -> None:
    """A failed drain is no reason to lose the checkpoint too."""
    workflow = world.workflow(
        world.rule(prepare=(world.step("a", fail), world.step("b"))), reboot()
    )
    workflow.run()

    assert world.ran == ["a", "b"]
    assert workflow.wants_approval


def test_failed_step_with_stop_ends_the_phase_unapproved(world: World) -> None:
    """on_failure = "stop": better the full notice than unsaved data. Also after a restart."""
    rule = world.rule(prepare=(world.step("a", fail, on_failure=OnFailure.STOP), world.step("b")))
    for _ in range(2):
        workflow = world.workflow(rule, reboot())
        workflow.run()
        assert not workflow.wants_approval
        world.restart()

    assert world.ran == ["a"]


def test_cut_step_with_stop_prevents_the_approval(world: World) -> None:
    """A step that did not run did not succeed."""
    first = world.step("a", lambda context: world.time.advance(1000))
    workflow = world.workflow(
        world.rule(prepare=(first, world.step("b", on_failure=OnFailure.STOP))), reboot()
    )
    workflow.run()

    assert world.ran == ["a"]
    assert not workflow.wants_approval


def test_step_with_a_bug_fails_and_the_rest_runs(world: World) -> None:
    """The agent survives its steps."""

    def break_(context: StepContext) -> None:
        raise ZeroDivisionError

    world.workflow(world.rule(prepare=(world.step("a", break_), world.step("b"))), reboot()).run()

    assert world.ran == ["a", "b"]
    assert (
        world.journal.progress["E1"].steps[WorkflowPhase.PREPARE, 0].kind is EntryKind.STEP_FAILED
    )


def test_started_interrupts_prepare(world: World) -> None:
    """Another VM approved: no time is left, and the start steps must run now."""
    workflow: list[Workflow] = []

    def be_interrupted(context: StepContext) -> None:
        workflow[0].update(started(reboot()))
        assert context.stop.is_set()
        raise StepFailed("interrupted")

    rule = world.rule(prepare=(world.step("a", be_interrupted), world.step("b")))
    workflow.append(world.workflow(rule, reboot()))
    workflow[0].run()

    assert world.ran == ["a", "start"]
    assert not workflow[0].wants_approval


@pytest.mark.parametrize("phase", ["prepare", "start"])
def test_end_of_the_event_interrupts_the_phase_and_recovers(world: World, phase: str) -> None:
    """Canceled or finished: the running phase has lost its purpose."""
    workflow: list[Workflow] = []

    def be_interrupted(context: StepContext) -> None:
        workflow[0].finish()
        assert context.stop.is_set()

    rule = world.rule(**{phase: (world.step("a", be_interrupted), world.step("b"))})
    workflow.append(world.workflow(rule, reboot() if phase == "prepare" else started(reboot())))
    workflow[0].run()

    assert world.ran == ["a", "recover"]
    assert workflow[0].progress.is_done


def test_event_that_no_longer_names_this_vm_is_over(world: World) -> None:
    """What was drained must come back, and this VM must not approve."""
    workflow = world.workflow(world.rule(), reboot(resources=("web-0", "web-1")))
    workflow.run()
    workflow.update(reboot(resources=("web-1",)))
    workflow.run()

    assert world.ran == ["prepare", "recover"]
    assert not workflow.wants_approval


def test_rule_for_peers_continues_when_a_peer_is_removed(world: World) -> None:
    """Such an event never affected this VM."""
    workflow = world.workflow(
        world.rule(concerns=Concerns.PEER), reboot(resources=("web-1", "web-2"))
    )
    workflow.run()
    workflow.update(reboot(resources=("web-2",)))
    workflow.run()

    assert world.ran == ["prepare"]


def test_step_interrupted_by_the_agents_end_runs_again(world: World) -> None:
    """It was not the step's fault."""
    workflow: list[Workflow] = []

    def be_ended(context: StepContext) -> None:
        workflow[0].stop()
        assert context.stop.is_set()
        raise StepFailed("the agent has to end")

    workflow.append(
        world.workflow(world.rule(prepare=(world.step("a", be_ended), world.step("b"))), reboot())
    )
    workflow[0].run()
    assert not workflow[0].has_work
    world.restart()
    world.workflow(world.rule(prepare=(world.step("a"), world.step("b"))), reboot()).run()

    assert world.ran == ["a", "a", "b"]


class SlowPrograms(Participants):
    """Ready after some checks, each taking ten seconds."""

    def __init__(self, world: World, checks: int) -> None:
        self.world, self.checks = world, checks
        self.notified: list[tuple[str, float]] = []

    def begin(self, event: Event, phase: WorkflowPhase, deadline: float) -> None:
        self.notified.append((phase, deadline))

    def all_ready(self, event_id: str) -> bool:
        assert event_id == "E1"
        assert self.checks >= 0, "asked again after the last check"
        self.checks -= 1
        self.world.time.advance(10)
        return self.checks < 0


def test_programs_are_notified_and_awaited_in_prepare(world: World) -> None:
    """They are notified before the steps, with the same deadline."""
    programs = SlowPrograms(world, checks=2)
    workflow = world.workflow(world.rule(), reboot(), world.context(programs))
    workflow.run()
    workflow.update(started(reboot()))
    workflow.run()

    assert programs.notified == [("prepare", 1895.0), ("start", 1330.0)]
    assert programs.checks == -1


def test_status_shows_the_wait_for_programs(world: World) -> None:
    """Its last step is done by then, and not what the agent waits for."""
    shown: list[tuple[str, str]] = []

    class WatchedPrograms(SlowPrograms):
        def all_ready(self, event_id: str) -> bool:
            status = workflow.status()
            shown.append((status.phase, status.step))
            return super().all_ready(event_id)

    programs = WatchedPrograms(world, checks=1)
    workflow = world.workflow(world.rule(), reboot(), world.context(programs))
    workflow.run()

    assert set(shown) == {("prepare", "waiting for local programs")}


def test_programs_are_not_awaited_beyond_the_deadline(world: World) -> None:
    """A program that never answers must not cost the approval."""
    workflow = world.workflow(
        world.rule(), reboot(lead_seconds=30), world.context(SlowPrograms(world, checks=100))
    )
    workflow.run()

    assert workflow.wants_approval


class OvertakenPrograms(SlowPrograms):
    """Programs that are asked once: the event ends before they answer."""

    workflow: Workflow

    def all_ready(self, event_id: str) -> bool:
        assert not self.workflow.status().is_prepared
        assert self.checks == 1, "asked again after the end"
        self.checks = 0
        self.workflow.finish()
        return False


def test_end_of_the_event_ends_the_wait_for_programs(world: World) -> None:
    programs = OvertakenPrograms(world, checks=1)
    workflow = programs.workflow = world.workflow(world.rule(), reboot(), world.context(programs))
    workflow.run()

    assert world.ran == ["prepare", "recover"]


def test_rule_without_applications_notifies_no_programs(world: World) -> None:
    programs = SlowPrograms(world, checks=0)
    world.workflow(world.rule(applications=False), reboot(), world.context(programs)).run()

    assert programs.notified == []


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (Rule("r", approve=ApproveWhen.NEVER), False, False),
        (Rule("r", approve=ApproveWhen.AT_ONCE), True, True),
        (Rule("r", approve=ApproveWhen.WHEN_PREPARED), False, True),
        (Rule("r", approve=ApproveWhen.AT_ONCE, hold=True), False, False),
        (Rule("r", approve=ApproveWhen.WHEN_PREPARED, hold=True), False, False),
    ],
)
def test_hold_overrides_approve(world: World, rule: Rule, before: bool, after: bool) -> None:
    """The agent never approves an event that it must hold."""
    workflow = world.workflow(rule, reboot())
    assert workflow.wants_approval is before
    workflow.run()
    assert workflow.wants_approval is after


def test_full_disk_does_not_repeat_a_finished_step(world: World) -> None:
    """The process still knows what it could not write."""
    failures = [JournalLost("full")]

    class Flaky(Journal):
        def write(self, key: str, kind: EntryKind, **facts: object) -> None:
            if kind is EntryKind.STEP_DONE and failures:
                raise failures.pop()
            super().write(key, kind, **facts)

    world.use_journal(Flaky)
    workflow = world.workflow(world.rule(prepare=(world.step("a"), world.step("b"))), reboot())
    with pytest.raises(JournalLost):
        workflow.run()
    workflow.run()

    assert world.ran == ["a", "b"]


def test_status_shows_the_running_phase_and_step(world: World) -> None:
    workflow: list[Workflow] = []
    shown = []

    def look(context: StepContext) -> None:
        world.time.advance(100)
        shown.append(workflow[0].status())

    workflow.append(world.workflow(world.rule(prepare=(world.step("drain", look),)), reboot()))
    workflow[0].run()

    status = shown[0]
    assert (status.phase, status.step, status.rule, status.seconds_left) == (
        "prepare",
        "drain",
        "all",
        800,
    )
    assert (status.is_prepared, status.is_approved, status.is_held) == (False, False, False)
    assert (workflow[0].status().phase, workflow[0].status().is_prepared) == ("", True)


def test_event_with_unknown_status_is_left_alone(world: World) -> None:
    workflow = world.workflow(world.rule(approve=ApproveWhen.AT_ONCE), reboot(status="Completed"))
    workflow.run()

    assert world.ran == []
    assert not workflow.wants_approval
    assert not workflow.has_work


def test_recover_is_for_all_original_resources(world: World) -> None:
    """This VM's name disappears first, and its server must come back. Also after a restart."""
    step = world.step("back")
    rule = world.rule(recover=(step,))
    world.workflow(rule, reboot(resources=("web-0", "web-1"))).run()
    world.workflow(rule, started(reboot(resources=("web-0",)))).run()
    world.restart()
    workflow = world.workflow(rule, started(reboot(resources=())))
    workflow.run()

    assert isinstance(step.step, RecordingStep)
    assert [context.event.resources for context in step.step.contexts] == [("web-0", "web-1")]


def test_changed_step_runs_after_a_restart(world: World) -> None:
    """The file was edited: a step is recognized by its settings and its index."""
    with pytest.raises(Killed):
        world.workflow(
            world.rule(prepare=(world.step("a"), world.step("b", be_killed))), reboot()
        ).run()
    world.restart()
    world.restart()
    world.workflow(world.rule(prepare=(world.step("checkpoint"), world.step("a"))), reboot()).run()

    assert world.ran == ["a", "b", "checkpoint", "a"]


HTTP = {"url": "http://lb/drain", "method": "PUT", "headers": {"X-Key": "hunter2"}, "body": "a"}


@pytest.mark.parametrize(
    ("changed", "is_over"),
    [
        ({}, True),
        ({"url": "http://lb/other"}, False),
        ({"body": "b"}, False),
        ({"headers": {"X-Key": "hunter3"}}, False),
        ({"expect": [200]}, False),
        ({"proxy": False}, True),
    ],
)
def test_http_step_with_another_request_is_another_step(
    world: World, changed: dict[str, object], is_over: bool
) -> None:
    """Its description has only the method and the host, because paths and headers are secrets."""
    before, after = make_step("http", HTTP, "W"), make_step("http", HTTP | changed, "W")
    world.journal.write_event(reboot(), "r")
    world.journal.write(
        "E1", EntryKind.STEP_DONE, phase="prepare", index=0, fingerprint=fingerprint(before)
    )
    world.restart()
    progress = world.journal.progress["E1"]

    assert before.describe() == after.describe()
    assert progress.is_step_over(WorkflowPhase.PREPARE, 0, fingerprint(after)) is is_over


def test_journal_has_no_settings_of_a_step(world: World) -> None:
    """A header may be a password, and the journal is a file of its own."""

    class Sent(HttpStep):
        def run(self, context: StepContext) -> None:
            """Without a server."""

    step = Sent("http://lb/drain", "PUT", {"X-Key": "hunter2"}, "a")
    world.workflow(world.rule(prepare=(PlannedStep(step),)), reboot()).run()
    journal = (world.folder / "journal").read_text()

    assert "PUT http://lb" in journal
    assert [secret for secret in ("hunter2", "drain", "X-Key") if secret in journal] == []


def test_full_disk_does_not_repeat_a_notification(world: World) -> None:
    failures = [JournalLost("full")] * 3

    class Flaky(Journal):
        def write(self, key: str, kind: EntryKind, **facts: object) -> None:
            if kind is EntryKind.STEP_BEGUN and failures:
                raise failures.pop()
            super().write(key, kind, **facts)

    world.use_journal(Flaky)
    programs = SlowPrograms(world, checks=0)
    workflow = world.workflow(world.rule(), reboot(), world.context(programs))
    for _ in range(3):
        with pytest.raises(JournalLost):
            workflow.run()
    workflow.run()

    assert [phase for phase, _ in programs.notified] == ["prepare"]


def test_truncated_description_is_not_a_change(world: World) -> None:
    """Compared with the full text, the workflow would never be idle."""
    workflow = world.workflow(world.rule(), reboot(description="x" * 100_000))
    workflow.run()

    assert not workflow.has_work
