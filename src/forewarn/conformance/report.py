"""What a run came to: rows for a table, JSON, JUnit; and the reference page's list of checks.

`python -m forewarn.conformance.report docs/conformance.md` writes that page's table anew.
"""

import sys
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from forewarn.conformance import checks as topic  # noqa: F401  (fills the registry)
from forewarn.conformance.check import CHECKS, NEEDS, Check, Level
from forewarn.conformance.run import Result, Verdict

ORDER = (Verdict.PASSED, Verdict.NOT_RUN, Verdict.FAILED)
COLUMNS = ("verdict", "level", "check", "detail")
LIST_COLUMNS = ("check", "level", "needs", "reference", "reason")
BEGIN, END = "<!-- checks -->\n", "<!-- /checks -->\n"


def rows(results: Iterable[Result]) -> list[dict[str, str]]:
    """A line for each check: what failed comes last, where people look first."""
    return [
        {
            "verdict": one.verdict,
            "level": one.check.level,
            "check": one.check.name,
            "detail": one.detail,
        }
        for one in sorted(results, key=lambda one: ORDER.index(one.verdict))
    ]


def listed(checks: Iterable[Check]) -> list[dict[str, object]]:
    """The checks themselves, for `--list`."""
    return [
        {
            "check": one.name,
            "level": one.level,
            "needs": list(one.needs),
            "reference": one.reference,
            "reason": one.reason,
        }
        for one in checks
    ]


def summary(results: Sequence[Result]) -> str:
    """How many of each, in one line."""
    verdicts = Counter(one.verdict for one in results)
    must = sum(one.is_must_failed for one in results)
    failed = verdicts[Verdict.FAILED]
    return (
        f"{len(results)} checks: {verdicts[Verdict.PASSED]} passed, {failed} failed "
        f"({must} must, {failed - must} should), {verdicts[Verdict.NOT_RUN]} not run"
    )


def as_json(url: str, results: Sequence[Result]) -> dict[str, object]:
    """All there is to know of a run."""
    verdicts = Counter(one.verdict for one in results)
    return {
        "endpoint": url,
        "passed": verdicts[Verdict.PASSED],
        "failed": verdicts[Verdict.FAILED],
        "failed_must": sum(one.is_must_failed for one in results),
        "not_run": verdicts[Verdict.NOT_RUN],
        "checks": [
            {
                "name": one.check.name,
                "topic": one.check.topic,
                "level": one.check.level,
                "reason": one.check.reason,
                "reference": one.check.reference,
                "needs": list(one.check.needs),
                "verdict": one.verdict,
                "detail": one.detail,
                "seconds": round(one.seconds, 4),
            }
            for one in results
        ],
    }


def as_junit(url: str, results: Sequence[Result], *, is_strict: bool) -> bytes:
    """JUnit's XML.

    What only should be, and is not, is skipped there with its reason, unless that counts too.
    """
    suite = xml.Element(
        "testsuite", name=f"forewarn conform {_printable(url)}", tests=str(len(results)), errors="0"
    )
    for one in results:
        case = xml.SubElement(
            suite,
            "testcase",
            classname=one.check.topic,
            name=one.check.name,
            time=f"{one.seconds:.3f}",
        )
        if one.is_must_failed or (is_strict and one.verdict is Verdict.FAILED):
            failure = xml.SubElement(
                case, "failure", type=one.check.level, message=_printable(one.detail)
            )
            failure.text = f"{one.check.reason} ({one.check.reference})"
        elif one.verdict is not Verdict.PASSED:
            should = f"{Level.SHOULD}: " if one.verdict is Verdict.FAILED else ""
            xml.SubElement(case, "skipped", message=should + _printable(one.detail))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    told: bytes = xml.tostring(suite, encoding="utf-8", xml_declaration=True)
    return told


def reference() -> str:
    """The tables of `docs/conformance.md`."""
    needs = "".join(f"| {need} | {words} |\n" for need, words in NEEDS.items())
    checks = "".join(
        f"| `{one.name}` | {one.level} | {', '.join(one.needs) or '-'} | {one.reason} | {one.reference} |\n"
        for one in CHECKS.values()
    )
    return (
        f"| need | what it is |\n|---|---|\n{needs}\n"
        f"{len(CHECKS)} checks:\n\n| check | level | needs | why | where it stands |\n|---|---|---|---|---|\n{checks}"
    )


def _printable(text: str) -> str:
    """XML has no way to write a control character."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _write(page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + reference() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
