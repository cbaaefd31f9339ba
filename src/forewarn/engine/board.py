"""What polls read: every scope as last committed, who is in it, and the pages made of it. In memory: no lock, no store.

`publish` is the only way in. A page is made once per change and api-version, by whoever first asks for it (`web/poll.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from forewarn.core.fleet import Scope, Vm
from forewarn.errors import UnknownHost, UnknownScope, UnknownVm


class Place:
    """One scope on the board. `pages` holds ready bytes and starts empty at every visible change.

    `fresh_until` is the moment (seconds since the epoch) up to which a poll need not be recorded; 0: record the next one.
    `waiters` wait for the next change of the document, or of who is in the scope.
    """

    __slots__ = ("fresh_until", "pages", "revision", "scope", "waiters")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.revision = 0
        self.pages: dict[str, bytes] = {}
        self.waiters: set[asyncio.Timeout] | None = None
        self.fresh_until = 0.0


class Board:
    """All scopes and the ways to find them: by name, VM, address, host and event."""

    def __init__(self, seen_interval_seconds: float) -> None:
        self.seen_interval_seconds = seen_interval_seconds
        self.revision = 0
        self.scopes: dict[str, Place] = {}
        self.vms: dict[str, Place] = {}
        self.addresses: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self.shared_ids: dict[str, set[str]] = {}
        """The VMs of ids that several VMs have: a fleet file with such ids is refused, but a store may hold an older fleet."""
        self.hosts: dict[str, set[str]] = {}
        self.declared_hosts: tuple[str, ...] = ()
        self.events: dict[str, Place] = {}
        self.ended: dict[str, Place] = {}
        self.followers: list[Callable[[Place], None]] = []
        self._gone: dict[str, int] = {}

    def publish(self, scope: Scope, revision: int) -> bool:
        """Show a scope as committed at a revision. News that is older than what is shown changes nothing."""
        if not self.is_news(scope.name, revision):
            return False
        place = self.scopes.get(scope.name)
        if place is None:
            place = self.scopes[scope.name] = Place(Scope(name=scope.name))
        old, place.scope, place.revision = place.scope, scope, revision
        self._index(place, old, scope)
        if scope.seen_at is not None:
            place.fresh_until = scope.seen_at.timestamp() + self.seen_interval_seconds
        if scope.incarnation != old.incarnation:
            place.pages = {}
            wake(place)
        for follower in self.followers:
            follower(place)
        return True

    def withdraw(self, name: str, revision: int) -> bool:
        """Take a scope away that was deleted at a revision."""
        place = self.scopes.get(name)
        if not self.is_news(name, revision):
            return False
        self._gone[name] = revision  # also where nothing is shown: what is older may still be on its way
        if place is None:
            return False
        old, place.scope, place.revision = place.scope, Scope(name=name), revision
        del self.scopes[name]
        self._index(place, old, place.scope)
        wake(place)
        for follower in self.followers:
            follower(place)
        return True

    def is_news(self, name: str, revision: int) -> bool:
        """Whether a revision of a scope is newer than what is shown, or than the scope's end."""
        place = self.scopes.get(name)
        return revision > (self._gone.get(name, 0) if place is None else place.revision)

    def caught_up(self, revision: int) -> None:
        """All up to this revision has been told: nothing older can arrive any more."""
        self.revision = max(self.revision, revision)
        if self._gone:
            self._gone = {name: gone for name, gone in self._gone.items() if gone > self.revision}

    def place(self, scope: str) -> Place:
        """The scope by its name; UnknownScope if there is none."""
        found = self.scopes.get(scope)
        if found is None:
            raise UnknownScope(f"there is no scope {scope!r}", scope=scope)
        return found

    def find_vm(self, name: str) -> tuple[Place, Vm]:
        """The VM by its name, and where it is; UnknownVm if there is none."""
        place = self.vms.get(name)
        vm = place.scope.vm(name) if place else None
        if place is None or vm is None:
            raise UnknownVm(f"there is no VM {name!r}", vm=name)
        return place, vm

    def places_on(self, host: str) -> list[Place]:
        """The scopes that have VMs on a host, in the order of their names; UnknownHost if nobody ever heard of it."""
        if host not in self.hosts and host not in self.declared_hosts:
            raise UnknownHost(f"there is no host {host!r}", host=host)
        return sorted({self.vms[name] for name in self.hosts.get(host, ())}, key=lambda place: place.scope.name)

    def host_names(self) -> list[str]:
        return sorted({*self.hosts, *self.declared_hosts})

    def _index(self, place: Place, old: Scope, new: Scope) -> None:
        if old.vms != new.vms:
            before, after = set(old.vms), set(new.vms)
            for vm in before - after:
                self._forget(place, vm)
            for vm in after - before:
                self._learn(place, vm)
            wake(place)  # who waits here may belong elsewhere now
        if old.events != new.events:
            _replace(self.events, place, (event.id for event in old.events), (event.id for event in new.events))
        if old.ended != new.ended:
            _replace(self.ended, place, (ended.id for ended in old.ended), (ended.id for ended in new.ended))

    def _forget(self, place: Place, vm: Vm) -> None:
        if self.vms.get(vm.name) is not place:  # it has already been seen in another scope
            return
        del self.vms[vm.name]
        if self.addresses.get(vm.address) == vm.name:
            del self.addresses[vm.address]
        self._forget_id(vm)
        residents = self.hosts.get(vm.host)
        if residents is not None:
            residents.discard(vm.name)
            if not residents:
                del self.hosts[vm.host]

    def _learn(self, place: Place, vm: Vm) -> None:
        moved_from = self.vms.get(vm.name)
        if moved_from is not None and moved_from is not place:  # its old scope has not told us yet that it left
            known = moved_from.scope.vm(vm.name)
            if known is not None:
                self._forget(moved_from, known)
        self.vms[vm.name] = place
        if vm.address:
            self.addresses[vm.address] = vm.name
        if vm.id and (first := self.ids.setdefault(vm.id, vm.name)) != vm.name:
            self.shared_ids.setdefault(vm.id, {first}).add(vm.name)
        if vm.host:
            self.hosts.setdefault(vm.host, set()).add(vm.name)

    def _forget_id(self, vm: Vm) -> None:
        sharing = self.shared_ids.get(vm.id, set()) - {vm.name}
        if len(sharing) > 1:
            self.shared_ids[vm.id] = sharing
        elif sharing:
            self.ids[vm.id] = sharing.pop()
            del self.shared_ids[vm.id]
        elif self.ids.get(vm.id) == vm.name:
            del self.ids[vm.id]


