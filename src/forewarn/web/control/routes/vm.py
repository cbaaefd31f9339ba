"""VMs: list, show, and the operations of their users."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
from litestar import Controller, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_202_ACCEPTED

from forewarn import errors
from forewarn.engine.operations import Operations, ScopedEvent
from forewarn.errors import Invalid
from forewarn.web.control import views
from forewarn.web.control.dependencies import (
    Cursor,
    EngineDependency,
    Limit,
    OperationsDependency,
    PrincipalDependency,
)
from forewarn.web.control.openapi import COMMON_ERRORS, error_responses

OPERATION_ERRORS = error_responses(
    errors.UnknownVm,
    errors.AlreadyPending,
    errors.TooManyOperations,
    errors.NoticeTooShort,
    errors.VmDown,
)
EVENT_OR_NULL = "`event` is null if it runs at once: no VM polls, or the policy wants no notice."


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The earliest start: later than the minimum notice, never earlier."""

    not_before: datetime | None = None


DEFAULT_NOTICE = Notice()


def to_utc(not_before: datetime) -> datetime:
    if not_before.tzinfo is None:
        text = not_before.isoformat()
        raise Invalid(
            f"not_before is {text}, without a time zone; expected one, as in {text}Z",
            field="not_before",
        )
    try:
        return not_before.astimezone(UTC)
    except OverflowError as error:
        raise Invalid(
            f"not_before is {not_before}; expected a time in the years 1 to 9999 in UTC",
            field="not_before",
        ) from error


def earliest(notice: Notice) -> datetime | None:
    return None if notice.not_before is None else to_utc(notice.not_before)


def _operation(
    verb: str, operate: Callable[..., Awaitable[ScopedEvent | None]], summary: str
) -> HTTPRouteHandler:
    @post(
        f"/{{vm:str}}/{verb}",
        operation_id=f"{verb}_vm",
        status_code=HTTP_202_ACCEPTED,
        description=f"{summary} {EVENT_OR_NULL}",
        responses=OPERATION_ERRORS,
    )
    async def handler(
        self: Controller,
        vm: FromPath[str],
        operations: OperationsDependency,
        principal: PrincipalDependency,
        data: JSONBody[Notice] = DEFAULT_NOTICE,
    ) -> views.EventResult:
        placed = await operate(operations, vm, by=principal.name, not_before=earliest(data))
        return views.event_result(placed)

    return handler


class VmController(Controller):
    path = "/api/v1/vms"
    tags = ("VMs",)

    @get("/", responses=COMMON_ERRORS)
    async def list_vms(
        self, engine: EngineDependency, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.VmList:
        """All VMs, by name."""
        return await views.vm_list(engine.board, limit, cursor)

    @get("/{vm:str}", responses=error_responses(errors.UnknownVm))
    async def show_vm(self, vm: FromPath[str], engine: EngineDependency) -> views.VmView:
        """A VM, its host, and the ids of the events that name it."""
        return views.vm_view(*await engine.look_up(lambda: engine.board.find_vm(vm)))

    restart = _operation("restart", Operations.restart, "Restarts the VM on its host.")
    redeploy = _operation("redeploy", Operations.redeploy, "Moves the VM to another host.")
    evict = _operation("evict", Operations.evict, "Evicts a spot VM: it is deallocated.")
    delete = _operation("delete", Operations.delete, "Deletes the VM; it leaves the fleet.")
