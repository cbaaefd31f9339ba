"""The reports of a run: console and JUnit."""

import re
from xml.etree import ElementTree

import pytest

from forewarn.lab.scenario.report import Console, Verbosity, render_json, render_junit
from tests.unit.lab.scenario.small_scenarios import WEB, play, scene

SCENARIO = scene(
    {"at": "10m", "do": "restart", "vm": "web-0", "as": "restart"},
    scopes=[WEB],
    guests=[{"approve": "20s"}],
    faults=[{"fault": "status", "code": 500, "vms": ["web-0"], "from": "10m", "for": "10s"}],
    expectations=[
        {"expect": "approval", "of": "restart", "by": "web-0", "within": "60s"},
        {"expect": "approval", "of": "restart", "by": "web-1", "within": "60s"},
    ],
)


def print_run(verbosity: Verbosity) -> list[str]:
    lines: list[str] = []
    console = Console(lines.append, verbosity)
    console.print_result("test", play(SCENARIO, console))
    return lines


def test_console_prints_what_matters() -> None:
    """Ten equal bad responses are one line, and a count when they end."""
    lines = [" ".join(line.split()) for line in print_run(Verbosity.NORMAL)]
    time = next(line.split()[0] for line in lines if "good responses again" in line)

    assert time.startswith("+10m10")
    assert lines[0] == "1h in virtual time"
    assert lines[2:8] == [
        "+10m web-0 added f1 status",
        "+10m step restart vm web-0, as restart",
        "+10m web Scheduled: Reboot of web-0 [restart]",
        (
            f"{lines[5].split()[0]} web-0 GET /metadata/scheduledevents?api-version=2020-07-01 ->"
            f" 500 (status)"
        ),
        "+10m10s web-0 removed f1 status",
        f"{time} web-0 good responses again, after 10 bad ones",
    ]
    assert any(line.endswith("web-0 approves restart -> 200") for line in lines)


def test_quiet_prints_only_the_verdicts() -> None:
    first, second, whole = print_run(Verbosity.QUIET)

    assert first.startswith("passed  web-0 approves restart within 60s: after 30.")
    assert second.startswith("FAILED  web-1 approves restart within 60s: Reboot of web-0 (")
    assert ": web-0 approved it at +10m30." in second
    assert whole == "test FAILED (1 of 2 expectations)"


def test_verbose_prints_every_request() -> None:
    assert any('-> 200 {"DocumentIncarnation":' in line for line in print_run(Verbosity.VERBOSE))


def test_junit_has_a_case_per_expectation() -> None:
    result = play(SCENARIO)
    text = render_junit("test", result)
    suite = ElementTree.fromstring(text).find("testsuite")  # noqa: S314 - our own

    assert suite is not None
    assert {name: suite.get(name) for name in ("name", "tests", "failures")} == {
        "name": "test",
        "tests": "2",
        "failures": "1",
    }
    passed, failed = suite.findall("testcase")
    assert (passed.get("name"), passed.find("failure")) == (
        "web-0 approves restart within 60s",
        None,
    )
    failure = failed.find("failure")
    assert failure is not None
    assert failure.text is not None
    assert "was not approved by web-1 in time" in str(failure.get("message"))
    assert "scheduled: Reboot of web-0 by scenario: restart" in failure.text


@pytest.mark.parametrize("letter", ["\x00", "\x1b", "\ufffe"])
def test_junit_is_valid_xml_for_any_text(letter: str) -> None:
    scenario = scene(
        {"at": "1m", "do": "log", "text": f"a{letter}b"},
        expectations=[{"expect": "polls", "vm": "db-0", "every": "1s"}],
    )
    result = play(scenario)

    text = render_junit("test", result)
    root = ElementTree.fromstring(text)  # noqa: S314 - our own

    assert root.tag == "testsuites"


def test_junit_has_times_of_the_scenario() -> None:
    result = play(SCENARIO)
    suite = ElementTree.fromstring(render_junit("test", result)).find("testsuite")  # noqa: S314
    assert suite is not None
    times = [float(case.get("time", "")) for case in suite.findall("testcase")]

    assert float(suite.get("time", "")) == pytest.approx(result.timeline.seconds, abs=0.001)
    assert 630 <= times[0] < 640
    assert times[1] == float(suite.get("time", ""))


def test_json_has_the_verdicts() -> None:
    shown = render_json("test", play(SCENARIO))
    verdicts = shown["expectations"]
    assert isinstance(verdicts, list)
    first, second = verdicts

    assert (first["expected"], first["outcome"]) == ("web-0 approves restart within 60s", "passed")
    assert first["reason"].startswith("after 30.")
    assert 630 <= first["seconds"] < 640
    assert second["outcome"] == "failed"
    assert (shown["scenario"], shown["is_passed"], shown["steps_not_reached"]) == (
        "test",
        False,
        (),
    )


def test_progress_names_what_the_run_waits_for_and_how_long() -> None:
    shown: list[str] = []
    play(SCENARIO, Console(lambda line: None, progress=shown.append))
    waiting = r"\+10m\S* of 1h, (.*) left for 1 of 2: web-0 approves restart within 60s"
    left = [match[1] for each in shown if (match := re.fullmatch(waiting, each))]

    assert shown[0] == ("+0s of 1h, 1h left for 1 of 2: web-0 approves restart within 60s")
    assert left[:2] == ["50m", "1m"]  # before the step, and after it
    assert left[-1].endswith("s")


def test_console_paints_outcomes() -> None:
    lines: list[str] = []
    console = Console(lines.append, Verbosity.QUIET, paint=lambda text, colour: f"<{colour}>{text}")
    console.print_result("test", play(SCENARIO, console))

    assert [line.split("  ")[0] for line in lines] == [
        "<green>passed",
        "<red>FAILED",
        "<red>test FAILED (1 of 2 expectations)",
    ]


def test_real_run_says_when_it_will_end() -> None:
    lines: list[str] = []
    play(scene(until="1s"), Console(lines.append), rate=10.0)

    assert re.fullmatch(r"1s at rate 10: at most 0.1s, ends about \d\d:\d\d", lines[0])
