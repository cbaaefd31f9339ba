"""Running scenarios: every action does what it says, conditions hold steps back, and the same seed
gives the same day.
"""

from typing import Any

import pytest

from forewarn.errors import Invalid, NotFound
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.run_options import RunOptions, choose_external, choose_rate
from forewarn.lab.scenario.schema import load_from_library
from forewarn.lab.scenario.steps import ScenarioStep
from forewarn.lab.transcript import TranscriptKind
from tests.unit.lab.scenario.small_scenarios import DB, WEB, changes, play, scene

RESTART = {"at": "10m", "do": "restart", "vm": "web-0", "as": "restart"}
PATCH = {"at": "10m", "do": "maintain", "host": "host-a", "type": "Reboot", "as": "patch"}
CHANGES = (
    "scheduled",
    "started",
    "completed",
    "canceled",
    "extended",
    "executed-silently",
    "failed",
    "joined",
    "left",
    "approved",
)

DONE: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "restart": ([RESTART], ["600 scheduled Reboot of web-0", "1500 started", "2100 completed"]),
    "redeploy": (
        [{**RESTART, "do": "redeploy"}],
        ["600 scheduled Redeploy of web-0", "1200 started", "1800 completed"],
    ),
    "evict": (
        [{**RESTART, "do": "evict"}],
        ["600 scheduled Preempt of web-0", "630 started", "660 completed"],
    ),
    "delete": (
        [{**RESTART, "do": "delete", "notice": "20m"}],
        ["600 scheduled Terminate of web-0", "1800 started", "1860 left web-0", "1860 completed"],
    ),
    "maintain": (
        [{**PATCH, "host": "host-b"}],
        ["600 scheduled Reboot of web-1", "1500 started", "2100 completed"],
    ),
    "degrade": (
        [{"at": "10m", "do": "degrade", "host": "host-b"}],
        ["600 scheduled Redeploy of web-1"],
    ),
    "fail": (
        [{"at": "10m", "do": "fail", "host": "host-b"}],
        ["600 scheduled Reboot of web-1", "600 started", "1200 completed"],
    ),
    "approve": (
        [RESTART, {"at": "11m", "do": "approve", "event": "restart"}],
        ["600 scheduled Reboot of web-0", "660 approved operator", "660 started", "1260 completed"],
    ),
    "cancel": (
        [RESTART, {"at": "11m", "do": "cancel", "event": "restart"}],
        ["600 scheduled Reboot of web-0", "660 canceled"],
    ),
    "complete": (
        [
            {**RESTART, "do": "evict", "as": "x"},
            {"when": "x started", "after": "5s", "do": "complete", "event": "x"},
        ],
        ["600 scheduled Preempt of web-0", "630 started", "635 completed"],
    ),
    "extend": (
        [RESTART, {"at": "11m", "do": "extend", "event": "restart", "by": "30m"}],
        ["600 scheduled Reboot of web-0", "660 extended to 2030-01-01T00:55:00Z", "3300 started"],
    ),
    "apply": ([{"at": "10m", "do": "apply", "fleet": {"scopes": [WEB]}}], ["600 left db-0"]),
    "fault": ([{"at": "10m", "do": "fault", "set": {"fault": "empty", "for": "10s"}}], []),
    "clear": ([{"at": "10m", "do": "clear"}], []),
    "break": (
        [{"at": "1m", "do": "break", "vm": "web-0"}, {**RESTART, "do": "evict"}],
        ["600 scheduled Preempt of web-0", "630 started", "990 failed"],
    ),
    "mend": (
        [
            {"at": "1m", "do": "break", "vm": "web-0"},
            {**RESTART, "do": "evict"},
            {"at": "11m", "do": "mend", "vm": "web-0"},
        ],
        ["600 scheduled Preempt of web-0", "630 started", "660 completed"],
    ),
    "jump": (
        [RESTART, {"at": "11m", "do": "jump", "by": "20m"}],
        ["600 scheduled Reboot of web-0", "1860 started", "2460 completed"],
    ),
    "log": ([{"at": "10m", "do": "log", "text": "half time"}], []),
}


def test_every_verb_is_tested_here() -> None:
    assert set(DONE) == {kind.__struct_config__.tag for kind in ScenarioStep.__args__}


@pytest.mark.parametrize("action", DONE)
def test_verb_does_what_it_says(action: str) -> None:
    steps, expected = DONE[action]
    result = play(scene(*steps))

    assert changes(result, *CHANGES) == expected
    assert result.is_passed


def faults(result: Any) -> list[tuple[str, str]]:
    entries = [entry for entry in result.transcript.entries if entry.kind is TranscriptKind.FAULT]
    return [(entry.at.strftime("%H:%M:%S"), entry.what) for entry in entries]


def test_fault_ends_after_its_duration() -> None:
    result = play(scene(faults=[{"fault": "empty", "vms": ["db-0"], "from": "5m", "for": "90s"}]))

    assert faults(result) == [("00:05:00", "added"), ("00:06:30", "removed")]


