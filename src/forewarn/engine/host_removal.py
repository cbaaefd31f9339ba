"""Forgets a host whose daemon does not come back. An operator says what is known of its VMs.

    MANAGED -> FENCED           they are off and stay off: nothing may run there any more
    MANAGED -> LEFT RUNNING     only the daemon goes: what may run there is not started elsewhere
    LEFT RUNNING -> FENCED      the operator says so later
    FENCED -> LEFT RUNNING      that was a mistake
    FENCED -> MANAGED           a daemon with the name of the host connects, of any machine
    LEFT RUNNING -> MANAGED     the daemon of its machine connects

The record keeps the machine and the last report. They count if the host was left running. It also
keeps when the daemon was away: that was no notice.
"""

from datetime import datetime

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Abandon, SetPower
from forewarn.core.fleet import Power
from forewarn.engine.duplicates import HOSTS_COMPARED_MAX, DuplicateVms
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.managed_hosts import (
    HOST_KEY,
    ManagedHost,
    ManagedHosts,
    is_served,
    unless_fenced,
)
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.transaction import Transaction
from forewarn.errors import Refused, Unavailable, UnknownHost
from forewarn.store.base import WRITES_MAX

SCOPES_COMPARED_MAX = WRITES_MAX - HOSTS_COMPARED_MAX - 2
"""How many scopes of a host the commit compares that forgets it. It also compares the hosts that
run duplicates of its VMs, its own record, and the lease of its server.
"""
IMPACTS_NAMED_MAX = 5
WAS_FORGOTTEN = "was forgotten: nothing can tell whether this was carried out"


class HostRemoval:
    def __init__(
        self,
        engine: Engine,
        managed: ManagedHosts,
        contacts: HostContacts,
        duplicates: DuplicateVms,
    ) -> None:
        self._engine = engine
        self._managed = managed
        self._contacts = contacts
        self._duplicates = duplicates

    async def forget(
        self, host: str, *, by: str, fail_impacts: bool = False, power: Power | None = None
    ) -> None:
        """Manage a host no longer, because its daemon does not come back.

        The operator says which `power` its VMs have: they are stopped, because the host is fenced,
        or unknown, because they go on running there. That is needed also if none is known: one may
        have been moved there since the last report. Refused while its VMs have impacts, unless
        these are to fail: nothing can tell whether they were carried out.
        """
        await self._engine.require_caught_up()
        if self._managed.find_record(host) is not None and not self._managed.has_contact(host):
            stated = self._require_power(host, power)
            await self._abandon(host, by, is_accepted=fail_impacts)
            await self._submit_to_all(host, SetPower(host=host, power=stated), by)

        def decide(transaction: Transaction) -> None:
            known = require_away(host, transaction)
            self._compare(host, transaction)
            stated = self._require_power(host, power)
            self._require_no_impacts(host)
            self._require_stated(host, stated)
            was_left = not known.session and unless_fenced(known) is not None
            is_left = stated is Power.UNKNOWN
            if not known.session and was_left == is_left:
                return
            if not is_left:
                self._duplicates.compare(known, {}, transaction.now, transaction)
            forgotten = forget_daemon(known, transaction.now, is_left=is_left)
            gaps = self._contacts.gaps_until(known, transaction.now)
            transaction.put(HOST_KEY.format(host), replace(forgotten, gaps=gaps))
            detail = f"host {host} is no longer managed by a daemon"
            if not known.session:
                detail = f"host {host} is {'left running' if is_left else 'fenced'}"
            transaction.record(Change(ChangeKind.UPDATED, host=host, detail=detail))

        await self._engine.update([HOST_KEY.format(host)], decide, by=by)

    def _require_power(self, host: str, power: Power | None) -> Power:
        if power is not None:
            return power
        names = self._vms_on(host)
        such = f", such as {names[0]}" if names else ""
        raise Refused(
            f"VMs may run on {host}{such}, and nothing else may start them meanwhile; expected"
            " `fenced`, if they are off and stay off, or `still_running`, if only the daemon goes",
            host=host,
            vms=len(names),
        )

    def _require_stated(self, host: str, power: Power) -> None:
        """The daemon may have gone, or VMs may have come, after that was to be written."""
        board = self._engine.board
        for name in self._vms_on(host):
            vm = board.vms[name].scope.vm(name)
            if vm is not None and vm.power not in (power, Power.DEALLOCATED):
                raise Unavailable(f"{host} or its VM {name} has just changed; try again")

    def _compare(self, host: str, transaction: Transaction) -> None:
        """Let the commit compare the scopes of the host, as far as a commit can."""
        for name in self._scopes_of(host)[:SCOPES_COMPARED_MAX]:
            transaction.get(SCOPE_KEY.format(name))

    def _scopes_of(self, host: str) -> list[str]:
        return sorted({self._engine.board.vms[vm].scope.name for vm in self._vms_on(host)})

    def _vms_on(self, host: str) -> list[str]:
        return sorted(self._engine.board.hosts.get(host, ()))

    def _list_impacts(self, host: str) -> list[str]:
        """The impacts on its VMs that are not over, in words."""
        scopes = {name: self._engine.board.vms[name].scope for name in self._vms_on(host)}
        return [
            f"the {impact.type} of {impact.vm}"
            for name, scope in scopes.items()
            for impact in scope.impacts
            if impact.vm == name and not impact.is_over
        ]

    def _require_no_impacts(self, host: str) -> None:
        impacts = self._list_impacts(host)
        if impacts:
            raise Refused(
                f"impacts on VMs of {host} are not over: {', '.join(impacts[:IMPACTS_NAMED_MAX])};"
                " complete or cancel their events, or forget it with `fail_impacts`",
                host=host,
                impacts=len(impacts),
            )

    async def _abandon(self, host: str, by: str, *, is_accepted: bool) -> None:
        if not is_accepted:
            self._require_no_impacts(host)
        if not self._list_impacts(host):
            return
        problem = f"{host} {WAS_FORGOTTEN}"
        await self._submit_to_all(host, Abandon(host=host, problem=problem), by)

    async def _submit_to_all(self, host: str, command: Abandon | SetPower, by: str) -> None:
        """Change the scopes of a host, each only while its daemon is away: it may just return."""

        def check(transaction: Transaction) -> None:
            require_away(host, transaction)

        for scope in self._scopes_of(host):
            await self._engine.submit(scope, command, by=by, check=check)


def require_away(host: str, transaction: Transaction) -> ManagedHost:
    """The record of a host; refuse to go on unless its daemon is away. The commit compares that."""
    known: ManagedHost | None = transaction.get(HOST_KEY.format(host))
    if known is None:
        raise UnknownHost(f"there is no host {host!r} with a daemon", host=host)
    if is_served(known, transaction.get):
        raise Refused(f"the daemon of {host} is connected; stop it first", host=host)
    return known


def forget_daemon(known: ManagedHost, now: datetime, *, is_left: bool) -> ManagedHost:
    """The record without a daemon. A host that is not fenced has `unreported_since`."""
    reported_at = known.reported_at or known.unreported_since or known.since
    return ManagedHost(
        known.host,
        session="",
        server="",
        since=now,
        vms=known.vms,
        refused=known.refused,
        machine=known.machine,
        reported_at=reported_at,
        unreported_since=known.unreported_since or reported_at if is_left else None,
    )
