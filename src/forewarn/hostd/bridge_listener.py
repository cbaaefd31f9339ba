"""The relay on one bridge: its addresses, its nftables table, and why it cannot serve, if so."""

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from forewarn.engine.clock import wait_for_first
from forewarn.errors import Error
from forewarn.hostd.bridge_table import INTERFACES, BridgeTable, find_ports
from forewarn.hostd.netlink import add_address
from forewarn.hostd.ports import (
    BACKLOG,
    BridgePorts,
    check_bridge,
    interface_index,
    is_plugged,
    listen,
    open_bridge,
)
from forewarn.hostd.relay import Relay, RelayPolicy
from forewarn.log import log
from forewarn.option_kind import Address
from forewarn.web.http.listener import SERVER_METADATA, Listener

ADDRESS_V6 = "fe80::a9fe:a9fe"
"""169.254.169.254 for guests that have only IPv6, as in OpenStack."""
UNPROTECTED = (
    "guests may be without notice for minutes after a move, and one guest can make the relay"
    " refuse the others"
)
BACKLOG_MAX_FILE = Path("/proc/sys/net/core/somaxconn")
FOLLOW_SECONDS = 2.0
SETTLE_SECONDS = 0.1
"""Changes of interfaces come in bursts."""


class BridgeProblem(NamedTuple):
    """What does not work, and why. `is_usual`: most operators need not care."""

    text: str
    reason: str
    is_usual: bool = False


