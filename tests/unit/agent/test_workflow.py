"""One event from its announcement to its end: what is run, in which order, how often, and what the
journal knows.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.agent.journal import Journal, JournalLost
from forewarn.agent.progress import What
from forewarn.agent.rules import Approve, Concerns, OnFailure, Rule
from forewarn.agent.step import Occasion, Phase, StepFailed
from forewarn.agent.workflow import Handling
from forewarn.client import Event
from tests.unit.agent.agent_world import Noted, World, fail, reboot, started


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


class Died(BaseException):
    """As kill -9 looks from inside: nothing after it is run."""


def die(occasion: Occasion) -> None:
    raise Died


def marks(world: World, key: str = "E1") -> frozenset[What]:
    return world.journal.progress[key].marks


def test_an_event_is_prepared_started_and_recovered_each_once(world: World) -> None:
    """The whole life of an event, with calls in between that bring no news."""
    handling = world.handling(world.rule(), reboot())
    for _ in range(2):
        handling.work()
    assert world.diary == ["prepare"]
    assert handling.wants_approval

    handling.read(started(reboot()))
    for _ in range(2):
        handling.work()
    assert world.diary == ["prepare", "start"]
    assert not handling.wants_approval

    handling.finish()
    for _ in range(2):
        handling.work()
    assert world.diary == ["prepare", "start", "recover"]
    assert handling.is_done


def test_a_canceled_event_is_recovered_without_being_started(world: World) -> None:
    """What was drained for nothing must come back."""
    handling = world.handling(world.rule(), reboot())
    handling.work()
    handling.finish()
    handling.work()

    assert world.diary == ["prepare", "recover"]


def test_an_event_that_ended_before_anything_was_begun_needs_no_recovery(world: World) -> None:
    """To start what was never stopped may be harmful."""
    handling = world.handling(world.rule(), reboot())
    handling.finish()
    handling.work()

    assert world.diary == []
    assert handling.is_done


def test_an_event_first_seen_started_is_started_and_recovered(world: World) -> None:
    """The agent came late; prepare is for what has not begun."""
    handling = world.handling(world.rule(), started(reboot()))
    handling.work()
    handling.finish()
    handling.work()

    assert world.diary == ["start", "recover"]


def test_everything_is_in_the_journal_before_it_is_done(world: World) -> None:
    """At the moment a step runs, the disk knows that it was begun."""
    seen: list[object] = []

    def look(occasion: Occasion) -> None:
        progress = world.journal.progress["E1"]
        seen.append((progress.event, progress.begun, progress.steps))

    world.handling(world.rule(prepare=(world.step("a", look),)), reboot()).work()

    assert seen == [(reboot(), {Phase.PREPARE}, {(Phase.PREPARE, 0): What.STEP_BEGUN})]


def test_after_a_crash_done_steps_stay_done_and_the_one_in_doubt_is_run_again(world: World) -> None:
    """Begun and not done: nobody knows how far it came."""
    rule = world.rule(prepare=(world.step("a"), world.step("b", die), world.step("c")))
    with pytest.raises(Died):
        world.handling(rule, reboot()).work()
    world.again()

    world.handling(
        replace(rule, prepare=(world.step("a"), world.step("b"), world.step("c"))), reboot()
    ).work()

    assert world.diary == ["a", "b", "b", "c"]


def test_after_the_reboot_itself_nothing_is_prepared_and_recover_runs_once(world: World) -> None:
    """The event was about this machine: the next life finds it over."""
    world.handling(world.rule(), reboot()).work()
    for _ in range(2):
        world.again()
        handling = Handling(world.rule(), reboot(), world.here())
        handling.finish()
        handling.work()

    assert world.diary == ["prepare", "recover"]


def test_a_handling_of_an_earlier_life_waits_until_its_event_is_shown_again(world: World) -> None:
    """How much time is left is not in the journal, and the event may be over."""
    with pytest.raises(Died):
        world.handling(
            world.rule(prepare=(world.step("a", die),), approve=Approve.AT_ONCE), reboot()
        ).work()
    world.again()
    handling = Handling(world.rule(approve=Approve.AT_ONCE), reboot(), world.here())

    assert not handling.has_work
    assert not handling.wants_approval
    handling.read(reboot())
    assert handling.has_work
    assert handling.wants_approval


def test_a_step_gets_its_share_of_the_time_to_not_before(world: World) -> None:
    """900 seconds less 5 for the approval, split one to three."""
    steps = (world.step("a"), world.step("b", weight=3))
    world.handling(world.rule(prepare=steps), reboot()).work()

    deadlines = [one.step.occasions[0].deadline for one in steps if isinstance(one.step, Noted)]
    assert deadlines == [1000 + 895 / 4, 1000 + 895]


def test_a_clock_that_jumps_does_not_move_a_deadline(world: World) -> None:
    """NotBefore meets the time of day once per reading; from then on the other clock counts."""

    def jump(occasion: Occasion) -> None:
        world.hands.now += timedelta(days=1)

    last = world.step("b")
    world.handling(world.rule(prepare=(world.step("a", jump), last)), reboot()).work()

    assert isinstance(last.step, Noted)
    assert last.step.occasions[0].deadline == 1000 + 895


def test_a_not_before_that_moved_moves_the_deadline(world: World) -> None:
    """The document that shows it is a new reading."""
    handling: list[Handling] = []

    def postpone(occasion: Occasion) -> None:
        handling[0].read(reboot(lead_seconds=1800))

    last = world.step("b")
    handling.append(world.handling(world.rule(prepare=(world.step("a", postpone), last)), reboot()))
    handling[0].work()

    assert isinstance(last.step, Noted)
    assert last.step.occasions[0].deadline == 1000 + 1795


@pytest.mark.parametrize("event", [reboot(lead_seconds=-60), reboot(not_before=None)])
def test_an_event_that_is_overdue_is_prepared_within_thirty_seconds(
    world: World, event: Event
) -> None:
    """It may start at any moment, or our clock is wrong: doing nothing would be worse than doing it
    quickly.
    """
    step = world.step("a")
    world.handling(world.rule(prepare=(step,)), event).work()

    assert isinstance(step.step, Noted)
    assert step.step.occasions[0].deadline == 1000 + 27


def test_in_a_preempt_the_last_steps_are_cut_and_it_is_approved_in_time(world: World) -> None:
    """30 seconds: the first step takes all it may, and those after it have nothing left."""

    def take_all(occasion: Occasion) -> None:
        world.hands.pass_(occasion.seconds_left)

    steps = (
        world.step("a", take_all, weight=1000),
        world.step("b", take_all),
        world.step("c"),
        world.step("d"),
    )
    handling = world.handling(world.rule(prepare=steps), reboot(type="Preempt", lead_seconds=30))
    handling.work()

    assert world.diary == ["a"]
    assert handling.wants_approval
    assert handling.status().seconds_left == pytest.approx(3, abs=0.2)
    assert world.journal.progress["E1"].steps[Phase.PREPARE, 3] is What.STEP_CUT


def test_it_is_said_at_the_start_that_the_time_will_not_suffice(world: World) -> None:
    """By the limits:

    100 and 100 seconds do not fit into 60. In the log, the status, the journal and the counters,
    once.
    """
    here = world.here()
    states: list[bool] = []
    handling: list[Handling] = []

    def look(occasion: Occasion) -> None:
        states.append(handling[0].status().is_late)

    steps = (world.step("a", look, limit_seconds=100), world.step("b", limit_seconds=100))
    handling.append(world.handling(world.rule(prepare=steps), reboot(lead_seconds=60), here))
    handling[0].work()

    assert states == [True]
    assert What.LATE in marks(world)
    assert here.tally.counts()["forewarn_agent_late_total"] == 1


def test_what_a_step_took_before_tells_that_it_will_be_late(world: World) -> None:
    """There is no limit in the file, but the last drain took two minutes."""
    here = world.here()
    rule = world.rule(prepare=(world.step("drain", lambda occasion: world.hands.pass_(120)),))
    world.handling(rule, reboot("E1"), here).work()
    world.handling(
        rule, replace(reboot("E2"), not_before=world.hands.now + timedelta(seconds=60)), here
    ).work()

    assert What.LATE not in marks(world, "E1")
    assert What.LATE in marks(world, "E2")


def test_a_step_that_fails_does_not_stop_the_rest_by_default(world: World) -> None:
    """One drain that hangs is no reason to lose the checkpoint too."""
    handling = world.handling(
        world.rule(prepare=(world.step("a", fail), world.step("b"))), reboot()
    )
    handling.work()

    assert world.diary == ["a", "b"]
    assert handling.wants_approval


def test_a_step_that_must_not_fail_ends_the_phase_and_forbids_the_approval(world: World) -> None:
    """on_failure = stop: rather the full notice than data that was not saved.

    In the next life too.
    """
    rule = world.rule(prepare=(world.step("a", fail, on_failure=OnFailure.STOP), world.step("b")))
    for _ in range(2):
        handling = world.handling(rule, reboot())
        handling.work()
        assert not handling.wants_approval
        world.again()

    assert world.diary == ["a"]


def test_a_step_that_must_not_fail_and_is_cut_forbids_the_approval(world: World) -> None:
    """Not run is not done."""
    first = world.step("a", lambda occasion: world.hands.pass_(1000))
    handling = world.handling(
        world.rule(prepare=(first, world.step("b", on_failure=OnFailure.STOP))), reboot()
    )
    handling.work()

    assert world.diary == ["a"]
    assert not handling.wants_approval


def test_a_step_with_a_bug_has_failed_and_the_rest_goes_on(world: World) -> None:
    """The agent outlives its steps."""

    def break_(occasion: Occasion) -> None:
        raise ZeroDivisionError

    world.handling(world.rule(prepare=(world.step("a", break_), world.step("b"))), reboot()).work()

    assert world.diary == ["a", "b"]
    assert world.journal.progress["E1"].steps[Phase.PREPARE, 0] is What.STEP_FAILED


def test_started_stops_the_step_under_way_and_leaves_the_rest_of_prepare(world: World) -> None:
    """Another VM approved: there is no time left, and the start steps must be run now."""
    handling: list[Handling] = []

    def be_overtaken(occasion: Occasion) -> None:
        handling[0].read(started(reboot()))
        assert occasion.stop.is_set()
        raise StepFailed("told to stop")

    rule = world.rule(prepare=(world.step("a", be_overtaken), world.step("b")))
    handling.append(world.handling(rule, reboot()))
    handling[0].work()

    assert world.diary == ["a", "start"]
    assert not handling[0].wants_approval


@pytest.mark.parametrize("phase", ["prepare", "start"])
def test_the_end_of_the_event_stops_what_is_under_way_and_recovers(
    world: World, phase: str
) -> None:
    """Canceled or finished: what was for it is for nothing now."""
    handling: list[Handling] = []

    def be_overtaken(occasion: Occasion) -> None:
        handling[0].finish()
        assert occasion.stop.is_set()

    rule = world.rule(**{phase: (world.step("a", be_overtaken), world.step("b"))})
    handling.append(world.handling(rule, reboot() if phase == "prepare" else started(reboot())))
    handling[0].work()

    assert world.diary == ["a", "recover"]
    assert handling[0].is_done


def test_an_event_that_no_longer_hits_this_vm_is_over_for_it(world: World) -> None:
    """The VM was taken out of the event: what it drained must come back, and it has no business in
    approving.
    """
    handling = world.handling(world.rule(), reboot(resources=("web-0", "web-1")))
    handling.work()
    handling.read(reboot(resources=("web-1",)))
    handling.work()

    assert world.diary == ["prepare", "recover"]
    assert not handling.wants_approval


def test_a_rule_for_peers_goes_on_when_a_peer_has_gone(world: World) -> None:
    """There the event never hit this VM."""
    handling = world.handling(
        world.rule(concerns=Concerns.PEER), reboot(resources=("web-1", "web-2"))
    )
    handling.work()
    handling.read(reboot(resources=("web-2",)))
    handling.work()

    assert world.diary == ["prepare"]


def test_a_step_stopped_by_the_agents_own_end_is_in_doubt(world: World) -> None:
    """The next life runs it again: it was not the step's fault."""
    handling: list[Handling] = []

    def be_ended(occasion: Occasion) -> None:
        handling[0].end()
        assert occasion.stop.is_set()
        raise StepFailed("the agent has to end")

    handling.append(
        world.handling(world.rule(prepare=(world.step("a", be_ended), world.step("b"))), reboot())
    )
    handling[0].work()
    assert not handling[0].has_work
    world.again()
    world.handling(world.rule(prepare=(world.step("a"), world.step("b"))), reboot()).work()

    assert world.diary == ["a", "a", "b"]


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
        self.world.hands.pass_(10)
        return self.looks < 0


