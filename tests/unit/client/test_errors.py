"""The guest's branch of the error hierarchy."""

from collections.abc import Iterator

from forewarn.client import EndpointError
from forewarn.client.errors import brief
from forewarn.errors import Error


def tree(kind: type[Error]) -> Iterator[type[Error]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def test_every_guest_error_has_a_unique_code() -> None:
    """A code is for machines: the command line looks errors up by it."""
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


def test_value_in_a_message_is_shortened() -> None:
    """The value comes from the endpoint, which must not be able to fill a guest's log."""
    assert brief("x") == "'x'"
    assert (
        max(len(brief("x" * 10**6)), len(brief(["x" * 10**6])), len(brief(b"\xff" * 10**6))) <= 100
    )
