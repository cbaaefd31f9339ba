"""The worker that advances campaigns: it reconciles each one, and carries out the actions.

Every server has one; the lease `campaigns` decides which of them works. A campaign is reconciled
when it changed, when a scope changed that it waits for, and every few seconds. So the work depends
on the hosts in progress, not on the size of the fleet.
"""

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from forewarn.campaign.model import (
    Action,
    AnnounceHost,
    Campaign,
    CampaignCommand,
    CampaignState,
    CancelEvent,
    CheckHealth,
    EventRef,
    HealthChecked,
    HostAnnounced,
    Reconcile,
    operation_id_of,
)
from forewarn.campaign.rules import Decision, next_hosts
from forewarn.campaign.service import Campaigns, maintain
from forewarn.core.command import Cancel
from forewarn.core.event import Cause
from forewarn.core.fleet import Scope, Vm
from forewarn.core.scheduling import event_id_of
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import within
from forewarn.engine.engine import Engine
from forewarn.engine.lease import run_under_lease
from forewarn.errors import Error, ImpactFailed, NotFound, Refused, Unavailable
from forewarn.log import log
from forewarn.platform.base import ImpactRequest, Platform
from forewarn.store.base import Lease

RECONCILE_INTERVAL = timedelta(seconds=15)
OUTPUT_LENGTH_MAX = 300
CHECKS_MAX = 32


class HealthCheck(NamedTuple):
    """The health command of this server's configuration, and how long it may take."""

    platform: Platform
    limit: timedelta


