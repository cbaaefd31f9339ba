"""The results of a run as lines, JSON and JUnit, and the list of checks for the docs.

`python -m forewarn.conformance.report` prints the tables of `docs/conformance.md`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from forewarn import junit
from forewarn.conformance.check import SHOULD, Basis, Check, Need
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.run import Result, Verdict

LIST_COLUMNS = ("check", "level", "basis", "needs", "reference", "reason")
COLOURS = {Verdict.FAILED: "red", Verdict.NOT_RUN: "yellow", Verdict.PASSED: "green"}
Paint = Callable[[str, str], str]


def lines(
    results: Sequence[Result], paint: Paint, *, only_failures: bool, is_verbose: bool
) -> Iterator[str]:
    """The topics with their scores and failures, those with the most failures first.

    Then why checks were not run, once for each reason. Verbose lists every check.
    """
    topics: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: list(Verdict).index(result.verdict)):
        topics.setdefault(result.check.topic, []).append(result)
    for topic, group in sorted(topics.items(), key=lambda each: -_count(each[1])["failed"]):
        counts = _count(group)
        if counts["failed"] or not only_failures:
            worst = group[0].verdict if counts["failed"] else group[-1].verdict
            yield paint(f"{topic}: {_score(group)}", COLOURS[worst])
        for check, verdict, detail, _ in group:
            if verdict is Verdict.FAILED or is_verbose:
                note = " (convention)" if check.basis is Basis.CONVENTION else ""
                word = paint(f"{verdict:8}", COLOURS[verdict])
                reason = f": {junit.printable(detail)}" if detail else ""
                yield f"  {word} {check.level:6} {check.name}{note}{reason}"
    for reason, count in [] if only_failures else _count_reasons(results):
        yield paint(f"{count} not run: {junit.printable(reason)}", "yellow")


def _score(results: Sequence[Result]) -> str:
    """How many have passed of those that ran, or the main reason why none ran."""
    counts = _count(results)
    ran, not_run = counts["passed"] + counts["failed"], counts["not_run"]
    if not ran:
        return f"not run: {_count_reasons(results)[0][0]}"
    return f"{counts['passed']} of {ran} passed" + (f", {not_run} not run" if not_run else "")


def _count_reasons(results: Sequence[Result]) -> list[tuple[str, int]]:
    """Why checks were not run, and how many, the most frequent reason first."""
    skipped = (result.detail for result in results if result.verdict is Verdict.NOT_RUN)
    return Counter(skipped).most_common()


def list_checks(checks: Iterable[Check]) -> list[dict[str, object]]:
    """For `--list`."""
    return [{"check": check.name, **_describe(check)} for check in checks]


def _describe(check: Check) -> dict[str, object]:
    return {
        "level": check.level,
        "basis": check.basis,
        "needs": list(check.needs),
        "reference": check.reference,
        "reason": check.reason,
    }


def _count(results: Sequence[Result]) -> dict[str, int]:
    verdicts = Counter(result.verdict for result in results)
    return {
        "passed": verdicts[Verdict.PASSED],
        "failed": verdicts[Verdict.FAILED],
        "failed_must": sum(result.fails_run() for result in results),
        "not_run": verdicts[Verdict.NOT_RUN],
    }


def summary(results: Sequence[Result]) -> str:
    """The numbers in one line."""
    counts = _count(results)
    failed, must = counts["failed"], counts["failed_must"]
    return (
        f"{len(results)} checks: {counts['passed']} passed, {failed} failed "
        f"({must} must, {failed - must} should), {counts['not_run']} not run"
    )


def as_json(
    url: str, results: Sequence[Result], *, only_failures: bool = False
) -> dict[str, object]:
    shown = [
        {
            "name": check.name,
            "topic": check.topic,
            **_describe(check),
            "verdict": verdict,
            "detail": detail,
            "seconds": round(seconds, 4),
        }
        for check, verdict, detail, seconds in results
        if verdict is Verdict.FAILED or not only_failures
    ]
    return {"endpoint": url, **_count(results), "checks": shown}


def as_junit(url: str, results: Sequence[Result], *, is_strict: bool) -> bytes:
    """JUnit XML. A failed `should` is skipped there with its reason, unless `is_strict`."""
    cases = []
    for result in results:
        check, verdict, detail, seconds = result
        is_failure = result.fails_run(is_strict=is_strict)
        skipped = f"{SHOULD}: {detail}" if verdict is Verdict.FAILED else detail
        case = junit.TestCase(
            name=check.name,
            classname=check.topic,
            seconds=seconds,
            failure=detail if is_failure else "",
            details=f"{check.reason} ({check.reference})",
            skipped="" if is_failure else skipped,
        )
        cases.append(case)
    return junit.render(f"forewarn conform {url}", cases)


def reference() -> str:
    """The tables of `docs/conformance.md`."""
    needs = "".join(f"| {need} | {need.remedy} |\n" for need in Need)
    checks = "".join(
        f"| `{check.name}` | {check.level} | {check.basis} | {', '.join(check.needs) or '-'}"
        f" | {check.reason} | {check.reference} |\n"
        for check in CHECKS.values()
    )
    return (
        f"| need | what it is |\n|---|---|\n{needs}\n{len(CHECKS)} checks:\n\n"
        f"| check | level | basis | needs | why | source |\n|---|---|---|---|---|---|\n{checks}"
    )


if __name__ == "__main__":
    print(reference())
