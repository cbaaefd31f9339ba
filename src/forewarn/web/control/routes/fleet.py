"""What an operator may call, on a listener of its own. Requests become words of `Operations`; what
is shown is in `views.py`.

No rules and no statuses of problems here: the rules are in `core/`, the statuses in `problems.py`.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, MediaType, Request, Response, get, post, put
from litestar.di import NamedDependency, Provide
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, HeaderParameter, JSONBody, QueryParameter, RawBody
from litestar.status_codes import HTTP_200_OK, HTTP_202_ACCEPTED
from litestar.types import ControllerRouterHandler

from forewarn import errors
from forewarn.auth.tokens import Role
from forewarn.config import is_loopback
from forewarn.core.event import Cause, EventType
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations, Told
from forewarn.errors import Invalid, Unavailable
from forewarn.fleetfile.parser import compute_etag, dump_json, parse
from forewarn.fleetfile.schema import SCHEMA
from forewarn.web.control import views
from forewarn.web.control.app import Application
from forewarn.web.control.auth import DELAY_SECONDS, Authenticator, Principal
from forewarn.web.control.checks import OPEN, door
from forewarn.web.control.docs_page import docs
from forewarn.web.control.error_handlers import CONTROL_HANDLERS
from forewarn.web.control.idempotency import Answers
from forewarn.web.control.openapi import BodyFleet, BodyOptional, describe
from forewarn.web.control.openapi_responses import ANY as ANY
from forewarn.web.control.openapi_responses import answers as answers
from forewarn.web.control.routes.campaign import Campaigns
from forewarn.web.control.routes.history import Histories
from forewarn.web.control.routes.stream import Streams
from forewarn.web.control.routes.token import Tokens
from forewarn.web.http_status import BodyTooLarge
from forewarn.web.service import Service

BODY_BYTES_MAX = 64 * 1024
SECRET_BYTES = 32
FLEET_BYTES_MAX = 64 * 1024 * 1024
LIST_MAX = 10_000

Limit = Annotated[
    int,
    QueryParameter(
        ge=1, le=LIST_MAX, description="At most so many; `total` tells how many there are."
    ),
]
Cursor = Annotated[
    str | None,
    QueryParameter(description="The `next` of the answer before, for what comes after it."),
]
DryRun = Annotated[bool, QueryParameter(description="Only tell the difference.")]
IfMatch = Annotated[
    str | None,
    HeaderParameter(
        name="If-Match",
        description="The ETag of the fleet that was read: only that one is changed.",
    ),
]
Engines = NamedDependency[Engine]
Desk = NamedDependency[Operations]
Asker = NamedDependency[Principal]


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body that says nothing, for a request whose address says it all."""


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When it may happen at the earliest: later than the notice asks, never sooner."""

    not_before: datetime | None = None


class Extension(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When it may happen at the earliest from now on."""

    not_before: datetime


class Approver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose word it is: that of a VM counts as the scope's policy says, an operator's suffices."""

    vm: str = ""


class Maintenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be done to the VMs of a host, and why."""

    type: Literal["Freeze", "Reboot", "Redeploy"]
    cause: Literal["maintenance", "infrastructure", "live-migration"] = "maintenance"
    duration_seconds: int | None = None
    not_before: datetime | None = None
    description: str | None = None


NOTHING, NO_NOTICE, AN_OPERATOR = Nothing(), Notice(), Approver()


