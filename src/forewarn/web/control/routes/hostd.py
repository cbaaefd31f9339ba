"""What a host daemon calls: it reports its VMs, asks for work, and sends results.

The token decides the host. Every call may be repeated: that changes nothing.
"""

from datetime import timedelta
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, delete, post, put
from litestar.params import JSONBody, QueryParameter
from litestar.status_codes import HTTP_200_OK

from forewarn import errors
from forewarn.auth.tokens import Role
from forewarn.engine.host_session import RemoteResult, RunningImpact, Work
from forewarn.engine.remote_hosts import RemoteHosts
from forewarn.web.control.dependencies import ApiCall, Call, Name

INVENTORY_BYTES_MAX = 1024 * 1024
VMS_MAX = 2000
IMPACTS_MAX = 1000
WAIT_SECONDS_MAX = 30

SessionId = Annotated[
    str, msgspec.Meta(min_length=1, max_length=64, description="a text of 1 to 64 characters")
]
SessionQuery = Annotated[str, QueryParameter(name="session", description="One run of the daemon.")]


class HostInventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All VMs of a host; see docs/hostd.md for their fields."""

    session: SessionId
    vms: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=VMS_MAX)]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the daemon has, and how long it waits for something new."""

    session: SessionId
    running: Annotated[list[RunningImpact], msgspec.Meta(max_length=IMPACTS_MAX)] = []
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=WAIT_SECONDS_MAX)] = 0


class HostResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session: SessionId
    results: Annotated[list[RemoteResult], msgspec.Meta(max_length=IMPACTS_MAX)]


class InventoryView(msgspec.Struct, frozen=True):
    """How many VMs were accepted, and why others were not."""

    vms: int
    problems: list[str]


class ResultsView(msgspec.Struct, frozen=True):
    """How many results were wanted. They are recorded."""

    accepted: int


class SessionView(msgspec.Struct, frozen=True):
    session: str


class HostDaemonController(Controller):
    path = "/api/v1/hosts/{host:str}"
    tags = ("Host daemons",)
    opt = MappingProxyType({"role": Role.HOST, "errors": (errors.HostTaken,)})

    @put("/inventory", request_max_body_size=INVENTORY_BYTES_MAX)
    async def report_inventory(
        self, host: Name, call: Call, data: JSONBody[HostInventory]
    ) -> InventoryView:
        """Reports all VMs of the host. The fleet follows."""
        hosts = _hosts_of(call, host)
        inventory = await hosts.report(host, data.session, data.memory_bytes, data.vms, call.by)
        return InventoryView(len(inventory.vms), inventory.problems)

    @post("/work", status_code=HTTP_200_OK)
    async def request_work(
        self, host: Name, call: Call, data: JSONBody[WorkRequest], request: Request[Any, Any, Any]
    ) -> Work:
        """Returns new work as soon as there is some. Also the daemon's sign of life."""

        async def wait_for_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        wait = timedelta(seconds=data.wait_seconds)
        hosts = _hosts_of(call, host)
        return await hosts.work(host, data.session, data.running, wait, wait_for_disconnect)

    @post("/results", status_code=HTTP_200_OK)
    async def report_results(
        self, host: Name, call: Call, data: JSONBody[HostResults]
    ) -> ResultsView:
        """Reports how impacts ended."""
        hosts = _hosts_of(call, host)
        return ResultsView(await hosts.finish(host, data.session, data.results))

    @delete("/session", status_code=HTTP_200_OK)
    async def end_session(self, host: Name, call: Call, session: SessionQuery) -> SessionView:
        """Ends the session of a daemon that stops: its host is unreachable from now on."""
        await _hosts_of(call, host).end(host, session)
        return SessionView(session)


def _hosts_of(call: ApiCall, host: str) -> RemoteHosts:
    """Forbidden unless the token is that of this host."""
    if call.principal.host != host:
        raise errors.Forbidden(
            f"{call.by} is for the host {call.principal.host}, not for {host[:80]!r}",
            host=host[:80],
        )
    return call.service.hosts
