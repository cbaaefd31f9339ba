"""A campaign: maintenance of many hosts, a few at a time.

Values, and what may be said of it; the rules are in `rolling.py`.
"""

import uuid
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum

import msgspec

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Budget
from forewarn.core.timing import Timing
from forewarn.engine.record import RecordCodec

NAMESPACE = uuid.UUID("7d0f3a51-5f0c-4d0e-9a53-0c6b1f6f1a2e")
HOSTS_MAX = 100_000
PATTERNS_MAX = 100
MAX_HOSTS_MAX = 250
TROUBLES_MAX = 100
"""How many hosts that were not done are named in the campaign itself, the last ones; the history
has them all.
"""
CHECK_SPARE = timedelta(seconds=30)
CHECK_MAX = timedelta(hours=2)
"""No health check is claimed for longer: the option allows it an hour."""


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator wants done, to which hosts, and how carefully."""

    type: EventType
    patterns: tuple[str, ...]
    name: str = ""
    cause: Cause = Cause.MAINTENANCE
    duration_seconds: int | None = None
    description: str | None = None
    max_hosts: int = 1
    max_unavailable: Budget | None = None
    pause_on_failure: bool = True
    health_command: str | msgspec.UnsetType = msgspec.UNSET
    health_seconds_max: int | msgspec.UnsetType = msgspec.UNSET
    """These two are of the first version: its records are read, but a health command stands in the
    configuration now.
    """


class State(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    CANCELED = "canceled"
    DONE = "done"


class Phase(StrEnum):
    """How far a host has come: it has its turn and is about to be announced, its events live, its
    health is asked for.
    """

    ORDERED = "ordered"
    ANNOUNCED = "announced"
    CHECKING = "checking"


class Turn(IntEnum):
    """How badly a host is wanted by a campaign that goes on, and so how badly it serves as a place
    to move VMs to.
    """

    WAITING = 1
    UNDER_WAY = 2


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event of the campaign.

    Who shows the scope as of an earlier revision cannot know it yet.
    """

    scope: str
    event_id: str
    revision: int = 0


class UnderWay(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A host that has its turn.

    `trouble` is why it will not count as done; `checker` asks for its health, in time.
    """

    host: str
    taken_at: datetime
    phase: Phase = Phase.ORDERED
    events: tuple[Told, ...] = ()
    trouble: str = ""
    checker: str = ""
    checked_until: datetime | None = None


class Trouble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host that was not done, and why.

    Skipped: nothing went wrong there, but it has not had its maintenance.
    """

    host: str
    why: str
    is_failed: bool


class Campaign(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """One record.

    Its hosts, in their order, stand beside it and never change: `cursor` of them have left that
    list, and those of `window` still wait for their turn. `is_braked`: it was paused by a failure
    or by a health command, not by a person.
    """

    id: str
    wish: Wish
    started_at: datetime
    total: int
    waves: int = 0
    state: State = State.RUNNING
    why: str = ""
    is_braked: bool = False
    ended_at: datetime | None = None
    cursor: int = 0
    window: tuple[str, ...] = ()
    under_way: tuple[UnderWay, ...] = ()
    done: int = 0
    skipped: int = 0
    failed: int = 0
    troubles: tuple[Trouble, ...] = ()
    asked_as: str = ""
    """Which request it was that started it: asked twice is asked once."""
    spent: timedelta = timedelta(0)
    """What the hosts that are done took, all together."""

    @property
    def name(self) -> str:
        return self.wish.name or self.id

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None

    @property
    def waiting(self) -> int:
        return 0 if self.is_over else self.total - self.cursor + len(self.window)

    @property
    def by(self) -> str:
        """Who did what the campaign did."""
        return f"campaign {self.name}"


class Roll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which campaigns there are.

    Whoever gives a host its turn writes it anew, so that no two do it at once.
    """

    started: int = 0
    alive: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


# --- what may be said of a campaign


class Look(msgspec.Struct, frozen=True):
    """Something may have changed: look who is done and who is next."""


class Pause(msgspec.Struct, frozen=True):
    pass


class Resume(msgspec.Struct, frozen=True):
    pass


class Cancel(msgspec.Struct, frozen=True):
    pass


class Announced(msgspec.Struct, frozen=True):
    """The host's events exist. `trouble`: what could not be announced."""

    host: str
    events: tuple[Told, ...] = ()
    trouble: str = ""


class Claimed(msgspec.Struct, frozen=True):
    """A worker will ask for the host's health."""

    host: str
    worker: str


class Checked(msgspec.Struct, frozen=True):
    """The health command has answered: `problem` empty for yes."""

    host: str
    worker: str
    problem: str = ""


Word = Look | Pause | Resume | Cancel | Announced | Claimed | Checked


# --- what must be done


class Announce(msgspec.Struct, frozen=True):
    """Announce the maintenance of a host; with the same `operation_id`, asking again is asking
    once.
    """

    host: str
    operation_id: str


class Withdraw(msgspec.Struct, frozen=True):
    """Cancel a Scheduled event."""

    scope: str
    event_id: str


class Check(msgspec.Struct, frozen=True):
    """Ask for the health of a host."""

    host: str


Order = Announce | Withdraw | Check


def operation_id(campaign: Campaign, host: str) -> str:
    """One id for ever for what a campaign does to a host.

    The moment keeps it new where a store began anew, and counts from 1.
    """
    return str(
        uuid.uuid5(NAMESPACE, f"{campaign.id}/{campaign.started_at.isoformat()}/{host}")
    ).upper()


def host_seconds(wish: Wish, timing: Timing) -> timedelta:
    """How long a host takes if nobody says go ahead: its notice and its impact."""
    return timing.notice[wish.type] + impact_seconds(wish, timing)


def impact_seconds(wish: Wish, timing: Timing) -> timedelta:
    """How long an impact takes: as is usual for its type, or longer if the operator says so."""
    return max(timing.duration[wish.type], timedelta(seconds=wish.duration_seconds or 0))


def estimate(campaign: Campaign, now: datetime, timing: Timing) -> datetime | None:
    """When it will probably end: as fast as it was so far, else as the notice and the usual
    durations say. None while it is not going on.
    """
    if campaign.is_over or campaign.state is State.PAUSED:
        return None
    span = campaign.spent / campaign.done if campaign.done else host_seconds(campaign.wish, timing)
    begun = max((max(one.taken_at + span, now) for one in campaign.under_way), default=now)
    if campaign.state is State.CANCELED:
        return begun
    return begun + span * (campaign.waves * campaign.waiting / max(campaign.total, 1))


CAMPAIGN = RecordCodec("campaign", Campaign)
ROLL = RecordCodec("roll of campaigns", Roll)
NAMES: RecordCodec[tuple[str, ...]] = RecordCodec("campaign's hosts", tuple[str, ...])
