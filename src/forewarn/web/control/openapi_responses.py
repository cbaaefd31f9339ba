"""The documented error answers of the control API: what OpenAPI tells of each request beside its
good answer.
"""

from litestar.openapi.datastructures import ResponseSpec

from forewarn.errors import (
    Error,
    Forbidden,
    Invalid,
    StoreLost,
    StoreUnusable,
    Unauthorized,
    Unavailable,
)
from forewarn.web.control import views
from forewarn.web.http_status import HeadTooLarge, TooManyRequests, TooSlow, status_of

EVERY: tuple[type[Error], ...] = (
    *(Invalid, Unauthorized, Forbidden, TooSlow, TooManyRequests, HeadTooLarge),
    *(Error, Unavailable, StoreLost, StoreUnusable),
)
"""What every request may get."""


def answers(*problems: type[Error]) -> dict[int, ResponseSpec]:
    """The documented error answers: these, and those that every request may get."""
    codes: dict[int, list[str]] = {}
    for problem in problems + EVERY:
        codes.setdefault(status_of(problem), []).append(problem.code)
    return {
        status: ResponseSpec(
            views.ErrorAnswer, generate_examples=False, description=", ".join(names)
        )
        for status, names in codes.items()
    }


ANY = answers()
