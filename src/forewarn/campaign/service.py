"""Campaigns as operators use them, and the one way to change one."""

import asyncio
import fnmatch
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta

from forewarn.campaign.budget import ScopeSummary, summarize
from forewarn.campaign.cache import HOSTS_KEY, CampaignCache, campaign_key
from forewarn.campaign.forecast import Forecast, forecast
from forewarn.campaign.model import (
    HOSTS_BYTES_MAX,
    HOSTS_MAX,
    NAMESPACE,
    Campaign,
    CampaignCommand,
    CampaignSpec,
    HostRun,
    OperatorCommand,
    host_duration,
)
from forewarn.campaign.rules import CampaignContext, Decision, decide_campaign
from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Maintain
from forewarn.core.fleet import Scope
from forewarn.core.machine import decide
from forewarn.engine.engine import Engine
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, OverBudget, TooManyCampaigns, UnknownCampaign
from forewarn.store.base import Lease

LIVE_MAX = 100
"""A step compares all live campaigns and a lease: as many checks as one commit may have."""
ENDED_MAX = 1000
DELETIONS_MAX = 10


class Campaigns:
    """Plan, start, pause, resume and cancel campaigns. Create it before the engine loads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.cache = CampaignCache(engine)

    async def plan(self, spec: CampaignSpec) -> Forecast:
        """What a campaign would do at present. Nothing is changed."""
        engine = self._engine
        # Let the rules of maintenance check the request.
        decide(
            Scope(name="-"), maintain(spec, "-", NAMESPACE.hex), engine.clock.now(), engine.timing
        )
        hosts = await asyncio.to_thread(match_hosts, engine.board.host_names(), spec.patterns)
        if not hosts:
            raise Invalid(
                f"no host matches {', '.join(spec.patterns)}; expected patterns such as rack7-*",
                field="hosts",
            )
        if len(hosts) > HOSTS_MAX:
            raise Invalid(
                f"{len(hosts)} hosts match; expected at most {HOSTS_MAX} in one campaign",
                field="hosts",
                hosts=len(hosts),
            )
        size = sum(len(host.encode()) for host in hosts)
        if size > HOSTS_BYTES_MAX:
            raise Invalid(
                f"the names of the {len(hosts)} hosts that match have {size} bytes;"
                f" expected at most {HOSTS_BYTES_MAX} in one campaign",
                field="hosts",
                hosts=len(hosts),
            )
        scopes = await self._scopes_on(hosts)
        horizon = engine.clock.now() + host_duration(spec, engine.timing)

        def compute() -> Forecast:
            summaries: dict[str, ScopeSummary] = {}
            for scope in (scope for on_host in scopes.values() for scope in on_host):
                if scope.name not in summaries:
                    summaries[scope.name] = summarize(scope)
            return forecast(
                hosts,
                lambda host: [summaries[scope.name] for scope in scopes[host]],
                max_hosts=spec.max_hosts,
                budget=spec.max_unavailable,
                horizon=horizon,
            )

        return await asyncio.to_thread(compute)

    async def _scopes_on(self, hosts: Sequence[str]) -> dict[str, list[Scope]]:
        board = self._engine.board
        scopes: dict[str, list[Scope]] = {}
        for number, host in enumerate(hosts):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
            published = {board.vms[vm] for vm in board.hosts.get(host, ())}
            scopes[host] = sorted((one.scope for one in published), key=lambda scope: scope.name)
        return scopes

    async def start(self, spec: CampaignSpec, by: str, operation_id: str) -> Campaign:
        """Start a campaign. Refused if a host alone exceeds the budget of a scope.

        `operation_id` identifies the request. Repeated, here or on another server, it returns the
        campaign that it started before.
        """
        known = self._find_started(operation_id)
        if known is not None:
            return known
        planned = await self.plan(spec)
        if planned.too_large:
            refuse_too_large(planned)

        def decide_start(transaction: Transaction) -> Campaign:
            known = self._find_started(operation_id)
            if known is not None:
                return known
            campaigns = self.cache.all()
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
            detail = f"{campaign.id} started: {spec.type} of {campaign.total} hosts"
            transaction.record(Change(what=ChangeKind.CAMPAIGN, detail=detail))
            return campaign

        return await self._engine.update(["campaign/"], decide_start, by=by)

    def _find_started(self, operation_id: str) -> Campaign | None:
        campaigns = (one for one in self.cache.all() if one.operation_id == operation_id)
        return next(campaigns, None)

    async def pause(self, campaign_id: str, by: str) -> Campaign:
        """Start no more hosts. Announced hosts continue."""
        return (await self.apply(campaign_id, OperatorCommand.PAUSE, by)).campaign

    async def resume(self, campaign_id: str, by: str) -> Campaign:
        return (await self.apply(campaign_id, OperatorCommand.RESUME, by)).campaign

    async def cancel(self, campaign_id: str, by: str) -> Campaign:
        """Start no more hosts and cancel Scheduled events. Started events end by themselves."""
        return (await self.apply(campaign_id, OperatorCommand.CANCEL, by)).campaign

    async def apply(
        self,
        campaign_id: str,
        command: CampaignCommand,
        by: str = "",
        *,
        health_limit: timedelta | None = None,
        lease: Lease | None = None,
    ) -> Decision:
        """Apply a command durably. Without `by` the campaign itself is the author.

        A step that may start hosts compares every live campaign, so that no two steps use the
        same part of a budget.
        """
        key = campaign_key(campaign_id)

        def decide_step(transaction: Transaction) -> Decision:
            before: Campaign | None = transaction.get(key)
            if before is None:
                raise UnknownCampaign(f"there is no campaign {campaign_id!r}", campaign=campaign_id)
            others: list[HostRun] = []
            if not isinstance(command, OperatorCommand):
                others = self._others(before, transaction)
            context = self.context(before, others, health_limit)
            decision = decide_campaign(before, command, context, transaction.now)
            if decision.campaign != before:
                transaction.put(key, decision.campaign)
                transaction.record(*decision.changes, by=by or before.by)
                if decision.campaign.is_over:
                    self._clean_up(transaction, before.id)
            return decision

        return await self._engine.update([key], decide_step, by=by, lease=lease)

    def _others(self, campaign: Campaign, transaction: Transaction) -> list[HostRun]:
        live = (other for other in self.cache.live() if other.id != campaign.id)
        read = (transaction.get(campaign_key(other.id)) for other in live)
        return [run for other in read if other is not None for run in other.in_progress]

    def _clean_up(self, transaction: Transaction, campaign_id: str) -> None:
        """Delete the list of hosts, and the oldest campaigns that are over."""
        transaction.put(HOSTS_KEY.format(campaign_id), None)
        ended = [campaign.id for campaign in self.cache.all() if campaign.is_over]
        surplus = max(len(ended) + 1 - ENDED_MAX, 0)
        for old in ended[: min(surplus, DELETIONS_MAX)]:
            transaction.put(campaign_key(old), None)

    def context(
        self,
        campaign: Campaign,
        others: Sequence[HostRun] | None = None,
        health_limit: timedelta | None = None,
    ) -> CampaignContext:
        """What a decision about a campaign depends on. `others` default to the cached ones."""
        if others is None:
            live = (other for other in self.cache.live() if other.id != campaign.id)
            others = [run for other in live for run in other.in_progress]
        return CampaignContext(
            fleet=self.cache.fleet,
            hosts=self.cache.hosts_of(campaign.id),
            others=others,
            horizon=host_duration(campaign.spec, self._engine.timing),
            health_limit=health_limit,
        )


def refuse_too_large(planned: Forecast) -> None:
    first, count = planned.too_large[0], len(planned.too_large)
    more = f"; {count} hosts are too large" if count > 1 else ""
    raise OverBudget(
        f"{first}{more}",
        host=first.host,
        scope=first.scope,
        vms=first.vms,
        max_unavailable=first.limit,
    )


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
