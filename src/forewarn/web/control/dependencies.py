"""What routes share: the API call, the parameters of lists, and times in a request."""

from datetime import UTC, datetime
from typing import Annotated, NamedTuple

import msgspec
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from forewarn.engine.problems import Problems
from forewarn.engine.turns import Turn, yield_once
from forewarn.errors import Invalid
from forewarn.web.control.auth import Principal
from forewarn.web.service import Service

LIST_MAX = 10_000
LIST_DEFAULT = 1000
NAMES_MAX = 100

Name = FromPath[str]
Limit = Annotated[
    int, QueryParameter(ge=1, le=LIST_MAX, description="Items per page; `total` counts all.")
]
Cursor = Annotated[
    str | None, QueryParameter(description="The `next` of the previous page; omit for the first.")
]

Names = Annotated[
    str | None,
    QueryParameter(
        description=f"Only these, separated by commas, up to {NAMES_MAX}; unknown ones are left out"
    ),
]

OnHost = Annotated[str | None, QueryParameter(description="Only those on this host.")]
InScope = Annotated[
    str | None, QueryParameter(name="scope", description="Only those in this scope.")
]


class ApiCall(NamedTuple):
    """Who sends the request, and the service that it is for.

    The service of a retried request repeats the operation, which the rules recognize by its id.
    """

    principal: Principal
    service: Service

    @property
    def problems(self) -> Problems:
        """What is wrong with hosts and VMs, for what the response shows."""
        return self.service.hosts.problems

    @property
    def by(self) -> str:
        """The author of what the request changes, for the history."""
        return self.principal.name

    async def take_turn(self) -> None:
        """Before each slice of a long response."""
        await self.service.turns.take(self.principal.identity)


class PageRequest(msgspec.Struct, frozen=True):
    """Which part of a list is wanted, and the turns in which it is built."""

    limit: int = LIST_DEFAULT
    cursor: str | None = None
    take_turn: Turn = yield_once


Call = NamedDependency[ApiCall]
Page = NamedDependency[PageRequest]


def make_page(call: Call, limit: Limit = LIST_DEFAULT, cursor: Cursor = None) -> PageRequest:
    """The dependency `page`."""
    return PageRequest(limit, cursor, call.take_turn)


def split_names(text: str | None) -> list[str] | None:
    """The names in the parameter of a list; None if all items are wanted."""
    names = None if text is None else text.split(",")
    if names is not None and len(names) > NAMES_MAX:
        raise Invalid(f"expected at most {NAMES_MAX} names, got {len(names)}", names=len(names))
    return names


def to_utc(time: datetime | str | None, field: str = "not_before") -> datetime | None:
    """The time in UTC; Invalid if it has no time zone, or is not one of the years 1 to 9999."""
    if time is None:
        return None
    try:
        parsed = datetime.fromisoformat(time) if isinstance(time, str) else time
        if parsed.tzinfo is None:
            raise ValueError
        return parsed.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Invalid(
            f"{field}: expected a time with its zone, such as 2030-01-31T12:00:00Z, "
            f"got {str(time)[:80]!r}",
            field=field,
        ) from error
