"""When the guests of a host could read nothing new.

A daemon that is away is in one of two states, and one that returns leaves a gap in its record:

    its server noticed    the record has `away_since`, the time of its last request
    its server was lost   the record names a server without a lease. That server was certainly alive
                          until `Loss.since`, but may not have noticed a silence of its daemon, so
                          the daemon may be away since SILENT before

A server that was there when the lease ended knows that time, and writes it into the record as
`away_since` when `gap_min` has passed: one that starts later cannot know it. Until then such a
server takes the earliest time that is possible, see `_earliest_loss`.

A daemon that continues at another server within seconds was not away. If it was away for longer, it
says so with its second request there. One whose libvirt does not answer is not away either: its
guests can read. The guests of one without a bridge ask the servers: its absence is no gap.

A daemon in contact says for how long its guests have asked and no metadata server has answered: the
way there may be another one than to the control API. The record has `unconfirmed_since` meanwhile,
and then a gap. It is written when that begins and when it ends. If its server loses contact
meanwhile, it stays, apart from the time of the last request, which operators see.

An event starts by time only when it is known whether the daemon was in contact: `known_until`. The
server of the host knows it at once, every other one after ALL_KNOW_AFTER. For a Preempt seconds
count, so its daemon sends requests more often meanwhile.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from forewarn.core.event import Gap
from forewarn.core.readability import drop_future, keep_recent
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import SHOWN_KEY, Engine
from forewarn.engine.isolation import isolated
from forewarn.engine.lease import TTL_SECONDS, lease_key
from forewarn.engine.machine_binding import SILENT
from forewarn.engine.managed_hosts import (
    ManagedHost,
    ManagedHosts,
    is_served,
    unless_forgotten,
)
from forewarn.engine.record import Shown
from forewarn.engine.replica import POLLS_PASS_EVERY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error
from forewarn.platform.remote import WorkRequest

LOST_MAX = 100
"""How many lost servers are remembered."""
TTL = timedelta(seconds=TTL_SECONDS)
NOTE_RETRY = timedelta(seconds=1)
NEVER = datetime.min.replace(tzinfo=UTC)
NOTE_SLACK = timedelta(seconds=5)
"""How long it may take until what a server has noticed is written into the records of hosts."""
SINCE_SLACK = timedelta(seconds=2)
"""A time that a daemon reports in whole seconds is the same again within this."""
UNNOTICED_MAX = SILENT - timedelta(seconds=1)
"""How long a daemon may have been silent without its server noticing. It counts for a Preempt, and
not for other events.
"""
ALL_KNOW_AFTER = SILENT + TTL + NOTE_SLACK
"""Every server knows after this time that a host was away: its server has noticed that, or died
before, and its lease has ended.
"""


class Loss(NamedTuple):
    """A server lost its lease at `at`; it was certainly alive until `since`."""

    at: datetime
    since: datetime


class HostContacts:
    """Create it before the engine loads."""

    def __init__(self, engine: Engine, managed: ManagedHosts) -> None:
        self._engine = engine
        self._managed = managed
        self._began_at = engine.clock.now()
        self._asked_at: dict[str, datetime] = {}
        self._contact_at: dict[tuple[str, timedelta], datetime] = {}  # by host and shortest gap
        self._leases: set[str] = set()
        self._lost: dict[str, Loss] = {}
        self._shown_before: Shown | None = None  # what this server has found when it started
        self._changed = asyncio.Event()
        engine.on_change("lease", self._on_lease)
        engine.on_change(SHOWN_KEY, self._on_shown)

    def _on_lease(self, before: bytes | None, after: bytes | None) -> None:
        """Remember when leases were lost. There is one for each server, and few others.

        A server that was cut off from the store learns of it only when that ends.
        """
        leases = {key for key, _ in self._engine.records.values("lease")}
        now, stale_since = self._engine.decision_time(), self._engine.stale_since
        lost_at = min(now, stale_since or now)
        for key in self._leases - leases:
            self._lost[key] = Loss(lost_at, min(lost_at, now - TTL))
            if len(self._lost) > LOST_MAX:
                del self._lost[next(iter(self._lost))]
        self._leases = leases
        self._changed.set()

    def _on_shown(self, before: Shown | None, after: Shown | None) -> None:
        self._shown_before = self._shown_before or after

    async def run(self) -> None:
        """Write since when hosts are away whose server was lost, until cancelled.

        Every server does, and the first one succeeds.
        """
        engine = self._engine
        while True:  # ends when cancelled
            self._changed.clear()
            look_at: datetime | None = None
            hosts = list(engine.records.values("hostd"))
            for number, (key, record) in enumerate(hosts, start=1):
                if number % POLLS_PASS_EVERY == 0:
                    await asyncio.sleep(0)
                note_at: datetime | None = engine.decision_time() + NOTE_RETRY
                text = "bug while looking at a host"
                with isolated(engine.throttled_log, text, host=record.host):
                    note_at = await self._note_if_due(key, record)
                look_at = min(filter(None, (look_at, note_at)), default=None)
            wake_at = look_at and look_at + engine.clock_lead
            await wait_for(engine.clock, self._changed, wake_at)

    async def _note_if_due(self, key: str, record: ManagedHost) -> datetime | None:
        """Write that the server of a host was lost, if it is time to. Returns when to look again;
        None: when something changes.
        """
        now = self._engine.decision_time()
        try:
            note_at = self._note_at(unless_forgotten(record))
            if note_at is None or note_at > now:
                return note_at
            await self._note_loss(key)
        except Error as error:  # the other hosts come first
            warn = self._engine.throttled_log.warn
            warn("host not updated", host=record.host, problem=error.message)
            return now + NOTE_RETRY
        return None

    def _note_at(self, record: ManagedHost | None) -> datetime | None:
        """When to write that the server of this host was lost; None if it was not, or is noted."""
        if record is None or not record.server or record.away_since is not None:
            return None
        loss = self._find_loss(record)
        return loss and loss.at + self._engine.timing.gap_min

    async def _note_loss(self, key: str) -> None:
        def decide(transaction: Transaction) -> None:
            known = unless_forgotten(transaction.get(key))
            if known is None or not known.server or known.away_since is not None:
                return
            loss = None if is_served(known, transaction.get) else self._find_loss(known)
            if loss is not None:
                transaction.put(key, replace(known, away_since=_last_contact(known, loss)))

        await self._engine.update([key], decide, by="server")

    def _find_loss(self, record: ManagedHost) -> Loss | None:
        """The loss of the server that the record names; None if that has its lease."""
        key = lease_key(record.server)
        if self._engine.records.get(key).value is not None:
            return None
        return self._lost.get(key) or Loss(self._began_at, self._earliest_loss(record))

    def _earliest_loss(self, record: ManagedHost) -> datetime:
        """Until when a server that was lost before this one started was certainly alive.

        While an event is Scheduled, the record `shown` is a few seconds old. Its server was alive
        then. Any other one was not yet lost for so long that this was written.
        """
        shown, written_after = self._shown_before, TTL + self._engine.timing.gap_min + NOTE_SLACK
        if shown is None:
            return record.since
        shown_at = min(shown.at, self._began_at)  # the clock of its server may have been ahead
        is_same = shown.server == record.server
        return shown_at if is_same else shown_at - written_after

    def gaps_of(self, host: str) -> Sequence[Gap]:
        """When the daemon was away, recently, also if it was forgotten since."""
        record = self._managed.find_record(host)
        return record.gaps if record is not None else ()

    def gaps_until(self, record: ManagedHost, now: datetime) -> tuple[Gap, ...]:
        """When the daemon of a host that is forgotten now was away, until now: from then on its VMs
        ask the servers.
        """
        if not record.session or not record.relays:
            return record.gaps
        loss = self._find_loss(record) if record.server else None
        away_since = _last_contact(record, loss) if loss else record.since
        times = (record.away_since or away_since, record.unconfirmed_since)
        since = min(time for time in times if time is not None)
        return keep_recent([*record.gaps, Gap(since, now)], now, self._engine.timing)

    def away_since(self, host: str) -> datetime | None:
        """Since when the daemon is away, or its relay gets no answer.

        None while neither is so, or the host has no daemon that relays.
        """
        return self._unread_since(self._find_relay(host))

    def silent_since(self, host: str, at: datetime | None = None) -> datetime | None:
        """Since when the VMs of a host could not poll, at a time or now; None if they could.

        In the hour after an absence, they may not have polled again. If the next one began in that
        hour, they could not poll since the first one began.
        """
        now, away_since = self._engine.decision_time(), self.away_since(host)
        at = at or now
        since = at if away_since is None else min(away_since, at)
        for gap in sorted(drop_future(self.gaps_of(host), now), reverse=True):
            if gap.since < since < gap.until + self._engine.timing.seen_interval:
                since = gap.since
        return since if since < at else None

    def _find_relay(self, host: str) -> ManagedHost | None:
        """The record of a host whose guests read through its daemon."""
        record = self._managed.find(host)
        return record if record is not None and record.relays else None

    def is_in_doubt(self, host: str) -> bool:
        """Whether the host has a relay that no server has contact with at present."""
        return self._find_relay(host) is not None and not self._managed.has_contact(host)

    def _unread_since(self, record: ManagedHost | None, session: str = "") -> datetime | None:
        """As `away_since`, for a request of a session, if one is given."""
        times = (self._away_since(record, session), record.unconfirmed_since if record else None)
        return min(filter(None, times), default=None)

    def _away_since(self, record: ManagedHost | None, session: str) -> datetime | None:
        if record is None:
            return None
        if not record.server:
            return record.away_since or record.since
        loss = self._find_loss(record)
        if loss is None or record.away_since is not None:
            return record.away_since if loss else None
        is_known = lease_key(record.server) in self._lost
        lasts = self._engine.decision_time() - loss.at
        is_short = is_known and lasts < self._engine.timing.gap_min_preempt
        if is_short:
            return None
        if session in ("", record.session):  # its daemon will report for how long it had no server
            return max(record.since, loss.since)
        return _last_contact(record, loss)

    def find_absence(self, record: ManagedHost, request: WorkRequest) -> datetime | None:
        """Since when a host may have been away whose daemon returns with this request; None if it
        was not.

        The same session counts itself for how long it had no server. Otherwise the host may be away
        since the last time that it certainly was in contact: long, if no server was there to notice
        when its own one was lost.
        """
        if record.away_since is not None:
            return record.away_since
        if request.session == record.session and request.no_server_seconds is not None:
            now = self._engine.decision_time()
            return now - timedelta(seconds=request.no_server_seconds)
        return self._away_since(record, request.session)

    def note_request(self, host: str) -> None:
        """The daemon of a host that this server serves has sent a request.

        The first one after a silence proves nothing: its daemon reports with the next one for how
        long it had no server.
        """
        now, before = self._engine.decision_time(), self._asked_at.get(host)
        self._asked_at[host] = now
        timing = self._engine.timing
        for gap_min in (timing.gap_min_preempt, timing.gap_min):
            if before is not None and now - before <= gap_min:
                self._contact_at[host, gap_min] = now

    def known_until(self, host: str, server: str, gap_min: timedelta) -> datetime:
        """Until when this server knows whether the daemon was in contact, but for a shorter gap.

        One that is known to be away, and a host without a relay, is known at any time. While its
        server is lost, and it is not written yet since when, nothing is known: its daemon may
        continue at another server.
        """
        now, record = self._engine.decision_time(), self._find_relay(host)
        if self._note_at(record) is not None:
            return NEVER
        if record is None or self._unread_since(record) is not None:
            return now
        contact_at, own = now - ALL_KNOW_AFTER, self._contact_at.get((host, gap_min))
        if record.server == server and own is not None:
            contact_at = max(contact_at, own)
        return contact_at + gap_min

    def is_noted(self, record: ManagedHost, request: WorkRequest) -> bool:
        """Whether the record says what this request says about contact."""
        if not self._is_unconfirmed(request):
            return record.unconfirmed_since is None
        since = self._engine.decision_time() - timedelta(seconds=request.unconfirmed_seconds)
        noted = record.unconfirmed_since
        return noted is not None and noted <= since + SINCE_SLACK

    def _is_unconfirmed(self, request: WorkRequest) -> bool:
        lasts = timedelta(seconds=request.unconfirmed_seconds)
        return request.relays and lasts >= self._engine.timing.gap_min_preempt

    def note(
        self,
        known: ManagedHost | None,
        new: ManagedHost,
        request: WorkRequest,
        contact_at: datetime | None,
        now: datetime,
    ) -> ManagedHost:
        """The new record of a host, with what it says about contact.

        `contact_at` is when its daemon sent its last request; None if this server does not know.
        """
        if known is not None and not new.server:
            away_since = self._away_since(known, new.session) or contact_at or now
            left = replace(new, away_since=away_since)  # `unconfirmed_since` stays
            return left if known.server else new
        since, timing = self._unread_since(known, new.session), self._engine.timing
        if since is None and known is not None and known.session != new.session:
            since = contact_at or now - UNNOTICED_MAX  # its daemon was killed and has restarted
        gaps = list(known.gaps) if known is not None else []
        if self._is_unconfirmed(request):  # a gap of which only the beginning is known
            asked_at = now - timedelta(seconds=request.unconfirmed_seconds)
            known_since = known.unconfirmed_since if known is not None else None
            times = (known_since, asked_at, since)
            unconfirmed_since = min(time for time in times if time is not None)
            return replace(
                new, away_since=None, gaps=tuple(gaps), unconfirmed_since=unconfirmed_since
            )
        was_relay = known is not None and known.relays
        if was_relay and since is not None and now - since >= timing.gap_min_preempt:
            gaps.append(Gap(since, now))
        kept = keep_recent(gaps, now, timing)
        return replace(new, away_since=None, gaps=kept, unconfirmed_since=None)


def _last_contact(record: ManagedHost, loss: Loss) -> datetime:
    """Until when the daemon was certainly in contact with a server that was lost."""
    return max(record.since, loss.since - SILENT)
