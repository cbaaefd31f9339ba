"""What a host daemon and a server exchange, in one call that says everything each time.

    POST /api/v1/hosts/{host}/work    WorkRequest -> Work

Nothing is lost with a request or a response, because the next one repeats it.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forewarn.core.fleet import ScopeKind
from forewarn.fleetfile.schema import Address, Domain, Mac, Name, VmId
from forewarn.platform.base import ImpactRequest, ImpactResult

VMS_MAX = 2000
SessionId = Annotated[
    str, Meta(min_length=1, max_length=64, description="a text of 1 to 64 characters")
]
ImpactKey = tuple[str, str]
"""The id of the event and the name of the VM."""


class RunningImpact(msgspec.Struct, frozen=True, omit_defaults=True):
    """An impact that a daemon carries out, or has the result of; `tries` is 0 if it only knows that
    it was begun. A server that cancels it adds the other hosts that the VM may run on.
    """

    event_id: str
    vm: str
    tries: int
    result: ImpactResult | None = None
    may_run_on: tuple[str, ...] = ()

    @property
    def key(self) -> ImpactKey:
        return self.event_id, self.vm


class ReportedVm(msgspec.Struct, frozen=True, kw_only=True):
    """A VM as its daemon reports it. Its first interface and the preferred address come first."""

    name: Name
    id: VmId
    macs: Annotated[tuple[Mac, ...], Meta(max_length=64)] = ()
    addresses: tuple[Address, ...] = ()
    power: Literal["running", "stopped"] = "running"
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    scope: Name = msgspec.field(default_factory=str)
    kind: ScopeKind | None = None
    update_domain: Domain | None = None
    fault_domain: Domain | None = None


class HostReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All VMs of a host, each as a `ReportedVm`: one that is not valid does not hide the others."""

    vms: Annotated[list[dict[str, Any]], Meta(max_length=VMS_MAX)]
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a daemon has. `session` is one run of it.

    `inventory` is omitted if the server has it. `wait`: the server responds when it has something
    new, or after a few seconds. `is_leaving`: the daemon stops. `number` grows with each request
    of a session, so that one that arrives late is recognized; 0 if the daemon does not count them.
    """

    session: SessionId
    running: Annotated[list[RunningImpact], Meta(max_length=VMS_MAX)] = []
    inventory: HostReport | None = None
    wait: bool = False
    is_leaving: bool = False
    number: Annotated[int, Meta(ge=0)] = 0


class Work(msgspec.Struct, frozen=True):
    """What a daemon should start, and what it should no longer run or has been recorded.

    `problems` name VMs of the inventory that do not fit into the fleet. `is_merged` is False if
    the inventory has to be sent again soon.
    """

    impacts: tuple[ImpactRequest, ...] = ()
    cancel: tuple[RunningImpact, ...] = ()
    problems: tuple[str, ...] = ()
    is_merged: bool = True
