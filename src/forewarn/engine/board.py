"""What polls read: every scope as last committed, who is in it, and the pages made of it. In
memory: no lock, no store.

`publish` is the only way in. A page is made once per change and api-version, by whoever first asks
for it (`web/metadata/fast_path.py`).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from forewarn.core.event import Event, EventType, Status
from forewarn.core.fleet import Scope, Vm
from forewarn.engine.sorted_keys import SortedKeys
from forewarn.errors import UnknownHost, UnknownScope, UnknownVm


class PublishedScope:
    """One scope on the board. `pages` holds ready bytes and starts empty at every visible change.

    `fresh_until` is the moment (seconds since the epoch) up to which a poll need not be recorded;
    0: record the next one. `waiters` wait for the next change of the document, or of who is in the
    scope.
    """

    __slots__ = ("fresh_until", "pages", "revision", "scope", "waiters")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.revision = 0
        self.pages: dict[str, bytes] = {}
        self.waiters: set[asyncio.Timeout] | None = None
        self.fresh_until = 0.0


class Board:
    """All scopes and the ways to find them: by name, VM, address, host and event.

    `scope_names`, `vm_names`, `known_hosts` and `event_keys` hold the same in order, for lists in
    pages; `event_counts` has the number of live events of each type and status. All of it is kept
    up to date with each change, so that no reader goes through the fleet.
    """

    def __init__(self, seen_interval_seconds: float) -> None:
        self.seen_interval_seconds = seen_interval_seconds
        self.revision = 0
        self.scopes: dict[str, PublishedScope] = {}
        self.vms: dict[str, PublishedScope] = {}
        self.addresses: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self.shared_ids: dict[str, set[str]] = {}
        """The VMs of ids that several VMs have: a fleet file with such ids is refused, but a store
        may hold an older fleet.
        """
        self.hosts: dict[str, set[str]] = {}
        self.events: dict[str, PublishedScope] = {}
        self.ended: dict[str, PublishedScope] = {}
        self.event_counts: Counter[tuple[EventType, Status]] = Counter()
        self.scope_names: SortedKeys[str] = SortedKeys(self.scopes.keys)
        self.vm_names: SortedKeys[str] = SortedKeys(self.vms.keys)
        self.known_hosts: SortedKeys[str] = SortedKeys(lambda: {*self.hosts, *self._declared})
        self.event_keys: SortedKeys[tuple[str, str]] = SortedKeys(self._event_keys)
        self.followers: list[Callable[[PublishedScope], None]] = []
        self._declared: dict[str, None] = {}
        self._gone: dict[str, int] = {}

    @property
    def declared_hosts(self) -> tuple[str, ...]:
        """The hosts that the fleet names, whether or not they have VMs."""
        return tuple(self._declared)

    @declared_hosts.setter
    def declared_hosts(self, names: tuple[str, ...]) -> None:
        before, self._declared = self._declared, dict.fromkeys(names)
        for name in self._declared.keys() ^ before.keys():
            if name not in self.hosts:
                change = self.known_hosts.add if name in self._declared else self.known_hosts.remove
                change(name)

    def publish(self, scope: Scope, revision: int) -> bool:
        """Show a scope as committed at a revision.

        News that is older than what is shown changes nothing.
        """
        if not self.is_news(scope.name, revision):
            return False
        place = self.scopes.get(scope.name)
        if place is None:
            place = self._add(scope)
        else:
            old, place.scope = place.scope, scope
            self._index(place, old, scope)
            if scope.incarnation != old.incarnation:
                place.pages = {}
                wake(place)
        place.revision = revision
        if scope.seen_at is not None:
            place.fresh_until = scope.seen_at.timestamp() + self.seen_interval_seconds
        for follower in self.followers:
            follower(place)
        return True

    def _add(self, scope: Scope) -> PublishedScope:
        """A scope that is new, with nothing to compare it with and nobody waiting.

        A start may do this a million times.
        """
        place = self.scopes[scope.name] = PublishedScope(scope)
        self.scope_names.add(scope.name)
        for vm in scope.vms:
            self._learn(place, vm)
        if scope.events:
            self._index_events(place, (), scope.events)
        if scope.ended:
            self.ended.update((ended.id, place) for ended in scope.ended)
        return place

    def withdraw(self, name: str, revision: int) -> bool:
        """Take a scope away that was deleted at a revision."""
        place = self.scopes.get(name)
        if not self.is_news(name, revision):
            return False
        self._gone[name] = (
            revision  # also where nothing is shown: what is older may still be on its way
        )
        if place is None:
            return False
        old, place.scope, place.revision = place.scope, Scope(name=name), revision
        del self.scopes[name]
        self.scope_names.remove(name)
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

    def sort(self) -> None:
        """Put all keys in order now, so that no reader has to wait for it.

        Later changes keep them so.
        """
        for keys in (self.scope_names, self.vm_names, self.known_hosts, self.event_keys):
            keys.sort()

    def place(self, scope: str) -> PublishedScope:
        """The scope by its name; UnknownScope if there is none."""
        found = self.scopes.get(scope)
        if found is None:
            raise UnknownScope(f"there is no scope {scope!r}", scope=scope)
        return found

    def find_vm(self, name: str) -> tuple[PublishedScope, Vm]:
        """The VM by its name, and where it is; UnknownVm if there is none."""
        place = self.vms.get(name)
        vm = place.scope.vm(name) if place else None
        if place is None or vm is None:
            raise UnknownVm(f"there is no VM {name!r}", vm=name)
        return place, vm

    def places_on(self, host: str) -> list[PublishedScope]:
        """The scopes that have VMs on a host, in the order of their names;

        UnknownHost if nobody ever heard of it.
        """
        if not self.is_host(host):
            raise UnknownHost(f"there is no host {host!r}", host=host)
        return sorted(
            {self.vms[name] for name in self.hosts.get(host, ())},
            key=lambda place: place.scope.name,
        )

    def is_host(self, name: str) -> bool:
        """Whether a VM is on it, or the fleet declares it."""
        return name in self.hosts or name in self._declared

    def host_names(self) -> list[str]:
        return self.known_hosts[:]

    def find_event(self, event_id: str) -> tuple[PublishedScope, Event] | None:
        """The live event by its id, and where it is."""
        place = self.events.get(event_id)
        event = place.scope.event(event_id) if place else None
        return None if place is None or event is None else (place, event)

    def _index(self, place: PublishedScope, old: Scope, new: Scope) -> None:
        if old.vms != new.vms:
            self._index_vms(place, old.vms, new.vms)
            wake(place)  # who waits here may belong elsewhere now
        if old.events != new.events:
            self._index_events(place, old.events, new.events)
        if old.ended != new.ended:
            gone, come = {ended.id for ended in old.ended}, {ended.id for ended in new.ended}
            for key in gone - come:
                self.ended.pop(key, None)
            self.ended.update(dict.fromkeys(come - gone, place))

    def _index_vms(self, place: PublishedScope, old: Sequence[Vm], new: Sequence[Vm]) -> None:
        """What is old is dropped before anything new is taken in: two VMs may have exchanged their
        addresses.
        """
        before, after = {vm.name: vm for vm in old}, {vm.name: vm for vm in new}
        for vm in old:
            if after.get(vm.name) != vm:
                self._forget(place, vm)
        for vm in new:
            if before.get(vm.name) != vm:
                self._learn(place, vm)

    def _index_events(
        self, place: PublishedScope, old: Sequence[Event], new: Sequence[Event]
    ) -> None:
        before, after = {event.id for event in old}, {event.id for event in new}
        self.event_counts.subtract((event.type, event.status) for event in old)
        self.event_counts.update((event.type, event.status) for event in new)
        for event in old:
            if event.id not in after:
                self.events.pop(event.id, None)
                self.event_keys.remove(_event_key(event))
        for event in new:
            if event.id not in before:
                self.events[event.id] = place
                self.event_keys.add(_event_key(event))

    def _event_keys(self) -> Iterator[tuple[str, str]]:
        return (_event_key(event) for place in self.scopes.values() for event in place.scope.events)

    def _forget(self, place: PublishedScope, vm: Vm) -> None:
        if self.vms.get(vm.name) is not place:  # it has already been seen in another scope
            return
        del self.vms[vm.name]
        self.vm_names.remove(vm.name)
        if self.addresses.get(vm.address) == vm.name:
            del self.addresses[vm.address]
        self._forget_id(vm)
        residents = self.hosts.get(vm.host)
        if residents is not None:
            residents.discard(vm.name)
            if not residents:
                del self.hosts[vm.host]
                if vm.host not in self._declared:
                    self.known_hosts.remove(vm.host)

    def _learn(self, place: PublishedScope, vm: Vm) -> None:
        name, host = vm.name, vm.host
        moved_from = self.vms.get(name)
        if (
            moved_from is not None and moved_from is not place
        ):  # its old scope has not told us yet that it left
            known = moved_from.scope.vm(name)
            if known is not None:
                self._forget(moved_from, known)
        if name not in self.vms:
            self.vm_names.add(name)
        self.vms[name] = place
        if vm.address:
            self.addresses[vm.address] = name
        if vm.id and (first := self.ids.setdefault(vm.id, name)) != name:
            self.shared_ids.setdefault(vm.id, {first}).add(name)
        if host:
            residents = self.hosts.get(host)
            if residents is None:
                residents = self.hosts[host] = set()
                if host not in self._declared:
                    self.known_hosts.add(host)
            residents.add(name)

    def _forget_id(self, vm: Vm) -> None:
        sharing = self.shared_ids.get(vm.id, set()) - {vm.name}
        if sharing:
            self.ids[vm.id] = min(sharing)
            if len(sharing) > 1:
                self.shared_ids[vm.id] = sharing
            else:
                del self.shared_ids[vm.id]
        elif self.ids.get(vm.id) == vm.name:
            del self.ids[vm.id]


def _event_key(event: Event) -> tuple[str, str]:
    """Sorts events by age. Microseconds of the same width, so that text is in the order of time."""
    return f"{event.created_at:%Y-%m-%dT%H:%M:%S.%f}", event.id


async def wait_for_change(
    place: PublishedScope,
    incarnation: int,
    seconds: float,
    leaving: Callable[[], Awaitable[object]] | None = None,
) -> bool:
    """True when the place may show another incarnation, or the time is up; False when the one who
    waits has left before.

    Awaiting `leaving()` ends when it leaves. It is awaited right here, so that a waiting client
    costs one task and one timer.
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
def _waiting(place: PublishedScope, limit: asyncio.Timeout) -> Iterator[None]:
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


def wake(place: PublishedScope) -> None:
    """Tell all who wait here that there is something new: their time is up now."""
    waiters, place.waiters = place.waiters, None
    for limit in waiters or ():
        if not limit.expired():
            limit.reschedule(0)
