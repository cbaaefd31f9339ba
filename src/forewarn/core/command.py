"""The commands of a scope.

A command that creates something carries its id, so repeating it after a lost reply changes nothing.
"""

from datetime import datetime
from typing import NamedTuple

import msgspec

from forewarn.core.event import Cause, EventType, Gap
from forewarn.core.fleet import Policy, Power, ScopeKind, Vm


class _VmOperation(msgspec.Struct, frozen=True, kw_only=True):
    """`not_before` may give more notice than the type requires, never less.

    `silent_since`: since when the VM could not poll, because its host was away; None if it could.
    """

    vm: str
    event_id: str
    not_before: datetime | None = None
    silent_since: datetime | None = None


class Restart(_VmOperation, frozen=True):
    """A user restarts a VM. A VM that does not run is started, without an event."""


class Redeploy(_VmOperation, frozen=True):
    """A user moves a VM to another host."""


class Delete(_VmOperation, frozen=True):
    """A user deletes a VM."""


class Evict(_VmOperation, frozen=True):
    """The platform deallocates a spot VM."""


class _HostOperation(msgspec.Struct, frozen=True, kw_only=True):
    """Affects the scope's VMs on a host: one event per update domain, ids from `operation_id`."""

    host: str
    operation_id: str


class Maintain(_HostOperation, frozen=True, kw_only=True):
    type: EventType
    cause: Cause = Cause.MAINTENANCE
    duration_seconds: int | None = None
    description: str | None = None
    not_before: datetime | None = None


class Degrade(_HostOperation, frozen=True, kw_only=True):
    """The hardware is expected to fail: its VMs are redeployed within days."""

    not_before: datetime | None = None


class Fail(_HostOperation, frozen=True):
    """The hardware has failed. The only command whose events start immediately."""


class Approve(msgspec.Struct, frozen=True, kw_only=True):
    """A VM of the scope approves all of these events, or none.

    Without `vm` an operator approves, which is always sufficient.
    """

    event_ids: tuple[str, ...]
    vm: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    event_id: str


class Extend(msgspec.Struct, frozen=True, kw_only=True):
    """Postpone a Scheduled event."""

    event_id: str
    not_before: datetime


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """An operator reports that the impacts of a Started event are done."""

    event_id: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A worker claims an impact that is due.

    `stop_seconds` is how long its platform may still act on the VM after the call was canceled.
    `host` is the host whose daemon will carry it out; empty: the server itself. `tries` is how many
    there were when that was decided: another try since may be at another daemon. None: any number.
    """

    event_id: str
    vm: str
    worker: str
    stop_seconds: float = 0.0
    host: str = ""
    tries: int | None = None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has lost its lease: its claims end now, and other workers may claim its impacts.

    With `event_id` and `vm` only the claim of that impact: its host is unreachable, or a bug has
    ended its try. After a bug the next try begins later, and the impact fails after some of them.
    `tries` is the number of the try that has ended: the same worker may have begun the next one.
    """

    worker: str
    event_id: str = ""
    vm: str = ""
    tries: int | None = None
    is_bug: bool = False


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A worker reports the result of its attempt. `problem` is empty on success.

    `host` is where the VM is now, if it moved; `detail` is for the history only. `is_back` is
    False if the VM was restarted and may still boot. `is_final`: a retry would fail as well.
    """

    event_id: str
    vm: str
    worker: str
    tries: int
    problem: str = ""
    host: str = ""
    detail: str = ""
    is_back: bool = True
    is_final: bool = False


class Abandon(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing will carry out the impacts of the VMs on this host: they have failed."""

    host: str
    problem: str


class SetPower(msgspec.Struct, frozen=True, kw_only=True):
    """The VMs on this host have this power: an operator says so, and nothing else can."""

    host: str
    power: Power


class Back(msgspec.Struct, frozen=True, kw_only=True):
    """A VM that was restarted is up again. `detail` says how that is known, for the history."""

    event_id: str
    vm: str
    detail: str = ""


class Seen(msgspec.Struct, frozen=True):
    """A VM of the scope polled."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. The only command that starts an event because its NotBefore is reached.

    `shown_at`: until then, all times in which these `events` could not be read are stored with
    them. Nothing with a later NotBefore starts, and no other event: its announcement may have been
    committed late. None: nothing was unreadable.
    """

    shown_at: datetime | None = None
    events: frozenset[str] | None = None

    def covers(self, event_id: str) -> bool:
        return self.events is None or event_id in self.events


class Unread(NamedTuple):
    """When the VMs of an event could not read it; `since`: they cannot now."""

    event_id: str
    gaps: tuple[Gap, ...] = ()
    since: datetime | None = None


class NoteUnread(msgspec.Struct, frozen=True):
    """Store with these events when they could not be read, and postpone them if necessary.

    Repeated, or with gaps that are known already, it changes nothing.
    """

    events: tuple[Unread, ...]


class SetMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Set the VMs and the policy. A VM that stays keeps its power, a new one gets the power here.

    `is_file`: the members come from the fleet file, which may be older than a VM's last move.
    Otherwise they describe the present.
    """

    kind: ScopeKind
    policy: Policy
    vms: tuple[Vm, ...]
    is_file: bool = False


class UpdateMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Change some VMs as their host reports them; the others stay as they are.

    `vms` are those that the host has, each with the host that it was on when this was decided;
    `gone` are VMs that the host no longer has, `left` those that are in another scope now. A VM in
    `found` runs on this host, although the one that it was on is unreachable.
    """

    host: str
    kind: ScopeKind
    vms: tuple[tuple[str, Vm], ...] = ()
    gone: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    found: frozenset[str] = frozenset()


class Retire(msgspec.Struct, frozen=True):
    """Remove the scope."""


UserOperation = Restart | Redeploy | Delete
Operation = UserOperation | Evict
HostOperation = Maintain | Degrade | Fail
Command = (
    Operation
    | HostOperation
    | Approve
    | Cancel
    | Extend
    | Complete
    | Claim
    | Release
    | Finish
    | Abandon
    | SetPower
    | Back
    | Seen
    | Tick
    | NoteUnread
    | SetMembers
    | UpdateMembers
    | Retire
)