def test_cleared_fault_ends_only_once() -> None:
    set_fault = {
        "at": "5m",
        "do": "fault",
        "set": {"fault": "empty", "for": "10m"},
        "as": "silence",
    }
    result = play(scene(set_fault, {"at": "6m", "do": "clear", "fault": "silence"}))

    assert faults(result) == [("00:05:00", "added"), ("00:06:00", "removed")]


def test_name_stands_for_all_events_of_a_step() -> None:
    """A host with VMs of two scopes has two events with one name."""
    result = play(scene(PATCH, {"at": "11m", "do": "cancel", "event": "patch"}))

    assert changes(result, "scheduled", "canceled") == [
        "600 scheduled Reboot of db-0",
        "600 scheduled Reboot of web-0",
        "660 canceled",
        "660 canceled",
    ]


@pytest.mark.parametrize(
    ("when", "happens"),
    [
        ("patch scheduled", 600),
        ("patch started", 1500),
        ("patch completed", 2100),
        ("web-0 sees Reboot Started", 1501),
        ("web-0 polled", 0),
    ],
)
def test_step_waits_for_its_condition(when: str, happens: int) -> None:
    result = play(
        scene(
            PATCH,
            {"when": when, "after": "5s", "do": "restart", "vm": "web-1"},
            {"at": "0s", "do": "log", "text": "begin"},
        )
    )
    restarts = [
        float(line.split()[0]) for line in changes(result, "scheduled") if line.endswith("web-1")
    ]

    assert len(restarts) == 1
    assert happens - 1 < restarts[0] - 5 <= happens + 1


def test_condition_on_a_name_waits_for_all_its_events() -> None:
    events = [
        {**RESTART, "vm": "web-0", "as": "x"},
        {**RESTART, "at": "20m", "vm": "web-1", "as": "x"},
    ]
    approve = {"at": "30m", "do": "approve", "event": "x"}
    result = play(
        scene(*events, approve, {"when": "x completed", "do": "log", "text": "all are"}, until="2h")
    )

    logged = [
        entry.at.strftime("%H:%M:%S") for entry in result.transcript.entries if entry.what == "log"
    ]
    assert logged == ["00:40:00"]


@pytest.mark.parametrize(
    ("when", "happens"), [("web-0 approved", "00:05:00"), ("web-0 approved patch", "00:10:00")]
)
def test_approval_is_a_condition(when: str, happens: str) -> None:
    """Of any event, or of those of a name."""
    steps = [{**RESTART, "at": "5m"}, PATCH, {"when": when, "do": "log", "text": "web-0 is ready"}]
    result = play(scene(*steps, guests=[{}]))

    assert [
        entry.at.strftime("%H:%M:%S") for entry in result.transcript.entries if entry.what == "log"
    ] == [happens]


def test_refused_step_fails_the_run_with_a_reason() -> None:
    result = play(scene(RESTART, {**RESTART, "at": "11m"}))

    assert not result.is_passed
    assert [verdict.expected for verdict in result.verdicts] == ["step 2 (restart) succeeds"]
    assert "web-0 has a Reboot pending already" in result.verdicts[0].reason


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"when": "restart canceled"}, "`restart canceled` was never true"),
        (
            {"when": "web-0 approved restart", "after": "1m"},
            "`web-0 approved restart` was never true",
        ),
        (
            {"when": "restart completed", "after": "26m"},
            "`restart completed` was true less than 26m before the end",
        ),
    ],
)
def test_step_that_never_ran_fails_the_run(step: dict[str, str], reason: str) -> None:
    """What the scenario is about did not happen."""
    result = play(scene(RESTART, {**step, "do": "log", "text": "so it is"}))

    assert [
        (verdict.expected, verdict.reason, verdict.is_passed) for verdict in result.verdicts
    ] == [("step 2 (log) runs", reason, False)]


def test_step_that_ran_adds_no_verdict() -> None:
    result = play(
        scene(
            RESTART, {"when": "restart completed", "after": "25m", "do": "log", "text": "so it is"}
        )
    )

    assert result.verdicts == ()


def test_jump_beyond_the_calendar_fails_the_run() -> None:
    jumps = [{"at": f"{number}m", "do": "jump", "by": "366d"} for number in range(12)]
    result = play(scene(*jumps, clock={"start": "8990-12-31T00:00:00Z"}))

    assert "step 12 (jump) succeeds" in [verdict.expected for verdict in result.verdicts]
    assert not result.is_passed


def test_clock_is_in_utc() -> None:
    result = play(scene(RESTART, clock={"start": "2030-01-01T02:00:00+02:00"}))

    assert {str(entry.at.tzinfo) for entry in result.transcript.entries} == {"UTC"}
    assert changes(result, "started") == ["1500 started"]


def test_step_on_a_missing_event_is_refused() -> None:
    result = play(scene(RESTART, {"at": "9m", "do": "cancel", "event": "restart"}))

    assert [verdict.reason for verdict in result.verdicts] == [
        "there is no event named restart now"
    ]


