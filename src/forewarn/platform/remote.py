"""What a host daemon and a server exchange, in one call that says everything each time.

    POST /api/v1/hosts/{host}/work    WorkRequest -> Work

Nothing is lost with a request or a response, because the next one repeats it.
"""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from forewarn.core.fleet import ScopeKind
from forewarn.fleetfile.schema import Address, Domain, Mac, Name, VmId
from forewarn.platform.base import PROBLEM_LENGTH_MAX, ImpactRequest, ImpactResult

VMS_MAX = 2000
UNMOVABLE_LENGTH_MAX = 200
REFUSED_GUESTS_MAX = 100
BRIDGES_MAX = 100
UNCONFIRMED_SECONDS_MAX = 86_400
NOTICED_SECONDS_MAX = 9.0
"""A server notices after this time at the latest that it is cut off from its store."""
STALE_SECONDS_MIN = 3.0
"""After this time, polls get the age of what they read. The election of a leader is shorter."""
MARKED_SECONDS_MAX = 1.0
"""How long it takes until polls do: a server looks once a second whether they should."""
UNMARKED_SECONDS_MAX = NOTICED_SECONDS_MAX + STALE_SECONDS_MIN + MARKED_SECONDS_MAX
"""For so long a server that is cut off from its store answers before it marks its documents. It is
less than a gap that counts for most events: guests can read from another server after that.
"""
SessionId = Annotated[
    str, Meta(min_length=1, max_length=64, description="a text of 1 to 64 characters")
]
MachineId = Annotated[
    str, Meta(min_length=1, max_length=64, description="a text of 1 to 64 characters")
]
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON that is not what was expected."""
ImpactKey = tuple[str, str]
"""The id of the event and the name of the VM."""


class RunningImpact(msgspec.Struct, frozen=True, omit_defaults=True):
    """An impact that a daemon carries out, or has the result of; `tries` is 0 if it only knows that
    it was begun. A server that cancels it adds the other hosts that the VM may run on, and whether
    a VM that it has stopped may be started: not while the daemon of another host acts on it.
    """

    event_id: str
    vm: str
    tries: int
    result: ImpactResult | None = None
    may_run_on: tuple[str, ...] = ()
    may_start: bool = True

    @property
    def key(self) -> ImpactKey:
        return self.event_id, self.vm


class ReportedVm(msgspec.Struct, frozen=True, kw_only=True):
    """A VM as its daemon reports it. Its first interface and the preferred address come first.

    `unmovable` is why it cannot run on another host, as far as its own host can tell.
    """

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
    unmovable: Annotated[str, Meta(max_length=UNMOVABLE_LENGTH_MAX)] = ""


class HostReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All VMs of a host, each as a `ReportedVm`: one that is not valid does not hide the others.

    They are decoded one at a time, so that polls are answered in between. They were listed
    `age_seconds` ago.
    """

    vms: Annotated[list[msgspec.Raw], Meta(max_length=VMS_MAX)]
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    age_seconds: Annotated[float, Meta(ge=0, le=1 << 31)] = 0


class RefusalReason(StrEnum):
    """Why a guest got an error from the relay of its host."""

    NOT_A_VM = "not-a-vm"
    """403: no VM of this host is at the client's port."""
    IN_DOUBT = "in-doubt"
    """503: its MAC has just come to its port, or took too long to connect."""
    TOO_MANY = "too-many"
    """503: a limit of connections is reached."""
    NO_SERVER = "no-server"
    """503: no server answers, and the last document is too old."""
    SERVER_REFUSED = "server-refused"
    """401, 403 or 429 of a server."""
    SERVER_ERROR = "server-error"
    """5xx of a server."""
    BAD_REQUEST = "bad-request"
    """Another error, for a poll that is not as the protocol asks."""


class RefusedGuest(msgspec.Struct, frozen=True):
    """A guest that polls and has got nothing but errors for some time; `reason` is the last one.

    `guest` is the id of the VM, or an address if no VM of the host is at its port.
    """

    guest: Annotated[str, Meta(max_length=64)]
    reason: RefusalReason
    seconds: Annotated[int, Meta(ge=0, le=1 << 32)]


class UnservedBridge(msgspec.Struct, frozen=True):
    """A bridge whose guests cannot reach the relay, and why; `vms` of the host are plugged in."""

    bridge: Annotated[str, Meta(max_length=64)]
    problem: Annotated[str, Meta(max_length=PROBLEM_LENGTH_MAX)]
    vms: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a daemon has. `session` is one run of it, `machine` identifies what it runs on.

    `inventory` is omitted if the server has it. `wait`: the server responds when it has something
    new, or after a few seconds. `is_leaving`: the daemon stops. `number` grows with each request
    of a session, so that one that arrives late is recognized; 0 if the daemon does not count them.
    `refusals` counts the errors that guests got since the daemon started. `refused` lists guests
    that get nothing else.
    `problem` is why the daemon cannot act on its VMs at present; empty if it can.
    `unserved` lists the bridges that are not served; impacts on their VMs still work.
    `unconfirmed_seconds` is for how long guests have asked and no metadata server has answered, or
    could not ask. `no_server_seconds` is for how long no server had answered this session; None if
    one has answered its last request, or if none has ever. `relays`: it has bridges, so its guests
    read through it.
    """

    session: SessionId
    machine: MachineId
    running: Annotated[list[RunningImpact], Meta(max_length=VMS_MAX)] = []
    inventory: HostReport | None = None
    wait: bool = False
    is_leaving: bool = False
    number: Annotated[int, Meta(ge=0)] = 0
    refusals: dict[RefusalReason, Annotated[int, Meta(ge=0, le=1 << 60)]] = {}
    refused: Annotated[list[RefusedGuest], Meta(max_length=REFUSED_GUESTS_MAX)] = []
    problem: Annotated[str, Meta(max_length=PROBLEM_LENGTH_MAX)] = ""
    unserved: Annotated[list[UnservedBridge], Meta(max_length=BRIDGES_MAX)] = []
    unconfirmed_seconds: Annotated[int, Meta(ge=0, le=UNCONFIRMED_SECONDS_MAX)] = 0
    no_server_seconds: Annotated[int, Meta(ge=0, le=UNCONFIRMED_SECONDS_MAX)] | None = None
    relays: bool = True


class Work(msgspec.Struct, frozen=True):
    """What a daemon should start, and what it should no longer run or has been recorded.

    `problems` name VMs of the inventory that do not fit into the fleet. `is_merged` is False if
    the inventory has to be sent soon, or again.
    """

    impacts: tuple[ImpactRequest, ...] = ()
    cancel: tuple[RunningImpact, ...] = ()
    problems: tuple[str, ...] = ()
    is_merged: bool = True
