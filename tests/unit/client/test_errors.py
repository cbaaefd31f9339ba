"""The guest's branch of the tree of problems."""

from collections.abc import Iterator

from forewarn.client import EndpointError
from forewarn.client.errors import brief
from forewarn.errors import Error


def tree(kind: type[Error]) -> Iterator[type[Error]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def test_every_problem_of_the_guest_has_a_code_of_its_own() -> None:
    """A code is for machines: the command line finds a problem by it."""
    named = [
        kind
        for kind in tree(Error)
        if "code" in vars(kind) and kind.__module__.startswith("forewarn.")
    ]
    guest = {kind.code for kind in tree(EndpointError)}

    assert len({kind.code for kind in named}) == len(named)
    assert guest == {
        "endpoint_problem",
        "no_answer",
        "bad_answer",
        "bad_document",
        "redirected",
        "declined",
        "try_later",
    }


def test_a_message_shows_enough_of_a_value_and_never_all() -> None:
    """An endpoint decides what a guest writes into its log; it must not fill it."""
    assert brief("x") == "'x'"
    assert (
        max(len(brief("x" * 10**6)), len(brief(["x" * 10**6])), len(brief(b"\xff" * 10**6))) <= 100
    )
