"""Hosts: list, show, maintenance and failures."""

from datetime import datetime
from typing import Literal

import msgspec
from litestar import Controller, get, post
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_202_ACCEPTED

from forewarn import errors
from forewarn.core.event import Cause, EventType
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
from forewarn.web.control.routes.vm import DEFAULT_NOTICE, Notice, earliest, to_utc

HOST_ERRORS = error_responses(errors.UnknownHost, errors.AlreadyPending, errors.NoticeTooShort)


class Maintenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to the VMs of a host, and why."""

    type: Literal["Freeze", "Reboot", "Redeploy"]
    cause: Literal["maintenance", "infrastructure", "live-migration"] = "maintenance"
    duration_seconds: int | None = None
    not_before: datetime | None = None
    description: str | None = None


class HostController(Controller):
    path = "/api/v1/hosts"
    tags = ("Hosts",)

    @get("/", responses=COMMON_ERRORS)
    async def list_hosts(
        self, engine: EngineDependency, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.HostList:
        """All hosts that have VMs or are declared in the fleet file, by name."""
        return await views.host_list(engine.board, limit, cursor)

    @get("/{host:str}", responses=error_responses(errors.UnknownHost))
    async def show_host(self, host: FromPath[str], engine: EngineDependency) -> views.HostView:
        """A host, its VMs, and the ids of the events that name any of them."""
        return await engine.look_up(lambda: views.host_view(engine.board, host))

    @post("/{host:str}/maintain", status_code=HTTP_202_ACCEPTED, responses=HOST_ERRORS)
    async def maintain(
        self,
        host: FromPath[str],
        data: JSONBody[Maintenance],
        operations: OperationsDependency,
        principal: PrincipalDependency,
    ) -> views.HostEvents:
        """Schedules maintenance of every VM on the host: an event per scope and update domain."""
        placed = await operations.maintain(
            host,
            by=principal.name,
            type=EventType(data.type),
            cause=Cause(data.cause),
            duration_seconds=data.duration_seconds,
            description=data.description,
            not_before=None if data.not_before is None else to_utc(data.not_before),
        )
        return views.host_events(placed)

    @post("/{host:str}/degrade", status_code=HTTP_202_ACCEPTED, responses=HOST_ERRORS)
    async def degrade(
        self,
        host: FromPath[str],
        operations: OperationsDependency,
        principal: PrincipalDependency,
        data: JSONBody[Notice] = DEFAULT_NOTICE,
    ) -> views.HostEvents:
        """Schedules a Redeploy of every VM on the host, because its hardware is failing."""
        placed = await operations.degrade(host, by=principal.name, not_before=earliest(data))
        return views.host_events(placed)

    @post("/{host:str}/fail", status_code=HTTP_202_ACCEPTED, responses=HOST_ERRORS)
    async def fail(
        self,
        host: FromPath[str],
        operations: OperationsDependency,
        principal: PrincipalDependency,
        data: JSONBody[EmptyBody] = EMPTY_BODY,
    ) -> views.HostEvents:
        """Reports that the host has failed: its VMs restart at once, without notice."""
        return views.host_events(await operations.fail(host, by=principal.name))