def app(
    service: Service,
    *,
    host: str = "127.0.0.1",
    more: Sequence[ControllerRouterHandler] = (),
    delay_seconds: float = DELAY_SECONDS,
    make_secret: Callable[[], str] = lambda: secrets.token_hex(SECRET_BYTES),
) -> Application:
    """The application of the control listener. `host` is the name it is bound to; loopback names
    are always good.

    `more` are the routes of whoever has more to offer here: the lab's clock, say. A bad token is
    answered `delay_seconds` late.
    """
    operations = service.operations
    kept = Answers(service.engine, operations.new_id)
    porter = Authenticator(
        service.tokens, is_loopback=is_loopback(host), delay_seconds=delay_seconds
    )

    def asker(request: Request[Any, Any, Any]) -> Principal:
        found: Principal = request.scope["state"]["caller"]
        return found

    def desk(request: Request[Any, Any, Any]) -> Operations:
        slot = request.scope["state"].get("slot")
        return operations.repeating(slot.operation_id) if slot else operations

    return Application(
        kept,
        route_handlers=[
            landing,
            healthz,
            readyz,
            docs,
            Fleets,
            Scopes,
            Vms,
            Hosts,
            Events,
            Tokens,
            Histories,
            Streams,
            Campaigns,
            *more,
        ],
        dependencies={
            "operations": Provide(desk, sync_to_thread=False),
            "engine": Provide(lambda: service.engine, sync_to_thread=False),
            "campaigns": Provide(lambda: service.campaigns, sync_to_thread=False),
            "feed": Provide(lambda: service.feed, sync_to_thread=False),
            "tokens": Provide(lambda: service.tokens, sync_to_thread=False),
            "caller": Provide(asker, sync_to_thread=False),
            "make_secret": Provide(lambda: make_secret, sync_to_thread=False),
        },
        before_request=door(porter, kept, host),
        exception_handlers=CONTROL_HANDLERS,
        request_max_body_size=BODY_BYTES_MAX,
        openapi_config=describe(),
        logging_config=None,
    )


def _utc(said: datetime | None) -> datetime | None:
    """The moment in UTC."""
    if said is None:
        return None
    if said.tzinfo is None:
        raise Invalid(
            f"not_before needs a time zone, as in {said.isoformat()}Z; got {said.isoformat()}",
            field="not_before",
        )
    try:
        return said.astimezone(UTC)
    except OverflowError as error:
        raise Invalid(
            f"not_before is {said}; expected a moment of the years 1 to 9999 in UTC",
            field="not_before",
        ) from error


OF_VM = answers(
    errors.UnknownVm,
    errors.AlreadyPending,
    errors.TooManyOperations,
    errors.NoticeTooShort,
    errors.VmDown,
    BodyTooLarge,
)
OF_HOST = answers(errors.UnknownHost, errors.AlreadyPending, errors.NoticeTooShort, BodyTooLarge)
OF_EVENT = answers(errors.UnknownEvent, errors.EventEnded, errors.WrongStatus, BodyTooLarge)


@get("/", tags=["Service"], opt={OPEN: True})
async def landing() -> views.Landing:
    """Tells where the API, its description and the health checks are."""
    return views.Landing()


@get("/healthz", tags=["Service"], opt={OPEN: True})
async def healthz() -> views.Health:
    """Answers as long as the process does."""
    return views.Health("ok")


@get("/readyz", tags=["Service"], responses=ANY, opt={OPEN: True})
async def readyz(engine: Engines) -> views.Health:
    """Answers once the store has been read and is being followed."""
    if not engine.can_serve:
        raise Unavailable(
            "the store is not being followed, or did not take the latest commit; try again"
        )
    return views.Health("ready")


class Fleets(Controller):
    path = "/api/v1/fleet"
    tags = ("Fleet",)

    @get("/", responses=ANY)
    async def read(self, operations: Desk) -> Response[dict[str, Any]]:
        """The fleet as it is now, as JSON that PUT takes back.

        Its ETag is for the If-Match of that PUT.
        """
        text: Any = await asyncio.to_thread(
            lambda: dump_json(operations.fleet())
        )  # what is bytes already is sent as it is
        headers = {"ETag": f'"{await asyncio.to_thread(compute_etag, text)}"'}
        return Response(text, media_type=MediaType.JSON, headers=headers)

    @put(
        "/",
        request_max_body_size=FLEET_BYTES_MAX,
        operation_class=BodyFleet,
        responses=answers(errors.VmBusy, errors.ScopeBusy, errors.FleetChanged, BodyTooLarge),
    )
    async def apply(
        self,
        body: RawBody,
        operations: Desk,
        caller: Asker,
        *,
        dry_run: DryRun = False,
        if_match: IfMatch = None,
    ) -> views.DifferenceView:
        """Makes the fleet what the YAML or JSON says; this is an admin's. With `dry_run` only tells
        the difference.

        With `If-Match` only a fleet that is still the one that was read is changed.
        """
        if not dry_run:
            caller.must_be(Role.ADMIN)
        fleet = await asyncio.to_thread(parse, body, "body")
        tags = (
            set()
            if if_match in (None, "*")
            else {one.strip().strip('"') for one in if_match.split(",")}
        )
        return views.difference(
            await operations.apply(fleet, by=caller.name, dry_run=dry_run, tags=tags),
            dry_run=dry_run,
        )

    @get("/schema", responses=ANY)
    async def schema(self) -> Response[dict[str, Any]]:
        """What a fleet file may say."""
        return Response(SCHEMA)


