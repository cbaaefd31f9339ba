"""The worker that advances campaigns: it reconciles each one, and does what their hosts need.

Every server has one; the lease `campaigns` decides which of them works. Campaigns are reconciled
when one of them changed, when a scope changed that they wait for, and every few seconds. So the
work depends on the hosts in progress, not on the size of the fleet.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from forewarn.campaign import rules
from forewarn.campaign.model import (
    Campaign,
    CampaignState,
    EventRef,
    HostPhase,
    HostRun,
    operation_id_of,
)
from forewarn.campaign.service import Campaigns, maintain
from forewarn.core.command import Cancel
from forewarn.core.event import Cause, Status
from forewarn.core.fleet import Scope, Vm
from forewarn.core.scheduling import event_ids_of
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import Engine
from forewarn.engine.isolation import isolated
from forewarn.engine.lease import run_under_lease
from forewarn.errors import Error, ImpactFailed, NotFound, Refused, Unavailable
from forewarn.platform.base import ImpactRequest, Platform
from forewarn.store.base import Lease

RECONCILE_INTERVAL = timedelta(seconds=15)
CATCH_UP_PAUSE = timedelta(seconds=1)
CLOCK_OFF_PAUSE = timedelta(seconds=10)
"""Long enough for another server to take over the campaigns: this one cannot announce events."""
OUTPUT_LENGTH_MAX = 300
CHECKS_MAX = 32


@dataclass(eq=False)
class CampaignWorker:
    """States:  WAITING for the lease -> WORKING -> lease lost: WAITING.

    `health` runs the health command of this server's configuration, if there is one, for at most
    `health_limit`.
    """

    engine: Engine
    campaigns: Campaigns
    health: Platform | None = None
    health_limit: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        self._lease: Lease | None = None
        self._changed = asyncio.Event()
        self._awaited: set[str] = set()
        self._checks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.engine.board.subscribe(self._on_scope_changed)
        self.engine.on_change("campaign", lambda before, after: self._changed.set())

    def _on_scope_changed(self, published: PublishedScope) -> None:
        if published.scope.name in self._awaited:
            self._changed.set()

    async def run(self) -> None:
        """Work until cancelled, while this server holds the lease and its clock is right."""
        clock = self.engine.clock
        while True:  # ends when cancelled
            if self.engine.clock_compared.is_set() and not self.engine.is_clock_off:
                await run_under_lease(self.engine, "campaigns", self._work)
            await clock.sleep_until(clock.now() + CLOCK_OFF_PAUSE)

    async def _work(self, lease: Lease) -> None:
        self._lease, clock = lease, self.engine.clock
        # The last holder may have committed something just now. From here on only this server
        # starts hosts, so it knows every event that a campaign refers to.
        while not await self.engine.catch_up():  # ends when the store answers
            await clock.sleep_until(clock.now() + CATCH_UP_PAUSE)
        try:
            while not self.engine.is_clock_off:
                self._changed.clear()
                self._awaited = set()
                is_idle = False
                with isolated(self.engine.throttled_log, "bug while listing campaigns"):
                    live = self.campaigns.live()
                    for campaign in live:
                        await self._reconcile(campaign.id)
                        await asyncio.sleep(0)  # let polls pass
                    is_idle = not live
                until = None if is_idle else clock.now() + RECONCILE_INTERVAL
                await wait_for(clock, self._changed, until)
        finally:  # the next holder of the lease checks these hosts again
            checks = tuple(self._checks.values())
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def _reconcile(self, campaign_id: str) -> None:
        limit = self.health_limit if self.health else None
        rule = partial(rules.reconcile, health_limit=limit)
        with isolated(
            self.engine.throttled_log, "bug while reconciling a campaign", campaign=campaign_id
        ):
            try:
                campaign = await self._apply(campaign_id, rule)
                self._await_scopes(campaign)
                for run in campaign.in_progress:
                    if run.phase is HostPhase.ORDERED:
                        await self._announce(campaign, run)
                    elif run.phase is HostPhase.CHECKING:
                        self._start_check(campaign, run)
                    elif campaign.state is CampaignState.CANCELED:
                        await self._cancel_events(campaign, run)
            except Error as error:
                self.engine.throttled_log.warn(
                    "campaign step failed", campaign=campaign_id, problem=error.message
                )

    async def _apply(self, campaign_id: str, rule: rules.Rule) -> Campaign:
        return await self.campaigns.apply(campaign_id, rule, lease=self._lease)

    def _await_scopes(self, campaign: Campaign) -> None:
        """Remember the scopes of its events, and of the next hosts if it may start more."""
        self._awaited |= {ref.scope for run in campaign.in_progress for ref in run.events}
        draft = self.campaigns.draft(campaign, self.engine.clock.now())
        for host in rules.next_hosts(draft):
            scopes = draft.fleet.scopes_on(host) or ()
            self._awaited.update(summary.scope.name for summary in scopes)

    async def _cancel_events(self, campaign: Campaign, run: HostRun) -> None:
        """Cancel what is Scheduled. Started events end by themselves."""
        for ref in run.events:
            event = rules.find_event(self.campaigns.fleet, ref)
            if event is not None and event.status is Status.SCHEDULED:
                with suppress(NotFound, Refused):  # started or over meanwhile
                    command = Cancel(event_id=ref.event_id)
                    await self.engine.submit(ref.scope, command, campaign.by)

    async def _announce(self, campaign: Campaign, run: HostRun) -> None:
        """Announce the maintenance in every scope on the host. Repeating it changes nothing."""
        operation_id = operation_id_of(campaign, run.host)
        command = maintain(campaign.spec, run.host, operation_id)
        scopes = self.campaigns.fleet.scopes_on(run.host)
        events: list[EventRef] = []
        problem = "the host no longer exists" if scopes is None else ""
        for summary in scopes or ():
            try:
                outcome = await self.engine.submit(summary.scope.name, command, campaign.by)
            except Unavailable:
                raise
            except Error as refusal:
                problem = problem or refusal.message
            else:
                ids = find_event_ids(outcome.scope, operation_id)
                events += [EventRef(outcome.scope.name, event_id) for event_id in ids]
        rule = partial(rules.set_announced, run=run, events=tuple(events), problem=problem)
        await self._apply(campaign.id, rule)

    def _start_check(self, campaign: Campaign, run: HostRun) -> None:
        key = (campaign.id, run.host)
        if self.health is None or key in self._checks or len(self._checks) >= CHECKS_MAX:
            return  # the next round asks again
        task = asyncio.create_task(self._check(campaign, run, self.health))
        self._checks[key] = task
        task.add_done_callback(lambda _: self._checks.pop(key, None))

    async def _check(self, campaign: Campaign, run: HostRun, health: Platform) -> None:
        operation_id, vm = operation_id_of(campaign, run.host), Vm(name="", host=run.host)
        request = ImpactRequest(operation_id, "", vm, campaign.spec.type, Cause.MAINTENANCE, 1)
        problem = ""
        try:
            try:
                await health.run_impact(request)
            except ImpactFailed as error:
                problem = describe(error)
            await self._apply(campaign.id, partial(rules.set_checked, run=run, problem=problem))
        except (OSError, Error) as error:  # not started, or not recorded: the next round repeats it
            self.engine.throttled_log.warn(
                "health check interrupted", campaign=campaign.id, host=run.host, problem=str(error)
            )
        except Exception as error:  # a bug in the platform; the next round repeats the check
            self.engine.throttled_log.error(
                "health check failed", error=error, campaign=campaign.id, host=run.host
            )


def describe(error: ImpactFailed) -> str:
    """The message and the end of the output, as one printable line."""
    output = str(error.facts.get("output", ""))
    line = " ".join(f"{error.message} {output[-OUTPUT_LENGTH_MAX:]}".split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def find_event_ids(scope: Scope, operation_id: str) -> list[str]:
    """The events that one operation made in a scope, including those that are over."""
    known = {event.id for event in scope.events}.union(ended.id for ended in scope.ended)
    return [each for each in event_ids_of(operation_id, scope) if each in known]
