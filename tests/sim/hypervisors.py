"""Two hosts with VMs, and what must be true of them at all times.

A VM may be defined on both hosts, as in the middle of a move. Whoever changes something, a daemon
or a hand, calls a method here, and each is checked at once.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from tests.rules import Broken

HOSTS = ("host-a", "host-b")


class State(StrEnum):
    OFF = "off"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class Marker:
    """The event that has begun to act on a VM; a move goes from `host` to `target`."""

    event: str = ""
    host: str = ""
    target: str = ""


@dataclass
class Copy:
    """A VM as one host has it."""

    state: State = State.OFF
    marker: Marker = Marker()


@dataclass
class Boot:
    """From its start to when it is stopped or reset, if it was. It is up after a while."""

    started_at: float
    up_at: float
    ended_at: float | None = None

    def was_up(self, since: float, now: float) -> bool:
        is_up_at = self.up_at if self.ended_at is None else min(self.ended_at, now)
        return since <= self.up_at <= now and self.up_at <= is_up_at


@dataclass
class Actor:
    """Who acts on VMs: one run of the daemon of a host. Of a killed one nothing starts any more.

    `calls_left` counts down to its death between two calls.
    """

    host: str
    session: str
    is_dead: bool = False
    has_ended: bool = False
    calls_left: int = -1


@dataclass
class Hypervisors:
    chance: Random
    copies: dict[str, dict[str, Copy]] = field(default_factory=lambda: {host: {} for host in HOSTS})
    boots: defaultdict[str, list[Boot]] = field(default_factory=lambda: defaultdict(list))
    acting: defaultdict[str, list[tuple[Actor, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    left_off: set[str] = field(default_factory=set)
    """Those that an operator stopped, or that were evicted."""
    evicted: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    """The events that have started, and the operations without an event."""
    recovering: set[str] = field(default_factory=set)
    """Those whose guests may still shut down: no operator acts on them meanwhile."""
    starting: set[str] = field(default_factory=set)
    """The events that start a VM that is off."""
    stopped_by: dict[str, tuple[Actor, str]] = field(default_factory=dict)
    restarted_at: dict[tuple[str, str], float] = field(default_factory=dict)
    cut_until: float = 0.0
    """Until then, no host reaches the other's hypervisor."""
    changed: dict[str, list[asyncio.Event]] = field(
        default_factory=lambda: {host: [] for host in HOSTS}
    )
    problem: Exception | None = None

    def must(self, holds: object, rule: str, *facts: object) -> None:
        """Remembered, because whoever called may swallow what is raised."""
        if not holds:
            self.problem = self.problem or Broken(f"{rule}: {facts}")
            raise self.problem

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def add(self, host: str, vm: str) -> None:
        self.copies[host][vm] = Copy()
        self.start(host, vm)

    # --- looking

    def find(self, host: str, vm: str) -> Copy | None:
        return self.copies[host].get(vm)

    def places(self, vm: str) -> list[str]:
        """The hosts on which it is not off: it has its disk open there."""
        return [
            host
            for host in HOSTS
            if (copy := self.find(host, vm)) is not None and copy.state is not State.OFF
        ]

    def is_up(self, vm: str) -> bool:
        """Whether its guest runs."""
        (*_, boot) = self.boots[vm]
        is_running = any(self.copies[host][vm].state is State.RUNNING for host in self.places(vm))
        return is_running and boot.ended_at is None and boot.up_at <= self.now

    def is_idle(self, vm: str) -> bool:
        """Whether nobody acts on it, and nobody who has died has begun to."""
        markers = [each[vm].marker for each in self.copies.values() if vm in each]
        return not self.actors(vm) and not any(marker.event for marker in markers)

    def has_begun(self, host: str, vm: str) -> bool:
        """Whether an impact that this host carries out has begun to act on the VM."""
        copy = self.find(host, vm)
        return copy is not None and bool(copy.marker.event) and copy.marker.host in ("", host)

    def actors(self, vm: str) -> list[tuple[Actor, str]]:
        return [each for each in self.acting[vm] if not each[0].is_dead]

    @contextmanager
    def acts(self, actor: Actor, vm: str, event: str) -> Iterator[None]:
        """Within this, this daemon acts on the VM, and no other does."""
        others = self.actors(vm)
        self.must(not others, "one daemon at a time acts on a VM", vm, actor, event, others)
        self.acting[vm].append((actor, event))
        try:
            yield
        finally:
            self.acting[vm].remove((actor, event))

    # --- changes, each atomic

    def start(self, host: str, vm: str, *, is_wanted: bool = True) -> None:
        """`is_wanted`: even if it was left off."""
        copy = self.copies[host][vm]
        if copy.state is not State.OFF:
            return
        self.must(not self.places(vm), "a VM runs on one host", vm, host)
        self.must(
            is_wanted or vm not in self.left_off, "a VM that was left off stays off", vm, host
        )
        self.left_off.discard(vm)
        self.evicted.discard(vm)
        self.stopped_by.pop(vm, None)
        copy.state = State.RUNNING
        self._boot(vm)
        self._notify(host)

    def _boot(self, vm: str) -> None:
        self._end_boot(vm)
        up_at = self.now + self.chance.uniform(1, 25)
        self.boots[vm].append(Boot(self.now, up_at))

    def _end_boot(self, vm: str) -> None:
        for boot in self.boots[vm][-1:]:
            boot.ended_at = self.now if boot.ended_at is None else boot.ended_at

    def stop(self, host: str, vm: str) -> None:
        self.copies[host][vm].state = State.OFF
        self._end_boot(vm)
        self._notify(host)

    def later(self, seconds: float, change: Callable[[], None]) -> None:
        """What a guest does by itself, whoever has died since."""
        asyncio.get_running_loop().call_later(seconds, change)

    def reset(self, host: str, vm: str) -> None:
        self.copies[host][vm].state = State.RUNNING
        self._boot(vm)

    def suspend(self, host: str, vm: str) -> None:
        self.copies[host][vm].state = State.SUSPENDED

    def resume(self, host: str, vm: str) -> None:
        copy = self.find(host, vm)
        if copy is not None and copy.state is State.SUSPENDED:
            copy.state = State.RUNNING

    def mark(self, host: str, vm: str, marker: Marker = Marker()) -> None:  # noqa: B008
        copy = self.find(host, vm)
        if copy is not None:
            copy.marker = marker

    def define(self, host: str, vm: str, marker: Marker) -> None:
        self.copies[host].setdefault(vm, Copy()).marker = marker
        self._notify(host)

    def undefine(self, host: str, vm: str) -> None:
        """A VM that is off is gone then."""
        copy = self.find(host, vm)
        if copy is not None and copy.state is State.OFF:
            del self.copies[host][vm]
            self._notify(host)

    def move(self, host: str, vm: str, target: str) -> None:
        """With its state: live, if it runs."""
        copy = self.copies[host].pop(vm)
        self.must(not self.places(vm), "a VM runs on one host", vm, target)
        copy.marker = Marker()
        self.copies[target][vm] = copy
        self._notify(host)
        self._notify(target)

    def _notify(self, host: str) -> None:
        for event in self.changed[host]:
            event.set()
