"""Campaigns over the control API. The rules are in `campaign/rules.py`."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from litestar import Controller, Response, get, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK, HTTP_202_ACCEPTED
from msgspec import Meta

from forewarn.campaign.budget import Blocker
from forewarn.campaign.forecast import Forecast
from forewarn.campaign.model import (
    MAX_HOSTS_MAX,
    PATTERNS_MAX,
    Campaign,
    CampaignSpec,
    CampaignState,
    DoneHost,
    HostPhase,
    HostRun,
    SkippedHost,
    estimate_end,
    impact_duration,
)
from forewarn.campaign.rules import find_next_blocker
from forewarn.core.event import Cause, Event, EventType, Status, is_move
from forewarn.engine.engine import Engine
from forewarn.engine.problems import ScopeIndex
from forewarn.engine.turns import SLICE, Turn
from forewarn.errors import (
    CampaignOver,
    DaemonAway,
    OverBudget,
    Refused,
    TooManyCampaigns,
    UnknownCampaign,
)
from forewarn.fleetfile.parser import format_budget, parse_budget
from forewarn.fleetfile.schema import MaxUnavailable
from forewarn.web.control import pagination
from forewarn.web.control.dependencies import ApiCall, Call, Name, Page
from forewarn.web.control.pagination import Key, Paged
from forewarn.web.control.routes.host import (
    ALLOW_UNREACHABLE,
    DESCRIPTION,
    DURATION,
    refuse_unreachable,
)
from forewarn.web.control.views import view
from forewarn.web.service import Service

NUMBER_MAX = 10**12
WAITING_HOSTS_MAX = 100
UNMOVABLE_MAX = 1000
WARNINGS_MAX = 1000

ENDED_ERRORS = (UnknownCampaign, CampaignOver)
Pattern = Annotated[str, Meta(min_length=1, max_length=128, description="1 to 128 characters")]
Label = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9._ -]{0,63})?$(?!\n)",
        description="up to 64 letters, digits, spaces and . _ -",
    ),
]


class NewCampaign(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Maintenance of all hosts that match any of the shell patterns.

    With `plan` the response has the waves and nothing is started. The health command that runs
    after each host is an option of the server, never part of a request.
    """

    type: Literal["Freeze", "Reboot", "Redeploy"]
    hosts: Annotated[
        list[Pattern],
        Meta(
            min_length=1,
            max_length=PATTERNS_MAX,
            description=f"a list of 1 to {PATTERNS_MAX} shell patterns of host names",
        ),
    ]
    name: Label = ""
    max_hosts: Annotated[
        int, Meta(ge=1, le=MAX_HOSTS_MAX, description=f"a number of hosts, 1 to {MAX_HOSTS_MAX}")
    ] = 1
    max_unavailable: MaxUnavailable = None
    pause_on_failure: Annotated[bool, Meta(description="true to pause after a failure")] = True
    cause: Literal["maintenance", "infrastructure", "live-migration"] = "maintenance"
    duration_seconds: Annotated[int | None, DURATION] = None
    description: Annotated[str | None, DESCRIPTION] = None
    plan: Annotated[bool, Meta(description="true to start nothing")] = False
    allow_unreachable: Annotated[bool, ALLOW_UNREACHABLE] = False

    def spec(self) -> CampaignSpec:
        return view(
            CampaignSpec,
            self,
            type=EventType(self.type),
            cause=Cause(self.cause),
            patterns=tuple(dict.fromkeys(self.hosts)),
            max_unavailable=parse_budget(self.max_unavailable),
        )


class HostCounts(msgspec.Struct, frozen=True):
    """Skipped: nothing went wrong, but the host has not had its maintenance."""

    total: int
    done: int
    in_progress: int
    waiting: int
    skipped: int
    failed: int


class HostRunView(msgspec.Struct, frozen=True):
    """A host in progress: what it waits for, and until when at the latest or probably.

    `until` is null if that is not known, such as while the host's daemon is away.
    """

    host: str
    phase: HostPhase
    since: datetime
    waiting_for: str
    until: datetime | None
    events: tuple[str, ...]


