"""Where a guest is plugged in: the port of a bridge from which a connection comes.

A guest chooses its addresses, but not its port. The kernel keeps the Ethernet header of the first
packet of a connection. Its source is the guest's MAC, and the bridge's forwarding table knows at
which port it has seen that MAC last. Three things could go wrong, and all are refused:

- The neighbor table has another MAC for the address: the response would go to another guest.
- The MAC has just come to this port. Two guests may be using it, and then the entry says only
  which of them sent a packet last.
- The first packet was sent long ago: a guest can begin a connection with its neighbor's MAC, and
  complete it when the neighbor has its port back.

All of that needs a bridge that learns at which port a MAC is. One with a port that does not learn
is not served, and neither is a MAC whose entry was made by hand.
"""

import asyncio
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

from forewarn.engine.clock import RealClock
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.errors import Unavailable
from forewarn.hostd.netlink import (
    AF_BRIDGE,
    LinkChange,
    Neighbour,
    Netlink,
    add_address,
    pack_address,
)
from forewarn.option_kind import Address

DOUBT_SECONDS = 2.0
"""How long a MAC that has come to a port is not served: longer than connecting may take."""
ENTRIES_MAX = 16_384
"""Entries that are cached: a guest can make up as many addresses as it likes."""
BACKLOG = 4096
SYN_RETRIES = 1
"""How often our response to a first packet is sent again: a half-open connection lasts three
seconds. One that is established after a repetition is refused anyway.
"""
TCP_SAVE_SYN, TCP_SAVED_SYN = 27, 28
SAVE_FROM_ETHERNET = 2
SYN_BYTES_MAX = 512
TCP_INFO_RETRANSMITS = struct.Struct("=100xI")
"""The end of what is read of struct tcp_info: tcpi_total_retrans."""
ETHERNET = struct.Struct("!6s6sH")
IP_TYPES = (0x0800, 0x86DD)


class Peer(NamedTuple):
    """The other side of a connection; `mac` is the source of its first packet.

    `address` is empty if the peer has reset the connection. `has_syn`: the kernel has kept the
    first packet. It has not if it had to use a SYN cookie.
    """

    address: str
    mac: bytes
    has_syn: bool = True


class BridgePorts:
    """Finds the VM of a peer. `vms` has the id of the VM at each port, by the interface's index.

    Entries are cached until the kernel reports a change. It queues its notice before it passes the
    packet on that caused the change, and notices are read before each lookup, so the cache is
    never behind what has been received.

    `_ports` has where each MAC was seen last; negative if the entry was deleted since. A MAC that
    comes to a port is in doubt unless it was there before: what is not known may have been
    elsewhere. `links_changed` is set when a port may have come or gone.
    """

    def __init__(self, index: int, kernel: Netlink, vms: dict[int, str]) -> None:
        self.index = index
        self._kernel = kernel
        self._vms = vms
        self.links_changed = asyncio.Event()
        self._throttled_log = ThrottledLog(RealClock())
        self._macs: dict[str, bytes] = {}
        self._ports: dict[bytes, int] = {}
        self._doubted_until: dict[bytes, float] = {}
        self._all_doubted_until = 0.0

    def close(self) -> None:
        self._kernel.close()

    def vm_of(self, peer: Peer, now: float) -> str:
        """The id of the VM at whose port the peer is; empty if there is none.

        Unavailable if that is in doubt, so that the peer should connect again.
        """
        if not peer.address:
            return ""
        try:
            return self._find(peer, now)
        except OSError as error:  # this process lacks file descriptors, say
            raise Unavailable("Service unavailable. The port of the bridge is unknown") from error

    def _find(self, peer: Peer, now: float) -> str:
        self.follow(now)
        if peer.mac and self._ports.get(peer.mac, 0) <= 0:
            entry = self._kernel.forwarding_entry(self.index, peer.mac)
            self.follow(now)  # what has changed before this answer
            if entry and not self._is_fixed(entry) and self._ports.get(peer.mac, 0) <= 0:
                self._ports[peer.mac] = entry.interface
        doubted_until = max(self._doubted_until.get(peer.mac, 0.0), self._all_doubted_until)
        if not peer.mac or doubted_until > now:
            raise Unavailable("Service unavailable. The port of the bridge is in doubt")
        # Without a neighbor, the response goes by a router, or the kernel will ask for it.
        mac = self._macs.get(peer.address) or self._kernel.neighbour(self.index, peer.address)
        if mac not in (peer.mac, b""):
            return ""
        if mac:
            self._macs[peer.address] = mac
        return self._vms.get(self._ports.get(peer.mac, 0), "")

    def follow(self, now: float) -> None:
        """Read what has changed."""
        notices = self._kernel.notices()
        if notices is None or len(self._macs) + len(self._ports) > ENTRIES_MAX:
            for cache in (self._macs, self._ports, self._doubted_until):
                cache.clear()
            self._all_doubted_until = now + DOUBT_SECONDS
        for notice in notices or ():
            if isinstance(notice, LinkChange):
                self.links_changed.set()
                if notice.is_deleted:
                    self._vms.pop(notice.interface, None)
            elif notice.family != AF_BRIDGE and notice.interface == self.index:
                self._macs.pop(notice.address, None)
            elif notice.bridge == self.index and notice.is_guests:
                self._follow_port(notice, now)

    def _follow_port(self, entry: Neighbour, now: float) -> None:
        last = abs(self._ports.get(entry.mac, 0))
        if entry.is_deleted or self._is_fixed(entry):
            self._ports[entry.mac] = -last
            return
        if last != entry.interface:
            self._doubted_until[entry.mac] = now + DOUBT_SECONDS
        self._ports[entry.mac] = entry.interface

    def _is_fixed(self, entry: Neighbour) -> bool:
        if entry.is_fixed:
            text = "a guest is not served: its forwarding entry is static or sticky"
            self._throttled_log.warn(text, mac=entry.mac.hex(":"))
        return entry.is_fixed


