"""The loop that makes campaigns go on: whoever may have something to do is looked at, and what the
rules order is done.

A campaign is looked at when it changed, when a scope changed that it waits for, and now and then.
So the work goes with the hosts under way and not with the fleet. Every server does this; revisions
and ids settle that each thing is done once.
"""

import asyncio
import logging
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from forewarn.campaign import model as said
from forewarn.campaign.cache import CampaignCache
from forewarn.campaign.forecast import window_of
from forewarn.campaign.model import Campaign, Phase, State, Told
from forewarn.campaign.service import Campaigns, maintenance
from forewarn.core import command as ask
from forewarn.core.event import Cause
from forewarn.core.fleet import Scope, Vm
from forewarn.core.scheduling import event_id_of
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import within
from forewarn.engine.engine import Engine
from forewarn.errors import Error, ImpactFailed, NotFound, Refused, Unavailable
from forewarn.platform.base import ImpactRequest, Platform

log = logging.getLogger("forewarn")

NOW_AND_THEN = timedelta(seconds=15)
OUTPUT_LENGTH_MAX = 300
CHECKS_MAX = 32


class HealthCheck(NamedTuple):
    """The command of this server's configuration that is run after each host, and how long it may
    take.
    """

    platform: Platform
    limit: timedelta


class CampaignWorker:
    """One server's part in all campaigns.

    `worker` names it where it asks for a host's health, if it has a way to.
    """

    def __init__(
        self, engine: Engine, cache: CampaignCache, worker: str, health: HealthCheck | None = None
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._worker = worker
        self._health = health
        self._desk = Campaigns(engine, cache, health.limit if health else None)
        self._due: dict[str, None] = dict.fromkeys(cache.roll.alive)
        self._changed = asyncio.Event()
        self._awaited: dict[str, frozenset[str]] = {}
        self._checks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._look_at = engine.clock.now() + NOW_AND_THEN
        engine.board.subscribe(self._notice_scope)
        cache.subscribe(self._notice)

    async def run(self) -> None:
        """Work until cancelled.

        A health command that runs then is ended, and asked again by whoever comes next.
        """
        try:
            while True:  # ends when cancelled
                self._look_now_and_then()
                if self._due:
                    campaign_id = next(iter(self._due))
                    del self._due[campaign_id]
                    await self._attend(campaign_id)
                else:
                    self._changed.clear()
                    await self._rest()
        finally:
            for task in self._checks.values():
                task.cancel()
            await asyncio.gather(*self._checks.values(), return_exceptions=True)

    def _look_now_and_then(self) -> None:
        """However much happens meanwhile: a campaign of which nobody hears anything has its look
        too.
        """
        now = self._engine.clock.now()
        if (
            not now < self._look_at <= now + NOW_AND_THEN
        ):  # its moment has come, or the clock was set back
            self._look_at = now + NOW_AND_THEN
            self._due.update(dict.fromkeys(self._cache.roll.alive))

    async def _rest(self) -> None:
        """Until something changed, or the next look is due."""
        if not self._cache.roll.alive:
            await self._changed.wait()
            return
        with suppress(TimeoutError):
            await within(
                self._engine.clock, self._look_at - self._engine.clock.now(), self._changed.wait()
            )

    def _notice_scope(self, place: PublishedScope) -> None:
        self._wake({place.scope.name})

    def _notice(self, before: Campaign | None, after: Campaign) -> None:
        """A campaign changed: it may go on, and so may those that waited for what it has let go."""
        if after.is_over:
            self._awaited.pop(after.id, None)
        else:
            self._due[after.id] = None
        still = {one.host for one in after.under_way}
        left = [one for one in (before.under_way if before else ()) if one.host not in still]
        self._wake({told.scope for one in left for told in one.events})
        self._changed.set()

    def _wake(self, scopes: set[str]) -> None:
        for campaign_id, awaited in self._awaited.items():
            if not awaited.isdisjoint(scopes):
                self._due[campaign_id] = None
                self._changed.set()

    async def _attend(self, campaign_id: str) -> None:
        try:
            decision = await self._desk.tell(campaign_id, said.Look())
            for order in decision.orders:
                await self._carry_out(decision.campaign, order)
            self._await(decision.campaign)
        except NotFound:
            self._awaited.pop(campaign_id, None)
        except Error as problem:
            self._engine.throttled_log.warn(
                "campaign step failed", campaign=campaign_id, problem=problem.message
            )
        except Exception:  # a bug that this one campaign meets must not stop the others
            log.exception("campaign step broken", extra={"facts": {"campaign": campaign_id}})

    def _await(self, campaign: Campaign) -> None:
        """Know which scopes it waits for: those of its events, and where it has room for more
        hosts, those of the next ones.
        """
        if campaign.is_over:
            return
        awaited = {told.scope for one in campaign.under_way for told in one.events}
        if campaign.state is State.RUNNING and len(campaign.under_way) < campaign.wish.max_hosts:
            stop = campaign.cursor + window_of(campaign.wish.max_hosts) - len(campaign.window)
            for host in (
                *campaign.window,
                *self._cache.hosts_of(campaign.id, campaign.cursor, stop),
            ):
                awaited.update(scope.name for scope in self._desk.fleet.on_host(host) or ())
        self._awaited[campaign.id] = frozenset(awaited)

    async def _carry_out(self, campaign: Campaign, order: said.Order) -> None:
        match order:
            case said.Announce():
                await self._desk.tell(campaign.id, await self._announce(campaign, order))
            case said.Withdraw():
                await self._withdraw(campaign, order)
            case said.Check():
                await self._claim_check(campaign, order.host)

    async def _announce(self, campaign: Campaign, order: said.Announce) -> said.Announced:
        """Tell every scope on the host. Who has been told by us before is told nothing new."""
        command = maintenance(campaign.wish, order.host, order.operation_id)
        events: list[Told] = []
        trouble = ""
        try:
            places = self._engine.board.scopes_on(order.host)
        except NotFound:
            return said.Announced(order.host, (), "there is no such host any more")
        for place in places:
            try:
                outcome = await self._engine.submit(place.scope.name, command, campaign.by)
            except Unavailable:
                raise
            except Error as refusal:
                trouble = trouble or refusal.message
            else:
                ids = ours(outcome.scope, order.operation_id)
                events += [Told(outcome.scope.name, event_id, place.revision) for event_id in ids]
        return said.Announced(order.host, tuple(events), trouble)

    async def _withdraw(self, campaign: Campaign, order: said.Withdraw) -> None:
        try:
            await self._engine.submit(order.scope, ask.Cancel(event_id=order.event_id), campaign.by)
        except (NotFound, Refused):
            return  # it has started, or it is over: its end is waited for

    async def _claim_check(self, campaign: Campaign, host: str) -> None:
        if (
            self._health is None
            or len(self._checks) >= CHECKS_MAX
            or (campaign.id, host) in self._checks
        ):
            return  # the next round comes soon
        decision = await self._desk.tell(campaign.id, said.Claimed(host, self._worker))
        mine = [
            one
            for one in decision.campaign.under_way
            if one.host == host and one.checker == self._worker
        ]
        if mine and mine[0].phase is Phase.CHECKING:
            task = self._checks[campaign.id, host] = asyncio.create_task(
                self._check(campaign, host, self._health.platform)
            )
            task.add_done_callback(lambda _: self._checks.pop((campaign.id, host), None))

    async def _check(self, campaign: Campaign, host: str, platform: Platform) -> None:
        """Ask the operator's command for the host's health, and tell what it said."""
        event_type = campaign.wish.type
        order = ImpactRequest(
            said.operation_id(campaign, host),
            "",
            Vm(name="", host=host),
            event_type,
            Cause.MAINTENANCE,
            1,
        )
        problem = ""
        try:
            await platform.run_impact(order)
        except OSError as shortage:  # not a verdict: the claim expires, and the check is made again
            self._engine.throttled_log.warn(
                "health command not started", host=host, problem=str(shortage)
            )
            return
        except Error as refusal:
            output = (
                str(refusal.facts.get("output", "")) if isinstance(refusal, ImpactFailed) else ""
            )
            words = f"{refusal.message} {output[-OUTPUT_LENGTH_MAX:]}".split()
            problem = "".join(
                letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
                for letter in " ".join(words)
            )
        try:
            await self._desk.tell(campaign.id, said.Checked(host, self._worker, problem))
        except Error as trouble:  # the claim lapses, and it is asked again
            self._engine.throttled_log.warn(
                "health not recorded", campaign=campaign.id, host=host, problem=trouble.message
            )


def ours(scope: Scope, operation_id: str) -> list[str]:
    """The events that one operation made in a scope, those included that are over already."""
    ids = [
        event_id_of(operation_id, scope.name, domain)
        for domain in sorted({vm.update_domain for vm in scope.vms})
    ]
    known = {event.id for event in scope.events}.union(ended.id for ended in scope.ended)
    return [event_id for event_id in ids if event_id in known]
