"""The history: entries by VM, scope, host, event, change and time, newest first."""

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from litestar import Controller, get
from litestar.params import QueryParameter

from forewarn.core.change import ChangeKind
from forewarn.engine.entry import Entry
from forewarn.errors import Invalid
from forewarn.history.query import EntryFilter, read
from forewarn.web.control import pagination
from forewarn.web.control.dependencies import EngineDependency
from forewarn.web.control.openapi import COMMON_ERRORS

PAGE_MAX = 1000
POSITION_DIGITS_MAX = 18

VmFilter = Annotated[str, QueryParameter(name="vm", description="Only entries about this VM.")]
ScopeFilter = Annotated[
    str, QueryParameter(name="scope", description="Only entries of this scope.")
]
HostFilter = Annotated[str, QueryParameter(name="host", description="Only entries of this host.")]
EventFilter = Annotated[
    str, QueryParameter(name="event", description="Only entries of this event, by its id.")
]
ChangeFilter = Annotated[
    str,
    QueryParameter(name="what", description=f"Only this kind of change: {', '.join(ChangeKind)}."),
]
Since = Annotated[
    str | None, QueryParameter(name="since", description="Only from this time on, RFC 3339.")
]
Until = Annotated[
    str | None, QueryParameter(name="until", description="Only before this time, RFC 3339.")
]
PageLimit = Annotated[
    int, QueryParameter(name="limit", ge=1, le=PAGE_MAX, description="Entries per page.")
]
PageCursor = Annotated[
    str | None, QueryParameter(name="cursor", description="The `next` of the previous page.")
]


class HistoryList(msgspec.Struct, frozen=True):
    """Entries, newest first. A page with filters may be empty and still have a `next`."""

    history: list[Entry]
    next: str | None


class HistoryController(Controller):
    path = "/api/v1/history"
    tags = ("History",)

    @get("/", responses=COMMON_ERRORS)
    async def read_history(
        self,
        engine: EngineDependency,
        *,
        vm: VmFilter = "",
        of_scope: ScopeFilter = "",
        host: HostFilter = "",
        event: EventFilter = "",
        what: ChangeFilter = "",
        since: Since = None,
        until: Until = None,
        limit: PageLimit = 100,
        cursor: PageCursor = None,
    ) -> HistoryList:
        """What happened, newest first: when, by whom, what and why."""
        wanted = EntryFilter(
            vm=vm,
            scope=of_scope,
            host=host,
            event=event.upper(),
            what=check_change(what),
            since=_parse_time(since, "since"),
            until=_parse_time(until, "until"),
        )
        before = None if cursor is None else _decode_position(cursor)
        page = await read(engine.store, wanted, limit=limit, before=before)
        after = None if page.next is None else pagination.encode((str(page.next),))
        return HistoryList(page.entries, after)


def check_change(name: str) -> str:
    """The name of a kind of change, or "" for all; Invalid if it is unknown."""
    if name and name not in list(ChangeKind):
        raise Invalid(
            f"what: expected one of {', '.join(ChangeKind)}, got {name[:80]!r}", field="what"
        )
    return name


def _parse_time(text: str | None, field: str) -> datetime | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise ValueError
        return time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Invalid(
            f"{field}: expected a time such as 2030-01-31T12:00:00Z, got {text[:80]!r}",
            field=field,
        ) from error


def _decode_position(cursor: str) -> int:
    (position, *more) = pagination.decode(cursor)
    is_number = position.isascii() and position.isdigit()
    if more or not is_number or len(position) > POSITION_DIGITS_MAX:
        raise pagination.invalid_cursor(cursor)
    return int(position)
