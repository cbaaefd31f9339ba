"""A connected host daemon as its server sees it, and what the two of them exchange."""

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from forewarn.engine.inventory import Inventory
from forewarn.fleetfile.schema import NameOrNothing
from forewarn.platform.base import ImpactRequest, ImpactResult

ImpactKey = tuple[str, str]
"""The id of the event and the name of the VM."""


class RunningImpact(msgspec.Struct, frozen=True):
    """An impact that a daemon is carrying out, or has the result of."""

    event_id: str
    vm: str
    tries: int

    @property
    def key(self) -> ImpactKey:
        return self.event_id, self.vm


class RemoteResult(RunningImpact, frozen=True):
    """How an impact ended. `problem` is empty on success; then `host` and `is_back` are as in
    `ImpactResult`. `detail` is for the history.
    """

    problem: str = ""
    detail: str = ""
    host: NameOrNothing = ""
    is_back: bool = True


class Work(msgspec.Struct, frozen=True):
    """What a daemon should start, and what it should cancel."""

    impacts: list[ImpactRequest]
    cancel: list[RunningImpact]


@dataclass(eq=False)
class Call:
    """An impact that the daemon has to carry out."""

    request: ImpactRequest
    result: asyncio.Future[ImpactResult]


@dataclass(eq=False)
class Session:
    """A connected daemon. At `silent_at` it counts as silent, unless it sends something."""

    id: str
    silent_at: datetime
    calls: dict[ImpactKey, Call] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    inventory: Inventory | None = None
    merge_at: datetime | None = None
