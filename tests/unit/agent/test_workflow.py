"""One event from its announcement to its end: kind is run, in which order, how often, and what the
journal knows.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.agent.journal import Journal, JournalLost
from forewarn.agent.progress import EntryKind
from forewarn.agent.rules import ApproveWhen, Concerns, OnFailure, Rule
from forewarn.agent.steps.base import Phase, StepContext, StepFailed
from forewarn.agent.workflow import Workflow
from forewarn.client import Event
from tests.unit.agent.agent_world import RecordingStep, World, fail, reboot, started


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


class Died(BaseException):
    """As kill -9 looks from inside: nothing after it is run."""


def die(context: StepContext) -> None:
    raise Died


def marks(world: World, key: str = "E1") -> frozenset[EntryKind]:
    return world.journal.progress[key].marks


def test_an_event_is_prepared_started_and_recovered_each_once(world: World) -> None:
    """The whole life of an event, with calls in between that bring no news."""
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
    assert workflow.is_done


def test_a_canceled_event_is_recovered_without_being_started(world: World) -> None:
    """What was drained for nothing must come back."""
    workflow = world.workflow(world.rule(), reboot())
    workflow.run()
    workflow.finish()
    workflow.run()

    assert world.ran == ["prepare", "recover"]


def test_an_event_that_ended_before_anything_was_begun_needs_no_recovery(world: World) -> None:
    """To start what was never stopped may be harmful."""
    workflow = world.workflow(world.rule(), reboot())
    workflow.finish()
    workflow.run()

    assert world.ran == []
    assert workflow.is_done


def test_an_event_first_seen_started_is_started_and_recovered(world: World) -> None:
    """The agent came late; prepare is for what has not begun."""
    workflow = world.workflow(world.rule(), started(reboot()))
    workflow.run()
    workflow.finish()
    workflow.run()

    assert world.ran == ["start", "recover"]


def test_everything_is_in_the_journal_before_it_is_done(world: World) -> None:
    """At the moment a step runs, the disk knows that it was begun."""
    seen: list[object] = []

    def look(context: StepContext) -> None:
        progress = world.journal.progress["E1"]
        seen.append((progress.event, progress.begun, progress.steps))

    world.workflow(world.rule(prepare=(world.step("a", look),)), reboot()).run()

    assert seen == [(reboot(), {Phase.PREPARE}, {(Phase.PREPARE, 0): EntryKind.STEP_BEGUN})]


def test_after_a_crash_done_steps_stay_done_and_the_one_in_doubt_is_run_again(world: World) -> None:
    """Begun and not done: nobody knows how far it came."""
    rule = world.rule(prepare=(world.step("a"), world.step("b", die), world.step("c")))
    with pytest.raises(Died):
        world.workflow(rule, reboot()).run()
    world.restart()

    world.workflow(
        replace(rule, prepare=(world.step("a"), world.step("b"), world.step("c"))), reboot()
    ).run()

    assert world.ran == ["a", "b", "b", "c"]


def test_after_the_reboot_itself_nothing_is_prepared_and_recover_runs_once(world: World) -> None:
    """The event was about this machine: the next life finds it over."""
    world.workflow(world.rule(), reboot()).run()
    for _ in range(2):
        world.restart()
        workflow = Workflow(world.rule(), reboot(), world.context())
        workflow.finish()
        workflow.run()

    assert world.ran == ["prepare", "recover"]


def test_a_handling_of_an_earlier_life_waits_until_its_event_is_shown_again(world: World) -> None:
    """How much time is left is not in the journal, and the event may be over."""
    with pytest.raises(Died):
        world.workflow(
            world.rule(prepare=(world.step("a", die),), approve=ApproveWhen.AT_ONCE), reboot()
        ).run()
    world.restart()
    workflow = Workflow(world.rule(approve=ApproveWhen.AT_ONCE), reboot(), world.context())

    assert not workflow.has_work
    assert not workflow.wants_approval
    workflow.update(reboot())
    assert workflow.has_work
    assert workflow.wants_approval


def test_a_step_gets_its_share_of_the_time_to_not_before(world: World) -> None:
    """900 seconds less 5 for the approval, split one to three."""
    steps = (world.step("a"), world.step("b", weight=3))
    world.workflow(world.rule(prepare=steps), reboot()).run()

    deadlines = [
        one.step.contexts[0].deadline for one in steps if isinstance(one.step, RecordingStep)
    ]
    assert deadlines == [1000 + 895 / 4, 1000 + 895]


def test_a_clock_that_jumps_does_not_move_a_deadline(world: World) -> None:
    """NotBefore meets the time of day once per reading; from then on the other clock counts."""

    def jump(context: StepContext) -> None:
        world.time.now += timedelta(days=1)

    last = world.step("b")
    world.workflow(world.rule(prepare=(world.step("a", jump), last)), reboot()).run()

    assert isinstance(last.step, RecordingStep)
    assert last.step.contexts[0].deadline == 1000 + 895


def test_a_not_before_that_moved_moves_the_deadline(world: World) -> None:
    """The document that shows it is a new reading."""
    workflow: list[Workflow] = []

    def postpone(context: StepContext) -> None:
        workflow[0].update(reboot(lead_seconds=1800))

    last = world.step("b")
    workflow.append(world.workflow(world.rule(prepare=(world.step("a", postpone), last)), reboot()))
    workflow[0].run()

    assert isinstance(last.step, RecordingStep)
    assert last.step.contexts[0].deadline == 1000 + 1795


@pytest.mark.parametrize("event", [reboot(lead_seconds=-60), reboot(not_before=None)])
def test_an_event_that_is_overdue_is_prepared_within_thirty_seconds(
    world: World, event: Event
) -> None:
    """It may start at any moment, or our clock is wrong: doing nothing would be worse than doing it
    quickly.
    """
    step = world.step("a")
    world.workflow(world.rule(prepare=(step,)), event).run()

    assert isinstance(step.step, RecordingStep)
    assert step.step.contexts[0].deadline == 1000 + 27


def test_in_a_preempt_the_last_steps_are_cut_and_it_is_approved_in_time(world: World) -> None:
    """30 seconds: the first step takes all it may, and those after it have nothing left."""

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
    assert world.journal.progress["E1"].steps[Phase.PREPARE, 3] is EntryKind.STEP_CUT


def test_it_is_said_at_the_start_that_the_time_will_not_suffice(world: World) -> None:
    """By the limits:

    100 and 100 seconds do not fit into 60. In the log, the status, the journal and the counters,
    once.
    """
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


def test_what_a_step_took_before_tells_that_it_will_be_late(world: World) -> None:
    """There is no limit in the file, but the last drain took two minutes."""
    shared = world.context()
    rule = world.rule(prepare=(world.step("drain", lambda context: world.time.advance(120)),))
    world.workflow(rule, reboot("E1"), shared).run()
    world.workflow(
        rule, replace(reboot("E2"), not_before=world.time.now + timedelta(seconds=60)), shared
    ).run()

    assert EntryKind.LATE not in marks(world, "E1")
    assert EntryKind.LATE in marks(world, "E2")


def test_a_step_that_fails_does_not_stop_the_rest_by_default(world: World) -> None:
    """One drain that hangs is no reason to lose the checkpoint too."""
    workflow = world.workflow(
        world.rule(prepare=(world.step("a", fail), world.step("b"))), reboot()
    )
    workflow.run()

    assert world.ran == ["a", "b"]
    assert workflow.wants_approval


def test_a_step_that_must_not_fail_ends_the_phase_and_forbids_the_approval(world: World) -> None:
    """on_failure = stop: rather the full notice than data that was not saved.

    In the next life too.
    """
    rule = world.rule(prepare=(world.step("a", fail, on_failure=OnFailure.STOP), world.step("b")))
    for _ in range(2):
        workflow = world.workflow(rule, reboot())
        workflow.run()
        assert not workflow.wants_approval
        world.restart()

    assert world.ran == ["a"]


def test_a_step_that_must_not_fail_and_is_cut_forbids_the_approval(world: World) -> None:
    """Not run is not done."""
    first = world.step("a", lambda context: world.time.advance(1000))
    workflow = world.workflow(
        world.rule(prepare=(first, world.step("b", on_failure=OnFailure.STOP))), reboot()
    )
    workflow.run()

    assert world.ran == ["a"]
    assert not workflow.wants_approval


def test_a_step_with_a_bug_has_failed_and_the_rest_goes_on(world: World) -> None:
    """The agent outlives its steps."""

    def break_(context: StepContext) -> None:
        raise ZeroDivisionError

    world.workflow(world.rule(prepare=(world.step("a", break_), world.step("b"))), reboot()).run()

    assert world.ran == ["a", "b"]
    assert world.journal.progress["E1"].steps[Phase.PREPARE, 0] is EntryKind.STEP_FAILED


def test_started_stops_the_step_under_way_and_leaves_the_rest_of_prepare(world: World) -> None:
    """Another VM approved: there is no time left, and the start steps must be run now."""
    workflow: list[Workflow] = []

    def be_overtaken(context: StepContext) -> None:
        workflow[0].update(started(reboot()))
        assert context.stop.is_set()
        raise StepFailed("told to stop")

    rule = world.rule(prepare=(world.step("a", be_overtaken), world.step("b")))
    workflow.append(world.workflow(rule, reboot()))
    workflow[0].run()

    assert world.ran == ["a", "start"]
    assert not workflow[0].wants_approval


@pytest.mark.parametrize("phase", ["prepare", "start"])
def test_the_end_of_the_event_stops_what_is_under_way_and_recovers(
    world: World, phase: str
) -> None:
    """Canceled or finished: what was for it is for nothing now."""
    workflow: list[Workflow] = []

    def be_overtaken(context: StepContext) -> None:
        workflow[0].finish()
        assert context.stop.is_set()

    rule = world.rule(**{phase: (world.step("a", be_overtaken), world.step("b"))})
    workflow.append(world.workflow(rule, reboot() if phase == "prepare" else started(reboot())))
    workflow[0].run()

    assert world.ran == ["a", "recover"]
    assert workflow[0].is_done


def test_an_event_that_no_longer_hits_this_vm_is_over_for_it(world: World) -> None:
    """The VM was taken out of the event: what it drained must come back, and it has no business in
    approving.
    """
    workflow = world.workflow(world.rule(), reboot(resources=("web-0", "web-1")))
    workflow.run()
    workflow.update(reboot(resources=("web-1",)))
    workflow.run()

    assert world.ran == ["prepare", "recover"]
    assert not workflow.wants_approval


def test_a_rule_for_peers_goes_on_when_a_peer_has_gone(world: World) -> None:
    """There the event never hit this VM."""
    workflow = world.workflow(
        world.rule(concerns=Concerns.PEER), reboot(resources=("web-1", "web-2"))
    )
    workflow.run()
    workflow.update(reboot(resources=("web-2",)))
    workflow.run()

    assert world.ran == ["prepare"]


def test_a_step_stopped_by_the_agents_own_end_is_in_doubt(world: World) -> None:
    """The next life runs it again: it was not the step's fault."""
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


