"""VMs, their scopes, and the policy of each scope. A scope is one document and one record.

These values are stored as they are, for years. Empty fields are left out of the record
(`omit_defaults`). A default that is a policy choice is always written, because a later version may
decide differently for new scopes and must not change stored ones: such a field has a
`default_factory`, which msgspec never leaves out. A record with an unknown field comes from a newer
version and is rejected (`forbid_unknown_fields`): writing it back would lose that field.
"""

from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

import msgspec

from forewarn.core.event import Ended, Event, EventType, Impact, Time
from forewarn.core.timing import NOTICE


class ScopeKind(StrEnum):
    VM = "vm"
    CLOUD_SERVICE = "cloud-service"
    AVAILABILITY_SET = "availability-set"
    SCALE_SET = "scale-set"


class Approval(StrEnum):
    """Whose approval starts an event early: any VM, more than half of the running VMs, or all."""

    ANY = "any"
    QUORUM = "quorum"
    ALL = "all"


class AutoApprove(StrEnum):
    """What is approved automatically, as Azure's scheduledEventsPolicy names it."""

    USER_RESTART = "user-restart"
    USER_REDEPLOY = "user-redeploy"
    ALL_INSTANCES_DOWN = "all-instances-down"


class RedeployMethod(StrEnum):
    """How a VM is moved: live, and stopped once if that is not possible; live or not at all; or
    stopped once, without a try to migrate it live.
    """

    LIVE = "live"
    LIVE_ONLY = "live-only"
    COLD = "cold"


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many VMs of a scope may be unavailable at a time: a number or a percentage."""

    number: int
    is_percent: bool = False

    def of(self, size: int) -> int:
        """The limit for a scope of `size` VMs.

        A percentage is rounded down to at least one, otherwise no VM could ever be maintained.
        """
        return max(size * self.number // 100, 1) if self.is_percent else self.number

    def __str__(self) -> str:
        return f"{self.number}%" if self.is_percent else str(self.number)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a scope."""

    approval: Approval = Approval.ANY
    auto_approve: tuple[AutoApprove, ...] = (AutoApprove.ALL_INSTANCES_DOWN,)
    terminate_notice: timedelta | None = NOTICE[EventType.TERMINATE]
    couple_terminates: bool = False
    user_operations_max: int = 100
    max_unavailable: Budget | None = None
    failed_hardware: EventType = EventType.REBOOT
    redeploy: RedeployMethod = RedeployMethod.LIVE


DEFAULT_POLICY = Policy()


class Power(StrEnum):
    """Whether a VM runs. A stopped VM stays assigned to its host; a deallocated VM does not.

    It is unknown for a VM whose host has no daemon any more, and went on running, and for one that
    ran, and that its host no longer has: it gets notice like one that runs.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    DEALLOCATED = "deallocated"
    UNKNOWN = "unknown"

    @property
    def is_off(self) -> bool:
        return self in (Power.STOPPED, Power.DEALLOCATED)


class Instance(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What `/metadata/instance` shows beyond what the rules need. Free text, all optional."""

    computer_name: str = ""
    location: str = ""
    zone: str = ""
    size: str = ""
    os_type: str = msgspec.field(default_factory=lambda: "Linux")
    priority: str = ""
    mac: str = ""
    public_address: str = ""
    subnet: str = ""
    resource_group: str = ""
    subscription: str = ""
    publisher: str = ""
    offer: str = ""
    sku: str = ""
    version: str = ""
    plan_name: str = ""
    plan_product: str = ""
    plan_publisher: str = ""
    admin_username: str = ""
    public_keys: tuple[str, ...] = ()
    disable_password_authentication: bool | None = None
    license_type: str = ""
    physical_zone: str = ""
    security_type: str = ""
    secure_boot: bool | None = None
    virtual_tpm: bool | None = None
    encryption_at_host: bool | None = None
    user_data: str = ""
    tags: tuple[tuple[str, str], ...] = ()


DEFAULT_INSTANCE = Instance()


class Vm(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A virtual machine.

    `name` is its entry in Resources and its name in `/metadata/instance`, not its hostname. `host`
    is where it is now. `declared_host` is in records of earlier versions, and not used.
    `is_address_taken`: its host reports an address that another VM had before, so requests from
    there are not this VM's while the other one runs.
    """

    name: str
    address: str = ""
    update_domain: int = 0
    host: str = ""
    power: Power = Power.RUNNING
    id: str = ""
    fault_domain: int = 0
    instance: Instance = DEFAULT_INSTANCE
    declared_host: str = ""
    is_address_taken: bool = False


class TriedMove(NamedTuple):
    """The last try to move a VM has ended at this time, and it is not known where the VM is.

    It may have been started on another host until then.
    """

    vm: str
    at: Time


class Scope(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A delivery group: all its VMs see one document. Events are in order of creation.

    `dropped` are impacts that ended while a worker held them: see `machine.py`. `tried_moves` are
    at most one for each VM, until a move succeeds, its host reports that it runs, or it leaves.
    `is_reported`: a host's report has created it, and no fleet has changed it since. Such a scope
    goes with its last VM.
    """

    name: str
    kind: ScopeKind = msgspec.field(default_factory=lambda: ScopeKind.VM)
    policy: Policy = msgspec.field(default_factory=lambda: DEFAULT_POLICY)
    vms: tuple[Vm, ...] = ()
    events: tuple[Event, ...] = ()
    impacts: tuple[Impact, ...] = ()
    ended: tuple[Ended, ...] = ()
    incarnation: int = 1
    seen_at: Time | None = None
    is_reported: bool = False
    dropped: tuple[Impact, ...] = ()
    tried_moves: tuple[TriedMove, ...] = ()

    def vm(self, name: str) -> Vm | None:
        return next((vm for vm in self.vms if vm.name == name), None)

    def event(self, event_id: str) -> Event | None:
        return next((event for event in self.events if event.id == event_id), None)

    def impact(self, event_id: str, vm: str) -> Impact | None:
        impacts = (i for i in self.impacts if i.vm == vm and i.event_id == event_id)
        return next(impacts, None)
