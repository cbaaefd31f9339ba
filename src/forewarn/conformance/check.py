"""A check: one rule of the protocol, why it matters, and what it needs.

The registry of checks, and how a check says that the endpoint breaks its rule.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from forewarn.conformance.session import Session

VALUE_LENGTH_MAX = 300


class Level(StrEnum):
    """`must`: documented by Microsoft, or captured from the real service.

    `should`: neither is known, and this serves clients best.
    """

    MUST = "must"
    SHOULD = "should"


MUST, SHOULD = Level.MUST, Level.SHOULD


class Need(StrEnum):
    """What a check cannot run without."""

    EVENT = "event"
    APPROVE = "approve"
    CONTROL = "control"
    NAME = "name"
    PEER = "peer"
    STRANGER = "stranger"


NEEDS = {
    Need.EVENT: "an event in the document, or `--control` to create one",
    Need.APPROVE: "`--approve`, to send a POST",
    Need.CONTROL: "`--control`, to create an event",
    Need.NAME: "`--as`, to call as a VM",
    Need.PEER: "a second `--as` of the same scope, and `--control` to know the scopes",
    Need.STRANGER: "a second `--as` of another scope, and `--control` to know the scopes",
}

Function = TypeVar("Function", bound=Callable[..., None])


@dataclass(frozen=True, kw_only=True)
class Check:
    """`reason` names the client or promise that needs it, `reference` its source.

    `needs` are tested in order.
    """

    name: str
    topic: str
    level: Level
    reason: str
    reference: str
    needs: tuple[Need, ...]
    run: Callable[["Session"], None]


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order they run. The modules of `checks` register them."""


class Failed(Exception):
    """The endpoint breaks the rule. The message has what was expected and what came instead."""


class NotRun(Exception):
    """The check could not run; the message says why."""


def check(
    level: Level, reference: str, *needs: Need, each: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """Register a function: its name is the check's name, its docstring the reason.

    With `each` it is one check for each of these values, and takes the value first.
    """

    def register(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        runs: dict[str, Callable[..., None]]
        runs = {f"{name}-{value}": partial(function, value) for value in each}
        for full_name, run in (runs or {name: function}).items():
            assert full_name not in CHECKS, f"duplicate check {full_name}"
            assert function.__doc__, f"{full_name} needs a docstring as its reason"
            CHECKS[full_name] = Check(
                name=full_name,
                topic=function.__module__.rpartition(".")[2],
                level=level,
                reason=" ".join(function.__doc__.split()),
                reference=reference,
                needs=needs,
                run=run,
            )
        return function

    return register


def fail(expected: str, actual: object) -> NoReturn:
    raise Failed(f"expected {expected}; got {describe(actual)}")


def expect(condition: bool, expected: str, actual: object) -> None:  # noqa: FBT001
    if not condition:
        fail(expected, actual)


def expect_equal(what: str, actual: object, wanted: object) -> None:
    """Types count: 1 is neither 1.0 nor true."""
    is_equal = actual == wanted and isinstance(actual, type(wanted))
    expect(is_equal, f"{what} {describe(wanted)}", actual)


def describe(value: object) -> str:
    """A value on one line, shortened if it is long."""
    is_sentence = isinstance(value, str) and value.isprintable() and " " in value
    text = str(value) if is_sentence else repr(value)
    if len(text) <= VALUE_LENGTH_MAX:
        return text
    return f"{text[:VALUE_LENGTH_MAX]}… ({len(text)} characters)"
