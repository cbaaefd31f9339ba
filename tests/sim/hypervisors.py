"""Two hosts with VMs, and what must be true of them at all times.

A VM may be defined on both hosts, as in the middle of a move. Whoever changes something, a daemon
or a hand, calls a method here, and each is checked at once.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from forewarn.errors import ImpactFailed
from tests.rules import Broken

HOSTS = ("host-a", "host-b")
CHECK_TO_ACT_SECONDS = 15.0
"""A daemon asks whether another host runs a VM, and starts it so much later at most."""


class OnlyTheLock(Broken):
    """A VM was started twice, and only the lock of its disk can prevent that: see its kinds."""


class StartedByHand(OnlyTheLock):
    """An operator has started a VM between the check and the act of a daemon, which cannot know."""


class HiddenByClone(OnlyTheLock):
    """The daemon of a clone has reported the VMs of a host while the one of the original was away.

    What the clone does not have is taken for gone (docs/hostd.md, "When something fails").
    """


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
    completed: set[str] = field(default_factory=set)
    """The events that an operator has completed."""
    abandoned: set[str] = field(default_factory=set)
    """The events that have failed because a host was forgotten."""
    recovering: set[str] = field(default_factory=set)
    """Those whose guests may still shut down: no operator acts on them meanwhile."""
    starting: set[str] = field(default_factory=set)
    """The events that start a VM that is off."""
    stopped_by: dict[str, tuple[Actor, str]] = field(default_factory=dict)
    restarted_at: dict[tuple[str, str], float] = field(default_factory=dict)
    by_hand_at: dict[str, float] = field(default_factory=dict)
    left_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a host had a VM no longer."""
    doubled: dict[str, float] = field(default_factory=dict)
    """Those that an operator runs twice, on disks without a lock, and since when."""
    is_known_double: Callable[[str], bool] = lambda vm: False
    """Whether the servers have learned some time ago that a VM runs twice, which it still does."""
    fenced: set[str] = field(default_factory=set)
    """The hosts that an operator has switched off, until they are switched on again."""
    clones: set[str] = field(default_factory=set)
    """The sessions of daemons on clones of a machine."""
    hidden_until: dict[str, float] = field(default_factory=dict)
    """The hosts whose VMs the servers know from a clone, and until when a daemon may act on it."""
    cut_until: float = 0.0
    """Until then, no host reaches the other's hypervisor."""
    changed: dict[str, list[asyncio.Event]] = field(
        default_factory=lambda: {host: [] for host in HOSTS}
    )
    problem: Exception | None = None
    has_lock: bool = False
    """Whether a lock manager keeps a VM from being started while another host runs it."""

    def must(self, holds: object, rule: str, *facts: object, kind: type[Broken] = Broken) -> None:
        """Remembered, because whoever called may swallow what is raised."""
        if not holds:
            self.problem = self.problem or kind(f"{rule}: {facts}")
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
        """Within this, this daemon acts on the VM, and no other does.

        But for the daemon of another host whose event an operator has just completed: it does not
        know that yet.
        """
        done = self.completed
        others = [
            (other, of)
            for other, of in self.actors(vm)
            if other.host == actor.host or not {event, of} & done
        ]
        self.must(not others, "one daemon at a time acts on a VM", vm, actor, event, others)
        is_double = self.is_known_double(vm)
        self.must(not is_double, "nothing acts on a VM that runs twice", vm, actor, event)
        self.acting[vm].append((actor, event))
        try:
            yield
        finally:
            self.leave(actor, vm, event)

    def leave(self, actor: Actor, vm: str, event: str) -> None:
        """The VM runs on its new host: from now on, this daemon only cleans up.

        If it is cut off, the servers find the VM there, and its next impact may begin.
        """
        if (actor, event) in self.acting[vm]:
            self.acting[vm].remove((actor, event))

    # --- changes, each atomic

    def start(self, host: str, vm: str, *, is_wanted: bool = True) -> None:
        """As a daemon does. `is_wanted`: even if it was left off.

        The lock refuses a second start, which looks like any failed try. So it must not hide one
        that a daemon should not have asked for.
        """
        if self.copies[host][vm].state is not State.OFF:
            return
        if host in self.fenced:
            raise ImpactFailed(f"{host} does not answer")
        if self.places(vm):
            kind = self._explain_second_start(vm)
            is_refused = vm in self.doubled or (self.has_lock and kind is not Broken)
            self.must(is_refused, "a VM runs on one host", vm, host, kind=kind)
            raise ImpactFailed(f"the disk of {vm} is locked by {self.places(vm)}")
        self.must(
            is_wanted or vm not in self.left_off, "a VM that was left off stays off", vm, host
        )
        self._start(host, vm)

    def _explain_second_start(self, vm: str) -> type[Broken]:
        """What the daemon could not know; Broken if there is no such thing."""
        if self.now - self.by_hand_at.get(vm, -CHECK_TO_ACT_SECONDS) < CHECK_TO_ACT_SECONDS:
            return StartedByHand
        is_hidden = any(self.now < self.hidden_until.get(host, 0) for host in self.places(vm))
        return HiddenByClone if is_hidden else Broken

    def note_served(self, host: str, session: str) -> None:
        """This daemon reports the VMs of a host now."""
        if session in self.clones:
            self.hidden_until[host] = math.inf
        elif self.hidden_until.get(host) == math.inf:
            self.hidden_until[host] = self.now + CHECK_TO_ACT_SECONDS

    def start_by_hand(self, host: str, vm: str) -> None:
        """An operator who needs a host for that switches it on again."""
        self.must(not self.places(vm), "an operator starts a VM that is off", vm, host)
        self.fenced.discard(host)
        self._start(host, vm)
        self.by_hand_at[vm] = self.now

    def _start(self, host: str, vm: str) -> None:
        copy = self.copies[host][vm]
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

    def run_copy(self, host: str, vm: str) -> None:
        """Run it here, too."""
        self.doubled[vm] = self.now
        self.copies[host].setdefault(vm, Copy()).state = State.RUNNING
        self._notify(host)

    def end_copy(self, host: str, vm: str) -> None:
        """Remove the copy. If an impact has stopped the VM meanwhile, this one is the VM."""
        self.doubled.pop(vm, None)
        if len(self.places(vm)) > 1:
            del self.copies[host][vm]
            self._notify(host)

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

    def unmark_moved(self, host: str, vm: str, event: str) -> None:
        """Unless another event has begun to act on the VM since."""
        copy = self.find(host, vm)
        if copy is not None and copy.marker.event in ("", event):
            copy.marker = Marker()

    def define(self, host: str, vm: str, marker: Marker) -> None:
        self.copies[host].setdefault(vm, Copy()).marker = marker
        self._notify(host)

    def undefine(self, host: str, vm: str) -> None:
        """A VM that is off is gone then."""
        copy = self.find(host, vm)
        if copy is not None and copy.state is State.OFF:
            del self.copies[host][vm]
            self.left_at[host, vm] = self.now
            self._notify(host)

    def move(self, host: str, vm: str, target: str) -> None:
        """With its state: live, if it runs."""
        if vm in self.doubled:
            raise ImpactFailed(f"{vm} runs on {target} already")
        if target in self.fenced:
            raise ImpactFailed(f"{target} does not answer")
        copy = self.copies[host].pop(vm)
        self.left_at[host, vm] = self.now
        self.must(not self.places(vm), "a VM runs on one host", vm, target)
        copy.marker = Marker()
        self.copies[target][vm] = copy
        self._notify(host)
        self._notify(target)

    def notify(self, host: str) -> None:
        """What the host has is listed again."""
        self._notify(host)

    def _notify(self, host: str) -> None:
        for event in self.changed[host]:
            event.set()
