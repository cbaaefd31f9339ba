"""Events: list, show, approve, cancel, extend, complete."""

from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Controller, Response, get, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK

from forewarn import errors
from forewarn.core.event import ended_before
from forewarn.web.control import lists, views
from forewarn.web.control.dependencies import (
    Call,
    InScope,
    Name,
    Names,
    OnHost,
    Page,
    split_names,
    to_utc,
)
from forewarn.web.control.lists import Filter
from forewarn.web.control.pagination import render_list
from forewarn.web.control.routes.vm import EARLIEST_START
from forewarn.web.control.views import EventList, EventResult, EventView

UNKNOWN = (errors.UnknownEvent, errors.EventEnded)
EVENT_ERRORS = (*UNKNOWN, errors.WrongStatus)


class Extension(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    not_before: Annotated[datetime, EARLIEST_START]


class ApprovalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The VM to approve for, by the scope's policy; without one, the operator approves for all."""

    vm: Annotated[str, msgspec.Meta(description="the name of the VM to approve for")] = ""


OPERATOR = ApprovalBody()


class EventController(Controller):
    path = "/api/v1/events"
    tags = ("Events",)

    @get("/", errors=(errors.UnknownHost, errors.UnknownScope))
    async def list_events(
        self,
        call: Call,
        page: Page,
        *,
        ids: Names = None,
        host: OnHost = None,
        of_scope: InScope = None,
    ) -> Response[EventList]:
        """All events that are Scheduled or Started, or the wanted ones, oldest first."""
        wanted = Filter(split_names(ids), host, of_scope)
        engine = call.service.engine
        await engine.look_up(lambda: wanted.vms(engine.board))
        return await render_list(
            await lists.event_list(engine.board, call.problems, page, wanted), page.take_turn
        )

    @get("/{event:str}", errors=UNKNOWN)
    async def show_event(self, event: Name, call: Call) -> EventView:
        """A Scheduled or Started event. Its id is case-insensitive."""
        return views.event_view(call.problems, *await call.service.operations.event(event))

    @post("/{event:str}/approve", status_code=HTTP_200_OK, errors=EVENT_ERRORS)
    async def approve_event(
        self, event: Name, call: Call, data: JSONBody[ApprovalBody] = OPERATOR
    ) -> EventResult:
        """Lets a Scheduled event start before its NotBefore. Repeating it changes nothing."""
        placed = await call.service.operations.approve(event, by=call.by, vm=data.vm)
        return views.event_result(call.problems, placed)

    @post("/{event:str}/cancel", status_code=HTTP_200_OK, errors=EVENT_ERRORS)
    async def cancel_event(self, event: Name, call: Call) -> EventResult:
        """Cancels a Scheduled event, and returns its last state."""
        canceled = await call.service.operations.cancel(event, by=call.by)
        return views.event_result(
            call.problems, canceled or ended_before(f"event {event.upper()} was canceled")
        )

    @post(
        "/{event:str}/extend",
        status_code=HTTP_200_OK,
        errors=(*EVENT_ERRORS, errors.NoticeTooShort, errors.Refused),
    )
    async def extend_event(self, event: Name, call: Call, data: JSONBody[Extension]) -> EventResult:
        """Postpones a Scheduled event. A Terminate cannot be postponed."""
        not_before = to_utc(data.not_before)
        assert not_before is not None
        placed = await call.service.operations.extend(event, by=call.by, not_before=not_before)
        return views.event_result(call.problems, placed)

    @post("/{event:str}/complete", status_code=HTTP_200_OK, errors=EVENT_ERRORS)
    async def complete_event(self, event: Name, call: Call) -> EventResult:
        """Reports that the impact of a Started event is over, and returns its last state."""
        completed = await call.service.operations.complete(event, by=call.by)
        return views.event_result(
            call.problems, completed or ended_before(f"event {event.upper()} was completed")
        )
