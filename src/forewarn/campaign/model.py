"""A campaign: maintenance of many hosts, a few at a time. Values; the rules are in `rules.py`."""

import uuid
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum

import msgspec

from forewarn.core.event import Cause, EventType, Time
from forewarn.core.fleet import Budget
from forewarn.core.timing import Timing
from forewarn.engine.record import RecordCodec

NAMESPACE = uuid.UUID("7d0f3a51-5f0c-4d0e-9a53-0c6b1f6f1a2e")
HOSTS_MAX = 5_000
HOSTS_BYTES_MAX = 500_000
"""The list of a campaign's hosts is one record, whose limit also covers its quotes and commas."""
PATTERNS_MAX = 100
MAX_HOSTS_MAX = 250
SKIPPED_HOSTS_MAX = 100
DONE_HOSTS_MAX = 100
"""How many hosts that were not done, or were, are named in the record; the history has them all."""


class CampaignSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator requested: which maintenance, of which hosts, how carefully."""

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
    """Only in records of version 0.1. Never run: the health command is an option of the server."""


class CampaignState(StrEnum):
    """The states are described in `rules.py`."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELED = "canceled"
    DONE = "done"


class HostPhase(StrEnum):
    """How far a host in progress is: about to be announced, its events live, health checked."""

    ORDERED = "ordered"
    ANNOUNCED = "announced"
    CHECKING = "checking"


class HostPriority(IntEnum):
    """How much a campaign needs a host, and so how unsuitable it is as a target for VMs."""

    WAITING = 1
    IN_PROGRESS = 2


class EventRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event of the campaign. Version 0.2 wrote and used `revision`."""

    scope: str
    event_id: str
    revision: int = 0

    def __str__(self) -> str:
        return f"event {self.event_id} of {self.scope}"


class HostRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host in progress.

    `problem` is why it will not count as done. `checked_until` is when its health check ends at
    the latest.
    """

    host: str
    taken_at: Time
    phase: HostPhase = HostPhase.ORDERED
    events: tuple[EventRef, ...] = ()
    problem: str = ""
    checked_until: Time | None = None


class SkippedHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host that was not done: its maintenance failed, or it had none (skipped)."""

    host: str
    why: str
    is_failed: bool


class DoneHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host whose maintenance is over, and since when."""

    host: str
    at: Time


class Campaign(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One record, written at every step; so it does not contain the list of hosts.

    That list is a record of its own and never changes. The first `cursor` hosts of it have been
    considered; those of them that still wait are in `window`. `paused_by_failure`: paused by a
    failed impact or health check, not by an operator. `operation_id` is the request that started
    it: repeating the request starts no second campaign. `spent` is the time that all done hosts
    with events took together, `timed` is their number.
    """

    id: str
    spec: CampaignSpec
    started_at: Time
    total: int
    waves: int = 0
    state: CampaignState = CampaignState.RUNNING
    pause_reason: str = ""
    paused_by_failure: bool = False
    ended_at: Time | None = None
    cursor: int = 0
    window: tuple[str, ...] = ()
    in_progress: tuple[HostRun, ...] = ()
    done: int = 0
    skipped: int = 0
    failed: int = 0
    skipped_hosts: tuple[SkippedHost, ...] = ()
    operation_id: str = ""
    spent: timedelta = timedelta(0)
    timed: int = 0
    done_hosts: tuple[DoneHost, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.name or self.id

    @property
    def number(self) -> int:
        return int(self.id[1:])

    @property
    def timed_hosts(self) -> int:
        """How many hosts took `spent`. A record of an earlier version counts all that are done."""
        return self.timed or (self.done if self.spent else 0)

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None

    @property
    def waiting(self) -> int:
        return 0 if self.is_over else self.total - self.cursor + len(self.window)

    @property
    def by(self) -> str:
        """The author of what the campaign does, for the history."""
        return f"campaign {self.name}"


# --- ids and times


def operation_id_of(campaign: Campaign, host: str) -> str:
    """The id of what a campaign does to a host.

    The start time keeps it unique if the store is replaced and campaigns count from 1 again.
    """
    name = f"{campaign.id}/{campaign.started_at.isoformat()}/{host}"
    return str(uuid.uuid5(NAMESPACE, name)).upper()


def host_duration(spec: CampaignSpec, timing: Timing) -> timedelta:
    """How long a host takes without early approvals: its notice and its impact."""
    return timing.notice[spec.type] + impact_duration(spec, timing)


def impact_duration(spec: CampaignSpec, timing: Timing) -> timedelta:
    """The usual duration of the type, or the operator's `duration_seconds` if that is longer."""
    return max(timing.duration[spec.type], timedelta(seconds=spec.duration_seconds or 0))


def estimate_end(campaign: Campaign, now: datetime, timing: Timing) -> datetime | None:
    """When it will probably end, judging by the hosts so far. None while it is paused or over."""
    if campaign.is_over or campaign.state is CampaignState.PAUSED:
        return None
    per_host = host_duration(campaign.spec, timing)
    if campaign.timed_hosts:
        per_host = campaign.spent / campaign.timed_hosts
    current = max((max(run.taken_at + per_host, now) for run in campaign.in_progress), default=now)
    if campaign.state is CampaignState.CANCELED:
        return current
    return current + per_host * (campaign.waves * campaign.waiting / max(campaign.total, 1))


CAMPAIGN = RecordCodec("campaign", Campaign)
CAMPAIGN_WAVES: RecordCodec[tuple[int, ...]] = RecordCodec("campaign waves", tuple[int, ...])
"""How many hosts of the list each planned wave has."""
CAMPAIGN_HOSTS: RecordCodec[tuple[str, ...]] = RecordCodec("campaign hosts", tuple[str, ...])
