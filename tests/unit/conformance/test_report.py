"""The list of checks, and the results of a run in every format."""

import re
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from forewarn.conformance import report
from forewarn.conformance.check import Level
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.run import Result, Verdict

ROOT = Path(__file__).parents[3]
MUST, SHOULD = CHECKS["version-missing-is-400"], CHECKS["path-in-any-case"]
RESULTS = [
    Result(CHECKS["etag-is-sent"], Verdict.PASSED, "", 0.01),
    Result(MUST, Verdict.FAILED, "expected status 400; got b'\x1b<&'", 0.02),
    Result(SHOULD, Verdict.FAILED, "expected status 200; got 404", 0.03),
    Result(CHECKS["events-may-overlap"], Verdict.NOT_RUN, "needs `--approve`", 0),
]


def test_docs_list_every_check() -> None:
    """`python -m forewarn.conformance.report` prints the tables."""
    assert report.reference() in (ROOT / "docs" / "conformance.md").read_text()


def test_every_check_has_a_name_a_reason_and_a_reference() -> None:
    assert len(CHECKS) >= 218
    for name, check in CHECKS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert check.reason.endswith("."), name
        assert re.match(r"PROTOCOL|RFC", check.reference), name


@pytest.mark.parametrize(
    "name",
    [
        "response-within-5-seconds",
        "connection-close-is-echoed",
        "document-incarnation-is-at-least-1",
        "path-below-the-document-is-404",
    ],
)
def test_inferred_rules_are_not_musts(name: str) -> None:
    """Neither documented nor captured: the real endpoint may differ, and is right by definition."""
    assert CHECKS[name].level is Level.SHOULD


def test_our_own_decisions_are_not_musts() -> None:
    decisions = [check for check in CHECKS.values() if check.reference.startswith("PROTOCOL 10")]

    assert decisions
    assert [check.name for check in decisions if check.level is Level.MUST] == []


def test_basis_tells_protocol_http_and_convention_apart() -> None:
    """Whoever fails a convention need not have broken the protocol."""
    names = ("etag-is-sent", "etag-is-quoted", "etag-is-the-incarnation")

    assert [CHECKS[name].basis for name in names] == ["protocol", "http", "convention"]


def show_lines(
    results: list[Result], *, only_failures: bool = False, is_verbose: bool = False
) -> list[str]:
    def plain(text: str, colour: str) -> str:
        return text

    return list(report.lines(results, plain, only_failures=only_failures, is_verbose=is_verbose))


def test_lines_have_failures_first_and_a_score_for_each_topic() -> None:
    lines = show_lines(RESULTS, is_verbose=True)

    assert lines == [
        "version: 0 of 1 passed",
        "  failed   must   version-missing-is-400: expected status 400; got b'\ufffd<&'",
        "request: 0 of 1 passed",
        "  failed   should path-in-any-case (convention): expected status 200; got 404",
        "lifecycle: not run: needs `--approve`",
        "  not run  must   events-may-overlap: needs `--approve`",
        "document: 1 of 1 passed",
        "  passed   must   etag-is-sent",
        "1 not run: needs `--approve`",
    ]


def test_what_was_not_run_is_one_line_for_each_reason() -> None:
    """It is no part of a score, and a hundred checks that need one flag are not a hundred lines."""
    results = [
        *RESULTS[:1],
        *(
            Result(CHECKS[name], Verdict.NOT_RUN, f"needs `--{flag}`", 0)
            for name, flag in (
                ("event-id-is-a-guid", "control"),
                ("approval-is-200", "approve"),
                ("approval-of-nothing-is-400", "approve"),
            )
        ),
    ]

    assert show_lines(results) == [
        "event: not run: needs `--control`",
        "approval: not run: needs `--approve`",
        "document: 1 of 1 passed",
        "2 not run: needs `--approve`",
        "1 not run: needs `--control`",
    ]


def test_only_failures_can_be_shown() -> None:
    lines = show_lines(RESULTS, only_failures=True)
    shown = report.as_json("http://h", RESULTS, only_failures=True)

    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "version",
        "request",
    ]
    assert len(lines) == 4
    assert (shown["passed"], len(shown["checks"])) == (1, 2)  # type: ignore[arg-type]


def test_summary_is_one_line() -> None:
    assert report.summary(RESULTS) == "4 checks: 1 passed, 2 failed (1 must, 1 should), 1 not run"


def test_json_has_everything() -> None:
    result = report.as_json("http://h", RESULTS)
    checks = result.pop("checks")

    assert result == {
        "endpoint": "http://h",
        "passed": 1,
        "failed": 2,
        "failed_must": 1,
        "not_run": 1,
    }
    assert isinstance(checks, list)
    assert checks[2] == {
        "name": "path-in-any-case",
        "topic": "request",
        "level": Level.SHOULD,
        "basis": "convention",
        "reason": "Microsoft's C# sample requests /metadata/scheduledEvents.",
        "reference": "PROTOCOL 3: path case (DISC)",
        "needs": [],
        "verdict": "failed",
        "detail": "expected status 200; got 404",
        "seconds": 0.03,
    }


def junit_suite(*, is_strict: bool) -> xml.Element:
    root = xml.fromstring(report.as_junit("http://h", RESULTS, is_strict=is_strict))  # noqa: S314
    (suite,) = root.findall("testsuite")
    return suite


def test_junit_fails_musts_and_skips_the_rest() -> None:
    suite = junit_suite(is_strict=False)
    counts = [suite.get(name) for name in ("tests", "failures", "skipped", "errors")]
    failure = suite.find("testcase[@name='version-missing-is-400']/failure")
    skipped = [element.get("message") for element in suite.findall("testcase/skipped")]

    assert counts == ["4", "1", "2", "0"]
    assert failure is not None
    assert failure.get("message") == "expected status 400; got b'\N{REPLACEMENT CHARACTER}<&'"
    assert skipped == ["should: expected status 200; got 404", "needs `--approve`"]


def test_strict_junit_fails_shoulds_too() -> None:
    suite = junit_suite(is_strict=True)

    assert (suite.get("failures"), suite.get("skipped")) == ("2", "1")
