"""VMs: list, show, and the operations of their users."""

from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_202_ACCEPTED

from forewarn import errors
from forewarn.core import command as ask
from forewarn.web.control import views
from forewarn.web.control.dependencies import ApiCall, Call, Name, Names, Page, split_names, to_utc
from forewarn.web.control.views import EventResult, VmList, VmView

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

    @get("/")
    async def list_vms(self, call: Call, page: Page, names: Names = None) -> VmList:
        """All VMs, or those that are named, by name."""
        return await views.vm_list(call.service.engine, page, split_names(names))

    @get("/{vm:str}", errors=(errors.UnknownVm,))
    async def show_vm(self, vm: Name, call: Call) -> VmView:
        """A VM, its host, and the ids of the events that name it."""
        engine = call.service.engine
        await engine.look_up(lambda: engine.board.find_vm(vm))
        return next(views.vm_views(engine, [vm]))

    @post("/{vm:str}/restart", status_code=HTTP_202_ACCEPTED, errors=OPERATION_ERRORS)
    async def restart_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> EventResult:
        """Restarts the VM on its host."""
        return await _operate(ask.Restart, vm, call, data)

    @post("/{vm:str}/redeploy", status_code=HTTP_202_ACCEPTED, errors=OPERATION_ERRORS)
    async def redeploy_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> EventResult:
        """Moves the VM to another host."""
        return await _operate(ask.Redeploy, vm, call, data)

    @post("/{vm:str}/evict", status_code=HTTP_202_ACCEPTED, errors=OPERATION_ERRORS)
    async def evict_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> EventResult:
        """Evicts a spot VM: it is deallocated."""
        return await _operate(ask.Evict, vm, call, data)

    @post("/{vm:str}/delete", status_code=HTTP_202_ACCEPTED, errors=OPERATION_ERRORS)
    async def delete_vm(self, vm: Name, call: Call, data: NoticeBody = NOTICE) -> EventResult:
        """Deletes the VM; it leaves the fleet."""
        return await _operate(ask.Delete, vm, call, data)


async def _operate(
    kind: type[ask.Operation], vm: str, call: ApiCall, notice: Notice
) -> EventResult:
    operate, not_before = call.service.operations.operate, to_utc(notice.not_before)
    return views.event_result(await operate(kind, vm, by=call.by, not_before=not_before))
