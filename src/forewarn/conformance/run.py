"""The checks, one after the other, each with a verdict.

What a check made is taken back before the next one looks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from forewarn.conformance.check import Check, Failed, Level, NotRun
from forewarn.conformance.session import Stage
from forewarn.errors import Error, Unavailable


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """`detail` is empty if it passed; else what was expected and what came, or why it was not run."""

    check: Check
    verdict: Verdict
    detail: str
    seconds: float

    @property
    def is_must_failed(self) -> bool:
        return self.verdict is Verdict.FAILED and self.check.level is Level.MUST


def run(stage: Stage, checks: Iterable[Check]) -> Iterator[Result]:
    """Each check's result as it comes."""
    for _, group in groupby(checks, key=lambda check: check.topic):
        try:
            for check in group:
                yield _run_one(stage, check)
        finally:
            stage.release()


def _run_one(stage: Stage, check: Check) -> Result:
    began = stage.time.now()
    verdict, detail = _judge(stage, check)
    if verdict is Verdict.FAILED and stage.learns_of_rate_limit():
        verdict, detail = _judge(stage, check)
    return Result(check, verdict, detail, stage.time.now() - began)


def _judge(stage: Stage, check: Check) -> tuple[Verdict, str]:
    verdict, detail = Verdict.PASSED, ""
    try:
        lacks = next((why for why in map(stage.lacks, check.needs) if why), "")
        if lacks:
            raise NotRun(lacks)
        check.run(stage)
    except Failed as failed:
        verdict, detail = Verdict.FAILED, str(failed)
    except NotRun as why:
        verdict, detail = Verdict.NOT_RUN, f"not run, because {why}"
    except Unavailable:
        raise
    except Error as problem:
        verdict, detail = (
            Verdict.NOT_RUN,
            f"not run, because the control API refused: {problem.message}",
        )
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as odd:  # an answer so strange that the check could not read it
        verdict, detail = (
            Verdict.FAILED,
            f"expected an answer of the documented form; got one that gave {odd!r}",
        )
    finally:
        stage.tidy()
    return verdict, detail
