"""Who is told: VMs, the scopes they are in, and what each scope's owner chose. A scope is one
document and one record.

These values are stored as they are, for years. A member that is empty is left out of the record
(`omit_defaults`). A default that is a decision is written: a later version may decide otherwise for
new scopes, and must not change those that are stored. So such a member has a `default_factory`,
which msgspec never leaves out. A record with an unknown member comes from a newer version and is
not read (`forbid_unknown_fields`): written back, it would lose that member.
"""

from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from forewarn.core.event import Ended, Event, EventType, Impact
from forewarn.core.timing import NOTICE


class ScopeKind(StrEnum):
    VM = "vm"
    CLOUD_SERVICE = "cloud-service"
    AVAILABILITY_SET = "availability-set"
    SCALE_SET = "scale-set"


class Approval(StrEnum):
    """Whose word starts an event early: any VM of the scope, more than half of its running VMs, or
    every one of them.
    """

    ANY = "any"
    QUORUM = "quorum"
    ALL = "all"


class AutoApprove(StrEnum):
    """What needs nobody's word, as Azure's scheduledEventsPolicy names it."""

    USER_RESTART = "user-restart"
    USER_REDEPLOY = "user-redeploy"
    ALL_INSTANCES_DOWN = "all-instances-down"


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many VMs of a scope may be unavailable at once: a number, or a part of a hundred of them."""

    number: int
    is_percent: bool = False

    def of(self, size: int) -> int:
        """For a scope of so many VMs.

        A part is rounded down, but one VM may always be down: else nothing could ever be done.
        """
        return max(size * self.number // 100, 1) if self.is_percent else self.number

    def __str__(self) -> str:
        return f"{self.number}%" if self.is_percent else str(self.number)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the owner of a scope chose, or got by choosing nothing."""

    approval: Approval = Approval.ANY
    auto_approve: tuple[AutoApprove, ...] = (AutoApprove.ALL_INSTANCES_DOWN,)
    terminate_notice: timedelta | None = NOTICE[EventType.TERMINATE]
    couple_terminates: bool = False
    user_operations_max: int = 100
    max_unavailable: Budget | None = None


NOTHING_CHOSEN = Policy()


class Power(StrEnum):
    """Whether a VM runs.

    A stopped one keeps its place on its host; a deallocated one has given it up.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    DEALLOCATED = "deallocated"


class Instance(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What `/metadata/instance` tells a VM about itself, beyond what the rules need.

    Free text, none of it required.
    """

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
    user_data: str = ""
    tags: tuple[tuple[str, str], ...] = ()


NOTHING_TOLD = Instance()


class Vm(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One virtual machine. Its name is its entry in Resources and its name in `/metadata/instance`,
    not its hostname.

    `host` is where it is; `declared_host` is what the fleet file said when it was last applied.
    """

    name: str
    address: str = ""
    update_domain: int = 0
    host: str = ""
    power: Power = Power.RUNNING
    id: str = ""
    fault_domain: int = 0
    instance: Instance = NOTHING_TOLD
    declared_host: str = ""


class Scope(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A delivery group: all its VMs see one document.

    Events stand in the order in which they were made.
    """

    name: str
    kind: ScopeKind = msgspec.field(default_factory=lambda: ScopeKind.VM)
    policy: Policy = msgspec.field(default_factory=lambda: NOTHING_CHOSEN)
    vms: tuple[Vm, ...] = ()
    events: tuple[Event, ...] = ()
    impacts: tuple[Impact, ...] = ()
    ended: tuple[Ended, ...] = ()
    incarnation: int = 1
    seen_at: datetime | None = None

    def vm(self, name: str) -> Vm | None:
        for vm in self.vms:
            if vm.name == name:
                return vm
        return None

    def event(self, event_id: str) -> Event | None:
        for event in self.events:
            if event.id == event_id:
                return event
        return None