class CampaignView(msgspec.Struct, frozen=True):
    """A campaign. `skipped_hosts` has the last hosts that were skipped or failed, with the reason.

    `waves` is how many were planned; `waves_done` counts those without a host that waits or is in
    progress, null if that is not known. `done_hosts` are the last hosts that are done.
    `waiting_for` is why the next host cannot start, and `waiting_hosts` are the next hosts in their
    order. In a list the last four are null or empty.
    """

    id: str
    name: str
    type: EventType
    state: CampaignState
    hosts: HostCounts
    waves: int
    waves_done: int | None
    pause_reason: str
    paused_by_failure: bool
    waiting_for: str
    started_at: datetime
    ended_at: datetime | None
    estimated_end: datetime | None
    patterns: tuple[str, ...]
    max_hosts: int
    max_unavailable: int | str | None
    pause_on_failure: bool
    in_progress: list[HostRunView]
    skipped_hosts: tuple[SkippedHost, ...]
    waiting_hosts: tuple[str, ...]
    done_hosts: tuple[DoneHost, ...]


class BlockerView(msgspec.Struct, frozen=True):
    """A host that cannot start, and why."""

    host: str
    scope: str
    why: str


class UnreachableHost(msgspec.Struct, frozen=True):
    """A host on which nothing can be done at present, and why."""

    host: str
    why: str


class UnmovableOnHost(msgspec.Struct, frozen=True):
    """A VM that cannot leave its host, and why."""

    host: str
    vm: str
    why: str


class PlanView(msgspec.Struct, frozen=True):
    """Hosts in waves, hosts that can never start, and hosts that cannot start at present.

    `unreachable` are hosts whose daemon is away, whatever else is said of them. If VMs are to move,
    `unmovable` are those that cannot, as far as that is known: at most 1,000.
    """

    waves: tuple[tuple[str, ...], ...]
    too_large: list[BlockerView]
    waiting: list[BlockerView]
    total: int
    unreachable: list[UnreachableHost]
    unmovable: list[UnmovableOnHost]


class CampaignResult(msgspec.Struct, frozen=True):
    """The campaign, or its plan if only that was requested.

    `warnings`: VMs that may run on its hosts, and that are not notified; at most 1,000.
    """

    campaign: CampaignView | None = None
    plan: PlanView | None = None
    warnings: list[str] = msgspec.field(default_factory=list)


class CampaignList(Paged, frozen=True):
    campaigns: list[CampaignView]