class Slow:
    """Applications that are ready after so many looks, each taking ten seconds."""

    def __init__(self, world: World, looks: int) -> None:
        self.world, self.looks = world, looks
        self.told: list[tuple[str, float]] = []

    def begin(self, event: Event, phase: Phase, deadline: float) -> None:
        self.told.append((phase, deadline))

    def all_ready(self, event_id: str) -> bool:
        assert event_id == "E1"
        assert self.looks >= 0, "asked again after the answer"
        self.looks -= 1
        self.world.time.advance(10)
        return self.looks < 0

    def names(self) -> tuple[str, ...]:
        return ()


def test_applications_are_told_of_each_phase_and_awaited_in_prepare(world: World) -> None:
    """They are told before the steps, with the same deadline, and it is not prepared before they
    have answered.
    """
    applications = Slow(world, looks=2)
    workflow = world.workflow(world.rule(), reboot(), world.context(applications))
    workflow.run()
    workflow.update(started(reboot()))
    workflow.run()

    assert applications.told == [("prepare", 1895.0), ("start", 1330.0)]
    assert applications.looks == -1


def test_when_time_is_up_applications_are_awaited_no_longer(world: World) -> None:
    """One program that never answers must not cost the approval."""
    workflow = world.workflow(
        world.rule(), reboot(lead_seconds=30), world.context(Slow(world, looks=100))
    )
    workflow.run()

    assert workflow.wants_approval


