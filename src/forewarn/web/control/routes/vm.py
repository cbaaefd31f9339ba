"""VMs: list, show, and the operations of their users."""

from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Controller, Response, get, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_202_ACCEPTED

from forewarn import errors
from forewarn.core import command as ask
from forewarn.web.control import lists, views
from forewarn.web.control.dependencies import (
    ApiCall,
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
from forewarn.web.control.views import OperationResult, VmList, VmView

OPERATION_ERRORS = (
    errors.UnknownVm,
    errors.AlreadyPending,
    errors.TooManyOperations,
    errors.NoticeTooShort,
    errors.VmDown,
)
EARLIEST_START = msgspec.Meta(
    description="the earliest start, such as 2030-01-31T12:00:00Z; at least the minimum notice"
)


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    not_before: Annotated[datetime | None, EARLIEST_START] = None


NOTICE = Notice()
NoticeBody = JSONBody[Notice]


class VmController(Controller):
    path = "/api/v1/vms"
    tags = ("VMs",)

    @get("/", errors=(errors.UnknownHost, errors.UnknownScope))
    async def list_vms(
        self,
        call: Call,
        page: Page,
        *,
        names: Names = None,
        host: OnHost = None,
        of_scope: InScope = None,
    ) -> Response[VmList]:
        """All VMs, or the wanted ones, by name."""
        wanted, engine = Filter(split_names(names), host, of_scope), call.service.engine
        await engine.look_up(lambda: wanted.vms(engine.board))
        return await render_list(
            await lists.vm_list(engine, call.problems, page, wanted), page.take_turn
        )

    @get("/{vm:str}", errors=(errors.UnknownVm,))
    async def show_vm(self, vm: Name, call: Call) -> VmView:
        """A VM, its host, and the ids of the events that name it."""
        engine = call.service.engine
        await engine.look_up(lambda: engine.board.find_vm(vm))
        return next(lists.VmViews(engine, call.problems).build([vm]))

    @post("/{vm:str}/restart", status_code=HTTP_202_ACCEPTED, errors=OPERATION_ERRORS)
    async def restart_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> OperationResult:
        """Restarts the VM on its host."""
        return await _operate(ask.Restart, vm, call, data)

    @post(
        "/{vm:str}/redeploy",
        status_code=HTTP_202_ACCEPTED,
        errors=(*OPERATION_ERRORS, errors.Refused),
    )
    async def redeploy_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> OperationResult:
        """Moves the VM to another host.

        Refused if its host was forgotten and left running: its VMs are started nowhere else.
        """
        engine = call.service.engine
        _, known = await engine.look_up(lambda: engine.board.find_vm(vm))
        await call.service.hosts.refuse_moves([known.host])
        return await _operate(ask.Redeploy, vm, call, data)

    @post("/{vm:str}/evict", status_code=HTTP_202_ACCEPTED, errors=OPERATION_ERRORS)
    async def evict_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> OperationResult:
        """Evicts a spot VM: it is deallocated."""
        return await _operate(ask.Evict, vm, call, data)

    @post("/{vm:str}/delete", status_code=HTTP_202_ACCEPTED, errors=OPERATION_ERRORS)
    async def delete_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> OperationResult:
        """Deletes the VM; it leaves the fleet."""
        return await _operate(ask.Delete, vm, call, data)


async def _operate(
    kind: type[ask.Operation], vm: str, call: ApiCall, notice: Notice
) -> OperationResult:
    operate, not_before = call.service.operations.operate, to_utc(notice.not_before)
    placed = await operate(kind, vm, by=call.by, not_before=not_before)
    result = views.event_result(call.problems, placed)
    published = call.service.engine.board.vms.get(vm)
    known = published.scope.vm(vm) if published else None  # None: it has been deleted already
    moves = issubclass(kind, ask.Redeploy)
    waits_for = call.problems.awaited_daemon(known, moves=moves) if known else ""
    return OperationResult(result.event, result.reason, waits_for)
