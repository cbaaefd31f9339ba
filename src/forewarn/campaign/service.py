"""Campaigns, as operators ask for them; and the one way to change one: read, decide, commit if
nobody was faster.

Whoever gives a host its turn writes the roll of campaigns anew in the same commit. So two servers,
or two campaigns, never both count on the same room in a scope.
"""

import asyncio
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from msgspec.structs import replace

from forewarn.campaign import model as said
from forewarn.campaign.budget import Standing, standing
from forewarn.campaign.cache import CAMPAIGN_KEY, ROLL_KEY, CampaignCache, put_hosts
from forewarn.campaign.forecast import Forecast, forecast
from forewarn.campaign.model import HOSTS_MAX, Campaign, Roll, UnderWay, Wish, host_seconds
from forewarn.campaign.rules import Decision, View, decide
from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Maintain
from forewarn.core.fleet import Scope
from forewarn.core.machine import decide as decide_scope
from forewarn.engine.engine import Engine
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, OverBudget, TooManyCampaigns, UnknownCampaign

ALIVE_MAX = 100
ENDED_MAX = 1000
KEYS = (ROLL_KEY, "campaign/")
"""What every decision about a campaign reads."""


class Campaigns:
    """All that can be asked of campaigns.

    `health_limit`: how long this server's health command may take; None: it has none.
    """

    def __init__(
        self, engine: Engine, cache: CampaignCache, health_limit: timedelta | None = None
    ) -> None:
        self._engine = engine
        self._health_limit = health_limit
        self.cache = cache
        self.fleet = cache.glances(engine.board)

    async def plan(self, wish: Wish) -> Forecast:
        """What a campaign would do, as things stand now. Nothing is changed."""
        engine, board = self._engine, self._engine.board
        self._check(wish)
        hosts = await asyncio.to_thread(matching, board.host_names(), wish.patterns)
        if not hosts:
            raise Invalid(
                f"no host matches {', '.join(wish.patterns)}; expected patterns such as rack7-*",
                field="hosts",
            )
        if len(hosts) > HOSTS_MAX:
            raise Invalid(
                f"{len(hosts)} hosts match; expected at most {HOSTS_MAX}",
                field="hosts",
                hosts=len(hosts),
            )
        scopes: dict[str, list[Scope]] = {}
        for number, host in enumerate(hosts):
            if number % POLLS_PASS_EVERY == 0:
                await asyncio.sleep(0)
            places = {board.vms[vm] for vm in board.hosts.get(host, ())}
            scopes[host] = sorted((place.scope for place in places), key=lambda scope: scope.name)
        horizon = engine.clock.now() + host_seconds(wish, engine.timing)
        glances = await asyncio.to_thread(glanced, scopes)
        return await asyncio.to_thread(
            forecast,
            hosts,
            lambda host: [glances[scope.name] for scope in scopes[host]],
            max_hosts=wish.max_hosts,
            budget=wish.max_unavailable,
            horizon=horizon,
        )

    async def start(self, wish: Wish, by: str, operation_id: str = "") -> Campaign:
        """A new campaign. A host that alone takes more than a scope's budget is told now, not found
        in the night.

        `operation_id` names the request: one that was carried out before, here or by another
        server, gives what it gave then.
        """
        if (before := self._asked_before(operation_id)) is not None:
            return before
        planned = await self.plan(wish)
        if planned.too_large:
            one = planned.too_large[0]
            more = (
                f"; {len(planned.too_large)} hosts are too large"
                if len(planned.too_large) > 1
                else ""
            )
            raise OverBudget(
                f"{one}{more}",
                host=one.host,
                scope=one.scope,
                vms=one.vms,
                max_unavailable=one.limit,
            )
        campaign: Campaign | None = None

        def decide_start(transaction: Transaction) -> Campaign:
            nonlocal campaign
            if (
                campaign is not None
                and transaction.get(CAMPAIGN_KEY.format(campaign.id)) == campaign
            ):
                return campaign  # it was committed, and only the reply was lost
            if (known := self._asked_before(operation_id)) is not None:
                return known
            campaign = replace(self._numbered(wish, planned), asked_as=operation_id)
            self._put_start(transaction, campaign, planned.hosts)
            return campaign

        async with self.cache.deciding:
            return await self._engine.update(KEYS, decide_start, by=by)

    async def pause(self, campaign_id: str, by: str) -> Campaign:
        """No new hosts; what is announced goes on."""
        return (await self.tell(campaign_id, said.Pause(), by)).campaign

    async def resume(self, campaign_id: str, by: str) -> Campaign:
        return (await self.tell(campaign_id, said.Resume(), by)).campaign

    async def cancel(self, campaign_id: str, by: str) -> Campaign:
        """No new hosts; what is Scheduled is canceled, what is Started ends by itself."""
        return (await self.tell(campaign_id, said.Cancel(), by)).campaign

    async def tell(self, campaign_id: str, word: said.Word, by: str = "") -> Decision:
        """Say something of a campaign, durably.

        What is returned has been committed. `by` empty: the campaign says it itself.
        """
        key = CAMPAIGN_KEY.format(campaign_id.lower())

        def decide_word(transaction: Transaction) -> Decision:
            before: Campaign | None = transaction.get(key)
            if before is None:
                raise UnknownCampaign(f"there is no campaign {campaign_id!r}", campaign=campaign_id)
            decision = decide(before, word, self.view(before), transaction.now)
            if decision.campaign != before:
                transaction.put(key, decision.campaign)
                self._put_roll(transaction, decision)
                transaction.record(*decision.changes, by=by or before.by)
            return decision

        async with self.cache.deciding:
            return await self._engine.update(KEYS, decide_word, by=by)

    def view(self, campaign: Campaign) -> View:
        """What a decision about a campaign rests on."""
        others: list[UnderWay] = []
        for other in self.cache.alive():
            others += other.under_way if other.id != campaign.id else ()
        return View(
            fleet=self.fleet,
            hosts=lambda start, stop: self.cache.hosts_of(campaign.id, start, stop),
            others=others,
            horizon=host_seconds(campaign.wish, self._engine.timing),
            health_limit=self._health_limit,
        )

    def _check(self, wish: Wish) -> None:
        """The rules of maintenance are asked what they would say."""
        decide_scope(
            Scope(name="-"),
            maintenance(wish, "-", said.NAMESPACE.hex),
            self._engine.clock.now(),
            self._engine.timing,
        )

    def _asked_before(self, operation_id: str) -> Campaign | None:
        campaigns = self.cache.all()
        return next((one for one in campaigns if one.asked_as == operation_id != ""), None)

    def _numbered(self, wish: Wish, planned: Forecast) -> Campaign:
        roll = self.cache.roll
        if len(roll.alive) >= ALIVE_MAX:
            raise TooManyCampaigns(
                f"{ALIVE_MAX} campaigns are going on; at most {ALIVE_MAX} may",
                campaigns_max=ALIVE_MAX,
            )
        return Campaign(
            id=f"c{roll.started + 1}",
            wish=wish,
            started_at=self._engine.clock.now(),
            total=len(planned.hosts),
            waves=len(planned.waves) + len(planned.waiting),
        )

    def _put_start(
        self, transaction: Transaction, campaign: Campaign, hosts: Sequence[str]
    ) -> None:
        roll: Roll = transaction.get(ROLL_KEY) or Roll()
        put_hosts(transaction, campaign.id, hosts)
        transaction.put(CAMPAIGN_KEY.format(campaign.id), campaign)
        transaction.put(
            ROLL_KEY, replace(roll, started=roll.started + 1, alive=(*roll.alive, campaign.id))
        )
        started = f"{campaign.id} started: {campaign.wish.type} of {campaign.total} hosts"
        transaction.record(Change(what=ChangeKind.CAMPAIGN, detail=started))

    def _put_roll(self, transaction: Transaction, decision: Decision) -> None:
        """Write the roll too if the campaign takes hosts, so that no other does so meanwhile, or
        if it is over.
        """
        campaign, roll = decision.campaign, transaction.get(ROLL_KEY) or Roll()
        if not campaign.is_over:
            if decision.is_taking:
                transaction.put(ROLL_KEY, roll)
            return
        ended = (*roll.ended, campaign.id)
        alive = tuple(one for one in roll.alive if one != campaign.id)
        transaction.put(ROLL_KEY, Roll(roll.started, alive, ended[-ENDED_MAX:]))
        old = [CAMPAIGN_KEY.format(one) for one in ended[:-ENDED_MAX]]
        for key in (*self.cache.pieces(campaign.id), *old):
            if transaction.get(key) is not None:
                transaction.put(key, None)


def matching(hosts: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The hosts that match any of the shell patterns, in the order in which they come."""
    wanted = re.compile("|".join(f"(?:{fnmatch.translate(pattern)})" for pattern in patterns))
    return [host for host in hosts if wanted.match(host)]


def glanced(scopes: Mapping[str, Iterable[Scope]]) -> dict[str, Standing]:
    """Each scope on any of the hosts, gone through once."""
    each = {scope.name: scope for on_host in scopes.values() for scope in on_host}
    return {name: standing(scope) for name, scope in each.items()}


def maintenance(wish: Wish, host: str, operation_id: str) -> Maintain:
    return Maintain(
        host=host,
        operation_id=operation_id,
        type=wish.type,
        cause=wish.cause,
        duration_seconds=wish.duration_seconds,
        description=wish.description,
    )
