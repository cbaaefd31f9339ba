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
from forewarn.campaign.cache import (
    CAMPAIGN_KEY,
    ROLL_KEY,
    forgotten,
    forgotten_hosts,
    written,
    written_hosts,
    written_roll,
)
from forewarn.campaign.forecast import Forecast, forecast
from forewarn.campaign.model import HOSTS_MAX, Campaign, Roll, UnderWay, Wish, host_seconds
from forewarn.campaign.rules import Decision, View, decide
from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Maintain
from forewarn.core.fleet import Scope
from forewarn.core.machine import decide as decide_scope
from forewarn.engine.engine import TRIES_MAX, Engine
from forewarn.errors import Conflict, Invalid, OverBudget, StoreLost, TooManyCampaigns, Unavailable
from forewarn.store.base import Write

ALIVE_MAX = 100
ENDED_MAX = 1000
POLLS_PASS_EVERY = 200
"""How many hosts are gathered for a plan before polls get their turn."""


class Campaigns:
    """All that can be asked of campaigns.

    `health_limit`: how long this server's health command may take; None: it has none.
    """

    def __init__(self, engine: Engine, health_limit: timedelta | None = None) -> None:
        self._engine = engine
        self._health_limit = health_limit
        self._shelf = engine.shelf
        self.fleet = engine.shelf.glances(engine.board)

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
        async with self._shelf.deciding:
            for _ in range(TRIES_MAX):
                if (before := self._asked_before(operation_id)) is not None:
                    return before
                campaign = replace(self._numbered(wish, planned), asked_as=operation_id)
                if await self._commit_start(campaign, planned.hosts, by):
                    return campaign
        raise Unavailable("too many change the campaigns at once; try again")

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
        async with self._shelf.deciding:
            if campaign_id.lower() not in self._shelf.kept:
                await self._read_again(
                    campaign_id.lower()
                )  # another server may have started it just now
            for _ in range(TRIES_MAX):
                before, revision = self._shelf.find(campaign_id)
                decision = decide(before, word, self.view(before), self._engine.clock.now())
                if decision.campaign == before:
                    return decision
                writes = [written(decision.campaign, revision), *self._roll_writes(decision)]
                try:
                    await self._engine.commit(
                        [], by or before.by, *writes, changes=decision.changes
                    )
                except (Conflict, StoreLost):
                    await self._read_again(before.id)
                    continue
                return decision
        raise Unavailable(
            f"campaign {campaign_id} is being changed by too many at once; try again",
            campaign=campaign_id,
        )

    def view(self, campaign: Campaign) -> View:
        """What a decision about a campaign rests on."""
        others: list[UnderWay] = []
        for other in self._shelf.alive():
            others += other.under_way if other.id != campaign.id else ()
        return View(
            fleet=self.fleet,
            hosts=lambda start, stop: self._shelf.hosts_of(campaign.id, start, stop),
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
        campaigns = (kept.campaign for kept in self._shelf.kept.values())
        return next((one for one in campaigns if one.asked_as == operation_id != ""), None)

    def _numbered(self, wish: Wish, planned: Forecast) -> Campaign:
        roll = self._shelf.roll
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

    async def _commit_start(self, campaign: Campaign, hosts: Sequence[str], by: str) -> bool:
        shelf, roll = self._shelf, self._shelf.roll
        after = replace(roll, started=roll.started + 1, alive=(*roll.alive, campaign.id))
        writes = [
            *written_hosts(campaign.id, hosts),
            written(campaign, 0),
            written_roll(after, shelf.roll_revision),
        ]
        told = Change(
            what=ChangeKind.CAMPAIGN,
            detail=f"{campaign.id} started: {campaign.wish.type} of {campaign.total} hosts",
        )
        try:
            await self._engine.commit([], by, *writes, changes=(told,))
        except (Conflict, StoreLost):
            await self._read_again(campaign.id)
            kept = shelf.kept.get(campaign.id)
            return (
                kept is not None and kept.campaign == campaign
            )  # it was written, and only the answer was lost
        return True

    def _roll_writes(self, decision: Decision) -> list[Write]:
        """What else a decision writes: the roll, so that nobody else gives a turn meanwhile, or
        because the campaign is over.
        """
        shelf, campaign, roll = self._shelf, decision.campaign, self._shelf.roll
        if not campaign.is_over:
            return [written_roll(roll, shelf.roll_revision)] if decision.is_taking else []
        ended = (*roll.ended, campaign.id)
        after = Roll(
            roll.started, tuple(one for one in roll.alive if one != campaign.id), ended[-ENDED_MAX:]
        )
        too_old = [write for one in ended[:-ENDED_MAX] for write in forgotten(shelf, one)]
        return [
            written_roll(after, shelf.roll_revision),
            *forgotten_hosts(shelf, campaign.id),
            *too_old,
        ]

    async def _read_again(self, campaign_id: str) -> None:
        """The roll, and every campaign that takes room in the fleet."""
        await self._read(ROLL_KEY)
        for one in dict.fromkeys((*self._shelf.roll.alive, campaign_id)):
            await self._read(CAMPAIGN_KEY.format(one))

    async def _read(self, key: str) -> None:
        for found in (await self._engine.store.load(key)).records:
            if found.key == key:
                self._engine.learn(found)


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
