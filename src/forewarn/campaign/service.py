"""Campaigns as operators use them, and the one way to change one."""

import asyncio
import fnmatch
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from itertools import accumulate

from forewarn.campaign.budget import ScopeSummary
from forewarn.campaign.forecast import Forecast, forecast
from forewarn.campaign.model import (
    CAMPAIGN,
    CAMPAIGN_HOSTS,
    CAMPAIGN_WAVES,
    HOSTS_BYTES_MAX,
    HOSTS_MAX,
    NAMESPACE,
    Campaign,
    CampaignSpec,
    CampaignState,
    HostPriority,
    host_duration,
)
from forewarn.campaign.rules import CampaignDraft, Rule, set_state
from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Maintain
from forewarn.core.fleet import Scope
from forewarn.core.machine import decide
from forewarn.engine.board import Board
from forewarn.engine.engine import Engine
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, OverBudget, TooManyCampaigns, UnknownCampaign
from forewarn.store.base import Lease

HOSTS_KEY = "campaign-hosts/{}/0"
"""Version 0.2 numbered several records of a long list; only the first one is left."""
WAVES_KEY = "campaign-waves/{}/"
LIVE_MAX = 100
ENDED_MAX = 1000
DELETIONS_MAX = 10
SUMMARIES_MAX = 10_000


