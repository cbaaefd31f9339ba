"""Runs checks one after the other. What a check creates is removed before the next one."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from forewarn.conformance.check import Check, Failed, Level, NotRun
from forewarn.conformance.session import Session
from forewarn.errors import Error, Unavailable


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """`detail` is empty if passed; else what was expected and what came, or why it was not run."""

    check: Check
    verdict: Verdict
    detail: str
    seconds: float

    @property
    def is_must_failed(self) -> bool:
        return self.verdict is Verdict.FAILED and self.check.level is Level.MUST


def run(session: Session, checks: Iterable[Check]) -> Iterator[Result]:
    """Yields each result when it is known."""
    for _, group in groupby(checks, key=lambda check: check.topic):
        try:
            for check in group:
                yield _run_one(session, check)
        finally:
            session.release()


def _run_one(session: Session, check: Check) -> Result:
    began = session.clock.now()
    verdict, detail = _judge(session, check)
    if verdict is Verdict.FAILED and session.discovers_rate_limit():
        verdict, detail = _judge(session, check)
    return Result(check, verdict, detail, session.clock.now() - began)


def _judge(session: Session, check: Check) -> tuple[Verdict, str]:
    try:
        if missing := next(filter(None, map(session.missing, check.needs)), ""):
            return Verdict.NOT_RUN, f"not run, because {missing}"
        check.run(session)
    except Failed as failed:
        return Verdict.FAILED, str(failed)
    except NotRun as reason:
        return Verdict.NOT_RUN, f"not run, because {reason}"
    except Unavailable:
        raise
    except Error as error:
        return Verdict.NOT_RUN, f"not run, because the control API refused: {error.message}"
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        # The response is so far from what is documented that the check could not read it.
        return Verdict.FAILED, f"expected a response in the documented form; got {error!r}"
    finally:
        session.clean_up()
    return Verdict.PASSED, ""
