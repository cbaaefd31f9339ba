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
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.host_session import DaemonSession, refuse_late, unreachable
from forewarn.engine.machine_binding import SILENT, bind, cloned
from forewarn.engine.managed_hosts import (
    HOST_KEY,
    ManagedHost,
    ManagedHosts,
    is_served,
    unless_forgotten,
)
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error, HostTaken, Unavailable
from forewarn.log import log
from forewarn.platform.remote import WorkRequest
from forewarn.store.base import Lease

TICK = timedelta(seconds=1)
MERGE_AFTER = timedelta(seconds=5)
"""A daemon that replaces one in contact may be the clone of its machine, with other VMs. The other
one sends a request in this time, and then none is served.
"""


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
    ) -> None:
        self._engine = engine
        self._managed = managed
        self._contacts = contacts
        self._get_lease = get_lease
        self._on_connect = on_connect
        self._on_end = on_end
        self._sessions: dict[str, DaemonSession] = {}
        self._processing = Counter[tuple[str, str]]()  # requests by host and session
        self._refused: dict[str, dict[str, int]] = {}  # replaced sessions, by host
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
        session, now = self._sessions.get(host), self._engine.clock.now
        record = self._managed.find(host)
        is_known = session is not None and session.latest.session == request.session
        if session and is_known and self.serves(host) and self._is_noted(record, request):
            return session
        is_replaced = record is not None and record.session != request.session
        was_connected = is_replaced and self._managed.has_contact(host)
        await self.update(host, request)
        await self._engine.require_caught_up()  # another server may have handed out impacts
        session = self._sessions.get(host)
        if session is None or session.latest.session != request.session:
            self._drop(host)
            merge_at = now() + MERGE_AFTER if was_connected else now()
            session = self._sessions[host] = DaemonSession(request, now() + SILENT, merge_at)
            self._connected.set()
        self._on_connect(self._managed.vms_of(self._managed.find(host)))
        return session

    def _is_noted(self, record: ManagedHost | None, request: WorkRequest) -> bool:
        """Whether the record says what this request says about its daemon."""
        is_same = record is not None and record.problem == request.problem
        return record is not None and is_same and self._contacts.is_noted(record, request)

    async def update(
        self,
        host: str,
        request: WorkRequest,
        change: Callable[[ManagedHost, Transaction], ManagedHost] = lambda record, _: record,
    ) -> None:
        """Change the record of a host whose daemon this request connects to this server."""
        lease, key, server = self._get_lease(), HOST_KEY.format(host), self._server()
        if lease is None:
            raise Unavailable("this server has no lease at present; try another server")
        is_repeated = self._is_repeated(host, request)

        def decide(transaction: Transaction) -> HostTaken | None:
            known = unless_forgotten(transaction.get(key))
            old = known or first_record(host, request, transaction.now)
            session = self._sessions.get(host)
            contact_at = session.silent_at - SILENT if session else transaction.now
            lost_at = contact_at if session and old.server == server else old.since
            new = bind(old, request, transaction.now, is_repeated=is_repeated)
            if new.rivals:
                new = note_unreported(old, new, lost_at)
            else:
                is_elsewhere = old.server != server and is_served(old, transaction.get)
                refuse_late(host, request, known, is_elsewhere=is_elsewhere)
                new = replace(new, server=server, problem=request.problem)
                new = note_unreported(old, new, lost_at)
                new = note_unreported(new, change(new, transaction), lost_at)
            new = self._contacts.note(known, new, request, contact_at, transaction.now)
            details = describe_change(old, new)
            if details:
                new = replace(new, since=transaction.now)
            for detail in details:
                transaction.record(Change(ChangeKind.UPDATED, host=host, detail=detail))
            if new != known:
                transaction.put(key, replace(new, number=request.number))
            return cloned(new) if new.rivals else None

        try:
            refusal = await self._engine.update([key], decide, by=f"hostd {host}", lease=lease)
            if refusal is not None:
                raise refusal
        except HostTaken as error:
            self._on_refusal(host, request, error)
            raise

    def _is_repeated(self, host: str, request: WorkRequest) -> bool:
        """Whether this session was refused before, and has sent another request since.

        A request of a daemon that has ended may arrive late, and says nothing.
        """
        number = self._refused.get(host, {}).get(request.session)
        return number is not None and not 0 < request.number <= number

    def _on_refusal(self, host: str, request: WorkRequest, error: HostTaken) -> None:
        record = self._managed.find(host)
        if record is not None and request.session in record.replaced:
            known = self._refused.get(host, {}) | {request.session: request.number}
            self._refused[host] = {each: known[each] for each in record.replaced if each in known}
        self._engine.throttled_log.warn("daemon refused", host=host, problem=error.message)

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
                try:
                    if self._is_silent(host, session):
                        is_silent = functools.partial(self._is_silent, host, session)
                        await self.end(host, session.latest, is_silent)
                        if is_silent():  # else it has sent something meanwhile
                            self._drop(host)
                except Error as error:  # the other hosts come first
                    problem = error.message
                    self._engine.throttled_log.warn("host not updated", host=host, problem=problem)
                except Exception:  # a bug with this one host must not stop the others
                    log.exception("bug while looking at a host", host=host)

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


def first_record(host: str, request: WorkRequest, now: datetime) -> ManagedHost:
    """Of a host that is not managed yet. A list of VMs from just before this request counts."""
    return ManagedHost(
        host, request.session, "", now, machine=request.machine, unreported_since=now - SILENT
    )


def note_unreported(old: ManagedHost, new: ManagedHost, lost_at: datetime) -> ManagedHost:
    """The new record; if its daemon does not act as before, a report is wanted since `lost_at`."""
    if new.unreported_since is None and describe_change(old, new):
        return replace(new, unreported_since=lost_at)
    return new


def describe_change(old: ManagedHost, new: ManagedHost) -> list[str]:
    """What a change of the record means for operators; nothing if its daemon acts as before."""
    host = new.host
    if new.rivals:
        text = f"{len(new.rivals)} machines with the same id run the daemon of {host}"
        return [] if old.rivals else [text]
    if (old.server, old.session) != (new.server, new.session):
        return [f"daemon of {host} {'connected' if new.server else 'unreachable'}"]
    if bool(old.problem) != bool(new.problem):
        state = f"cannot act: {new.problem}" if new.problem else "can act again"
        return [f"daemon of {host} {state}"]
    return []
