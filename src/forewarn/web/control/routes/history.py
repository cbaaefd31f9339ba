"""ChangeKind happened, over the control API: entries by VM, scope, host, event, change and time, the
newest first.
"""

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from forewarn.core.change import ChangeKind
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Entry
from forewarn.errors import Invalid
from forewarn.history.query import EntryFilter, read
from forewarn.web.control import pagination as cursors
from forewarn.web.control.openapi_responses import ANY

PAGE_MAX = 1000

OfVm = Annotated[str, QueryParameter(name="vm", description="Only what concerns this VM.")]
OfScope = Annotated[
    str, QueryParameter(name="scope", description="Only what became true in this scope.")
]
OfHost = Annotated[str, QueryParameter(name="host", description="Only what happened on this host.")]
OfEvent = Annotated[
    str, QueryParameter(name="event", description="Only this event; its id in any case of letters.")
]
OfChange = Annotated[
    str,
    QueryParameter(name="what", description=f"Only changes of this kind: {', '.join(ChangeKind)}."),
]
Since = Annotated[
    str | None, QueryParameter(name="since", description="Only from this moment on, RFC 3339.")
]
Until = Annotated[
    str | None, QueryParameter(name="until", description="Only before this moment, RFC 3339.")
]
PageLimit = Annotated[
    int, QueryParameter(name="limit", ge=1, le=PAGE_MAX, description="At most so many.")
]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", description="The `next` of the page before.")
]


class Entries(msgspec.Struct, frozen=True):
    """Entries, the newest first.

    A page may be empty and `next` still go on: each looks at so many notes and no more.
    """

    history: list[Entry]
    next: str | None


class Histories(Controller):
    path = "/api/v1/history"
    tags = ("History",)

    @get("/", responses=ANY)
    async def read_history(
        self,
        engine: NamedDependency[Engine],
        *,
        vm: OfVm = "",
        of_scope: OfScope = "",
        host: OfHost = "",
        event: OfEvent = "",
        what: OfChange = "",
        since: Since = None,
        until: Until = None,
        limit: PageLimit = 100,
        cursor: Cursor = None,
    ) -> Entries:
        """ChangeKind happened, the newest first: when, by whom, what and why."""
        wanted = EntryFilter(
            vm=vm,
            scope=of_scope,
            host=host,
            event=event.upper(),
            what=change(what),
            since=moment(since, "since"),
            until=moment(until, "until"),
        )
        page = await read(engine.store, wanted, limit=limit, before=_number(cursor))
        return Entries(
            page.entries, None if page.next is None else cursors.encode((str(page.next),))
        )


def change(said: str) -> str:
    """The kind of change that the query names; Invalid if there is none of this name."""
    if said and said not in list(ChangeKind):
        raise Invalid(
            f"what: expected one of {', '.join(ChangeKind)}, got {said[:80]!r}", field="what"
        )
    return said


def moment(said: str | None, field: str) -> datetime | None:
    """A moment of the query in UTC; Invalid if it is none, or has no time zone."""
    if said is None:
        return None
    try:
        found = datetime.fromisoformat(said)
        if found.tzinfo is None:
            raise ValueError
        return found.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Invalid(
            f"{field}: expected a moment such as 2030-01-31T12:00:00Z, got {said[:80]!r}",
            field=field,
        ) from error


def _number(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    (key, *more) = cursors.decode(cursor)
    if more or not key.isascii() or not key.isdigit() or len(key) > 18:
        raise Invalid(
            f"cursor: expected the `next` of an earlier answer, got {cursor[:80]!r}", field="cursor"
        )
    return int(key)
