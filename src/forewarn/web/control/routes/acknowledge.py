"""Approving events by the path and in the form of Azure's own API, for tools written for it.

Azure compares paths without case, so `ControlApp` passes them on in lower case.
"""

from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, post
from litestar.params import JSONBody, QueryParameter
from litestar.status_codes import HTTP_200_OK

from forewarn.errors import Invalid, UnknownEvent
from forewarn.web.control.dependencies import Call, Name
from forewarn.web.control.routes.event import UNKNOWN
from forewarn.wire.instance import has_resource

PROVIDER = "/providers/microsoft.maintenance/scheduledevents"
VERSIONS = ("2023-10-01-preview", "2025-10-01-preview", "2025-11-01")
"""The first has no list of events."""

IDS = "a list of 1 to 1000 event ids"
EventId = Annotated[str, msgspec.Meta(description="the id of an event")]
AnyRequest = Request[Any, Any, Any]
Version = Annotated[str, QueryParameter(name="api-version")]


class EventIdList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: Annotated[list[EventId], msgspec.Meta(min_length=1, max_length=1000, description=IDS)]


class Acknowledged(msgspec.Struct, frozen=True):
    value: str = "Successfully Approved"


class AcknowledgeController(Controller):
    path = (
        "/subscriptions/{subscription:str}/resourcegroups/{group:str}"
        "/providers/microsoft.compute/{type:str}/{name:str}" + PROVIDER
    )
    tags = ("Events",)

    @post("/{event:str}/acknowledge", status_code=HTTP_200_OK, errors=UNKNOWN, is_azure=True)
    async def acknowledge_event(
        self, event: Name, version: Version, call: Call, request: AnyRequest
    ) -> Acknowledged:
        """Approves an event, as Azure's API does."""
        return await _acknowledge(call, request, [event], version, VERSIONS)

    @post("/", status_code=HTTP_200_OK, errors=UNKNOWN, is_azure=True)
    async def acknowledge_events(
        self, version: Version, call: Call, data: JSONBody[EventIdList], request: AnyRequest
    ) -> Acknowledged:
        """Approves events of one resource, as Azure's API does: all of them, or none."""
        return await _acknowledge(call, request, data.value, version, VERSIONS[1:])


async def _acknowledge(
    call: Call, request: AnyRequest, event_ids: list[str], version: str, accepted: tuple[str, ...]
) -> Acknowledged:
    if version not in accepted:
        raise Invalid(f"api-version: expected {' or '.join(accepted)}, got {version!r}")
    resource = request.scope["path"].partition(PROVIDER)[0]
    for event_id in event_ids:
        scope, event = await call.service.operations.event(event_id)
        if not has_resource(scope, event.resources[0], resource):
            raise UnknownEvent(f"{resource} has no event {event.id}", event=event.id)
    await call.service.operations.approve(*event_ids, by=call.by)
    return Acknowledged()
