"""Events: list, show, approve, cancel, extend, complete."""

from datetime import datetime

import msgspec
from litestar import Controller, get, post
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_200_OK

from forewarn import errors
from forewarn.web.control import views
from forewarn.web.control.dependencies import (
    EMPTY_BODY,
    Cursor,
    EmptyBody,
    EngineDependency,
    Limit,
    OperationsDependency,
    PrincipalDependency,
)
from forewarn.web.control.openapi import COMMON_ERRORS, error_responses
from forewarn.web.control.routes.vm import to_utc

UNKNOWN = (errors.UnknownEvent, errors.EventEnded)
EVENT_ERRORS = error_responses(*UNKNOWN, errors.WrongStatus)


class Extension(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new earliest start."""

    not_before: datetime


class ApprovalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The VM to approve for, by the scope's policy; without one, the operator approves for all."""

    vm: str = ""


OPERATOR = ApprovalBody()


class EventController(Controller):
    path = "/api/v1/events"
    tags = ("Events",)

    @get("/", responses=COMMON_ERRORS)
    async def list_events(
        self, engine: EngineDependency, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.EventList:
        """All events that are Scheduled or Started, oldest first."""
        return await views.event_list(engine.board, limit, cursor)

    @get("/{event:str}", responses=error_responses(*UNKNOWN))
    async def show_event(
        self, event: FromPath[str], operations: OperationsDependency
    ) -> views.EventView:
        """A Scheduled or Started event. Its id is case-insensitive."""
        return views.event_view(*await operations.event(event))

    @post("/{event:str}/approve", status_code=HTTP_200_OK, responses=EVENT_ERRORS)
    async def approve(
        self,
        event: FromPath[str],
        operations: OperationsDependency,
        principal: PrincipalDependency,
        data: JSONBody[ApprovalBody] = OPERATOR,
    ) -> views.EventResult:
        """Lets a Scheduled event start before its NotBefore. Repeating it changes nothing."""
        placed = await operations.approve(event, by=principal.name, vm=data.vm)
        return views.event_result(placed)

    @post("/{event:str}/cancel", status_code=HTTP_200_OK, responses=EVENT_ERRORS)
    async def cancel(
        self,
        event: FromPath[str],
        operations: OperationsDependency,
        principal: PrincipalDependency,
        data: JSONBody[EmptyBody] = EMPTY_BODY,
    ) -> views.EventResult:
        """Cancels a Scheduled event, and returns its last state."""
        return views.event_result(await operations.cancel(event, by=principal.name))

    @post(
        "/{event:str}/extend",
        status_code=HTTP_200_OK,
        responses=error_responses(
            *UNKNOWN, errors.WrongStatus, errors.NoticeTooShort, errors.Refused
        ),
    )
    async def extend(
        self,
        event: FromPath[str],
        data: JSONBody[Extension],
        operations: OperationsDependency,
        principal: PrincipalDependency,
    ) -> views.EventResult:
        """Postpones a Scheduled event. A Terminate cannot be postponed."""
        not_before = to_utc(data.not_before)
        placed = await operations.extend(event, by=principal.name, not_before=not_before)
        return views.event_result(placed)

    @post("/{event:str}/complete", status_code=HTTP_200_OK, responses=EVENT_ERRORS)
    async def complete(
        self,
        event: FromPath[str],
        operations: OperationsDependency,
        principal: PrincipalDependency,
        data: JSONBody[EmptyBody] = EMPTY_BODY,
    ) -> views.EventResult:
        """Reports that the impact of a Started event is over, and returns its last state."""
        return views.event_result(await operations.complete(event, by=principal.name))
