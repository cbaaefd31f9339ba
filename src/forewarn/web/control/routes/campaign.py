"""Campaigns over the control API: what may be asked of them, and how they are shown.

The rules are in `campaign/rules.py`.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, ClassVar, Literal

import msgspec
from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.status_codes import HTTP_200_OK, HTTP_202_ACCEPTED
from msgspec import Meta

from forewarn.campaign.budget import Hindrance
from forewarn.campaign.forecast import Forecast
from forewarn.campaign.model import (
    MAX_HOSTS_MAX,
    PATTERNS_MAX,
    Campaign,
    Phase,
    State,
    Trouble,
    UnderWay,
    Wish,
    estimate,
    impact_seconds,
)
from forewarn.campaign.rules import hindrance_of_next
from forewarn.campaign.service import Campaigns as Desk
from forewarn.core.event import Cause, EventType, Status
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.errors import CampaignOver, OverBudget, TooManyCampaigns, UnknownCampaign
from forewarn.fleetfile.parser import format_budget, parse_budget
from forewarn.fleetfile.schema import MaxUnavailable
from forewarn.web.control.auth import Principal
from forewarn.web.control.openapi import BodyOptional
from forewarn.web.control.openapi_responses import ANY, answers
from forewarn.web.control.pagination import Key, page
from forewarn.web.http_status import BodyTooLarge

NUMBER_MAX = 10**12

Limit = Annotated[
    int,
    QueryParameter(
        ge=1, le=10_000, description="At most so many; `total` tells how many there are."
    ),
]
Cursor = Annotated[
    str | None,
    QueryParameter(description="The `next` of the answer before, for what comes after it."),
]
Engines = NamedDependency[Engine]
Desks = NamedDependency[Desk]
Asker = NamedDependency[Principal]
Pattern = Annotated[str, Meta(min_length=1, max_length=128)]
Name = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_][A-Za-z0-9._ -]{0,63})?$(?!\n)")]


class NewCampaign(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Maintenance of all hosts that match any of the shell patterns. With `plan` nothing is done:
    the answer tells the waves.

    The health command that runs after each host is an option of the server, never a part of a
    request.
    """

    REMOVED: ClassVar = {
        "health_command": "is not accepted over HTTP; it is the server's option campaign_health_command",
        "health_seconds_max": "is not accepted over HTTP; it is the server's option campaign_health_seconds_max",
    }

    type: Literal["Freeze", "Reboot", "Redeploy"]
    hosts: Annotated[list[Pattern], Meta(min_length=1, max_length=PATTERNS_MAX)]
    name: Name = ""
    max_hosts: Annotated[int, Meta(ge=1, le=MAX_HOSTS_MAX)] = 1
    max_unavailable: MaxUnavailable = None
    pause_on_failure: bool = True
    cause: Literal["maintenance", "infrastructure", "live-migration"] = "maintenance"
    duration_seconds: int | None = None
    description: str | None = None
    plan: bool = False


class NoWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address says it all."""


NO_WORDS = NoWords()


class HostCounts(msgspec.Struct, frozen=True):
    """Skipped: nothing went wrong, but the host has not had its maintenance."""

    total: int
    done: int
    under_way: int
    waiting: int
    skipped: int
    failed: int


class UnderWayView(msgspec.Struct, frozen=True):
    """A host that has its turn: what it waits for, and until when at the latest or probably."""

    host: str
    phase: Phase
    since: datetime
    waiting_for: str
    until: datetime | None
    events: tuple[str, ...]


class CampaignView(msgspec.Struct, frozen=True):
    """A campaign. `troubles` names the last hosts that were skipped or failed, and why; the history
    has them all.

    `waiting_for` is why the next host has to wait; a list does not tell it.
    """

    id: str
    name: str
    type: EventType
    state: State
    hosts: HostCounts
    why_paused: str
    is_braked: bool
    waiting_for: str
    started_at: datetime
    ended_at: datetime | None
    estimated_end: datetime | None
    patterns: tuple[str, ...]
    max_hosts: int
    max_unavailable: int | str | None
    pause_on_failure: bool
    under_way: list[UnderWayView]
    troubles: tuple[Trouble, ...]


class HindranceView(msgspec.Struct, frozen=True):
    """A host that cannot have its turn, and why."""

    host: str
    scope: str
    why: str


class PlanView(msgspec.Struct, frozen=True):
    """Hosts in waves; hosts that can never have their turn; hosts that will wait, as things stand
    now.
    """

    waves: tuple[tuple[str, ...], ...]
    too_large: list[HindranceView]
    waiting: list[HindranceView]
    total: int


class CampaignAnswer(msgspec.Struct, frozen=True):
    """The campaign, or its plan if only that was asked for."""

    campaign: CampaignView | None = None
    plan: PlanView | None = None


class CampaignList(msgspec.Struct, frozen=True):
    campaigns: list[CampaignView]
    total: int
    next: str | None


def _verb(
    verb: str, act: Callable[[Desk, str, str], Awaitable[Campaign]], sentence: str
) -> HTTPRouteHandler:
    @post(
        f"/{{campaign:str}}/{verb}",
        operation_id=f"{verb}_campaign",
        status_code=HTTP_200_OK,
        description=sentence,
        operation_class=BodyOptional,
        responses=answers(UnknownCampaign, CampaignOver, BodyTooLarge),
    )
    async def handler(
        self: Controller,
        campaign: FromPath[str],
        engine: Engines,
        campaigns: Desks,
        caller: Asker,
        data: JSONBody[NoWords] = NO_WORDS,
    ) -> CampaignAnswer:
        return CampaignAnswer(view(engine, campaigns, await act(campaigns, campaign, caller.name)))

    return handler


class Campaigns(Controller):
    path = "/api/v1/campaigns"
    tags = ("Campaigns",)

    @get("/", responses=ANY)
    async def list_campaigns(
        self, engine: Engines, campaigns: Desks, limit: Limit = 1000, cursor: Cursor = None
    ) -> CampaignList:
        """All campaigns, the latest first. The last thousand that are over are kept."""
        found = sorted(campaigns.cache.listed(), key=_age)
        shown, after = page(found, _age, limit, cursor)
        views = [view(engine, campaigns, one, is_listed=True) for one in shown]
        return CampaignList(views, len(found), after)

    @get("/{campaign:str}", responses=answers(UnknownCampaign))
    async def show_campaign(
        self, campaign: FromPath[str], engine: Engines, campaigns: Desks
    ) -> CampaignView:
        """A campaign: how far it is, what it waits for, and when it will probably end."""
        found = await engine.look_up(lambda: campaigns.cache.find(campaign))
        return view(engine, campaigns, found)

    @post(
        "/",
        status_code=HTTP_202_ACCEPTED,
        responses=answers(OverBudget, TooManyCampaigns, BodyTooLarge),
    )
    async def start_campaign(
        self,
        data: JSONBody[NewCampaign],
        engine: Engines,
        campaigns: Desks,
        operations: NamedDependency[Operations],
        caller: Asker,
    ) -> CampaignAnswer:
        """Starts a campaign; with `plan` only tells its waves.

        Refused if a host alone takes more than a scope's budget.
        """
        wish = _wish(data)
        if data.plan:
            return CampaignAnswer(plan=plan_view(await campaigns.plan(wish)))
        started = await campaigns.start(wish, by=caller.name, operation_id=operations.new_id())
        return CampaignAnswer(view(engine, campaigns, started))

    pause = _verb(
        "pause",
        Desk.pause,
        "No new hosts; what is announced goes on. Pausing again changes nothing.",
    )
    resume = _verb(
        "resume",
        Desk.resume,
        "Goes on, also after a failure; a host that failed is not tried again.",
    )
    cancel = _verb(
        "cancel",
        Desk.cancel,
        "Cancels the campaign's Scheduled events, and lets its Started ones end.",
    )


def view(
    engine: Engine, campaigns: Desk, campaign: Campaign, *, is_listed: bool = False
) -> CampaignView:
    wish, now = campaign.wish, engine.clock.now()
    is_asked = not (campaign.is_over or is_listed)
    hindrance = hindrance_of_next(campaign, campaigns.view(campaign), now) if is_asked else None
    return CampaignView(
        id=campaign.id,
        name=campaign.name,
        type=wish.type,
        state=campaign.state,
        hosts=HostCounts(
            total=campaign.total,
            done=campaign.done,
            under_way=len(campaign.under_way),
            waiting=campaign.waiting,
            skipped=campaign.skipped,
            failed=campaign.failed,
        ),
        why_paused=campaign.why,
        is_braked=campaign.is_braked,
        waiting_for="" if hindrance is None else f"{hindrance.host}: {hindrance}",
        started_at=campaign.started_at,
        ended_at=campaign.ended_at,
        estimated_end=estimate(campaign, now, engine.timing),
        patterns=wish.patterns,
        max_hosts=wish.max_hosts,
        max_unavailable=format_budget(wish.max_unavailable),
        pause_on_failure=wish.pause_on_failure,
        under_way=[_under_way(engine, campaign, one) for one in campaign.under_way],
        troubles=campaign.troubles,
    )


def _under_way(engine: Engine, campaign: Campaign, one: UnderWay) -> UnderWayView:
    places = [(told, engine.board.scopes.get(told.scope)) for told in one.events]
    live = [
        event
        for told, place in places
        if place is not None and (event := place.scope.event(told.event_id))
    ]
    started = [
        event.started_at for event in live if event.status is Status.STARTED and event.started_at
    ]
    events = f"{len(live)} event{'s' if len(live) != 1 else ''}"
    until: datetime | None = None
    if one.phase is Phase.CHECKING:
        text, until = "the health command", one.checked_until
    elif started:
        text, until = (
            f"{events} to end",
            max(started) + impact_seconds(campaign.wish, engine.timing),
        )
    elif live:
        text, until = f"{events} to start", max(event.not_before for event in live)
    else:
        text = "its events"
    return UnderWayView(
        one.host, one.phase, one.taken_at, text, until, tuple(event.id for event in live)
    )


def plan_view(planned: Forecast) -> PlanView:
    return PlanView(
        waves=planned.waves,
        too_large=[_hindrance(one) for one in planned.too_large],
        waiting=[_hindrance(one) for one in planned.waiting],
        total=len(planned.hosts) + len(planned.too_large),
    )


def _hindrance(found: Hindrance) -> HindranceView:
    return HindranceView(found.host, found.scope, str(found))


def _wish(data: NewCampaign) -> Wish:
    return Wish(
        type=EventType(data.type),
        patterns=tuple(dict.fromkeys(data.hosts)),
        name=data.name,
        cause=Cause(data.cause),
        duration_seconds=data.duration_seconds,
        description=data.description,
        max_hosts=data.max_hosts,
        max_unavailable=parse_budget(data.max_unavailable),
        pause_on_failure=data.pause_on_failure,
    )


def _age(campaign: Campaign) -> Key:
    """The latest first, in the order of text."""
    return (f"{NUMBER_MAX - int(campaign.id[1:]):013d}",)