class Scopes(Controller):
    path = "/api/v1/scopes"
    tags = ("Scopes",)

    @get("/", responses=ANY)
    async def list_scopes(
        self, engine: Engines, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.Scopes:
        """All scopes, by name."""
        return await views.scopes(engine, limit, cursor)

    @get("/{name:str}", responses=answers(errors.UnknownScope))
    async def show_scope(self, name: FromPath[str], engine: Engines) -> views.ScopeView:
        """A scope, its policy, its VMs and the ids of its events."""
        return views.scope(engine, await engine.look_up(lambda: engine.find_scope(name)))


def _operation(
    verb: str, operate: Callable[..., Awaitable[Told | None]], sentence: str
) -> HTTPRouteHandler:
    @post(
        f"/{{vm:str}}/{verb}",
        operation_id=f"{verb}_vm",
        status_code=HTTP_202_ACCEPTED,
        description=f"{sentence} The event is null when it is done at once, without notice: nobody polls, or none is wanted.",
        operation_class=BodyOptional,
        responses=OF_VM,
    )
    async def handler(
        self: Controller,
        vm: FromPath[str],
        operations: Desk,
        caller: Asker,
        data: JSONBody[Notice] = NO_NOTICE,
    ) -> views.EventAnswer:
        return views.event_answer(
            await operate(operations, vm, by=caller.name, not_before=_utc(data.not_before))
        )

    return handler


class Vms(Controller):
    path = "/api/v1/vms"
    tags = ("VMs",)

    @get("/", responses=ANY)
    async def list_vms(
        self, engine: Engines, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.Vms:
        """All VMs, by name."""
        return await views.vms(engine.board, limit, cursor)

    @get("/{vm:str}", responses=answers(errors.UnknownVm))
    async def show_vm(self, vm: FromPath[str], engine: Engines) -> views.VmView:
        """A VM, where it is, and the ids of the events that name it."""
        return views.vm(*await engine.look_up(lambda: engine.board.find_vm(vm)))

    restart = _operation(
        "restart", Operations.restart, "Restarts the VM on its host, as a user's wish."
    )
    redeploy = _operation(
        "redeploy", Operations.redeploy, "Moves the VM to another host, as a user's wish."
    )
    evict = _operation("evict", Operations.evict, "Takes the place of a spot VM back.")
    delete = _operation(
        "delete", Operations.delete, "Deletes the VM, as a user's wish; it leaves the fleet."
    )


class Hosts(Controller):
    path = "/api/v1/hosts"
    tags = ("Hosts",)

    @get("/", responses=ANY)
    async def list_hosts(
        self, engine: Engines, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.Hosts:
        """All hosts that have VMs or are named in the fleet file, by name."""
        return await views.hosts(engine.board, limit, cursor)

    @get("/{host:str}", responses=answers(errors.UnknownHost))
    async def show_host(self, host: FromPath[str], engine: Engines) -> views.HostView:
        """A host, its VMs, and the ids of the events that name any of them."""
        return await engine.look_up(lambda: views.host(engine.board, host))

    @post("/{host:str}/maintain", status_code=HTTP_202_ACCEPTED, responses=OF_HOST)
    async def maintain(
        self, host: FromPath[str], data: JSONBody[Maintenance], operations: Desk, caller: Asker
    ) -> views.EventsAnswer:
        """Announces maintenance to every VM on the host: one event for each scope and update
        domain.
        """
        told = await operations.maintain(
            host,
            by=caller.name,
            type=EventType(data.type),
            cause=Cause(data.cause),
            duration_seconds=data.duration_seconds,
            description=data.description,
            not_before=_utc(data.not_before),
        )
        return views.events_answer(told)

    @post(
        "/{host:str}/degrade",
        status_code=HTTP_202_ACCEPTED,
        operation_class=BodyOptional,
        responses=OF_HOST,
    )
    async def degrade(
        self,
        host: FromPath[str],
        operations: Desk,
        caller: Asker,
        data: JSONBody[Notice] = NO_NOTICE,
    ) -> views.EventsAnswer:
        """Tells every VM on the host that its hardware is expected to fail and that it will be
        moved within days.
        """
        return views.events_answer(
            await operations.degrade(host, by=caller.name, not_before=_utc(data.not_before))
        )

    @post(
        "/{host:str}/fail",
        status_code=HTTP_202_ACCEPTED,
        operation_class=BodyOptional,
        responses=OF_HOST,
    )
    async def fail(
        self,
        host: FromPath[str],
        operations: Desk,
        caller: Asker,
        data: JSONBody[Nothing] = NOTHING,
    ) -> views.EventsAnswer:
        """Starts over every VM on the host at once: the one operation that gives no notice."""
        return views.events_answer(await operations.fail(host, by=caller.name))


class Events(Controller):
    path = "/api/v1/events"
    tags = ("Events",)

    @get("/", responses=ANY)
    async def list_events(
        self, engine: Engines, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.Events:
        """All events that stand in a document, the oldest first."""
        return await views.events(engine.board, limit, cursor)

    @get("/{event:str}", responses=answers(errors.UnknownEvent, errors.EventEnded))
    async def show_event(self, event: FromPath[str], operations: Desk) -> views.EventView:
        """An event that stands in a document; its id in any case of letters."""
        return views.event(await operations.event(event))

    @post(
        "/{event:str}/approve",
        status_code=HTTP_200_OK,
        operation_class=BodyOptional,
        responses=OF_EVENT,
    )
    async def approve(
        self,
        event: FromPath[str],
        operations: Desk,
        caller: Asker,
        data: JSONBody[Approver] = AN_OPERATOR,
    ) -> views.EventAnswer:
        """Lets a Scheduled event start before its NotBefore; approving again changes nothing."""
        return views.event_answer(await operations.approve(event, by=caller.name, vm=data.vm))

    @post(
        "/{event:str}/cancel",
        status_code=HTTP_200_OK,
        operation_class=BodyOptional,
        responses=OF_EVENT,
    )
    async def cancel(
        self,
        event: FromPath[str],
        operations: Desk,
        caller: Asker,
        data: JSONBody[Nothing] = NOTHING,
    ) -> views.EventAnswer:
        """Takes a Scheduled event back. The answer shows it as it last was."""
        return views.event_answer(await operations.cancel(event, by=caller.name))

    @post(
        "/{event:str}/extend",
        status_code=HTTP_200_OK,
        responses=answers(
            errors.UnknownEvent,
            errors.EventEnded,
            errors.WrongStatus,
            errors.NoticeTooShort,
            errors.Refused,
            BodyTooLarge,
        ),
    )
    async def extend(
        self, event: FromPath[str], data: JSONBody[Extension], operations: Desk, caller: Asker
    ) -> views.EventAnswer:
        """Puts a Scheduled event off: more notice, never less. A Terminate is not put off."""
        not_before = _utc(data.not_before)
        assert not_before is not None
        return views.event_answer(
            await operations.extend(event, by=caller.name, not_before=not_before)
        )

    @post(
        "/{event:str}/complete",
        status_code=HTTP_200_OK,
        operation_class=BodyOptional,
        responses=OF_EVENT,
    )
    async def complete(
        self,
        event: FromPath[str],
        operations: Desk,
        caller: Asker,
        data: JSONBody[Nothing] = NOTHING,
    ) -> views.EventAnswer:
        """Says that what a Started event announced is done. The answer shows it as it last was."""
        return views.event_answer(await operations.complete(event, by=caller.name))
