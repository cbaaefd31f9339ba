"""What can be asked of a scope.

Commands carry their own ids, so asking again after a lost reply is asking once.
"""

from datetime import datetime

import msgspec

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Policy, ScopeKind, Vm


class _Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Something done to one VM.

    `not_before` may give more notice than the type asks, never less.
    """

    vm: str
    event_id: str
    not_before: datetime | None = None


class Restart(_Operation, frozen=True):
    """A user restarts a VM; one that does not run is started, and nobody needs to be told."""


class Redeploy(_Operation, frozen=True):
    """A user moves a VM to another host."""


class Delete(_Operation, frozen=True):
    """A user deletes a VM."""


class Evict(_Operation, frozen=True):
    """The platform takes a spot VM's place back."""


class _HostOperation(msgspec.Struct, frozen=True, kw_only=True):
    """Something that befalls a host, and so the scope's VMs on it: one event per update domain, ids
    made from `operation_id`.
    """

    host: str
    operation_id: str


class Maintain(_HostOperation, frozen=True, kw_only=True):
    type: EventType
    cause: Cause = Cause.MAINTENANCE
    duration_seconds: int | None = None
    description: str | None = None
    not_before: datetime | None = None


class Degrade(_HostOperation, frozen=True, kw_only=True):
    """The hardware is expected to fail: move away within days."""

    not_before: datetime | None = None


class Fail(_HostOperation, frozen=True):
    """The hardware has failed: the one command whose events start at once."""


class Approve(msgspec.Struct, frozen=True, kw_only=True):
    """A VM of the scope says go ahead, to all of these events or to none.

    `vm` empty: an operator says it, and that suffices.
    """

    event_ids: tuple[str, ...]
    vm: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    event_id: str


class Extend(msgspec.Struct, frozen=True, kw_only=True):
    """A Scheduled event shall happen later than was said."""

    event_id: str
    not_before: datetime


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """An operator says that what the event announced is done."""

    event_id: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A worker wants to carry an impact out (`tries` 0), or to go on with the try that it claimed."""

    event_id: str
    vm: str
    worker: str
    tries: int = 0


class Lapse(msgspec.Struct, frozen=True, kw_only=True):
    """A server saw an impact unchanged for longer than any claim lasts: its claim, or its wait for
    the next try, ends now.

    `due_at` is what the impact said. If it says something else by now, whoever claimed it is alive,
    and nothing changes.
    """

    event_id: str
    vm: str
    due_at: datetime


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A worker tells how the try ended:

    `problem` empty for done. `host` is where the VM is now, if it moved; `detail` is for the
    history alone.
    """

    event_id: str
    vm: str
    worker: str
    tries: int
    problem: str = ""
    host: str = ""
    detail: str = ""


class Seen(msgspec.Struct, frozen=True):
    """A VM of the scope polled."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class SetMembers(msgspec.Struct, frozen=True, kw_only=True):
    """The scope's members and choices shall be these. A VM that stays keeps its power; one that
    joins has the power given here.

    `is_file` says that this stands in the fleet file, which may be older than a VM's last move;
    otherwise it is true now.
    """

    kind: ScopeKind
    policy: Policy
    vms: tuple[Vm, ...]
    is_file: bool = False


class Retire(msgspec.Struct, frozen=True):
    """The scope shall be no more."""


Operation = Restart | Redeploy | Delete | Evict
HostOperation = Maintain | Degrade | Fail
Command = (
    Operation
    | HostOperation
    | Approve
    | Cancel
    | Extend
    | Complete
    | Claim
    | Lapse
    | Finish
    | Seen
    | Tick
    | SetMembers
    | Retire
)