class Overtaken(Slow):
    """Applications that are asked once: the event is over before they have answered."""

    workflow: Workflow

    def all_ready(self, event_id: str) -> bool:
        assert not self.workflow.status().is_prepared
        assert self.looks == 1, "asked again after the end"
        self.looks = 0
        self.workflow.finish()
        return False


def test_the_end_of_the_event_ends_the_wait_for_applications(world: World) -> None:
    """What they were asked for is over."""
    applications = Overtaken(world, looks=1)
    workflow = applications.workflow = world.workflow(
        world.rule(), reboot(), world.context(applications)
    )
    workflow.run()

    assert world.ran == ["prepare", "recover"]


def test_a_rule_without_applications_does_not_tell_them(world: World) -> None:
    """applications = false"""
    applications = Slow(world, looks=0)
    world.workflow(world.rule(applications=False), reboot(), world.context(applications)).run()

    assert applications.told == []


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
def test_the_rule_says_when_to_approve_and_hold_is_stronger(
    world: World, rule: Rule, before: bool, after: bool
) -> None:
    """The agent never approves an event that it was told to hold."""
    workflow = world.workflow(rule, reboot())
    assert workflow.wants_approval is before
    workflow.run()
    assert workflow.wants_approval is after


def test_what_was_done_is_not_done_again_because_it_could_not_be_written(world: World) -> None:
    """The disk is full for a moment, right after a step: in this life we still know."""
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