def test_applications_are_told_of_each_phase_and_awaited_in_prepare(world: World) -> None:
    """They are told before the steps, with the same deadline, and it is not prepared before they
    have answered.
    """
    applications = Slow(world, looks=2)
    handling = world.handling(world.rule(), reboot(), world.here(applications))
    handling.work()
    handling.read(started(reboot()))
    handling.work()

    assert applications.told == [("prepare", 1895.0), ("start", 1330.0)]
    assert applications.looks == -1


def test_when_time_is_up_applications_are_awaited_no_longer(world: World) -> None:
    """One program that never answers must not cost the approval."""
    handling = world.handling(
        world.rule(), reboot(lead_seconds=30), world.here(Slow(world, looks=100))
    )
    handling.work()

    assert handling.wants_approval


class Overtaken(Slow):
    """Applications that are asked once: the event is over before they have answered."""

    handling: Handling

    def all_ready(self, event_id: str) -> bool:
        assert not self.handling.status().is_prepared
        assert self.looks == 1, "asked again after the end"
        self.looks = 0
        self.handling.finish()
        return False


def test_the_end_of_the_event_ends_the_wait_for_applications(world: World) -> None:
    """What they were asked for is over."""
    applications = Overtaken(world, looks=1)
    handling = applications.handling = world.handling(
        world.rule(), reboot(), world.here(applications)
    )
    handling.work()

    assert world.diary == ["prepare", "recover"]