def test_any_vm_has_no_pending_event() -> None:
    result = play(scene({**RESTART, "vm": "any", "repeat": {"every": "1s", "times": 3}}))

    assert sorted(line.split()[-1] for line in changes(result, "scheduled")) == [
        "db-0",
        "web-0",
        "web-1",
    ]
    assert result.is_passed
    too_many = play(scene({**RESTART, "vm": "any", "repeat": {"every": "1s", "times": 4}}))
    assert too_many.verdicts[0].reason == "every VM has a pending event; expected one without"


@pytest.mark.parametrize(("busy", "free"), [("web-0", "web-1"), ("web-1", "web-0")])
def test_any_host_has_only_idle_vms(busy: str, free: str) -> None:
    maintain = {"at": "11m", "do": "maintain", "host": "any", "type": "Freeze"}
    result = play(scene({**RESTART, "vm": busy}, maintain, scopes=[WEB]))

    assert changes(result, "scheduled") == [
        f"600 scheduled Reboot of {busy}",
        f"660 scheduled Freeze of {free}",
    ]


def test_repeated_step_keeps_its_interval() -> None:
    result = play(
        scene({"at": "1m", "do": "log", "text": "tick", "repeat": {"every": "90s", "times": 3}})
    )
    ticks = [
        entry.at.strftime("%H:%M:%S") for entry in result.transcript.entries if entry.what == "log"
    ]

    assert ticks == ["00:01:00", "00:02:30", "00:04:00"]


def test_verdicts_end_the_transcript() -> None:
    expected = {"expect": "approval", "of": "restart"}
    result = play(scene(RESTART, expectations=[expected], guests=[{"approve": "1s"}]))

    assert [(entry.kind, entry.what) for entry in result.transcript.entries][-1:] == [
        (TranscriptKind.VERDICT, "passed")
    ]


def test_same_seed_gives_the_same_bytes() -> None:
    scenario = load_from_library("bad-day")
    first = play(scenario, seed=7).transcript.dump()

    assert play(scenario, seed=7).transcript.dump() == first
    assert play(scenario, seed=8).transcript.dump() != first


# --- who plays, and on which clock


@pytest.mark.parametrize(
    ("guests", "options", "external"),
    [
        ([{}], RunOptions(), ()),
        ([{"vms": ["web-0"]}], RunOptions(), ("web-1", "db-0")),
        ([{"vms": ["web-0"]}], RunOptions(external=("web-0",)), ("web-0",)),
        ([{}], RunOptions(command=("true",)), ("web-0",)),
        ([{"vms": ["web-0", "web-1"]}], RunOptions(command=("true",)), ("db-0",)),
    ],
)
def test_vms_without_a_guest_are_external(
    guests: list[Any], options: RunOptions, external: tuple[str, ...]
) -> None:
    assert choose_external(scene(guests=guests), options) == external


def test_unknown_external_vm_is_refused() -> None:
    with pytest.raises(
        NotFound, match="there is no VM 'web-9' in test; expected one of web-0, web-1, db-0"
    ):
        choose_external(scene(), RunOptions(external=("web-9",)))


def test_clock_is_virtual_without_external_vms_and_rate() -> None:
    quick = scene(clock={"rate": 60})

    assert choose_rate(scene(), RunOptions(), ()) is None
    assert choose_rate(scene(), RunOptions(), ("web-0",)) == 1.0
    assert (choose_rate(quick, RunOptions(), ()), choose_rate(quick, RunOptions(rate=5), ())) == (
        60.0,
        5,
    )


def test_jump_needs_a_virtual_clock() -> None:
    with pytest.raises(Invalid, match="test has a jump, which needs a virtual clock"):
        play(scene({"at": "1m", "do": "jump", "by": "1h"}), rate=60.0)


def test_rate_shortens_all_durations() -> None:
    """An hour in less than a second. Not timed: only what happened is looked at."""
    steps = [RESTART, {"at": "30m", "do": "log", "text": "half time"}]
    expected = {"expect": "event", "of": "restart", "becomes": "started"}
    result = play(
        scene(*steps, scopes=[WEB, DB], guests=[{"approve": "10s"}], expectations=[expected]),
        rate=5000.0,
        to_the_end=True,
    )

    assert result.is_passed
    assert [
        entry.what for entry in result.transcript.entries if entry.kind is TranscriptKind.STEP
    ] == [
        "restart",
        "log",
    ]


def test_real_clock_has_a_grace_at_rate_1() -> None:
    """At rate 1 nothing is shortened, but requests take time."""
    expected = {"expect": "polls", "vm": "web-0", "every": "0s"}

    assert play(scene(until="0s", expectations=[expected]), rate=1.0).is_passed


def test_missing_external_vm_is_named() -> None:
    result = play(scene(guests=[{"vms": ["web-0", "web-1"]}]), first_poll_seconds_max=0.1)

    assert [(verdict.expected, verdict.reason) for verdict in result.verdicts] == [
        ("db-0 polls its endpoint", "no poll within 0.1 s")
    ]
    assert not result.is_passed


def test_internal_error_is_raised_at_the_end_of_the_run() -> None:
    """The engine ignores errors of its listeners; the run must not."""

    def write(line: str) -> None:
        if "Scheduled" in line:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(scene(RESTART), Console(write))