def open_bridge(bridge: str, vms: dict[int, str]) -> BridgePorts:
    """Unavailable if there is no such bridge, or not now: libvirt may create it later."""
    kernel = Netlink.open()
    ports = BridgePorts(interface_index(bridge), kernel, vms)
    kernel.on_notice(lambda: ports.follow(time.monotonic()))
    return ports


def check_bridge(bridge: str) -> None:
    """Unavailable if its guests cannot be served, or not safely."""
    folder = Path("/sys/class/net", bridge, "bridge")
    if not interface_index(bridge):
        raise Unavailable(f"the bridge {bridge} does not exist; expected a bridge of this host")
    if not folder.is_dir():
        raise Unavailable(
            f"{bridge} is not a Linux bridge; Open vSwitch and macvtap are not supported"
        )
    if _setting(folder / "vlan_filtering", "0") != "0":
        raise Unavailable(f"the bridge {bridge} has vlan_filtering on; expected one without VLANs")
    if _setting(folder / "ageing_time", "1") == "0":
        raise Unavailable(
            f"the bridge {bridge} has an ageing_time of 0, so it does not learn at which port a"
            " MAC is; expected a longer one"
        )
    for port in sorted(folder.with_name("brif").iterdir()):
        if _setting(port / "learning", "1") == "0":
            raise Unavailable(
                f"the port {port.name} of the bridge {bridge} does not learn MACs, so its guest"
                " could act as another one; expected brport/learning to be 1 at every port"
            )


def _setting(file: Path, default: str) -> str:
    """A kernel without the feature does not have it, nor has a port that was just deleted."""
    try:
        return file.read_text().strip()
    except OSError:
        return default


def interface_index(name: str) -> int:
    """0 if it does not exist."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def is_plugged(interface: int) -> bool:
    """Whether the interface with this index is a port of a bridge."""
    try:
        return Path("/sys/class/net", socket.if_indextoname(interface), "brport").exists()
    except OSError:
        return False


def listen(bridge: str, address: Address) -> socket.socket:
    """A socket that gets connections to this address from this bridge only.

    The address is added to the bridge, and stays there: the next daemon needs it too.
    """
    family, _ = pack_address(address.host)
    index = interface_index(bridge)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        add_address(index, address.host)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge.encode() + b"\0")
        listening.setsockopt(socket.IPPROTO_TCP, TCP_SAVE_SYN, SAVE_FROM_ETHERNET)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_RETRIES)
        listening.bind((*address, 0, index) if family is socket.AF_INET6 else address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise Unavailable(
            f"cannot listen on {address} of the bridge {bridge}: {error.strerror}", bridge=bridge
        ) from error
    return listening


def peer_of(connection: socket.socket, address: str) -> Peer:
    """The peer of a connection that was just accepted.

    Its MAC is empty if it is not known, or if it took longer than a second to connect: then our
    response to the first packet was sent again.
    """
    try:
        syn = connection.getsockopt(socket.IPPROTO_TCP, TCP_SAVED_SYN, SYN_BYTES_MAX)
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RETRANSMITS.size)
    except OSError:
        return Peer(address, b"")
    if not syn:
        return Peer(address, b"", has_syn=False)
    _, source, kind = ETHERNET.unpack_from(syn.ljust(ETHERNET.size, b"\0"))
    is_prompt = TCP_INFO_RETRANSMITS.unpack(info) == (0,)
    return Peer(address, source if kind in IP_TYPES and is_prompt else b"")