def test_a_rule_without_applications_does_not_tell_them(world: World) -> None:
    """applications = false"""
    applications = Slow(world, looks=0)
    world.handling(world.rule(applications=False), reboot(), world.here(applications)).work()

    assert applications.told == []


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (Rule("r", approve=Approve.NEVER), False, False),
        (Rule("r", approve=Approve.AT_ONCE), True, True),
        (Rule("r", approve=Approve.WHEN_PREPARED), False, True),
        (Rule("r", approve=Approve.AT_ONCE, hold=True), False, False),
        (Rule("r", approve=Approve.WHEN_PREPARED, hold=True), False, False),
    ],
)
def test_the_rule_says_when_to_approve_and_hold_is_stronger(
    world: World, rule: Rule, before: bool, after: bool
) -> None:
    """The agent never approves an event that it was told to hold."""
    handling = world.handling(rule, reboot())
    assert handling.wants_approval is before
    handling.work()
    assert handling.wants_approval is after


def test_what_was_done_is_not_done_again_because_it_could_not_be_written(world: World) -> None:
    """The disk is full for a moment, right after a step: in this life we still know."""
    failures = [JournalLost("full")]

    class Flaky(Journal):
        def write(self, key: str, what: What, **facts: object) -> None:
            if what is What.STEP_DONE and failures:
                raise failures.pop()
            super().write(key, what, **facts)

    world.journal.close()
    world.journal = Flaky.open(world.folder / "journal")
    handling = world.handling(world.rule(prepare=(world.step("a"), world.step("b"))), reboot())
    with pytest.raises(JournalLost):
        handling.work()
    handling.work()

    assert world.diary == ["a", "b"]


