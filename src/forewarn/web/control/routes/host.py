"""Hosts: list, show, maintenance and failures."""

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from litestar import Controller, delete, get, post
from litestar.params import JSONBody, QueryParameter
from litestar.status_codes import HTTP_200_OK, HTTP_202_ACCEPTED

from forewarn import errors
from forewarn.core.event import Cause, EventType
from forewarn.web.control import views
from forewarn.web.control.dependencies import Call, Name, Names, Page, split_names, to_utc
from forewarn.web.control.routes.vm import EARLIEST_START, NOTICE, NoticeBody
from forewarn.web.control.views import HostEvents, HostList, HostView

HOST_ERRORS = (errors.UnknownHost, errors.AlreadyPending, errors.NoticeTooShort)
DURATION = msgspec.Meta(description="the length of the impact in whole seconds; -1 if unknown")
FailImpacts = Annotated[
    bool, QueryParameter(description="Impacts that wait for the daemon fail; else it is refused.")
]
DESCRIPTION = msgspec.Meta(description="text that VMs read")


class Maintenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to the VMs of a host, and why."""

    type: Literal["Freeze", "Reboot", "Redeploy"]
    cause: Literal["maintenance", "infrastructure", "live-migration"] = "maintenance"
    duration_seconds: Annotated[int | None, DURATION] = None
    not_before: Annotated[datetime | None, EARLIEST_START] = None
    description: Annotated[str | None, DESCRIPTION] = None


class ForgottenHost(msgspec.Struct, frozen=True):
    host: str


class HostController(Controller):
    path = "/api/v1/hosts"
    tags = ("Hosts",)

    @get("/")
    async def list_hosts(self, call: Call, page: Page, names: Names = None) -> HostList:
        """All hosts that have VMs or are declared in the fleet file, or those that are named."""
        board, managed = call.service.engine.board, call.service.hosts.managed
        return await views.host_list(board, managed, page, split_names(names))

    @get("/{host:str}", errors=(errors.UnknownHost,))
    async def show_host(self, host: Name, call: Call) -> HostView:
        """A host, its VMs, and the ids of the events that name any of them."""
        engine, managed = call.service.engine, call.service.hosts.managed
        return await engine.look_up(lambda: views.host_view(engine.board, managed, host))

    @delete(
        "/{host:str}/daemon",
        status_code=HTTP_200_OK,
        errors=(errors.UnknownHost, errors.Refused),
    )
    async def forget_daemon(
        self, host: Name, call: Call, *, fail_impacts: FailImpacts = False
    ) -> ForgottenHost:
        """Removes a host daemon that is gone for good. Its VMs stay in the fleet."""
        await call.service.hosts.managed.forget(host, by=call.by, fail_impacts=fail_impacts)
        return ForgottenHost(host)

    @post("/{host:str}/maintain", status_code=HTTP_202_ACCEPTED, errors=HOST_ERRORS)
    async def maintain_host(
        self, host: Name, call: Call, data: JSONBody[Maintenance]
    ) -> HostEvents:
        """Schedules maintenance of every VM on the host: an event per scope and update domain."""
        placed = await call.service.operations.maintain(
            host,
            by=call.by,
            type=EventType(data.type),
            cause=Cause(data.cause),
            duration_seconds=data.duration_seconds,
            description=data.description,
            not_before=to_utc(data.not_before),
        )
        return views.host_events(placed)

    @post("/{host:str}/degrade", status_code=HTTP_202_ACCEPTED, errors=HOST_ERRORS)
    async def degrade_host(self, host: Name, call: Call, data: NoticeBody = NOTICE) -> HostEvents:
        """Schedules a Redeploy of every VM on the host, because its hardware is failing."""
        not_before = to_utc(data.not_before)
        placed = await call.service.operations.degrade(host, by=call.by, not_before=not_before)
        return views.host_events(placed)

    @post("/{host:str}/fail", status_code=HTTP_202_ACCEPTED, errors=HOST_ERRORS)
    async def fail_host(self, host: Name, call: Call) -> HostEvents:
        """Reports that the host has failed: its VMs restart now, without notice."""
        return views.host_events(await call.service.operations.fail(host, by=call.by))
