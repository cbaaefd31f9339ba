"""When a verdict is decided: a run ends as soon as nothing that may still happen changes one."""

from typing import Any

import pytest

from forewarn.lab.scenario.verdict import RunResult, VerdictOutcome
from tests.unit.lab.scenario.small_scenarios import WEB, play, scene, seconds
from tests.unit.lab.scenario.timeline_builder import TimelineBuilder, at

RESTART = {"at": "10m", "do": "restart", "vm": "web-0", "as": "restart"}
APPROVED = {"expect": "approval", "of": "restart", "by": "web-0", "within": "60s"}


def is_decided(built: TimelineBuilder, at_second: float) -> bool:
    built.timeline.planned_end = at(3600)
    return built.ends(at_second).open_until is None


def end(result: RunResult) -> float:
    return seconds(result.transcript.entries[-1])


def run(*steps: dict[str, Any], approve: str = "5s", **more: Any) -> RunResult:
    return play(scene(*steps, scopes=[WEB], guests=[{"approve": approve}], **more))


def outcomes(result: RunResult) -> list[tuple[str, str]]:
    return [(verdict.expected, verdict.outcome) for verdict in result.verdicts]


# --- one expectation


def test_approval_is_decided_by_the_approval_or_its_limit() -> None:
    waiting = TimelineBuilder(expect="approval", of="patch", within="60s").scheduled(seconds=60)

    assert not is_decided(waiting, 120)
    assert is_decided(waiting, 121)
    assert is_decided(waiting.approves("web-0", seconds=70), 71)


def test_approval_is_open_while_a_step_will_create_an_event() -> None:
    built = TimelineBuilder(expect="approval", of="patch").scheduled(seconds=60)
    built.approves("web-0", seconds=61).timeline.coming["patch"] = 1

    assert not is_decided(built, 62)
    built.timeline.coming["patch"] = 0
    assert is_decided(built, 62)


def test_absence_of_an_approval_is_decided_when_the_event_ends() -> None:
    built = TimelineBuilder(expect="no-approval", of="patch").scheduled(seconds=60)

    assert not is_decided(built, 100)
    assert is_decided(built.change("completed", seconds=101), 101)


def test_forbidden_approval_is_decided_when_it_comes() -> None:
    built = TimelineBuilder(expect="no-approval", of="patch").scheduled(seconds=60)

    assert is_decided(built.approves("web-1", seconds=61), 61)


def test_foreign_approvals_are_open_while_any_event_is() -> None:
    built = TimelineBuilder(expect="no-foreign-approval").scheduled(seconds=60)

    assert not is_decided(built, 100)
    assert is_decided(built.change("canceled", seconds=101), 101)


def test_order_is_decided_by_the_last_approval() -> None:
    built = TimelineBuilder(expect="order", vms=["web-0", "web-1"]).scheduled(seconds=60)

    assert not is_decided(built.approves("web-0", seconds=61), 62)
    assert is_decided(built.approves("web-1", seconds=63), 63)


@pytest.mark.parametrize("kind", ["one-at-a-time", "together"])
def test_starts_are_open_until_all_events_have_ended(kind: str) -> None:
    built = TimelineBuilder(expect=kind, of="patch").scheduled(1, seconds=60)
    built.scheduled(2, seconds=60).change("started", 1, seconds=70).change(
        "completed", 1, seconds=71
    )
    started = 80 if kind == "one-at-a-time" else 70.5

    assert not is_decided(built, 71)
    built.change("started", 2, seconds=started)
    assert is_decided(built.change("completed", 2, seconds=90), 90)


def test_document_without_a_name_is_decided_by_the_first_one() -> None:
    shows = {"status": "Started"}
    built = TimelineBuilder(expect="document", vm="web-0", shows=shows, within="5m")

    assert not is_decided(built, 300)
    assert is_decided(built.polls("web-0", (1, "Started"), seconds=299), 300)
    assert is_decided(TimelineBuilder(expect="document", vm="web-0", shows=shows, within="5m"), 301)