def test_the_status_tells_the_phase_and_the_step_under_way(world: World) -> None:
    """For `forewarn agent status`: what it is doing, and how long it has."""
    handling: list[Handling] = []
    shown = []

    def look(occasion: Occasion) -> None:
        world.hands.pass_(100)
        shown.append(handling[0].status())

    handling.append(world.handling(world.rule(prepare=(world.step("drain", look),)), reboot()))
    handling[0].work()

    status = shown[0]
    assert (status.phase, status.step, status.rule, status.seconds_left) == (
        "prepare",
        "drain",
        "all",
        800,
    )
    assert (status.is_prepared, status.is_approved, status.is_held) == (False, False, False)
    assert (handling[0].status().phase, handling[0].status().is_prepared) == ("", True)


def test_an_event_with_an_unknown_status_is_neither_prepared_nor_approved(world: World) -> None:
    handling = world.handling(world.rule(approve=Approve.AT_ONCE), reboot(status="Completed"))
    handling.work()

    assert world.diary == []
    assert not handling.wants_approval
    assert not handling.has_work


def test_recover_is_for_all_the_names_that_the_event_had_at_first(world: World) -> None:
    """Our own name goes first, and our own server must come back. In the next life too."""
    step = world.step("back")
    rule = world.rule(recover=(step,))
    world.handling(rule, reboot(resources=("web-0", "web-1"))).work()
    world.handling(rule, started(reboot(resources=("web-0",)))).work()
    world.again()
    handling = world.handling(rule, started(reboot(resources=())))
    handling.work()

    assert isinstance(step.step, Noted)
    assert [occasion.event.resources for occasion in step.step.occasions] == [("web-0", "web-1")]


def test_a_step_that_the_file_did_not_have_before_is_run(world: World) -> None:
    """The file was edited between two lives: what is done is known by its name as well as by its
    place.
    """
    with pytest.raises(Died):
        world.handling(world.rule(prepare=(world.step("a"), world.step("b", die))), reboot()).work()
    world.again()
    world.again()
    world.handling(world.rule(prepare=(world.step("checkpoint"), world.step("a"))), reboot()).work()

    assert world.diary == ["a", "b", "checkpoint", "a"]


def test_applications_are_told_once_however_often_the_disk_is_full(world: World) -> None:
    """A program is no place to hear of our disk."""
    failures = [JournalLost("full")] * 3

    class Flaky(Journal):
        def write(self, key: str, what: What, **facts: object) -> None:
            if what is What.STEP_BEGUN and failures:
                raise failures.pop()
            super().write(key, what, **facts)

    world.journal.close()
    world.journal = Flaky.open(world.folder / "journal")
    applications = Slow(world, looks=0)
    handling = world.handling(world.rule(), reboot(), world.here(applications))
    for _ in range(3):
        with pytest.raises(JournalLost):
            handling.work()
    handling.work()

    assert [phase for phase, _ in applications.told] == ["prepare"]


def test_description_cut_for_the_journal_is_not_news_forever(world: World) -> None:
    """The journal keeps its beginning; compared with the whole, the handling would never be at
    rest.
    """
    handling = world.handling(world.rule(), reboot(description="x" * 100_000))
    handling.work()

    assert not handling.has_work
