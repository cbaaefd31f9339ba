"""When VMs could read what was committed, and when they could not. The rule is in `core`.

While an event is Scheduled, some server writes into the record `shown`, every few seconds, that it
shows all that was committed. If that is late, no server did in the meantime: they were down or
suspended, or the store had no quorum. The write appends that gap. While nothing is Scheduled, no
server writes, so the record gets old, and the next gap begins long before the next event; only what
comes after its announcement counts for it.

Every announcement compares the record. So if the store commits one late, either another server has
confirmed meanwhile, and it is refused and decided again, or no server has, and the gap covers the
whole delay.

The other part is the host of a VM: `host_contact.py` knows when its daemon was away.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cached_property

from forewarn.core.command import NoteUnread, Unread
from forewarn.core.event import Event, EventType, Gap, Status
from forewarn.core.fleet import Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.readability import drop_future, keep_recent, merge, with_gaps
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import wait_for
from forewarn.engine.engine import CLOCK_SKEW_SECONDS_MAX, SHOWN_KEY, Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.isolation import isolated
from forewarn.engine.record import Shown
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error, Unavailable

NEVER = datetime(1970, 1, 1, tzinfo=UTC)
RETRY = timedelta(seconds=1)
RETRY_AFTER_BUG = timedelta(minutes=1)
OTHERS_WAIT = 1.5
"""After so many intervals another server than the last one confirms."""
SLACK = timedelta(seconds=1)


def _believe(known: Shown | None, now: datetime) -> Shown:
    """The record, unless it is of a time to come: a server with a wrong clock has written it.

    Then nothing is known. That server may have stopped long ago, and nothing in the store says when
    by a clock that is right, so any shorter gap could be too short for the guests.
    """
    if known is None:
        return Shown(NEVER)
    if known.at > now + timedelta(seconds=CLOCK_SKEW_SECONDS_MAX):
        return Shown(NEVER, known.gaps)
    return known


class Readability:
    """Confirms what this server shows, and finds what its events miss.

    `is_serving`: VMs can reach this server. `gap_found` is set when any server has recorded a gap.
    """

    def __init__(
        self, engine: Engine, hosts: HostContacts, is_serving: Callable[[], bool] = lambda: True
    ) -> None:
        self._engine = engine
        self._hosts = hosts
        self._is_serving = is_serving
        self._is_right: Callable[[], bool] = lambda: False
        self._server = ""
        self._every_before: timedelta | None = None
        self._woken = asyncio.Event()
        self._confirming = asyncio.Lock()
        self.gap_found = asyncio.Event()
        engine.board.subscribe(self._on_scope)
        engine.on_change(SHOWN_KEY, self._on_shown)

    @property
    def shown_at(self) -> datetime:
        """Until when all gaps are known."""
        return self._shown.at

    @property
    def _shown(self) -> Shown:
        known: Shown | None = self._engine.records.get(SHOWN_KEY).value
        return _believe(known, self._engine.clock.now())

    # --- confirm what this server shows

    async def run(self, server: str, is_right: Callable[[], bool]) -> None:
        """Confirm regularly while an event is Scheduled, until cancelled.

        `is_right`: the clock of this server agrees with the others.
        """
        self._server, self._is_right = server, is_right
        clock = self._engine.clock
        while True:  # ends when cancelled
            self._woken.clear()
            confirm_at: datetime | None = clock.now() + RETRY_AFTER_BUG
            with isolated(
                self._engine.throttled_log, "bug while confirming that events can be read"
            ):
                confirm_at = await self._confirm_if_due()
            await wait_for(clock, self._woken, confirm_at)

    async def _confirm_if_due(self) -> datetime | None:
        """Confirm if it is time to. Returns when to look again; None: when something changes."""
        clock, confirm_at = self._engine.clock, self._next_time()
        if not self._is_right():
            return None  # until `on_clock_compared`
        if confirm_at is None or confirm_at > clock.now():
            return confirm_at
        try:
            await self.confirm(confirm_at)
        except Error as error:
            warn = self._engine.throttled_log.warn
            warn("readable events not confirmed", problem=error.message)
        return max(self._next_time() or NEVER, clock.now() + RETRY)

    def on_clock_compared(self) -> None:
        """The clock of this server may be right now, or no longer."""
        self._woken.set()

    def _next_time(self) -> datetime | None:
        """When this server should confirm next; None while no event is Scheduled."""
        every, shown = self._every(), self._shown
        if every is None:
            return None
        return shown.at + (every if shown.server == self._server else OTHERS_WAIT * every)

    def _every(self) -> timedelta | None:
        counts, timing = self._engine.board.event_counts, self._engine.timing
        if counts[EventType.PREEMPT, Status.SCHEDULED]:
            return timing.shown_every_preempt
        if any(counts[type_, Status.SCHEDULED] for type_ in EventType):
            return timing.shown_every
        return None

    def _on_scope(self, published: PublishedScope) -> None:
        every = self._every()
        if every != self._every_before:
            self._every_before = every
            self._woken.set()

    def _on_shown(self, before: Shown | None, after: Shown | None) -> None:
        if after is not None and after.gaps[-1:] != (before.gaps[-1:] if before else ()):
            self.gap_found.set()

    async def confirm(self, wanted: datetime) -> datetime:
        """Until when all gaps are known, at least until the wanted time, which has passed.

        Unavailable if this server cannot tell.
        """
        async with self._confirming:
            if self._shown.at >= wanted:
                return self._shown.at
            if not (self._is_right() and self._is_serving()):
                raise Unavailable("this server does not serve VMs at present")
            if not (self._engine.is_ready and await self._engine.catch_up()):
                raise Unavailable("this server does not show everything that was committed")

            def decide(transaction: Transaction) -> datetime:
                known = _believe(transaction.get(SHOWN_KEY), transaction.now)
                if known.at >= min(wanted, transaction.now):
                    return known.at
                gaps = self._add_gap(known, transaction.now)
                transaction.put(SHOWN_KEY, Shown(transaction.now, gaps, self._server))
                return transaction.now

            return await self._engine.update([SHOWN_KEY], decide, by=self._server)

    def _add_gap(self, known: Shown, now: datetime) -> tuple[Gap, ...]:
        """The recorded gaps, with the time since the last record if it was late."""
        timing = self._engine.timing
        every = self._every() or timing.shown_every
        late = max(timing.gap_min_preempt, OTHERS_WAIT * every + SLACK)
        new = [Gap(known.at, now)] if now - known.at >= late else []
        return keep_recent([*known.gaps, *new], now, timing)

    # --- what the events of a scope miss

    def find_known(self, scope: Scope) -> frozenset[str]:
        """The events of a scope of which it is known whether their VMs could read them, until
        `shown_at` or their NotBefore.
        """
        hosts = _PollingHosts(scope, self._hosts, self._engine)
        return frozenset(event.id for event in scope.events if self._is_known(scope, event, hosts))

    def _is_known(self, scope: Scope, event: Event, hosts: "_PollingHosts") -> bool:
        """Each is judged by itself: whether its hosts were connected may be known only at another
        server.
        """
        timing, due_until = self._engine.timing, max(self._engine.decision_time(), self.shown_at)
        is_due = event.status is Status.SCHEDULED and event.not_before <= due_until
        if not is_due or not event.notice:
            return True
        if not (was_unread(event) or is_enabled(scope, hosts.judged_at(event), timing)):
            return True
        gap_min = timing.gap_min_of(event.type)
        return all(
            self._hosts.known_until(host, self._server, gap_min) >= event.not_before
            for host in hosts.find_all(event)
        )

    def find_unread(self, scope: Scope) -> NoteUnread | None:
        """What is known about the events of a scope and not stored with them."""
        announced = _announced(scope)
        if not announced:
            return None
        timing, events = self._engine.timing, list[Unread]()
        hosts = _PollingHosts(scope, self._hosts, self._engine)
        for event in announced:
            unread = self._unread(scope, event, hosts)
            if with_gaps(event, unread.gaps, unread.since, timing) != event:
                events.append(unread)
        return NoteUnread(tuple(events)) if events else None

    def unread_at(self, scope: Scope) -> datetime | None:
        """When something has to be stored with the events of a scope: now, or as soon as a host
        has been away for long enough. None while none is away.
        """
        announced = _announced(scope)
        if not announced:
            return None
        now, timing = self._engine.decision_time(), self._engine.timing
        if self.find_unread(scope) is not None:
            return now
        hosts = _PollingHosts(scope, self._hosts, self._engine)
        times = (
            away + timing.gap_min_of(event.type)
            for event in announced
            if event.unreadable_since is None and not event.has_had_notice
            for away in map(self._hosts.away_since, hosts.find(event))
            if away is not None
        )
        return min((time for time in times if time > now), default=None)

    def _unread(self, scope: Scope, event: Event, hosts: "_PollingHosts") -> Unread:
        """A scope that is not polled, and a VM that does not poll on a host, delay nothing.

        Whether they poll is judged at the announcement, or before if their host is away since: then
        they cannot. An event that could not be read was one for VMs that poll.
        """
        timing, now = self._engine.timing, self._engine.decision_time()
        opened, away = event.unreadable_since, list[datetime]()
        if not (was_unread(event) or is_enabled(scope, hosts.judged_at(event), timing)):
            return Unread(event.id)
        gaps = [gap for gap in self._shown.gaps if gap.until > event.created_at]
        for host in hosts.find(event):
            gaps += self._hosts.gaps_of(host)
            away_since = self._hosts.away_since(host)
            if away_since is not None and (
                opened or now - away_since >= timing.gap_min_of(event.type)
            ):
                away.append(away_since)
        if opened and not away and not hosts.find_all(event):
            # Another server knows that a VM polls there, and this one does not know it yet.
            away += filter(None, map(self._hosts.away_since, hosts.find_away(event)))
        gaps = drop_future(gaps, now)
        # To correct what another server has found would mean to write in turns.
        is_in_doubt = opened and any(map(self._hosts.is_in_doubt, hosts.find_all(event)))
        if away or is_in_doubt:
            begun = opened or max(min(away), event.created_at)
            covering = (gap for gap in merge(gaps, after=event.created_at) if gap.since <= begun)
            return Unread(event.id, tuple(gaps), max((begun, *(gap.until for gap in covering))))
        if opened and not any(gap.since <= opened < gap.until for gap in gaps):
            gaps.append(Gap(opened, now))  # the VM has left the host that is away
        return Unread(event.id, tuple(gaps))


def _announced(scope: Scope) -> list[Event]:
    """The events whose notice has begun and is not over."""
    return [event for event in scope.events if event.status is Status.SCHEDULED and event.notice]


def was_unread(event: Event) -> bool:
    """Whether a gap was stored with the event, so its VMs polled when it was announced."""
    return bool(event.unreadable_since or event.gaps or event.unread_total)


class _PollingHosts:
    """The hosts of a scope that were away, or are, by VM: nearly always none."""

    def __init__(self, scope: Scope, contacts: HostContacts, engine: Engine) -> None:
        self._scope = scope
        self._contacts = contacts
        self._engine = engine
        self._hosts = {vm.name: vm.host for vm in scope.vms}
        self._away = {
            host
            for host in set(self._hosts.values())
            if contacts.gaps_of(host) or contacts.away_since(host) is not None
        }

    @cached_property
    def _polled(self) -> Mapping[str, int]:
        return self._engine.last_polls.times(self._scope)

    def find(self, event: Event) -> set[str]:
        """Those of the VMs in Resources that polled before the event was announced, or since."""
        return self.find_all(event) & self._away if self._away else set()

    def find_away(self, event: Event) -> set[str]:
        """Those of all VMs in Resources, whether they poll or not."""
        return set(self._hosts_of(event).values()) & self._away

    def find_all(self, event: Event) -> set[str]:
        """As `find`, whether they were away or not."""
        timing = self._engine.timing
        polls_for = timing.enabled_for + timing.seen_interval
        return {
            host
            for name, host in self._hosts_of(event).items()
            if self._polled.get(name, 0) > (self._last_chance(host, event) - polls_for).timestamp()
        }

    def judged_at(self, event: Event) -> datetime:
        """When the first VM in Resources could last poll at the announcement of an event."""
        hosts = self.find_away(event)
        return min((self._last_chance(host, event) for host in hosts), default=event.created_at)

    def _hosts_of(self, event: Event) -> dict[str, str]:
        """By VM."""
        return {name: self._hosts[name] for name in event.resources if name in self._hosts}

    def _last_chance(self, host: str, event: Event) -> datetime:
        """When the VMs of a host could last poll at the announcement of an event: before it if the
        host was away then, or until shortly before.
        """
        if host not in self._away:
            return event.created_at
        return self._contacts.silent_since(host, event.created_at) or event.created_at