async def wait_for_change(
    place: Place, incarnation: int, seconds: float, leaving: Callable[[], Awaitable[object]] | None = None
) -> bool:
    """True when the place may show another incarnation, or the time is up; False when the one who waits has left before.

    Awaiting `leaving()` ends when it leaves. It is awaited right here, so that a waiting client costs one task and one timer.
    """
    if place.scope.incarnation != incarnation or seconds <= 0:
        return True
    try:
        async with asyncio.timeout(seconds) as limit:
            with _waiting(place, limit):
                await (leaving or asyncio.Event().wait)()
    except TimeoutError:
        return True
    return False


@contextmanager
def _waiting(place: Place, limit: asyncio.Timeout) -> Iterator[None]:
    """Within this, a change at the place ends the wait. Leaving it leaves nothing behind."""
    if place.waiters is None:
        place.waiters = set()
    place.waiters.add(limit)
    try:
        yield
    finally:
        if place.waiters is not None:
            place.waiters.discard(limit)
            if not place.waiters:
                place.waiters = None


def wake(place: Place) -> None:
    """Tell all who wait here that there is something new: their time is up now."""
    waiters, place.waiters = place.waiters, None
    for limit in waiters or ():
        if not limit.expired():
            limit.reschedule(0)


def _replace(index: dict[str, Place], place: Place, before: Iterator[str], after: Iterator[str]) -> None:
    gone, come = set(before), set(after)
    for key in gone - come:
        index.pop(key, None)
    for key in come - gone:
        index[key] = place
