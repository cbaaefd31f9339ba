"""Which connections a listener accepts: per address, of unknown addresses, and in total.

The limits come from the file descriptors that this process may have.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from forewarn.config import Config, Identify
from forewarn.engine.clock import RealClock
from forewarn.engine.log_throttle import ThrottledLog

EVICTION_TRIES_MAX = 32
"""Connections that are looked at, to find an idle one that can be closed for a new one."""
UNKNOWN_SHARE = 8
"""One connection in this many may belong to clients whose address is not a VM's."""
OPERATOR_CONNECTIONS_MAX = 1024
DESCRIPTORS_RESERVED_MAX = 4096
DESCRIPTORS_MAX = 1 << 20
"""The default of Linux for one process (fs.nr_open)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`stall_seconds`: how long a request may take to arrive, and a response to be read."""

    head_bytes_max: int = 64 * 1024
    body_bytes_max: int = 64 * 1024
    idle_seconds: float = 75.0
    stall_seconds: float = 10.0
    connections_max: int = 1_000_000
    connections_per_address_max: int = 4096


def raise_descriptor_limit() -> int:
    """Raise the limit of file descriptors as far as allowed, and return it.

    Every VM may keep a connection open.
    """
    import resource  # POSIX only; the lab imports this module on Windows too

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard


def share_descriptors(config: Config, descriptors: int) -> tuple[Limits, Limits]:
    """The limits for VMs and for operators. Each connection takes a file descriptor.

    VMs cannot take everything: an eighth is reserved for operators, and a quarter for the store and
    the platform, which must work even if VMs open as many connections as they can. An address gets
    at most an eighth of the VMs' share, unless it may be a proxy for many VMs.
    """
    operators = min(descriptors // 8, OPERATOR_CONNECTIONS_MAX)
    vms = max(1, descriptors - operators - min(descriptors // 4, DESCRIPTORS_RESERVED_MAX))
    is_by_address = set(config.identify) == {Identify.ADDRESS}
    each = max(1, min(config.connections_per_address_max, vms // 8 if is_by_address else vms))
    limits = Limits(
        idle_seconds=config.idle_seconds,
        stall_seconds=config.header_seconds,
        connections_max=vms,
        connections_per_address_max=each,
    )
    each = min(config.connections_per_address_max, operators)
    return limits, replace(limits, connections_max=operators, connections_per_address_max=each)


class TimedConnection(Protocol):
    """A connection as the policy sees it. `time_out` is called after `due_at` has passed."""

    address: str
    due_at: float

    @property
    def is_evictable(self) -> bool:
        """Nothing is being received, processed or sent."""

    def time_out(self) -> None: ...

    def abort(self) -> None:
        """Close immediately, without sending the rest."""


Group = OrderedDict[TimedConnection, None]


class Admission:
    """Counts connections. At a limit, an idle one is closed for a new one.

    A connection is admitted if its address is below its limit, and if the listener is too or an
    idle connection can be closed: one of an unknown address if there is any, else the oldest.
    Unknown addresses share a small part of the total and never displace a VM. The cost does not
    grow with the number of connections. `limits_reached` counts, by limit, how often a connection
    was refused or an idle one closed. `on_refused` is called with the address of a connection that
    is refused: what it would have asked for is not read.
    """

    def __init__(self, limits: Limits, throttled_log: ThrottledLog | None = None) -> None:
        self.limits = limits
        self.throttled_log = throttled_log or ThrottledLog(RealClock())
        self.on_refused: Callable[[str], None] = lambda address: None
        self.counts: dict[str, int] = {}
        self.limits_reached = dict.fromkeys(("address", "unknown", "total"), 0)
        self._known: Group = OrderedDict()
        self._unknown: Group = OrderedDict()
        self._unknown_max = max(1, limits.connections_max // UNKNOWN_SHARE)

    @property
    def connections_count(self) -> int:
        return len(self._known) + len(self._unknown)

    def is_unknown(self, address: str) -> bool:
        """Whether the address can only be refused by the application."""
        return False

    def admit(self, connection: TimedConnection) -> bool:
        """Count a new connection; False if a limit refuses it."""
        address = connection.address
        group = self._unknown if self.is_unknown(address) else self._known
        if not self._has_room(address, group):
            self.on_refused(address)
            return False
        self.counts[address] = self.counts.get(address, 0) + 1
        group[connection] = None
        return True

    def release(self, connection: TimedConnection) -> None:
        """Stop counting a connection, if it was admitted."""
        address = connection.address
        for group in (self._known, self._unknown):
            if connection in group:
                del group[connection]
                self.counts[address] -= 1
                if not self.counts[address]:
                    del self.counts[address]

    def _has_room(self, address: str, group: Group) -> bool:
        limits = self.limits
        if self.counts.get(address, 0) >= limits.connections_per_address_max:
            return self._make_room("address", limits.connections_per_address_max, address)
        if group is self._unknown and len(group) >= self._unknown_max:
            return self._make_room("unknown", self._unknown_max, address, self._unknown)
        if self.connections_count >= limits.connections_max:
            return self._make_room("total", limits.connections_max, address, self._unknown, group)
        return True

    def _make_room(self, limit: str, limit_max: int, address: str, *groups: Group) -> bool:
        """A limit is reached: whether an idle connection of the groups could be closed."""
        self.limits_reached[limit] += 1
        self.throttled_log.warn(
            f"connection limit reached: {limit}",
            limit_max=limit_max,
            connections=self.connections_count,
            address=address,
        )
        return any(self._evict(group) for group in groups)

    def _evict(self, group: Group) -> bool:
        """Close an idle connection, the oldest first."""
        return self._evict_first(group, lambda connection: connection.is_evictable)

    def _evict_first(self, group: Group, may_close: Callable[[TimedConnection], bool]) -> bool:
        """Close the oldest that may be closed; the others move to the end of the group."""
        for _ in range(min(EVICTION_TRIES_MAX, len(group))):
            connection = next(iter(group))
            if may_close(connection):
                self.release(connection)
                connection.abort()
                return True
            group.move_to_end(connection)
        return False