class Campaigns:
    """Plan, start, pause, resume and cancel campaigns. Create it before the engine loads.

    The record of a campaign is small, because each step writes it. The list of its hosts is a
    record of its own, written once.
    """

    def __init__(self, engine: Engine, is_lost: Callable[[str], bool] = lambda host: False) -> None:
        self._engine = engine
        self.fleet = BoardView(engine.board, is_lost)
        engine.register("campaign", CAMPAIGN)
        engine.register("campaign-hosts", CAMPAIGN_HOSTS)
        engine.register("campaign-waves", CAMPAIGN_WAVES)

    def find(self, campaign_id: str) -> Campaign:
        key = campaign_key(campaign_id)
        return require_campaign(self._engine.records.get(key).value, campaign_id)

    def all(self) -> list[Campaign]:
        """The oldest first."""
        campaigns: list[Campaign] = [value for _, value in self._engine.records.values("campaign")]
        return sorted(campaigns, key=lambda campaign: campaign.number)

    def live(self) -> list[Campaign]:
        return [campaign for campaign in self.all() if not campaign.is_over]

    def host_priorities(self) -> dict[str, HostPriority]:
        """The hosts of live campaigns that wait or are in progress."""
        priorities: dict[str, HostPriority] = {}
        live = self.live()
        for campaign in live:
            if campaign.state is not CampaignState.CANCELED:
                waiting = self.waiting_hosts(campaign)
                priorities |= dict.fromkeys(waiting, HostPriority.WAITING)
        for campaign in live:
            priorities |= {run.host: HostPriority.IN_PROGRESS for run in campaign.in_progress}
        return priorities

    def waiting_hosts(self, campaign: Campaign) -> tuple[str, ...]:
        """The hosts that have not been taken, in their order."""
        return (*campaign.window, *self._hosts_of(campaign)[campaign.cursor :])

    def count_waves_done(self, campaign: Campaign) -> int | None:
        """How many of the planned waves have no host left; None if that is no longer known."""
        if campaign.state is CampaignState.DONE:
            return campaign.waves
        hosts, key = self._hosts_of(campaign), WAVES_KEY.format(campaign.id)
        sizes: tuple[int, ...] | None = self._engine.records.get(key).value
        if not hosts or sizes is None:
            return None
        left = {*self.waiting_hosts(campaign), *(run.host for run in campaign.in_progress)}
        ends = zip(sizes, accumulate(sizes), strict=True)
        return sum(left.isdisjoint(hosts[end - size : end]) for size, end in ends)

    def _hosts_of(self, campaign: Campaign) -> tuple[str, ...]:
        """A campaign's hosts in their order; none if it is over, or they are not known yet."""
        record = self._engine.records.get(HOSTS_KEY.format(campaign.id))
        return record.value or ()

    async def plan(self, spec: CampaignSpec) -> Forecast:
        """What a campaign would do at present. Nothing is changed."""
        engine = self._engine
        # Let the rules of maintenance check the request.
        decide(
            Scope(name="-"), maintain(spec, "-", NAMESPACE.hex), engine.clock.now(), engine.timing
        )
        hosts = await asyncio.to_thread(match_hosts, engine.board.known_hosts[:], spec.patterns)
        if not hosts:
            raise Invalid(
                f"no host matches {', '.join(spec.patterns)}; expected patterns such as rack7-*",
                field="hosts",
            )
        size = sum(len(host.encode()) for host in hosts)
        if len(hosts) > HOSTS_MAX or size > HOSTS_BYTES_MAX:
            raise Invalid(
                f"{len(hosts)} hosts match, whose names have {size} bytes; expected at most"
                f" {HOSTS_MAX} hosts and {HOSTS_BYTES_MAX} bytes in one campaign",
                field="hosts",
                hosts=len(hosts),
            )
        scopes: dict[str, Sequence[ScopeSummary]] = {}
        for host in hosts:
            await asyncio.sleep(0)  # let polls pass
            scopes[host] = self.fleet.scopes_on(host) or ()
        return await asyncio.to_thread(
            forecast,
            scopes,
            max_hosts=spec.max_hosts,
            budget=spec.max_unavailable,
            horizon=engine.clock.now() + host_duration(spec, engine.timing),
        )

    async def start(
        self,
        spec: CampaignSpec,
        by: str,
        operation_id: str,
        check: Callable[[Forecast], Awaitable[None]] | None = None,
    ) -> Campaign:
        """Start a campaign. Refused if a host alone exceeds the budget of a scope, or by `check`.

        `operation_id` identifies the request. Repeated, here or on another server, it returns the
        campaign that it started before.
        """
        known = self._find_started(operation_id)
        if known is not None:
            return known
        planned = await self.plan(spec)
        if planned.too_large:
            first, count = planned.too_large[0], len(planned.too_large)
            raise OverBudget(
                f"{first}; {count} hosts are too large" if count > 1 else str(first),
                host=first.host,
                scope=first.scope,
                vms=first.vms,
                max_unavailable=first.limit,
            )
        if check is not None:
            await check(planned)

        def decide_start(transaction: Transaction) -> Campaign:
            known = self._find_started(operation_id)
            if known is not None:
                return known
            campaigns = self.all()
            if sum(not campaign.is_over for campaign in campaigns) >= LIVE_MAX:
                raise TooManyCampaigns(
                    f"{LIVE_MAX} campaigns are running or paused, which is the maximum",
                    campaigns_max=LIVE_MAX,
                )
            campaign = Campaign(
                id=f"c{max((known.number for known in campaigns), default=0) + 1}",
                spec=spec,
                started_at=transaction.now,
                total=len(planned.hosts),
                waves=len(planned.waves) + len(planned.waiting),
                operation_id=operation_id,
            )
            transaction.put(campaign_key(campaign.id), campaign)
            transaction.put(HOSTS_KEY.format(campaign.id), planned.hosts)
            sizes = (*map(len, planned.waves), *(1 for _ in planned.waiting))
            transaction.put(WAVES_KEY.format(campaign.id), sizes)
            detail = f"{campaign.id} started: {spec.type} of {campaign.total} hosts"
            transaction.record(Change(what=ChangeKind.CAMPAIGN, detail=detail))
            return campaign

        return await self._engine.update(["campaign/"], decide_start, by=by)

    def _find_started(self, operation_id: str) -> Campaign | None:
        campaigns = (one for one in self.all() if one.operation_id == operation_id)
        return next(campaigns, None)

    async def set_state(self, campaign_id: str, state: CampaignState, by: str) -> Campaign:
        """Pause, resume (RUNNING) or cancel. Announced hosts continue unless it is canceled.

        Canceled, its Scheduled events are canceled, and its Started ones end by themselves.
        """
        await self._engine.require_caught_up()  # another server may have changed the state
        return await self.apply(campaign_id, lambda draft: set_state(draft, state), by)

    async def apply(
        self, campaign_id: str, rule: Rule, by: str = "", *, lease: Lease | None = None
    ) -> Campaign:
        """Apply a rule durably. Without `by` the campaign itself is the author."""
        key = campaign_key(campaign_id)

        def decide_step(transaction: Transaction) -> Campaign:
            before = require_campaign(transaction.get(key), campaign_id)
            draft = self.draft(before, transaction.now)
            rule(draft)
            if draft.campaign != before:
                transaction.put(key, draft.campaign)
                transaction.record(*draft.changes, by=by or before.by)
                if draft.campaign.is_over:
                    self._clean_up(transaction, before.id)
            return draft.campaign

        return await self._engine.update([key], decide_step, by=by, lease=lease)

    def _clean_up(self, transaction: Transaction, campaign_id: str) -> None:
        """Delete the list of hosts, its waves, and the oldest campaigns that are over."""
        transaction.put(HOSTS_KEY.format(campaign_id), None)
        transaction.put(WAVES_KEY.format(campaign_id), None)
        ended = [campaign.id for campaign in self.all() if campaign.is_over]
        for old in ended[: -(ENDED_MAX - 1)][:DELETIONS_MAX]:
            transaction.put(campaign_key(old), None)

    def draft(self, campaign: Campaign, now: datetime) -> CampaignDraft:
        """A campaign with what a decision about it depends on."""
        others = (other for other in self.live() if other.id != campaign.id)
        return CampaignDraft(
            campaign,
            now,
            self.fleet,
            hosts=self._hosts_of(campaign),
            others=[run for other in others for run in other.in_progress],
            horizon=host_duration(campaign.spec, self._engine.timing),
        )


