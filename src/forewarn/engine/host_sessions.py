"""The daemons that are connected to this server.

    UNKNOWN -> CONNECTED         its first request; the record of the host names this server
    CONNECTED -> SILENT          no request for SILENT; the record names no server, and the host is
                                 unreachable
    CONNECTED -> (taken over)    its record names another server or session
    CONNECTED -> (ended)         it leaves

In the last three, its impacts are released: they wait for the daemon and fail nothing. Which daemon
may connect is decided in `machine_binding.py`.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.host_session import DaemonSession, refuse_late, unreachable
from forewarn.engine.isolation import isolated
from forewarn.engine.machine_binding import MERGE_AFTER, SILENT, bind, cloned, find_refusal
from forewarn.engine.managed_hosts import (
    HOST_KEY,
    ManagedHost,
    ManagedHosts,
    is_served,
    unless_fenced,
    unless_forgotten,
)
from forewarn.engine.report_rate import ReportRate
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error, HostTaken, Unavailable
from forewarn.log import log
from forewarn.platform.remote import WorkRequest
from forewarn.store.base import Lease

TIME = "%Y-%m-%dT%H:%M:%SZ"
TICK = timedelta(seconds=1)
BRIDGES_SHOWN_MAX = 5
"""How many bridges a history entry names."""


class HostSessions:
    """Sessions by host.

    `on_connect` is called with the VMs of a host that is connected now, `on_end` with the name of
    one that is not any more.
    """

    def __init__(
        self,
        engine: Engine,
        managed: ManagedHosts,
        contacts: HostContacts,
        get_lease: Callable[[], Lease | None],
        on_connect: Callable[[Iterable[str]], None],
        on_end: Callable[[str], None],
        rate: ReportRate,
    ) -> None:
        self._engine = engine
        self._managed = managed
        self._contacts = contacts
        self._get_lease = get_lease
        self._on_connect = on_connect
        self._on_end = on_end
        self._rate = rate
        self._sessions: dict[str, DaemonSession] = {}
        self._processing = Counter[tuple[str, str]]()  # requests by host and session
        self._connected = asyncio.Event()
        engine.on_change("hostd", self._on_record)

    def find(self, host: str) -> DaemonSession | None:
        return self._sessions.get(host)

    def of(self, host: str) -> DaemonSession:
        return self._sessions[host]

    def all(self) -> Iterable[DaemonSession]:
        return self._sessions.values()

    def wake_all(self) -> None:
        for session in self._sessions.values():
            session.changed.set()

    def serves(self, host: str) -> bool:
        """Whether this server serves a host that is managed."""
        record, session = self._managed.find(host), self._sessions.get(host)
        served = session and (session.latest.session, self._server())
        return record is not None and served == (record.session, record.server)

    @asynccontextmanager
    async def contact(self, host: str, request: WorkRequest) -> AsyncIterator[DaemonSession]:
        """Within this, a request is processed, however long that takes: its daemon is not silent.

        Gives the session of the daemon; HostTaken if another one acts for the host.
        """
        key, session = (host, request.session), None
        self._processing[key] += 1
        try:
            session = await self._connect(host, request)
            self._contacts.note_request(host)
            yield session
        finally:
            self._processing[key] -= 1
            if not self._processing[key]:
                del self._processing[key]
            if session is not None:
                session.silent_at = self._engine.clock.now() + SILENT

    async def _connect(self, host: str, request: WorkRequest) -> DaemonSession:
        """The session of a daemon that has sent something."""
        session, record = self._sessions.get(host), self._managed.find(host)
        is_known = session is not None and session.latest.session == request.session
        is_connected = is_known and self.serves(host)
        if session and is_connected and self._is_noted(record, request):
            return session
        if not self._rate.has_room_for_change(host):
            self._engine.throttled_log.warn("too many changes of a host", host=host)
            if session and is_connected and record and self._contacts.is_noted(record, request):
                return session  # a later request says the same about problems and bridges
            raise Unavailable(f"the daemon of {host} reports too many changes; try again")
        try:
            await self.update(host, request)
        finally:
            if self._managed.find(host) != record:  # also if it is refused
                self._rate.add_change(host, len(request.unserved))
        await self._engine.require_caught_up()  # another server may have handed out impacts
        session = self._sessions.get(host)
        if session is None or session.latest.session != request.session:
            self._drop(host)
            silent_at = self._engine.clock.now() + SILENT
            session = self._sessions[host] = DaemonSession(request, silent_at)
            self._connected.set()
        session.server = self._server()
        self._on_connect(self._managed.vms_of(self._managed.find(host)))
        return session

    def _is_noted(self, record: ManagedHost | None, request: WorkRequest) -> bool:
        """Whether the record says what this request says about its daemon."""
        if record is None or record.problem != request.problem:
            return False
        is_same = record.unserved == tuple(request.unserved)
        return is_same and self._contacts.is_noted(record, request)

    async def update(
        self,
        host: str,
        request: WorkRequest,
        change: Callable[[ManagedHost, Transaction], ManagedHost] = lambda record, _: record,
    ) -> None:
        """Change the record of a host whose daemon this request connects to this server."""
        lease, key = self._get_lease(), HOST_KEY.format(host)
        if lease is None:
            raise Unavailable("this server has no lease at present; try another server")

        def decide(transaction: Transaction) -> HostTaken | None:
            record: ManagedHost | None = transaction.get(key)
            known = unless_forgotten(record)
            old = known or first_record(host, request, transaction.now, record)
            asked_at, lost = self._find_contact(old)
            contact_at = transaction.now if request.is_leaving else asked_at
            new = bind(old, request, transaction.now)
            refusal = find_refusal(new, request.session)
            if refusal is not None and not new.rivals:
                put_if_changed(transaction, known, new)
                return refusal
            if new.rivals:
                new = note_unreported(old, new, lost)
            else:
                new = self._serve(known, old, new, request, lost, transaction)
                new = note_unreported(new, change(new, transaction), lost)
            new = self._contacts.note(known, new, request, contact_at, transaction.now)
            details = describe_change(old, new)
            if details:
                new = replace(new, since=transaction.now)
            for detail in [*details, *describe_guests(old, new)]:
                transaction.record(Change(ChangeKind.UPDATED, host=host, detail=detail))
            put_if_changed(transaction, known, new, request.number)
            return refusal

        try:
            refusal = await self._engine.update([key], decide, by=f"hostd {host}", lease=lease)
            if refusal is not None:
                raise refusal
        except HostTaken as error:
            self._engine.throttled_log.warn("daemon refused", host=host, problem=error.message)
            raise

    def _serve(
        self,
        known: ManagedHost | None,
        old: ManagedHost,
        new: ManagedHost,
        request: WorkRequest,
        lost: "Lost",
        transaction: Transaction,
    ) -> ManagedHost:
        """The record of a host that this server serves now. Refuses a request that came late."""
        server = self._server()
        is_elsewhere = old.server != server and is_served(old, transaction.get)
        refuse_late(old.host, request, known, is_elsewhere=is_elsewhere)
        unserved = tuple(request.unserved)
        new = replace(
            new,
            server=server,
            problem=request.problem,
            unserved=unserved,
            relays=request.relays,
        )
        new = note_unreported(old, new, lost)
        had_contact = is_elsewhere or old.server == server
        absent_since = None if had_contact else self._contacts.find_absence(old, request)
        if known is None or was_absent(absent_since, transaction.now):
            vms = {id: vm.after_absence(transaction.now) for id, vm in old.vms.items()}
            new = replace(new, vms=vms)
        was_left = known is None and bool(old.machine)
        return hold_reports(old, new, transaction.now, had_contact=had_contact, was_left=was_left)

    def _find_contact(self, record: ManagedHost) -> tuple[datetime | None, "Lost"]:
        """When the daemon of a host last asked this server, None if it asks another one; and what
        is known if it is lost.
        """
        session = self._sessions.get(record.host)
        if session is None or record.server != session.server:
            return None, Lost(record.since, record.since)
        asked_at = session.silent_at - SILENT
        return asked_at, Lost(asked_at, session.reported_at or record.since)

    async def end(
        self, host: str, request: WorkRequest, is_lost: Callable[[], bool] = lambda: True
    ) -> None:
        """The daemon stops, or is silent and stays silent since this request."""

        def remove_server(record: ManagedHost, _: Transaction) -> ManagedHost:
            return replace(record, server="") if is_lost() else record

        record = self._managed.find(host)
        if record is not None and record.session == request.session:
            await self.update(host, request, remove_server)

    async def run(self) -> None:
        """Notice silent daemons, until cancelled."""
        clock = self._engine.clock
        while True:  # ends when cancelled
            await self._connected.wait()
            await clock.sleep_until(clock.now() + TICK)
            for host, session in list(self._sessions.items()):
                with isolated(self._engine.throttled_log, "bug while looking at a host", host=host):
                    await self._end_if_silent(host, session)

    async def _end_if_silent(self, host: str, session: DaemonSession) -> None:
        if not self._is_silent(host, session):
            return
        is_silent = functools.partial(self._is_silent, host, session)
        try:
            await self.end(host, session.latest, is_silent)
        except Error as error:  # the other hosts come first
            problem = error.message
            self._engine.throttled_log.warn("host not updated", host=host, problem=problem)
            return
        if is_silent():  # else it has sent something meanwhile
            self._drop(host)

    def _is_silent(self, host: str, session: DaemonSession) -> bool:
        is_processed = (host, session.latest.session) in self._processing
        is_late = session.silent_at <= self._engine.clock.now()
        return self._sessions.get(host) is session and is_late and not is_processed

    def _server(self) -> str:
        lease = self._get_lease()
        return lease.name.partition("/")[2] if lease is not None else ""

    def _drop(self, host: str) -> None:
        """The daemon is lost, or served by another server: its impacts are released."""
        session = self._sessions.pop(host, None)
        self._on_end(host)
        if session:
            session.end(unreachable(host))
        if not self._sessions:
            self._connected.clear()

    def _on_record(self, before: ManagedHost | None, after: ManagedHost | None) -> None:
        record = after or before
        assert record is not None
        if after is not None and after.rivals and not (before and before.rivals):
            log.error("no daemon is served", host=after.host, problem=cloned(after).message)
        if record.host in self._sessions and not self.serves(record.host):
            self._drop(record.host)


def first_record(
    host: str, request: WorkRequest, now: datetime, forgotten: ManagedHost | None
) -> ManagedHost:
    """Of a host that is not managed yet. A list of VMs from just before this request counts.

    What is known of a host that was left running is true until it reports.
    """
    known = unless_fenced(forgotten) or ManagedHost(host, "", "", now)
    return replace(
        known,
        session=request.session,
        since=now,
        unreported_since=now - SILENT,
        reported_at=known.reported_at or now - SILENT,
    )


def put_if_changed(
    transaction: Transaction, known: ManagedHost | None, new: ManagedHost, number: int | None = None
) -> None:
    """Write the record of a host, with the number of the request that has changed it."""
    if new != known:
        number = new.number if number is None else number
        transaction.put(HOST_KEY.format(new.host), replace(new, number=number))


class Lost(NamedTuple):
    """When a daemon that may be lost was certainly in contact, and when its last report was taken.

    Both may have been later.
    """

    at: datetime
    reported_at: datetime


def note_unreported(old: ManagedHost, new: ManagedHost, lost: Lost) -> ManagedHost:
    """The new record; if its daemon does not act as before, a report is wanted from then on."""
    if new.unreported_since is None and describe_change(old, new):
        return replace(new, unreported_since=lost.at, reported_at=lost.reported_at)
    return new


def describe_change(old: ManagedHost, new: ManagedHost) -> list[str]:
    """What a change of the record means for operators; nothing if its daemon acts as before."""
    host = new.host
    if new.rivals:
        text = f"{len(new.rivals)} machines with the same id run the daemon of {host}"
        return [] if old.rivals else [text]
    if (old.server, old.session) != (new.server, new.session):
        if new.server:
            return [f"daemon of {host} connected"]
        text = f"daemon of {host} unreachable"
        return [f"{text}: no contact since {new.away_since:{TIME}}" if new.away_since else text]
    if bool(old.problem) != bool(new.problem):
        state = f"cannot act: {new.problem}" if new.problem else "can act again"
        return [f"daemon of {host} {state}"]
    return []


def describe_guests(old: ManagedHost, new: ManagedHost) -> Iterator[str]:
    """Which guests get no response any more, and which do again; all bridges as one text."""
    since = new.unconfirmed_since
    if since is not None and old.unconfirmed_since is None:
        text = f"guests of {new.host} have had no response from a metadata server"
        yield f"{text} since {since:{TIME}}"
    elif since is None and old.unconfirmed_since is not None:
        yield f"guests of {new.host} no longer wait for a response from a metadata server"
    before, after = ({each.bridge: each for each in record.unserved} for record in (old, new))
    changed, texts = sorted(before.keys() ^ after.keys()), list[str]()
    for bridge in changed[:BRIDGES_SHOWN_MAX]:
        is_lost = bridge in after
        state = f"is not served: {after[bridge].problem}" if is_lost else "is served again"
        texts.append(f"bridge {bridge} of {new.host} {state}")
    if len(changed) > BRIDGES_SHOWN_MAX:
        texts.append(f"and {len(changed) - BRIDGES_SHOWN_MAX} more bridges")
    if texts:
        yield "; ".join(texts)


def was_absent(since: datetime | None, now: datetime) -> bool:
    """Whether the daemon of a host was away for so long that operators could know it."""
    return since is not None and now - since >= SILENT


def hold_reports(
    old: ManagedHost, new: ManagedHost, now: datetime, *, had_contact: bool, was_left: bool
) -> ManagedHost:
    """The new record, which says from when on a list of VMs counts.

    A session that has replaced one in contact may be that of a clone; if the server of that one was
    lost, it looks for another. So may one of a host that was left running: both may have been
    refused before. A list from before its host was back may lack what was moved there since.
    """
    if was_left or (old.server and new.session != old.session):
        new = replace(new, merge_at=now + MERGE_AFTER)
    if not had_contact and new.unreported_since is not None:
        return replace(new, unreported_since=max(new.unreported_since, now - SILENT))
    return new