class CampaignController(Controller):
    path = "/api/v1/campaigns"
    tags = ("Campaigns",)

    @get("/")
    async def list_campaigns(self, call: Call, page: Page) -> Response[CampaignList]:
        """All campaigns, the latest first. The last thousand that are over are kept."""
        campaigns = call.service.campaigns.all()[::-1]
        shown, after = pagination.page(campaigns, _sort_key, page.limit, page.cursor)
        hosts, views = HostRunViews(call.service, page.take_turn), list[CampaignView]()
        for number, campaign in enumerate(shown):
            if number % SLICE == 0:
                await page.take_turn()
            views.append(await view_campaign(call.service, campaign, hosts, is_listed=True))
        found = CampaignList(views, total=len(campaigns), next=after)
        return await pagination.render_list(found, page.take_turn)

    @get("/{campaign:str}", errors=(UnknownCampaign,))
    async def show_campaign(self, campaign: Name, call: Call) -> CampaignView:
        """A campaign: its progress, what it waits for, and when it will probably end."""
        service = call.service
        found = await service.engine.look_up(lambda: service.campaigns.find(campaign))
        return await view_campaign(service, found, HostRunViews(service, call.take_turn))

    @post(
        "/",
        status_code=HTTP_202_ACCEPTED,
        errors=(OverBudget, TooManyCampaigns, DaemonAway, Refused),
    )
    async def start_campaign(self, data: JSONBody[NewCampaign], call: Call) -> CampaignResult:
        """Starts a campaign; with `plan` only returns its waves.

        Refused if a host alone exceeds the budget of a scope, and if the daemon of a host is away,
        unless `allow_unreachable`. Moves are also refused for a host that was forgotten and left
        running.
        """
        service = call.service
        if data.plan:
            planned = await service.campaigns.plan(data.spec())
            away = await service.hosts.away_reasons(planned.hosts)
            plan = PlanView(
                waves=planned.waves,
                too_large=_view_blockers(planned.too_large),
                waiting=_view_blockers(planned.waiting),
                total=len(planned.hosts) + len(planned.too_large),
                unreachable=[UnreachableHost(*each) for each in away.items()],
                unmovable=await _list_unmovable(call, planned, data.spec()),
            )
            return CampaignResult(plan=plan, warnings=await _list_warnings(call, planned))
        operation_id, warnings = service.operations.new_id(), list[str]()

        async def check(planned: Forecast) -> None:
            if is_move(EventType(data.type), Cause(data.cause)):
                await service.hosts.refuse_moves(planned.hosts)
            if not data.allow_unreachable:
                await refuse_unreachable(service, planned.hosts)
            warnings[:] = await _list_warnings(call, planned)

        started = await service.campaigns.start(data.spec(), call.by, operation_id, check)
        hosts = HostRunViews(service, call.take_turn)
        campaign = await view_campaign(service, started, hosts)
        return CampaignResult(campaign, warnings=warnings)

    @post("/{campaign:str}/pause", status_code=HTTP_200_OK, errors=ENDED_ERRORS)
    async def pause_campaign(self, campaign: Name, call: Call) -> CampaignResult:
        """Starts no more hosts. Announced hosts continue."""
        return await _set_state(campaign, CampaignState.PAUSED, call)

    @post("/{campaign:str}/resume", status_code=HTTP_200_OK, errors=ENDED_ERRORS)
    async def resume_campaign(self, campaign: Name, call: Call) -> CampaignResult:
        """Continues with the next hosts. Failed hosts are not retried."""
        return await _set_state(campaign, CampaignState.RUNNING, call)

    @post("/{campaign:str}/cancel", status_code=HTTP_200_OK, errors=ENDED_ERRORS)
    async def cancel_campaign(self, campaign: Name, call: Call) -> CampaignResult:
        """Cancels Scheduled events. Started ones end by themselves."""
        return await _set_state(campaign, CampaignState.CANCELED, call)


async def _set_state(campaign: str, state: CampaignState, call: ApiCall) -> CampaignResult:
    changed = await call.service.campaigns.set_state(campaign, state, call.by)
    hosts = HostRunViews(call.service, call.take_turn)
    return CampaignResult(await view_campaign(call.service, changed, hosts))


class HostRunViews:
    """The hosts in progress of campaigns, for one request.

    All of them are looked up in the same state of a scope, which is read once. Other requests get
    their turns between hosts and between scopes.
    """

    def __init__(self, service: Service, take_turn: Turn) -> None:
        self._service = service
        self._take_turn = take_turn
        self._scopes: dict[str, ScopeIndex | None] = {}

    async def build(self, campaign: Campaign) -> tuple[list[HostRunView], bool]:
        """The hosts in progress, and whether any of them waits for more than time."""
        views, is_held_up = list[HostRunView](), False
        for run in campaign.in_progress:
            await self._take_turn()
            live = await self._list_live(run)
            obstacle = self._find_obstacle(run, live)
            events = [event for _, event in live]
            views.append(_view_run(self._service.engine, campaign.spec, run, events, obstacle))
            is_held_up = is_held_up or obstacle != ""
        return views, is_held_up

    async def _list_live(self, run: HostRun) -> list[tuple[ScopeIndex, Event]]:
        """The events of a host in progress that are not over yet."""
        live = list[tuple[ScopeIndex, Event]]()
        for ref in run.events:
            if ref.scope not in self._scopes:
                await self._take_turn()
                published = self._service.engine.board.scopes.get(ref.scope)
                self._scopes[ref.scope] = ScopeIndex(published.scope) if published else None
            scope = self._scopes[ref.scope]
            event = scope.events.get(ref.event_id) if scope else None
            if scope is not None and event is not None:
                live.append((scope, event))
        return live

    def _find_obstacle(self, run: HostRun, live: Sequence[tuple[ScopeIndex, Event]]) -> str:
        """What has to change before a host in progress goes on; empty if time alone is enough."""
        if run.phase is HostPhase.CHECKING:
            return ""
        hosts, problems = self._service.hosts, self._service.hosts.problems
        for scope, event in live:
            if event.status is Status.STARTED:
                obstacle = problems.obstacle(scope, event.id)
            else:
                reason = hosts.away_reason(run.host)
                obstacle = (
                    f"the daemon of {run.host}: {reason}"
                    if reason
                    else problems.waits_to_start(scope.scope, event, is_stuck=True)
                )
            if obstacle:
                return obstacle
        return ""


