"""Runs checks one after the other. What a check creates is removed before the next one."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from forewarn.conformance.check import Check, Failed, Level, NotRun
from forewarn.conformance.raw_http import RateLimited
from forewarn.conformance.session import Session
from forewarn.errors import Error, Unavailable


class Verdict(StrEnum):
    """In the order of a report."""

    FAILED = "failed"
    NOT_RUN = "not run"
    PASSED = "passed"


class Result(NamedTuple):
    """`detail` is empty if passed; else what was expected and what came, or why it was not run."""

    check: Check
    verdict: Verdict
    detail: str
    seconds: float

    def fails_run(self, *, is_strict: bool = False) -> bool:
        """A failed `must` does; if strict, a failed `should` too."""
        counts = is_strict or self.check.level is Level.MUST
        return counts and self.verdict is Verdict.FAILED


def run(session: Session, checks: Iterable[Check]) -> Iterator[Result]:
    """Yields each result when it is known."""
    for _, group in groupby(checks, key=lambda check: check.topic):
        try:
            for check in group:
                began = session.clock.now()
                verdict, detail = _judge(session, check)
                yield Result(check, verdict, detail, session.clock.now() - began)
        finally:
            session.release()


def _judge(session: Session, check: Check) -> tuple[Verdict, str]:
    try:
        for need in check.needs:
            session.require(need)
        try:
            check.run(session)
        except RateLimited:  # on a connection of its own: once more, with the full allowance
            session.clean_up()
            session.pause()
            check.run(session)
    except Failed as failed:
        return Verdict.FAILED, str(failed)
    except NotRun as reason:
        return Verdict.NOT_RUN, str(reason)
    except Unavailable:
        raise
    except Error as error:
        return Verdict.NOT_RUN, f"the control API refused: {error.message}"
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        # The response is so far from what is documented that the check could not read it.
        return Verdict.FAILED, f"expected a response in the documented form; got {error!r}"
    finally:
        session.clean_up()
    return Verdict.PASSED, ""