def test_polls_hold_only_at_the_end_but_break_at_once() -> None:
    built = TimelineBuilder(expect="polls", vm="web-0", every="60s").polls("web-0", seconds=30)

    assert not is_decided(built, 90)
    assert is_decided(built, 91)


def test_recovery_is_open_until_the_end_or_a_missing_retry() -> None:
    built = TimelineBuilder(expect="recovery", vm="web-0", within="10s")
    built.polls("web-0", seconds=1, status=500)

    assert not is_decided(built, 11)
    assert is_decided(built, 12)


# --- the run


def test_run_ends_when_every_expectation_is_decided() -> None:
    result = run(RESTART, expectations=[APPROVED], until="3h")

    assert result.is_passed
    assert 605 <= end(result) < 620
    assert result.ending == (
        f"ended at {result.timeline.format_time(result.timeline.end)} of 3h,"
        " when everything was decided; --to-the-end runs the rest"
    )


def test_run_goes_to_the_end_on_request() -> None:
    result = play(
        scene(RESTART, scopes=[WEB], guests=[{}], expectations=[APPROVED], until="3h"),
        to_the_end=True,
    )

    assert (end(result), result.ending) == (10_800, "ended at +3h of 3h")


def test_failed_expectation_is_decided_too() -> None:
    """In virtual time the run ends with the next thing that happens: here the start."""
    result = run(RESTART, expectations=[APPROVED], approve="never", until="3h")

    assert outcomes(result) == [("web-0 approves restart within 60s", "failed")]
    assert end(result) == 1500


def test_run_waits_for_steps_with_a_condition() -> None:
    """Such a step has a verdict of its own."""
    log = {"when": "restart completed", "do": "log", "text": "it is back"}
    result = run(RESTART, log, expectations=[APPROVED], until="3h")

    assert [entry.what for entry in result.transcript.entries if entry.what == "log"] == ["log"]
    assert result.is_passed


def test_steps_that_the_run_did_not_reach_are_named() -> None:
    late = {"at": "2h", "do": "restart", "vm": "web-1"}
    result = run(RESTART, late, expectations=[APPROVED], until="3h")

    assert result.is_passed
    assert result.skipped == ("step 2 (restart)",)


def test_expectation_whose_step_never_ran_is_not_reached() -> None:
    again = {"when": "restart canceled", "do": "restart", "vm": "web-1", "as": "again"}
    expected = {"expect": "event", "of": "again", "becomes": "completed"}
    result = run(RESTART, again, expectations=[APPROVED, expected])

    assert outcomes(result) == [
        ("web-0 approves restart within 60s", "passed"),
        ("again is completed", "not reached"),
        ("step 2 (restart) runs", "not reached"),
    ]
    assert not result.is_passed


def test_nothing_is_reached_if_an_external_vm_never_polls() -> None:
    polls = {"expect": "polls", "vm": "web-1", "every": "60s"}
    result = play(
        scene(RESTART, expectations=[APPROVED, polls]),
        external=("web-0",),
        first_poll_seconds_max=0.1,
    )

    assert outcomes(result) == [
        ("web-0 polls its endpoint", "failed"),
        ("web-0 approves restart within 60s", "not reached"),
        ("web-1 polls at least every 60s", "not reached"),
    ]
    assert result.skipped == ("step 1 (restart)",)


def test_verdict_has_the_time_of_its_decision() -> None:
    result = run(
        RESTART,
        expectations=[APPROVED, {"expect": "event", "of": "restart", "becomes": "completed"}],
    )
    approved, completed = (verdict.seconds for verdict in result.verdicts)

    assert 605 <= approved < 620
    assert 1205 <= completed < 1220


def test_scenario_without_expectations_runs_to_its_end() -> None:
    assert run(RESTART, until="2h").ending == "ended at +2h of 2h"


def test_outcomes_are_words() -> None:
    assert list(VerdictOutcome) == ["passed", "failed", "not reached"]