def test_the_status_tells_the_phase_and_the_step_under_way(world: World) -> None:
    """For `forewarn agent status`: what it is doing, and how long it has."""
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


def test_an_event_with_an_unknown_status_is_neither_prepared_nor_approved(world: World) -> None:
    workflow = world.workflow(world.rule(approve=ApproveWhen.AT_ONCE), reboot(status="Completed"))
    workflow.run()

    assert world.ran == []
    assert not workflow.wants_approval
    assert not workflow.has_work


def test_recover_is_for_all_the_names_that_the_event_had_at_first(world: World) -> None:
    """Our own name goes first, and our own server must come back. In the next life too."""
    step = world.step("back")
    rule = world.rule(recover=(step,))
    world.workflow(rule, reboot(resources=("web-0", "web-1"))).run()
    world.workflow(rule, started(reboot(resources=("web-0",)))).run()
    world.restart()
    workflow = world.workflow(rule, started(reboot(resources=())))
    workflow.run()

    assert isinstance(step.step, RecordingStep)
    assert [context.event.resources for context in step.step.contexts] == [("web-0", "web-1")]


def test_a_step_that_the_file_did_not_have_before_is_run(world: World) -> None:
    """The file was edited between two lives: kind is done is known by its name as well as by its
    place.
    """
    with pytest.raises(Died):
        world.workflow(world.rule(prepare=(world.step("a"), world.step("b", die))), reboot()).run()
    world.restart()
    world.restart()
    world.workflow(world.rule(prepare=(world.step("checkpoint"), world.step("a"))), reboot()).run()

    assert world.ran == ["a", "b", "checkpoint", "a"]


def test_applications_are_told_once_however_often_the_disk_is_full(world: World) -> None:
    """A program is no place to hear of our disk."""
    failures = [JournalLost("full")] * 3

    class Flaky(Journal):
        def write(self, key: str, kind: EntryKind, **facts: object) -> None:
            if kind is EntryKind.STEP_BEGUN and failures:
                raise failures.pop()
            super().write(key, kind, **facts)

    world.use_journal(Flaky)
    applications = Slow(world, looks=0)
    workflow = world.workflow(world.rule(), reboot(), world.context(applications))
    for _ in range(3):
        with pytest.raises(JournalLost):
            workflow.run()
    workflow.run()

    assert [phase for phase, _ in applications.told] == ["prepare"]


def test_description_cut_for_the_journal_is_not_news_forever(world: World) -> None:
    """The journal keeps its beginning; compared with the whole, the handling would never be at
    rest.
    """
    workflow = world.workflow(world.rule(), reboot(description="x" * 100_000))
    workflow.run()

    assert not workflow.has_work
