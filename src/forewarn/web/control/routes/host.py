"""Hosts: list, show, maintenance and failures."""

from collections.abc import Collection
from datetime import datetime
from functools import partial
from typing import Annotated, Literal

import msgspec
from litestar import Controller, Response, delete, get, post
from litestar.params import JSONBody, QueryParameter
from litestar.status_codes import HTTP_200_OK, HTTP_202_ACCEPTED

from forewarn import errors
from forewarn.core.event import Cause, EventType, is_move
from forewarn.core.fleet import Power
from forewarn.engine.managed_hosts import HOST_KEY, refuse_left_running
from forewarn.web.control import lists, views
from forewarn.web.control.dependencies import Call, Name, Names, Page, split_names, to_utc
from forewarn.web.control.pagination import render_list
from forewarn.web.control.routes.vm import EARLIEST_START, NOTICE, NoticeBody
from forewarn.web.control.views import HostEvents, HostList, HostView
from forewarn.web.service import Service

HOST_ERRORS = (errors.UnknownHost, errors.AlreadyPending, errors.NoticeTooShort)
LISTED_MAX = 5
DURATION = msgspec.Meta(description="the length of the impact in whole seconds; -1 if unknown")
FailImpacts = Annotated[
    bool, QueryParameter(description="Impacts that wait for the daemon fail; else it is refused.")
]
Fenced = Annotated[
    bool,
    QueryParameter(
        description="VMs there are off, and stay off: they may be started on other hosts."
    ),
]
StillRunning = Annotated[
    bool,
    QueryParameter(
        description="Only the daemon goes: its VMs stay there, and run or not. Nothing that may run"
        " there is started on other hosts."
    ),
]
DESCRIPTION = msgspec.Meta(description="text that VMs read")
ALLOW_UNREACHABLE = msgspec.Meta(
    description="true to announce it also where the daemon of a host is away: its VMs may be unable"
    " to read it, and its impacts wait for the daemon, or fail if it was forgotten"
)


async def refuse_unreachable(service: Service, hosts: Collection[str]) -> None:
    """Refuse hosts on which nothing can be done at present, also by what other servers know."""
    reasons = await service.hosts.away_reasons(hosts)
    if reasons:
        await service.engine.catch_up()
        reasons = await service.hosts.away_reasons(hosts)
    if not reasons:
        return
    shown = [f"{host}: {reason}" for host, reason in reasons.items()]
    more = f"; and {len(shown) - LISTED_MAX} more hosts" if len(shown) > LISTED_MAX else ""
    raise errors.DaemonAway(
        f"{'; '.join(shown[:LISTED_MAX])}{more}; VMs there may be unable to read an event, and its"
        " impacts would wait or fail; expected a daemon that is connected, or `allow_unreachable`",
        hosts=sorted(reasons),
    )


class Maintenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to the VMs of a host, and why."""

    type: Literal["Freeze", "Reboot", "Redeploy"]
    cause: Literal["maintenance", "infrastructure", "live-migration"] = "maintenance"
    duration_seconds: Annotated[int | None, DURATION] = None
    not_before: Annotated[datetime | None, EARLIEST_START] = None
    description: Annotated[str | None, DESCRIPTION] = None
    allow_unreachable: Annotated[bool, ALLOW_UNREACHABLE] = False


class ForgottenHost(msgspec.Struct, frozen=True):
    host: str


class HostController(Controller):
    path = "/api/v1/hosts"
    tags = ("Hosts",)

    @get("/")
    async def list_hosts(self, call: Call, page: Page, names: Names = None) -> Response[HostList]:
        """All hosts that have VMs or are declared in the fleet file, or those that are named."""
        board, managed = call.service.engine.board, call.service.hosts.managed
        return await render_list(
            await lists.host_list(board, managed, call.problems, page, split_names(names)),
            page.take_turn,
        )

    @get("/{host:str}", errors=(errors.UnknownHost,))
    async def show_host(self, host: Name, call: Call) -> HostView:
        """A host, its VMs, and the ids of the events that name any of them."""
        engine, managed = call.service.engine, call.service.hosts.managed
        return await engine.look_up(
            lambda: views.host_view(engine.board, managed, call.problems, host)
        )

    @delete(
        "/{host:str}/daemon",
        status_code=HTTP_200_OK,
        errors=(errors.UnknownHost, errors.Refused),
    )
    async def forget_daemon(
        self,
        host: Name,
        call: Call,
        *,
        fail_impacts: FailImpacts = False,
        fenced: Fenced = False,
        still_running: StillRunning = False,
    ) -> ForgottenHost:
        """Removes a host daemon that does not come back. Its VMs stay in the fleet.

        Either `fenced` or `still_running` is required. A host that was forgotten can be forgotten
        again, with the other one.
        """
        if fenced and still_running:
            raise errors.Invalid("expected `fenced` or `still_running`, not both")
        power = Power.STOPPED if fenced else Power.UNKNOWN if still_running else None
        await call.service.hosts.removal.forget(
            host, by=call.by, fail_impacts=fail_impacts, power=power
        )
        return ForgottenHost(host)

    @post(
        "/{host:str}/maintain",
        status_code=HTTP_202_ACCEPTED,
        errors=(*HOST_ERRORS, errors.DaemonAway, errors.Refused),
    )
    async def maintain_host(
        self, host: Name, call: Call, data: JSONBody[Maintenance]
    ) -> HostEvents:
        """Schedules maintenance of every VM on the host: an event per scope and update domain.

        Refused if the daemon of the host is away, unless `allow_unreachable`. A move is also
        refused if the host was forgotten and left running: its VMs are started nowhere else.
        """
        service = call.service
        await service.engine.look_up(lambda: service.engine.board.scopes_on(host))
        if is_move(EventType(data.type), Cause(data.cause)):
            await service.hosts.refuse_moves([host])
        if not data.allow_unreachable and service.hosts.away_reason(host):
            await service.engine.catch_up()
            if not service.operations.is_repeated(host):
                await refuse_unreachable(service, [host])
        placed = await call.service.operations.maintain(
            host,
            by=call.by,
            type=EventType(data.type),
            cause=Cause(data.cause),
            duration_seconds=data.duration_seconds,
            description=data.description,
            not_before=to_utc(data.not_before),
        )
        return views.host_events(call.problems, placed, host)

    @post(
        "/{host:str}/degrade", status_code=HTTP_202_ACCEPTED, errors=(*HOST_ERRORS, errors.Refused)
    )
    async def degrade_host(self, host: Name, call: Call, data: NoticeBody = NOTICE) -> HostEvents:
        """Schedules a Redeploy of every VM on the host, because its hardware is failing.

        Refused for a host that was forgotten and left running: its VMs are started nowhere else.
        """
        await call.service.hosts.refuse_moves([host])
        not_before = to_utc(data.not_before)
        placed = await call.service.operations.degrade(host, by=call.by, not_before=not_before)
        return views.host_events(call.problems, placed, host)

    @post("/{host:str}/fail", status_code=HTTP_202_ACCEPTED, errors=(*HOST_ERRORS, errors.Refused))
    async def fail_host(self, host: Name, call: Call) -> HostEvents:
        """Reports that the host has failed: its VMs restart now, without notice.

        Refused for a host that was forgotten and left running: its VMs may run there.
        """
        check = partial(refuse_left_running, host)
        await call.service.engine.update([HOST_KEY.format(host)], check, by=call.by)
        placed = await call.service.operations.fail(host, by=call.by, check=check)
        return views.host_events(call.problems, placed, host)
