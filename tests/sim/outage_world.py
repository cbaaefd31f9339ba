"""A world in which all servers are down now and then, and only what could be read is notice.

The witness knows the outages by itself, so a server that forgets one is found.
"""

from datetime import datetime, timedelta

from msgspec.structs import replace

from forewarn.core.event import Cause, Event, EventType, Gap, Status
from forewarn.core.fleet import Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.readability import merge, unread_duration
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.engine.readability import Readability
from tests.rules import could_be_approved, must, readable_seconds
from tests.sim.world import HOSTS, Witness, World

TIMING = Timing(shown_every=timedelta(seconds=30), gap_min=timedelta(minutes=2))
"""Servers confirm less often, because days pass."""
OUTAGES = tuple(timedelta(minutes=minutes) for minutes in (1, 5, 15, 60))
OUTAGE_CHANCE = 0.25
GAP_SLACK = timedelta(minutes=2)
"""Servers confirm every half a minute, and another one if that is late."""
LATE_MAX = min(OUTAGES)
"""For a Preempt, seconds count, and the store may refuse a server that confirms a few times."""


class OutageWitness(Witness):
    """`outages` are the times in which no server was running."""

    outages: list[Gap]
    first_seen: dict[str, datetime]

    def _saw(self, name: str, value: bytes | None) -> None:
        super()._saw(name, value)
        self.first_seen = {
            scope: self.first_seen.get(scope, seen_at) for scope, seen_at in self.seen.items()
        }

    def check_gaps(self, event: Event) -> None:
        """Each is an outage, and not much longer than that: its ends are known to some seconds.
        Between two outages a server may not have had the time to confirm.
        """
        known = [Gap(since - GAP_SLACK, until + GAP_SLACK) for since, until in self.outages]
        known = merge(known, after=event.created_at)
        late = timedelta(0)
        for gap in event.gaps:
            if any(each.since <= gap.since and gap.until <= each.until for each in known):
                continue
            late += gap.until - gap.since
            is_late = event.type is EventType.PREEMPT and gap.until - gap.since < LATE_MAX
            must(is_late, "a gap is an outage", event, self.outages)
        outages = sum((until - since for since, until in self.outages), late)
        slack = len(self.outages) * 2 * GAP_SLACK
        must(unread_duration(event) <= outages + slack, "each gap is made up once", event, outages)

    def _check(self, before: Scope, after: Scope) -> None:
        super()._check(before, after)
        old, now = {event.id: event for event in before.events}, self.now()
        if not is_enabled(after, now, self.timing):
            return  # a scope that is not polled delays nothing
        for event in after.events:
            was = old.get(event.id)
            if event.status is not Status.STARTED or not was or was.status is Status.STARTED:
                continue
            first_seen = self.first_seen.get(after.name, now)
            if first_seen >= event.created_at + event.notice:
                continue  # nor does one that was polled only when its event was due
            if was.is_approved or could_be_approved(before, after, event):
                continue
            gap_min = self.timing.gap_min_of(event.type)
            outages = [gap for gap in self.outages if gap.until - gap.since >= gap_min]
            must(
                event.cause is Cause.FAILED
                or readable_seconds(replace(event, gaps=tuple(outages)), now)
                >= event.notice.total_seconds(),
                "no event starts by time unless some server showed it for its minimum notice",
                event,
                outages,
                now,
            )


class OutageWorld(World):
    """`kind` is what a server knows about readability with."""

    def __init__(self, seed: int, kind: type[Readability] = Readability) -> None:
        super().__init__(seed, timing=TIMING)
        self._kind = kind
        self.witness: OutageWitness = OutageWitness(self.clock.now, self.timing)
        self.witness.outages, self.witness.first_seen = [], {}

    def make_readability(self, engine: Engine) -> Readability:
        return self._kind(engine, HostContacts(engine, ManagedHosts(engine)))

    async def _pass_time(self) -> None:
        is_outage = self.chance.random() < OUTAGE_CHANCE
        await (self._restart_server() if is_outage else super()._pass_time())

    async def _restart_server(self) -> None:
        """All of them: none shows anything meanwhile."""
        since = self.clock.now()
        for server in self.servers:
            await server.kill()
        await self.clock.advance(self.chance.choice(OUTAGES))
        self.witness.outages.append(Gap(since, self.clock.now()))
        for number in range(len(self.servers)):
            self.servers[number] = self.make_server(number)
            await self.servers[number].start()

    async def _operate_host(self) -> object:
        """Without degraded hardware: its notice of a week takes long to confirm."""
        type_ = self.chance.choice([EventType.FREEZE, EventType.REBOOT, EventType.REDEPLOY])
        host, operations = self.chance.choice(HOSTS), self._server().operations
        return await operations.maintain(host, type=type_, by="sim")
