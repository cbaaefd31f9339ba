"""The list of checks and what a run came to, in every form it is told in."""

import re
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from forewarn.conformance import report
from forewarn.conformance.check import CHECKS, Level
from forewarn.conformance.run import Result, Verdict

ROOT = Path(__file__).parents[3]
MUST, SHOULD = CHECKS["version-missing-is-400"], CHECKS["path-in-any-case"]
RESULTS = [
    Result(CHECKS["etag-is-sent"], Verdict.PASSED, "", 0.01),
    Result(MUST, Verdict.FAILED, "expected status 400; got b'\x1b<&'", 0.02),
    Result(SHOULD, Verdict.FAILED, "expected status 200; got 404", 0.03),
    Result(CHECKS["events-overlap"], Verdict.NOT_RUN, "not run, because it needs more", 0),
]


def test_the_page_lists_every_check_as_it_is() -> None:
    """`python -m forewarn.conformance.report docs/conformance.md` writes it anew."""
    assert report.reference() in (ROOT / "docs" / "conformance.md").read_text()


def test_there_are_at_least_80_checks_and_each_can_be_understood() -> None:
    assert len(CHECKS) >= 80
    for name, check in CHECKS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert check.reason.endswith("."), name
        assert re.match(r"PROTOCOL|RFC", check.reference), name


@pytest.mark.parametrize(
    "name",
    [
        "answer-comes-within-5-seconds",
        "connection-close-is-echoed",
        "document-number-is-at-least-1",
        "path-below-the-document-is-404",
    ],
)
def test_what_is_only_concluded_or_decided_is_no_must(name: str) -> None:
    """Neither documented nor captured: the real endpoint may differ there, and is right by
    definition.
    """
    assert CHECKS[name].level is Level.SHOULD


def test_what_rests_on_a_decision_is_no_must() -> None:
    decided = [
        check
        for check in CHECKS.values()
        if check.reference.startswith(("PROTOCOL, decided", "PROTOCOL 10"))
    ]

    assert decided
    assert [check.name for check in decided if check.level is Level.MUST] == []


def test_one_line_sums_it_up() -> None:
    assert report.summary(RESULTS) == "4 checks: 1 passed, 2 failed (1 must, 1 should), 1 not run"


def test_json_holds_all_there_is_to_know() -> None:
    told = report.as_json("http://h", RESULTS)

    assert {
        name: told[name] for name in ("endpoint", "passed", "failed", "failed_must", "not_run")
    } == {
        "endpoint": "http://h",
        "passed": 1,
        "failed": 2,
        "failed_must": 1,
        "not_run": 1,
    }
    assert isinstance(told["checks"], list)
    assert told["checks"][2] == {
        "name": "path-in-any-case",
        "topic": "path",
        "level": Level.SHOULD,
        "reason": "Microsoft's C# sample asks for /metadata/scheduledEvents.",
        "reference": "PROTOCOL 3: path case (DISC)",
        "needs": [],
        "verdict": "failed",
        "detail": "expected status 200; got 404",
        "seconds": 0.03,
    }


def junit(*, is_strict: bool) -> xml.Element:
    return xml.fromstring(report.as_junit("http://h", RESULTS, is_strict=is_strict))


def test_junit_counts_what_must_be_as_failed_and_the_rest_as_skipped() -> None:
    suite = junit(is_strict=False)

    assert {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")} == {
        "tests": "4",
        "failures": "1",
        "skipped": "2",
        "errors": "0",
    }
    failure = suite.find("testcase[@name='version-missing-is-400']/failure")
    assert failure is not None
    assert failure.get("message") == "expected status 400; got b'\N{REPLACEMENT CHARACTER}<&'"
    skipped = [one.get("message") for one in suite.findall("testcase/skipped")]
    assert skipped == ["should: expected status 200; got 404", "not run, because it needs more"]


def test_junit_counts_every_failure_where_that_is_wished() -> None:
    suite = junit(is_strict=True)

    assert (suite.get("failures"), suite.get("skipped")) == ("2", "1")