class BoardView:
    """The board as a `FleetView`. A large scope is summarized once for each of its revisions.

    `is_lost` says whether a host is unreachable.
    """

    def __init__(self, board: Board, is_lost: Callable[[str], bool]) -> None:
        self._board = board
        self._is_lost = is_lost
        self._summaries: dict[str, ScopeSummary] = {}

    def scope(self, name: str) -> Scope | None:
        published = self._board.scopes.get(name)
        return published.scope if published else None

    def scopes_on(self, host: str) -> list[ScopeSummary] | None:
        if host not in self._board.hosts:
            return None
        return [self._summarize(published.scope) for published in self._board.scopes_on(host)]

    def _summarize(self, scope: Scope) -> ScopeSummary:
        summary = self._summaries.get(scope.name)
        if summary is None or not summary.is_of(scope):
            if len(self._summaries) >= SUMMARIES_MAX:
                self._summaries.clear()
            summary = self._summaries[scope.name] = ScopeSummary(scope, self._is_lost)
        return summary


def campaign_key(campaign_id: str) -> str:
    return f"campaign/{campaign_id.lower()}/"


def require_campaign(campaign: Campaign | None, campaign_id: str) -> Campaign:
    if campaign is None:
        raise UnknownCampaign(f"there is no campaign {campaign_id!r}", campaign=campaign_id)
    return campaign


def match_hosts(hosts: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The hosts that match any of the shell patterns, in their order."""
    wanted = re.compile("|".join(f"(?:{fnmatch.translate(pattern)})" for pattern in patterns))
    return [host for host in hosts if wanted.match(host)]


def maintain(spec: CampaignSpec, host: str, operation_id: str) -> Maintain:
    return Maintain(
        host=host,
        operation_id=operation_id,
        type=spec.type,
        cause=spec.cause,
        duration_seconds=spec.duration_seconds,
        description=spec.description,
    )