class CampaignWorker:
    """States:  WAITING for the lease -> WORKING -> lease lost: WAITING."""

    def __init__(
        self, engine: Engine, campaigns: Campaigns, health: HealthCheck | None = None
    ) -> None:
        self._engine = engine
        self._campaigns = campaigns
        self._cache = campaigns.cache
        self._health = health
        self._lease: Lease | None = None
        self._due: dict[str, None] = {}
        self._changed = asyncio.Event()
        self._awaited: dict[str, frozenset[str]] = {}
        self._checks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._reconcile_at = engine.clock.now()
        engine.board.subscribe(self._on_scope_changed)
        self._cache.subscribe(self._on_campaign_changed)

    async def run(self) -> None:
        """Work until cancelled, while this server holds the lease."""
        clock = self._engine.clock

        async def sleep(seconds: float) -> None:
            await clock.sleep_until(clock.now() + timedelta(seconds=seconds))

        await run_under_lease(self._engine.store, "campaigns", self._work, sleep=sleep)

    async def _work(self, lease: Lease) -> None:
        self._lease = lease
        self._reconcile_at = self._engine.clock.now()
        await self._engine.catch_up()  # the last holder may have committed something just now
        try:
            while True:  # ends when cancelled
                self._mark_due()
                if self._due:
                    campaign_id = next(iter(self._due))
                    del self._due[campaign_id]
                    await self._reconcile(campaign_id)
                else:
                    self._changed.clear()
                    await self._wait()
        finally:  # the next holder of the lease checks these hosts again
            checks = tuple(self._checks.values())
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    def _mark_due(self) -> None:
        """Reconcile every live campaign once per interval, however much else happens."""
        now = self._engine.clock.now()
        if now < self._reconcile_at <= now + RECONCILE_INTERVAL:  # false if the clock was set back
            return
        self._reconcile_at = now + RECONCILE_INTERVAL
        self._due.update(dict.fromkeys(campaign.id for campaign in self._cache.live()))

    async def _wait(self) -> None:
        if not self._cache.live():
            await self._changed.wait()
            return
        clock = self._engine.clock
        with suppress(TimeoutError):
            await within(clock, self._reconcile_at - clock.now(), self._changed.wait())

    def _on_scope_changed(self, published: PublishedScope) -> None:
        self._wake({published.scope.name})

    def _on_campaign_changed(self, before: Campaign | None, after: Campaign) -> None:
        """The campaign may go on, and so may those that waited for hosts it has finished."""
        if after.is_over:
            self._awaited.pop(after.id, None)
        else:
            self._due[after.id] = None
        remaining = {run.host for run in after.in_progress}
        finished = (
            [run for run in before.in_progress if run.host not in remaining] if before else []
        )
        self._wake({ref.scope for run in finished for ref in run.events})
        self._changed.set()

    def _wake(self, scopes: set[str]) -> None:
        for campaign_id, awaited in self._awaited.items():
            if not awaited.isdisjoint(scopes):
                self._due[campaign_id] = None
                self._changed.set()

    async def _reconcile(self, campaign_id: str) -> None:
        try:
            decision = await self._apply(campaign_id, Reconcile())
            for action in decision.actions:
                await self._carry_out(decision.campaign, action)
            self._await_scopes(decision.campaign)
        except NotFound:
            self._awaited.pop(campaign_id, None)
        except Error as error:
            self._engine.throttled_log.warn(
                "campaign step failed", campaign=campaign_id, problem=error.message
            )
        except Exception:  # a bug in one campaign must not stop the others
            log.exception("campaign step failed", campaign=campaign_id)

    async def _apply(self, campaign_id: str, command: CampaignCommand) -> Decision:
        limit = self._health.limit if self._health else None
        return await self._campaigns.apply(
            campaign_id, command, health_limit=limit, lease=self._lease
        )

    def _await_scopes(self, campaign: Campaign) -> None:
        """Remember the scopes of its events, and of the next hosts if it may start more."""
        if campaign.is_over:
            return
        awaited = {ref.scope for run in campaign.in_progress for ref in run.events}
        is_full = len(campaign.in_progress) >= campaign.spec.max_hosts
        if campaign.state is CampaignState.RUNNING and not is_full:
            for host in next_hosts(campaign, self._cache.hosts_of(campaign.id))[0]:
                awaited.update(scope.name for scope in self._cache.fleet.scopes_on(host) or ())
        self._awaited[campaign.id] = frozenset(awaited)

    async def _carry_out(self, campaign: Campaign, action: Action) -> None:
        match action:
            case AnnounceHost():
                await self._apply(campaign.id, await self._announce(campaign, action))
            case CancelEvent():
                command = Cancel(event_id=action.event_id)
                with suppress(NotFound, Refused):  # started or over: wait for its end
                    await self._engine.submit(action.scope, command, campaign.by)
            case CheckHealth():
                self._start_check(campaign, action.host)

    async def _announce(self, campaign: Campaign, action: AnnounceHost) -> HostAnnounced:
        """Announce the maintenance in every scope on the host. Repeating it changes nothing."""
        command = maintain(campaign.spec, action.host, action.operation_id)
        events: list[EventRef] = []
        problem = ""
        try:
            scopes = self._engine.board.scopes_on(action.host)
        except NotFound:
            return HostAnnounced(action.host, (), "the host no longer exists")
        for published in scopes:
            try:
                outcome = await self._engine.submit(published.scope.name, command, campaign.by)
            except Unavailable:
                raise
            except Error as refusal:
                problem = problem or refusal.message
            else:
                ids = find_event_ids(outcome.scope, action.operation_id)
                name, revision = outcome.scope.name, published.revision
                events += [EventRef(name, event_id, revision) for event_id in ids]
        return HostAnnounced(action.host, tuple(events), problem)

    def _start_check(self, campaign: Campaign, host: str) -> None:
        key = (campaign.id, host)
        if self._health is None or key in self._checks or len(self._checks) >= CHECKS_MAX:
            return  # the next Reconcile asks again
        task = asyncio.create_task(self._check(campaign, host, self._health.platform))
        self._checks[key] = task
        task.add_done_callback(lambda _: self._checks.pop(key, None))

    async def _check(self, campaign: Campaign, host: str, platform: Platform) -> None:
        request = ImpactRequest(
            operation_id_of(campaign, host),
            "",
            Vm(name="", host=host),
            campaign.spec.type,
            Cause.MAINTENANCE,
            1,
        )
        problem = ""
        try:
            await platform.run_impact(request)
        except OSError as error:  # says nothing about the host: the next Reconcile tries again
            self._engine.throttled_log.warn(
                "health command not started", host=host, problem=str(error)
            )
            return
        except Error as error:
            problem = describe(error)
        try:
            await self._apply(campaign.id, HealthChecked(host, problem))
        except Error as error:  # the host is still CHECKING, so it is checked again
            self._engine.throttled_log.warn(
                "health not recorded", campaign=campaign.id, host=host, problem=error.message
            )


def describe(error: Error) -> str:
    """The message and the end of the output, as one printable line."""
    output = str(error.facts.get("output", "")) if isinstance(error, ImpactFailed) else ""
    line = " ".join(f"{error.message} {output[-OUTPUT_LENGTH_MAX:]}".split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def find_event_ids(scope: Scope, operation_id: str) -> list[str]:
    """The events that one operation made in a scope, including those that are over."""
    domains = sorted({vm.update_domain for vm in scope.vms})
    ids = [event_id_of(operation_id, scope.name, domain) for domain in domains]
    known = {event.id for event in scope.events}.union(ended.id for ended in scope.ended)
    return [event_id for event_id in ids if event_id in known]
