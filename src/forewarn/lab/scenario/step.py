"""What a scenario can do, each action a type, and when.

The types are the parser, the JSON Schema and the words of the errors.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from forewarn.duration import Duration
from forewarn.fleetfile.schema import FleetFile, Name, Text
from forewarn.lab.fault.kinds import Fault

ANY = "any"
TIMES_MAX = 100_000

Target = Annotated[
    Name, Meta(description="a name, or any: one that nothing awaits, chosen by the seed")
]
Called = Annotated[Name, Meta(description="a name that a step gives with `as`")]
Times = Annotated[
    int, Meta(ge=1, le=TIMES_MAX, description=f"a whole number from 1 to {TIMES_MAX}")
]
Seconds = Annotated[
    int, Meta(ge=-1, le=86_400, description="a whole number of seconds from -1 (unknown) to 86400")
]
Condition = Annotated[
    str,
    Meta(max_length=400, description="a condition such as `web-0 approved` or `patch completed`"),
]
Moment = Annotated[datetime, Meta(tz=True, description="a moment such as 2030-01-01T00:00:00Z")]


class MaintenanceType(StrEnum):
    FREEZE = "Freeze"
    REBOOT = "Reboot"
    REDEPLOY = "Redeploy"


class MaintenanceCause(StrEnum):
    """Settles the description that VMs read."""

    MAINTENANCE = "maintenance"
    INFRASTRUCTURE = "infrastructure"
    LIVE_MIGRATION = "live-migration"


class Repeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step again and again: `times` in all."""

    every: Duration
    times: Times


class Step(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="do",
    rename={"as_": "as"},
):
    """What all have: a time since the start, or a condition and how long after it."""

    at: Duration | None = None
    when: Condition | None = None
    after: Duration | None = None
    repeat: Repeat | None = None

    @property
    def action(self) -> str:
        return str(self.__struct_config__.tag)


class Announcing(Step, frozen=True, kw_only=True):
    """What makes events.

    `as` names them for later mention; `notice` asks for more of it than there must be.
    """

    as_: Name | None = None
    notice: Duration | None = None


class OnVm(Announcing, frozen=True, kw_only=True):
    """What is done to one VM."""

    vm: Target


class Restart(OnVm, frozen=True, kw_only=True, tag="restart"):
    """A user restarts a VM."""


class Redeploy(OnVm, frozen=True, kw_only=True, tag="redeploy"):
    """A user moves a VM to another host."""


class Evict(OnVm, frozen=True, kw_only=True, tag="evict"):
    """The platform takes the place of a spot VM back."""


class Delete(OnVm, frozen=True, kw_only=True, tag="delete"):
    """A user deletes a VM."""


class Maintain(Announcing, frozen=True, kw_only=True, tag="maintain"):
    """The platform maintains a host: an event for each scope and update domain on it."""

    host: Target
    type: MaintenanceType
    cause: MaintenanceCause = MaintenanceCause.MAINTENANCE
    duration_seconds: Seconds | None = None
    description: Text | None = None


class Degrade(Announcing, frozen=True, kw_only=True, tag="degrade"):
    """A host's hardware is about to fail: seven days' notice."""

    host: Target


class Fail(Step, frozen=True, kw_only=True, tag="fail"):
    """A host's hardware has failed: no notice, the event is Started at once."""

    host: Target
    as_: Name | None = None


class OnEvent(Step, frozen=True, kw_only=True):
    """What is said of the events of a name."""

    event: Called


class Approve(OnEvent, frozen=True, kw_only=True, tag="approve"):
    """Somebody else approves: an operator, or in the name of `vm`."""

    vm: Name | None = None


class Cancel(OnEvent, frozen=True, kw_only=True, tag="cancel"):
    """A Scheduled event is taken back."""


class Complete(OnEvent, frozen=True, kw_only=True, tag="complete"):
    """A Started event is over before its time."""


class Extend(OnEvent, frozen=True, kw_only=True, tag="extend"):
    """NotBefore is put off."""

    by: Duration


class Apply(Step, frozen=True, kw_only=True, tag="apply"):
    """The fleet becomes another one."""

    fleet: FleetFile


class SetFault(Step, frozen=True, kw_only=True, tag="fault"):
    """The endpoint misbehaves from now on. `as` names the fault for `clear`."""

    set: Fault
    as_: Name | None = None


class Clear(Step, frozen=True, kw_only=True, tag="clear"):
    """The named fault is over; without a name, all faults are."""

    fault: Name | None = None


class Break(Step, frozen=True, kw_only=True, tag="break"):
    """From now on, what is done to this VM fails."""

    vm: Name


class Mend(Step, frozen=True, kw_only=True, tag="mend"):
    """What is done to this VM works again."""

    vm: Name


class Jump(Step, frozen=True, kw_only=True, tag="jump"):
    """The clock leaps ahead, as that of a machine that slept: all that was due meanwhile is due
    now. Only on a virtual clock.
    """

    by: Duration


class Log(Step, frozen=True, kw_only=True, tag="log"):
    """A line in the transcript."""

    text: Text


OnHost = Maintain | Degrade | Fail
Action = (
    Restart
    | Redeploy
    | Evict
    | Delete
    | Maintain
    | Degrade
    | Fail
    | Approve
    | Cancel
    | Complete
    | Extend
    | Apply
    | SetFault
    | Clear
    | Break
    | Mend
    | Jump
    | Log
)
ACTIONS: tuple[type[Step], ...] = Action.__args__
