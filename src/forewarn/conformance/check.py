"""A check: one rule of the wire, why it matters, and what it takes to look.

The registry, and the words of a failure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from forewarn.conformance.session import Stage

SHOWN_MAX = 300


class Level(StrEnum):
    """`must`: documented or captured from the real service.

    `should`: nobody knows, and this is what serves clients best.
    """

    MUST = "must"
    SHOULD = "should"


class Need(StrEnum):
    """What a check cannot do without."""

    EVENT = "event"
    APPROVE = "approve"
    CONTROL = "control"
    NAME = "name"
    PEER = "peer"
    STRANGER = "stranger"


NEEDS = {
    Need.EVENT: "an event in the document, or `--control` to make one",
    Need.APPROVE: "`--approve`, to send a POST",
    Need.CONTROL: "`--control`, to make an event",
    Need.NAME: "`--as`, to call in the name of a VM",
    Need.PEER: "a second `--as` of the same scope, and `--control` to know the scopes",
    Need.STRANGER: "a second `--as` of another scope, and `--control` to know the scopes",
}

Run = Callable[["Stage"], None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """`reason` says which client or promise needs it, `reference` where that stands;

    `needs` are asked for in their order.
    """

    name: str
    topic: str
    level: Level
    reason: str
    reference: str
    needs: tuple[Need, ...]
    run: Run


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order they run. The modules of `topic` fill it."""


class Failed(Exception):
    """The endpoint breaks the rule. The message says what was expected and what came."""


class NotRun(Exception):
    """The check could not look, and says why."""


def check(level: Level, reference: str, *needs: Need) -> Callable[[Run], Run]:
    """Register a function as a check: its name is the check's, its docstring the reason."""

    def register(run: Run) -> Run:
        _register(
            run.__name__, run, level, reference, needs, doc=run.__doc__, module=run.__module__
        )
        return run

    return register


def check_each(
    versions: Iterable[str], level: Level, reference: str, *needs: Need
) -> Callable[[Callable[["Stage", str], None]], Callable[["Stage", str], None]]:
    """The same for a function that looks at one api-version: a check for each of them."""

    def register(run: Callable[["Stage", str], None]) -> Callable[["Stage", str], None]:
        for version in versions:
            one = partial(_swap, run, version)
            _register(
                f"{run.__name__}_{version}",
                one,
                level,
                reference,
                needs,
                doc=run.__doc__,
                module=run.__module__,
            )
        return run

    return register


def _swap(run: Callable[["Stage", str], None], version: str, stage: "Stage") -> None:
    run(stage, version)


def _register(
    name: str,
    run: Run,
    level: Level,
    reference: str,
    needs: tuple[Need, ...],
    *,
    doc: str | None,
    module: str,
) -> None:
    name = name.replace("_", "-")
    assert doc, f"{name} has no docstring to be its reason"
    assert name not in CHECKS, f"{name} stands twice"
    CHECKS[name] = Check(
        name=name,
        topic=module.rpartition(".")[2],
        level=level,
        reason=" ".join(doc.split()),
        reference=reference,
        needs=needs,
        run=run,
    )


def fail(expected: str, came: object) -> NoReturn:
    raise Failed(f"expected {expected}; got {shown(came)}")


def holds(is_so: bool, expected: str, came: object) -> None:
    if not is_so:
        fail(expected, came)


def same(what: str, came: object, wanted: object) -> None:
    """1 is not 1.0 and not true: types count."""
    holds(came == wanted and isinstance(came, type(wanted)), f"{what} {shown(wanted)}", came)


def shown(came: object) -> str:
    """What came, on one line, and cut where it is long."""
    tell = getattr(came, "told", None)
    is_sentence = isinstance(came, str) and came.isprintable() and " " in came
    text = str(tell()) if tell else str(came) if is_sentence else repr(came)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}… ({len(text)} characters)"
