"""The history: entries by VM, scope, host, event, change and time, newest first."""

from typing import Annotated

import msgspec
from litestar import Controller, Response, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter
from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.engine.entry import Entry
from forewarn.errors import Invalid
from forewarn.history.query import EntryFilter, read
from forewarn.web.control import pagination
from forewarn.web.control.dependencies import Call, Cursor, to_utc

PAGE_MAX = 1000
POSITION_DIGITS_MAX = 18


def make_filter(
    *,
    vm: Annotated[str, QueryParameter(description="Only entries about this VM.")] = "",
    of_scope: Annotated[
        str, QueryParameter(name="scope", description="Only entries of this scope.")
    ] = "",
    host: Annotated[str, QueryParameter(description="Only entries of this host.")] = "",
    event: Annotated[
        str, QueryParameter(description="Only entries of the event with this id.")
    ] = "",
    what: Annotated[
        str, QueryParameter(description=f"Only this kind of change: {', '.join(ChangeKind)}.")
    ] = "",
) -> EntryFilter:
    """The dependency `wanted`: which entries the history or the stream is to show."""
    if what and what not in list(ChangeKind):
        raise Invalid(
            f"what: expected one of {', '.join(ChangeKind)}, got {what[:80]!r}", field="what"
        )
    return EntryFilter(vm=vm, scope=of_scope, host=host, event=event.upper(), what=what)


Wanted = NamedDependency[EntryFilter]


class HistoryList(msgspec.Struct, frozen=True):
    """Entries, newest first. A page with filters may be empty and still have a `next`."""

    history: list[Entry]
    next: str | None


class HistoryController(Controller):
    path = "/api/v1/history"
    tags = ("History",)

    @get("/")
    async def read_history(
        self,
        call: Call,
        wanted: Wanted,
        *,
        since: Annotated[
            str | None, QueryParameter(description="Only from this time on, RFC 3339.")
        ] = None,
        until: Annotated[
            str | None, QueryParameter(description="Only before this time, RFC 3339.")
        ] = None,
        limit: Annotated[
            int, QueryParameter(ge=1, le=PAGE_MAX, description="Entries per page.")
        ] = 100,
        cursor: Cursor = None,
    ) -> Response[HistoryList]:
        """What happened, newest first: when, by whom, what and why."""
        wanted = replace(wanted, since=to_utc(since, "since"), until=to_utc(until, "until"))
        before = None if cursor is None else _decode_position(cursor)
        page = await read(
            call.service.engine.store,
            wanted,
            limit=limit,
            before=before,
            take_turn=call.take_turn,
        )
        after = None if page.next is None else pagination.encode((str(page.next),))
        return await pagination.render_list(HistoryList(page.entries, after), call.take_turn)


def _decode_position(cursor: str) -> int:
    (position, *more) = pagination.decode(cursor)
    is_number = position.isascii() and position.isdigit()
    if more or not is_number or len(position) > POSITION_DIGITS_MAX:
        raise pagination.invalid_cursor(cursor)
    return int(position)
