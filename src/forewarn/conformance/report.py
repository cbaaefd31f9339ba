"""The results of a run as table rows, JSON and JUnit, and the list of checks for the docs.

`python -m forewarn.conformance.report docs/conformance.md` updates the tables of that page.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from forewarn import junit
from forewarn.conformance.check import NEEDS, Check, Level
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.run import Result, Verdict

ORDER = (Verdict.PASSED, Verdict.NOT_RUN, Verdict.FAILED)
COLUMNS = ("verdict", "level", "check", "detail")
LIST_COLUMNS = ("check", "level", "needs", "reference", "reason")
BEGIN, END = "<!-- checks -->\n", "<!-- /checks -->\n"


def rows(results: Iterable[Result]) -> list[dict[str, str]]:
    """One row per check, failures last: that is where people look first."""
    return [
        {
            "verdict": result.verdict,
            "level": result.check.level,
            "check": result.check.name,
            "detail": result.detail,
        }
        for result in sorted(results, key=lambda result: ORDER.index(result.verdict))
    ]


def list_checks(checks: Iterable[Check]) -> list[dict[str, object]]:
    """For `--list`."""
    return [{"check": check.name, **_describe(check)} for check in checks]


def _describe(check: Check) -> dict[str, object]:
    return {
        "level": check.level,
        "needs": list(check.needs),
        "reference": check.reference,
        "reason": check.reason,
    }


def summary(results: Sequence[Result]) -> str:
    """The numbers in one line."""
    verdicts = Counter(result.verdict for result in results)
    must = sum(result.is_must_failed for result in results)
    failed = verdicts[Verdict.FAILED]
    return (
        f"{len(results)} checks: {verdicts[Verdict.PASSED]} passed, {failed} failed "
        f"({must} must, {failed - must} should), {verdicts[Verdict.NOT_RUN]} not run"
    )


def as_json(url: str, results: Sequence[Result]) -> dict[str, object]:
    verdicts = Counter(result.verdict for result in results)
    return {
        "endpoint": url,
        "passed": verdicts[Verdict.PASSED],
        "failed": verdicts[Verdict.FAILED],
        "failed_must": sum(result.is_must_failed for result in results),
        "not_run": verdicts[Verdict.NOT_RUN],
        "checks": [
            {
                "name": result.check.name,
                "topic": result.check.topic,
                **_describe(result.check),
                "verdict": result.verdict,
                "detail": result.detail,
                "seconds": round(result.seconds, 4),
            }
            for result in results
        ],
    }


def as_junit(url: str, results: Sequence[Result], *, is_strict: bool) -> bytes:
    """JUnit XML. A failed `should` is skipped there with its reason, unless `is_strict`."""
    cases = [_test_case(result, is_strict=is_strict) for result in results]
    return junit.render(f"forewarn conform {url}", cases)


def _test_case(result: Result, *, is_strict: bool) -> junit.TestCase:
    check = result.check
    is_failed = result.verdict is Verdict.FAILED
    is_failure = result.is_must_failed or (is_strict and is_failed)
    prefix = f"{Level.SHOULD}: " if is_failed else ""
    return junit.TestCase(
        name=check.name,
        classname=check.topic,
        seconds=result.seconds,
        failure=result.detail if is_failure else "",
        details=f"{check.reason} ({check.reference})",
        skipped="" if is_failure or not result.detail else prefix + result.detail,
    )


def reference() -> str:
    """The tables of `docs/conformance.md`."""
    needs = "".join(f"| {need} | {text} |\n" for need, text in NEEDS.items())
    checks = "".join(
        f"| `{check.name}` | {check.level} | {', '.join(check.needs) or '-'}"
        f" | {check.reason} | {check.reference} |\n"
        for check in CHECKS.values()
    )
    return (
        f"| need | what it is |\n|---|---|\n{needs}\n{len(CHECKS)} checks:\n\n"
        f"| check | level | needs | why | source |\n|---|---|---|---|---|\n{checks}"
    )


def _update(page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + reference() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    _update(Path(sys.argv[1]))
