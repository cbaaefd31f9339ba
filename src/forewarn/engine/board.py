"""What polls read: every scope as last committed, its VMs, and its rendered documents.

In memory: no lock, no store. Only `publish`, `see` and `withdraw` modify it. A document is rendered
once per change and api-version, by the first poll that needs it (`web/metadata/fast_path.py`).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from msgspec.structs import replace

from forewarn.core.event import Event, EventType, Status
from forewarn.core.fleet import Scope, Vm
from forewarn.core.machine import booting_impacts
from forewarn.engine.callbacks import Callbacks
from forewarn.engine.clock import RealClock
from forewarn.engine.index import SortedKeys, VmKeys
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import UnknownHost, UnknownScope, UnknownVm

TURN_CALLBACKS = 256
"""Waiters that are called in one iteration of the event loop: thousands may wait for one change."""


@dataclass(eq=False, slots=True)
class PublishedScope:
    """One scope on the board. `pages` holds rendered documents; a visible change empties it.

    `seen_revision` is that of the record of its polls; 0 if there is none. Until `fresh_until`
    (seconds since the epoch) polls need not be recorded; 0: record the next. The first poll of a VM
    is recorded from `first_polls_at` on: the store has refused one just before. `stored_polls` are
    the recorded times by VM, once they were looked up.
    `waiters` are the callbacks of long polls, in the order in which they came: each is called once,
    after the next change of the document or of the scope's VMs. `booting` are the VMs whose next
    poll ends an impact; None if there are none.
    """

    scope: Scope
    revision: int = 0
    seen_revision: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)
    waiters: dict[Callable[[], None], None] | None = None
    fresh_until: float = 0.0
    first_polls_at: float = 0.0
    stored_polls: Mapping[str, int] | None = None
    booting: Set[str] | None = None

    def add_waiter(self, callback: Callable[[], None]) -> None:
        self.waiters = self.waiters or {}
        self.waiters[callback] = None

    def remove_waiter(self, callback: Callable[[], None]) -> None:
        if self.waiters is not None:
            self.waiters.pop(callback, None)
            self.waiters = self.waiters or None


class Board:
    """All scopes, indexed by name, VM, address, host and event.

    `scope_names`, `vm_names`, `known_hosts` and `event_keys` are sorted, for paginated lists;
    `event_counts` counts live events by type and status. Each change updates them, so that no
    reader iterates over the fleet. Everything committed up to `revision` is shown.
    """

    def __init__(
        self, seen_interval_seconds: float, throttled_log: ThrottledLog | None = None
    ) -> None:
        self.throttled_log = throttled_log or ThrottledLog(RealClock())
        self.seen_interval_seconds = seen_interval_seconds
        self.revision = 0
        self.scopes: dict[str, PublishedScope] = {}
        self.vms: dict[str, PublishedScope] = {}
        self.addresses = VmKeys()
        self.shared_addresses = self.addresses.shared
        """VMs on different hosts may have the same address."""
        self.ids = VmKeys()
        self.shared_ids = self.ids.shared
        """A fleet file with duplicate ids is refused, but a store may hold an older fleet."""
        self._mixed_vms, self._mixed_scopes = VmKeys(), VmKeys()
        """Names that are not in lower case, by their name in lower case."""
        self.polled: dict[str, float] = {}
        """When a VM last polled at this server, in seconds since the epoch: see `last_polls.py`."""
        self.hosts: dict[str, set[str]] = {}
        """The VMs of every host that has any or that the fleet declares."""
        self.events: dict[str, PublishedScope] = {}
        self.ended: dict[str, PublishedScope] = {}
        self.event_counts: Counter[tuple[EventType, Status]] = Counter()
        self.scope_names: SortedKeys[str] = SortedKeys(self.scopes.keys)
        self.vm_names: SortedKeys[str] = SortedKeys(self.vms.keys)
        self.known_hosts: SortedKeys[str] = SortedKeys(self.hosts.keys)
        self.event_keys: SortedKeys[tuple[str, str]] = SortedKeys(
            lambda: (event_key(event) for one in self.scopes.values() for event in one.scope.events)
        )
        self._subscribers = Callbacks[[PublishedScope]](self.throttled_log)
        self.declared_hosts: Counter[str] = Counter()
        """The hosts that the fleet declares, whether or not they have VMs."""
        self._woken: deque[Callable[[], None]] = deque()

    def subscribe(self, callback: Callable[[PublishedScope], None]) -> None:
        """Call this with every scope that is published or withdrawn."""
        self._subscribers.add(callback)

    def declare_hosts(self, before: Sequence[str] | None, after: Sequence[str] | None) -> None:
        """A record that declared some hosts declares others now. Records may overlap."""
        self.declared_hosts.update(after or ())
        self.declared_hosts.subtract(before or ())
        for name in {*(before or ()), *(after or ())}:
            if self.declared_hosts[name]:
                self._add_host(name)
            else:
                del self.declared_hosts[name]
                self._remove_host(name)

    def publish(self, scope: Scope, revision: int) -> None:
        """Show a scope as committed at a revision."""
        published = self.scopes.get(scope.name)
        if published is None:
            published = self._add(scope)
        else:
            old = published.scope
            published.scope = replace(scope, seen_at=_later(old.seen_at, scope.seen_at))
            self._index(published, old, scope)
            if scope.incarnation != old.incarnation:
                published.pages = {}
                self.wake(published)
        published.revision = revision
        published.booting = {impact.vm for impact in booting_impacts(scope)} or None
        self._subscribers.call(f"scope {published.scope.name}", published)

    def see(self, name: str, seen_at: datetime | None, revision: int) -> None:
        """Show when a scope was last polled, as recorded at a revision; None: not recorded.

        That is not a change of the scope: it costs the same for any number of VMs.
        """
        published = self.scopes[name]
        latest = seen_at and _later(seen_at, published.scope.seen_at)
        published.scope = replace(published.scope, seen_at=latest)
        published.seen_revision = revision if seen_at else 0
        published.stored_polls = None
        published.fresh_until = seen_at.timestamp() + self.seen_interval_seconds if seen_at else 0.0

    def _add(self, scope: Scope) -> PublishedScope:
        """Add a new scope: nothing to compare, no waiters. A start may do this a million times."""
        published = self.scopes[scope.name] = PublishedScope(scope)
        self.scope_names.add(scope.name)
        self._mixed_scopes.assign(_folded(scope.name), scope.name)
        for vm in scope.vms:
            self._add_vm(published, vm)
        if scope.events:
            self._index_events(published, (), scope.events)
        if scope.ended:
            self.ended.update((ended.id, published) for ended in scope.ended)
        return published

    def withdraw(self, name: str, revision: int) -> None:
        """Remove a scope that was deleted at a revision."""
        published = self.scopes.pop(name, None)
        if published is None:
            return
        old, published.scope, published.revision = published.scope, Scope(name=name), revision
        published.booting = None
        self.scope_names.remove(name)
        self._mixed_scopes.release(_folded(name), name)
        self._index(published, old, published.scope)
        self.wake(published)
        self._subscribers.call(f"scope {published.scope.name}", published)

    def wake(self, published: PublishedScope) -> None:
        """Call all that wait for a change of this scope."""
        waiters, published.waiters = published.waiters, None
        self.call_in_turn(waiters or {})

    def call_in_turn(self, callbacks: Collection[Callable[[], None]]) -> None:
        """Call them soon, after all that were queued before."""
        if callbacks and not self._woken:
            asyncio.get_running_loop().call_soon(self._call_some)
        self._woken.extend(callbacks)

    def _call_some(self) -> None:
        try:
            for _ in range(min(len(self._woken), TURN_CALLBACKS)):
                self._woken.popleft()()
        finally:
            if self._woken:
                asyncio.get_running_loop().call_soon(self._call_some)

    def sort(self) -> None:
        """Sort all keys now, so that no reader waits for it. Later changes keep them sorted."""
        for keys in (self.scope_names, self.vm_names, self.known_hosts, self.event_keys):
            keys.sort()

    def vms_named_like(self, name: str) -> set[str]:
        """The VMs whose names differ from this one at most in case."""
        folded = name.lower()
        return self._mixed_vms.holders(folded) | ({folded} & self.vms.keys())

    def scopes_named_like(self, name: str) -> set[str]:
        """The scopes whose names differ from this one at most in case."""
        folded = name.lower()
        return self._mixed_scopes.holders(folded) | ({folded} & self.scopes.keys())

    def find_scope(self, name: str) -> PublishedScope:
        """The scope by its name; UnknownScope if there is none."""
        published = self.scopes.get(name)
        if published is None:
            raise UnknownScope(f"there is no scope {name!r}", scope=name)
        return published

    def find_vm(self, name: str) -> tuple[PublishedScope, Vm]:
        """The VM by its name, and its scope; UnknownVm if there is none."""
        published = self.vms.get(name)
        vm = published.scope.vm(name) if published else None
        if published is None or vm is None:
            raise UnknownVm(f"there is no VM {name!r}", vm=name)
        return published, vm

    def scopes_on(self, host: str) -> list[PublishedScope]:
        """The scopes that have VMs on a host, sorted by name; UnknownHost if there is none."""
        if host not in self.hosts:
            raise UnknownHost(f"there is no host {host!r}", host=host)
        found = {self.vms[name] for name in self.hosts[host]}
        return sorted(found, key=lambda published: published.scope.name)

    def find_event(self, event_id: str) -> tuple[PublishedScope, Event] | None:
        """The live event by its id, and its scope."""
        published = self.events.get(event_id)
        event = published.scope.event(event_id) if published else None
        return None if published is None or event is None else (published, event)

    def _index(self, published: PublishedScope, old: Scope, new: Scope) -> None:
        if old.vms != new.vms:
            self._index_vms(published, old.vms, new.vms)
            self.wake(published)  # a waiting VM may be in another scope now
        if old.events != new.events:
            self._index_events(published, old.events, new.events)
        if old.ended != new.ended:
            before, after = {ended.id for ended in old.ended}, {ended.id for ended in new.ended}
            for event_id in before - after:
                self.ended.pop(event_id, None)
            self.ended.update(dict.fromkeys(after - before, published))

    def _index_vms(self, published: PublishedScope, old: Sequence[Vm], new: Sequence[Vm]) -> None:
        """Remove old VMs before adding new ones: two VMs may have exchanged their addresses."""
        before, after = {vm.name: vm for vm in old}, {vm.name: vm for vm in new}
        for vm in old:
            if after.get(vm.name) != vm:
                self._remove_vm(published, vm)
                if vm.name not in after and vm.name not in self.vms:
                    self.polled.pop(vm.name, None)
        for vm in new:
            if before.get(vm.name) != vm:
                self._add_vm(published, vm)

    def _index_events(
        self, published: PublishedScope, old: Sequence[Event], new: Sequence[Event]
    ) -> None:
        before, after = {event.id: event for event in old}, {event.id: event for event in new}
        self.event_counts.subtract((event.type, event.status) for event in old)
        self.event_counts.update((event.type, event.status) for event in new)
        for event_id in before.keys() - after.keys():
            self.events.pop(event_id, None)
            self.event_keys.remove(event_key(before[event_id]))
        for event_id in after.keys() - before.keys():
            self.events[event_id] = published
            self.event_keys.add(event_key(after[event_id]))

    def _remove_vm(self, published: PublishedScope, vm: Vm) -> None:
        if self.vms.get(vm.name) is not published:  # it is shown in another scope already
            return
        del self.vms[vm.name]
        self.vm_names.remove(vm.name)
        self.addresses.release(vm.address, vm.name)
        self.ids.release(vm.id, vm.name)
        self._mixed_vms.release(_folded(vm.name), vm.name)
        if vm.host:
            self.hosts[vm.host].discard(vm.name)
            self._remove_host(vm.host)

    def _add_vm(self, published: PublishedScope, vm: Vm) -> None:
        moved_from = self.vms.get(vm.name)
        if moved_from is not None and moved_from is not published:  # its old scope still has it
            known = moved_from.scope.vm(vm.name)
            if known is not None:
                self._remove_vm(moved_from, known)
        if vm.name not in self.vms:
            self.vm_names.add(vm.name)
        self.vms[vm.name] = published
        self.addresses.assign(vm.address, vm.name, _address_rank(vm))
        self.ids.assign(vm.id, vm.name)
        self._mixed_vms.assign(_folded(vm.name), vm.name)
        if vm.host:
            self._add_host(vm.host).add(vm.name)

    def _add_host(self, name: str) -> set[str]:
        """The VMs of a host, which may be new."""
        if name not in self.hosts:
            self.hosts[name] = set()
            self.known_hosts.add(name)
        return self.hosts[name]

    def _remove_host(self, name: str) -> None:
        """Remove a host, unless it has VMs or the fleet declares it."""
        if name in self.hosts and not self.hosts[name] and name not in self.declared_hosts:
            del self.hosts[name]
            self.known_hosts.remove(name)


def _address_rank(vm: Vm) -> int:
    """A VM that runs has its address rather than one that does not, and else the first to have it.

    So an address that DHCP gives to another VM is that VM's until the first one runs again.
    """
    return 2 * (not vm.power.is_off) + (not vm.is_address_taken)


def _folded(name: str) -> str:
    """The name in lower case; empty if it is that already, as most names are."""
    folded = name.lower()
    return "" if folded == name else folded


def event_key(event: Event) -> tuple[str, str]:
    """Sorts events by age. Microseconds have a fixed width, so that text sorts by time."""
    return f"{event.created_at:%Y-%m-%dT%H:%M:%S.%f}", event.id


def _later(one: datetime | None, other: datetime | None) -> datetime | None:
    """The later poll: clocks differ, and earlier versions stored the last poll in the scope."""
    return max(filter(None, (one, other)), default=None)


async def wait_for_change(
    published: PublishedScope,
    incarnation: int,
    seconds: float,
    disconnected: Callable[[], Awaitable[object]] | None = None,
) -> bool:
    """True if the scope may show another incarnation or the time is up; False if disconnected.

    Awaiting `disconnected()` ends when the client disconnects. It is awaited right here, so that a
    waiting client costs one task and one timer.
    """
    if published.scope.incarnation != incarnation or seconds <= 0:
        return True
    timeout = asyncio.timeout(seconds)

    def expire() -> None:
        with suppress(RuntimeError):  # it ended while this callback was queued
            timeout.reschedule(0)

    try:
        async with timeout:
            published.add_waiter(expire)
            await (disconnected or asyncio.Event().wait)()
    except TimeoutError:
        return True
    finally:
        published.remove_waiter(expire)
    return False