async def view_campaign(
    service: Service, campaign: Campaign, hosts: HostRunViews, *, is_listed: bool = False
) -> CampaignView:
    in_progress, is_held_up = await hosts.build(campaign)
    spec, now = campaign.spec, service.engine.clock.now()
    blocker = None
    waiting: tuple[str, ...] = ()
    if not campaign.is_over and not is_listed:
        waiting = service.campaigns.waiting_hosts(campaign)
        blocker = find_next_blocker(service.campaigns.draft(campaign, now))
    return view(
        CampaignView,
        campaign,
        spec,
        waves_done=None if is_listed else service.campaigns.count_waves_done(campaign),
        done_hosts=() if is_listed else campaign.done_hosts,
        hosts=view(HostCounts, campaign, in_progress=len(campaign.in_progress)),
        waiting_for="" if blocker is None else f"{blocker.host}: {blocker}",
        waiting_hosts=waiting[:WAITING_HOSTS_MAX],
        estimated_end=None if is_held_up else estimate_end(campaign, now, service.engine.timing),
        max_unavailable=format_budget(spec.max_unavailable),
        in_progress=in_progress,
    )


def _view_run(
    engine: Engine, spec: CampaignSpec, run: HostRun, live: Sequence[Event], obstacle: str
) -> HostRunView:
    started = [e.started_at for e in live if e.status is Status.STARTED and e.started_at]
    events = f"{len(live)} event{'s' if len(live) != 1 else ''}"
    waiting_for, until = "its events", None
    if run.phase is HostPhase.CHECKING:
        waiting_for, until = "the health command", run.checked_until
    elif obstacle:
        waiting_for = obstacle
    elif started:
        end = max(started) + impact_duration(spec, engine.timing)
        waiting_for, until = f"{events} to end", end
    elif live:
        waiting_for, until = f"{events} to start", max(event.not_before for event in live)
    ids = tuple(event.id for event in live)
    return HostRunView(run.host, run.phase, run.taken_at, waiting_for, until, ids)


def _view_blockers(blockers: Iterable[Blocker]) -> list[BlockerView]:
    return [BlockerView(blocker.host, blocker.scope, str(blocker)) for blocker in blockers]


async def _list_warnings(call: ApiCall, planned: Forecast) -> list[str]:
    warnings = list[str]()
    for host in planned.hosts:
        await call.take_turn()
        warnings.extend(call.service.hosts.problems.warn_of_others(host))
        if len(warnings) >= WARNINGS_MAX:
            break
    return warnings[:WARNINGS_MAX]


async def _list_unmovable(
    call: ApiCall, planned: Forecast, spec: CampaignSpec
) -> list[UnmovableOnHost]:
    found = list[UnmovableOnHost]()
    for host in planned.hosts if is_move(spec.type, spec.cause) else ():
        await call.take_turn()
        unmovable = call.service.hosts.managed.unmovable_on(host)
        found.extend(UnmovableOnHost(host, vm, why) for vm, why in unmovable.items())
        if len(found) >= UNMOVABLE_MAX:
            break
    return found[:UNMOVABLE_MAX]


def _sort_key(campaign: Campaign) -> Key:
    """The latest first, in the order of text."""
    return (f"{NUMBER_MAX - campaign.number:013d}",)