@dataclass(eq=False)
class BridgeListener:
    """The listeners of one bridge, for IPv4 and IPv6.

    A bridge may be made later, or deleted and made again with libvirt's network, may get IPv6 at
    any time, and may get a port that makes it unsafe. `follow` notices that. `vms` has the id of
    the VM at each port, by its index. `on_ports` is called when a port has come or gone. Tests
    give a `table`, and in `interfaces` another folder than the kernel's.
    """

    relay: Relay
    bridge: str
    address: Address
    vms: dict[int, str]
    on_ports: Callable[[], None] = lambda: None
    _: KW_ONLY
    table: BridgeTable | None = None
    interfaces: Path = INTERFACES

    def __post_init__(self) -> None:
        self._ports: BridgePorts | None = None
        self._listeners: dict[Address, Listener] = {}
        self._woken = asyncio.Event()
        self._plugged: frozenset[int] | None = None  # the interfaces that are ports of the bridge
        self._table = self.table or BridgeTable(self.bridge, (self.address.host, ADDRESS_V6))

    @property
    def is_serving(self) -> bool:
        return bool(self._listeners)

    def wake(self) -> None:
        """The VMs have changed: look at the ports now."""
        self._woken.set()

    async def follow(self) -> None:
        """Listen wherever that becomes possible, until cancelled; log each problem once."""
        logged: list[BridgeProblem] = []
        while True:  # ends when cancelled
            problems = await self.update()
            for problem in problems:
                if problem not in logged:
                    write = log.info if problem.is_usual else log.warning
                    write(problem.text, bridge=self.bridge, problem=problem.reason)
            logged = problems
            await wait_for_first(*self._changes(), timeout=FOLLOW_SECONDS)
            await asyncio.sleep(SETTLE_SECONDS)

    def _changes(self) -> "list[asyncio.Task[object]]":
        events = [self._woken, *([self._ports.links_changed] if self._ports else [])]
        return [asyncio.create_task(event.wait()) for event in events]

    async def update(self) -> list[BridgeProblem]:
        """Listen on both addresses, if that is possible now; what does not work."""
        self._woken.clear()
        if self._ports:
            self._ports.links_changed.clear()
        self._look_at_ports()
        unconfirmed = self.relay.unconfirmed
        try:
            ports = await self._serve()
        except (Error, OSError) as error:
            reason = str(error) or type(error).__name__
            unconfirmed.set_bridge(self.bridge, reason, self._count_vms())
            return [BridgeProblem("guests are not served", reason)]
        unconfirmed.set_bridge(self.bridge, "")
        problems = [await self._listen_v6(ports), await self.keep_table(), check_backlog()]
        return [problem for problem in problems if problem]

    def _look_at_ports(self) -> None:
        """When the bridge is deleted, its ports stay, without a bridge, and so do its VMs."""
        known = self._plugged
        try:
            plugged = frozenset[int]().union(*find_ports(self.bridge, self.vms))
        except OSError:
            plugged = frozenset(each for each in known or () if not is_plugged(each))
        self._plugged = plugged
        if known is not None and known != plugged:
            self.on_ports()

    def _count_vms(self) -> int:
        """The VMs that are plugged into the bridge, or were until it was deleted."""
        plugged = self._plugged or frozenset()
        return len({self.vms[each] for each in plugged if each in self.vms})

    async def _serve(self) -> BridgePorts:
        """Listen on IPv4; an Error or OSError if that is not possible."""
        try:
            check_bridge(self.bridge)
        except (Error, OSError):
            await self.stop()
            raise
        if self._ports and self._ports.index != interface_index(self.bridge):
            await self.stop()
        self._ports = self._ports or open_bridge(self.bridge, self.vms)
        await self._listen(self._ports, self.address)
        return self._ports

    async def _listen_v6(self, ports: BridgePorts) -> BridgeProblem | None:
        """libvirt's networks are often without IPv6."""
        text = "guests are served by IPv4 only"
        disabled = Path("/proc/sys/net/ipv6/conf", self.bridge, "disable_ipv6")
        address = Address(ADDRESS_V6, self.address.port)
        try:
            if not disabled.exists() or disabled.read_text().strip() != "0":
                reason = f"the bridge {self.bridge} has no IPv6, so it cannot have {ADDRESS_V6}"
                return BridgeProblem(text, reason, is_usual=True)
            await self._listen(ports, address)
        except (Error, OSError) as error:
            return BridgeProblem(text, str(error))
        return None

    async def keep_table(self) -> BridgeProblem | None:
        """Load the rules that lead guests to this host, and limit how fast each one connects."""
        try:
            mac = (self.interfaces / self.bridge / "address").read_text().strip()
            ports = find_ports(self.bridge, self.vms, self.interfaces)
            await self._table.keep(mac, ports)
        except (Error, OSError) as error:
            return BridgeProblem(UNPROTECTED, str(error))
        if not ip_address(self.address.host).is_link_local:
            reason = (
                f"nftables rules are loaded for link-local addresses only; {self.address.host} is"
                " none; expected an address such as 169.254.169.254"
            )
            return BridgeProblem(UNPROTECTED, reason)
        return None

    async def _listen(self, ports: BridgePorts, address: Address) -> None:
        """The bridge's address may have been removed, so it is added again and again."""
        if address in self._listeners:
            add_address(ports.index, address.host)
            return
        policy = RelayPolicy(ports, refusals=self.relay.refusals)
        bound = listen(self.bridge, address)
        listener = Listener(self.relay, address, policy, server_name=SERVER_METADATA, bound=bound)
        await listener.start()
        self._listeners[address] = listener
        log.info("the relay listens", bridge=self.bridge, address=str(address))

    async def stop(self) -> None:
        listeners, self._listeners = self._listeners, {}
        await asyncio.gather(*(listener.stop() for listener in listeners.values()))
        if self._ports is not None:
            self._ports.close()
            self._ports = None


def check_backlog(file: Path = BACKLOG_MAX_FILE) -> BridgeProblem | None:
    """The kernel cuts the backlog of a listener, which limits half-open connections, to this."""
    try:
        backlog_max = int(file.read_text())
    except OSError:  # hidden from this process; the default is enough since Linux 5.4
        return None
    if backlog_max >= BACKLOG:
        return None
    reason = f"net.core.somaxconn is {backlog_max}; expected at least {BACKLOG}"
    return BridgeProblem("fewer half-open connections make the relay refuse guests", reason)
