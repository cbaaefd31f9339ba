"""A check: one rule of the protocol, why it matters, and what it needs.

The registry of checks, and how a check says that the endpoint breaks its rule.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

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


class Basis(StrEnum):
    """`protocol`: documented by Microsoft, or captured. `http`: an RFC says so.

    `convention`: neither; what clients cope with best, in Forewarn's judgement.
    """

    PROTOCOL = "protocol"
    HTTP = "http"
    CONVENTION = "convention"


class Need(StrEnum):
    """What a check cannot run without, and how to provide it."""

    EVENT = "event", "an event in the document, or `--control` to create one"
    APPROVE = "approve", "`--approve`, to send a POST"
    CONTROL = "control", "`--control`, to create an event"
    NAME = "name", "`--as`, to call as a VM"
    PEER = "peer", "a second `--as` of the same scope, and `--control` to know the scopes"
    STRANGER = "stranger", "a second `--as` of another scope, and `--control` to know the scopes"

    remedy: str

    def __new__(cls, value: str, remedy: str) -> "Need":
        need = str.__new__(cls, value)
        need._value_, need.remedy = value, remedy
        return need


class Check(NamedTuple):
    """`reason` names the client or promise that needs it, `reference` its source.

    `needs` are tested in order.
    """

    name: str
    topic: str
    level: Level
    needs: tuple[Need, ...]
    reference: str
    reason: str
    run: "Body"

    @property
    def basis(self) -> Basis:
        if self.reference.startswith("RFC"):
            return Basis.HTTP
        return Basis.PROTOCOL if self.level is Level.MUST else Basis.CONVENTION


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order they run. The modules of `checks` register them."""

Function = TypeVar("Function", bound=Callable[..., None])
Body = Callable[["Session"], object]


class Failed(Exception):
    """The endpoint breaks the rule. The message has what was expected and what came instead."""


class NotRun(Exception):
    """The check could not run; the message says why."""


def check(
    level: Level,
    reference: str,
    *needs: Need,
    each: Iterable[str] = ("",),
    body: Body | None = None,
) -> Callable[[Function], Function]:
    """Register a function: its name is the check's name, its docstring the reason.

    With `each` it is one check for each of these values, and takes the value first.
    """

    def register(function: Function) -> Function:
        for value in each:
            name = f"{function.__name__}-{value}".strip("-").replace("_", "-")
            assert name not in CHECKS, f"duplicate check {name}"
            assert function.__doc__, f"{name} needs a docstring as its reason"
            reason = " ".join(function.__doc__.split())
            run = body or (partial(function, value) if value else function)
            topic = function.__module__.rpartition(".")[2]
            CHECKS[name] = Check(name, topic, level, needs, reference, reason, run)
        return function

    return register


def rule(level: Level, reference: str, body: Body, *needs: Need) -> Callable[[Function], Function]:
    """Register a check that is a row of a table: `body` is what is sent and what is expected.

    The function below it has only the name and the reason.
    """
    return check(level, reference, *needs, body=body)


def fail(expected: str, actual: object) -> NoReturn:
    raise Failed(f"expected {expected}; got {describe(actual)}")


def expect(condition: object, expected: str, actual: object) -> None:
    if not condition:
        fail(expected, actual)


def expect_equal(what: str, actual: object, wanted: object) -> None:
    """Types count: 1 is neither 1.0 nor true."""
    is_same_type = isinstance(actual, type(wanted))
    if isinstance(actual, bool):  # in Python, a kind of int
        is_same_type = isinstance(wanted, bool)
    expect(is_same_type and actual == wanted, f"{what} {describe(wanted)}", actual)


def describe(value: object) -> str:
    """A value on one line, shortened if it is long."""
    is_sentence = isinstance(value, str) and value.isprintable() and " " in value
    text = str(value) if is_sentence else repr(value)
    if len(text) <= VALUE_LENGTH_MAX:
        return text
    return f"{text[:VALUE_LENGTH_MAX]}… ({len(text)} characters)"
