"""Where a guest is plugged in: the port of a bridge from which a connection comes.

A guest chooses its addresses, but not its port. The kernel keeps the Ethernet header of the first
packet of a connection. Its source is the guest's MAC, and the bridge's forwarding table knows at
which port it has seen that MAC last. Two things could go wrong, and both are refused:

- The neighbour table has another MAC for the address: the response would go to another guest.
- The MAC has just moved to this port. Two guests may be using it, and then the entry says only
  which of them sent a packet last.
"""

import socket
import struct
from pathlib import Path
from typing import NamedTuple

from forewarn.errors import Unavailable
from forewarn.hostd.netlink import AF_BRIDGE, Neighbour, Netlink, add_address, pack_address
from forewarn.option_kind import Address

DOUBT_SECONDS = 2.0
"""How long a MAC that has moved from port to port is not served."""
ENTRIES_MAX = 16_384
"""Entries that are cached: a guest can make up as many addresses as it likes."""
BACKLOG = 4096
TCP_SAVE_SYN, TCP_SAVED_SYN = 27, 28
SAVE_FROM_ETHERNET = 2
SYN_BYTES_MAX = 512
ETHERNET = struct.Struct("!6s6sH")
IP_TYPES = (0x0800, 0x86DD)


class Peer(NamedTuple):
    """The other side of a connection; `mac` is the source of its first packet."""

    address: str
    mac: bytes


class BridgePorts:
    """Finds the port of a peer. Entries are cached until the kernel reports a change.

    The kernel queues its notice before it passes the packet on that caused the change. Notices are
    read before each lookup, so the cache is never behind what has been received.
    """

    def __init__(self, bridge: str, index: int, kernel: Netlink) -> None:
        self.bridge = bridge
        self.index = index
        self._kernel = kernel
        self._macs: dict[str, bytes] = {}
        self._ports: dict[bytes, int] = {}
        self._names: dict[int, str] = {}
        self._moved_until: dict[bytes, float] = {}

    @property
    def entries(self) -> int:
        return len(self._macs) + len(self._ports) + len(self._moved_until)

    def close(self) -> None:
        self._kernel.close()

    def port_of(self, peer: Peer, now: float) -> str:
        """The name of the port from which the peer comes; empty if it is not known for sure.

        Unavailable if its MAC has just been at another port.
        """
        self._follow(now)
        if not peer.mac:
            return ""
        if self._moved_until.get(peer.mac, 0) > now:
            raise Unavailable("Service unavailable. The MAC was seen at two ports of the bridge")
        # Without a neighbour, the response goes by a router, or the kernel will ask for it.
        mac = self._macs.get(peer.address) or self._kernel.neighbour(self.index, peer.address)
        port = self._ports.get(peer.mac) or self._kernel.bridge_port(self.index, peer.mac)
        if not port or mac not in (peer.mac, b""):
            return ""
        if mac:
            self._macs[peer.address] = mac
        self._ports[peer.mac] = port
        self._names[port] = self._names.get(port) or self._kernel.name(port)
        return self._names[port]

    def _follow(self, now: float) -> None:
        notices = self._kernel.notices()
        if notices is None or self.entries > ENTRIES_MAX:
            self._forget()
        for notice in notices or ():
            entry = notice.neighbour
            if entry is None:
                self._names.pop(notice.interface, None)
            elif entry.family != AF_BRIDGE and entry.interface == self.index:
                self._macs.pop(entry.address, None)
            elif entry.bridge == self.index and entry.is_learned:
                self._follow_port(entry, is_deleted=notice.is_deleted, now=now)

    def _follow_port(self, entry: Neighbour, *, is_deleted: bool, now: float) -> None:
        before = self._ports.pop(entry.mac, 0)
        if is_deleted:
            return
        if before not in (0, entry.interface):
            self._moved_until[entry.mac] = now + DOUBT_SECONDS
        self._ports[entry.mac] = entry.interface

    def _forget(self) -> None:
        for cache in (self._macs, self._ports, self._names, self._moved_until):
            cache.clear()


def open_bridge(bridge: str) -> BridgePorts:
    """Unavailable if there is no such bridge: libvirt may create it later."""
    index = interface_index(bridge)
    if not index or not Path("/sys/class/net", bridge, "bridge").is_dir():
        problem = "is not a bridge" if index else "does not exist"
        raise Unavailable(f"the bridge {bridge} {problem}; expected a bridge of this host")
    return BridgePorts(bridge, index, Netlink())


def interface_index(name: str) -> int:
    """0 if it does not exist."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


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
        listening.bind((*address, 0, index) if family is socket.AF_INET6 else address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise Unavailable(
            f"cannot listen on {address} of the bridge {bridge}: {error.strerror}", bridge=bridge
        ) from error
    return listening


def peer_of(connection: socket.socket, address: str) -> Peer:
    """The peer of a connection that was just accepted. Its MAC is empty if it is not known."""
    try:
        syn = connection.getsockopt(socket.IPPROTO_TCP, TCP_SAVED_SYN, SYN_BYTES_MAX)
    except OSError:
        syn = b""
    _, source, kind = ETHERNET.unpack_from(syn.ljust(ETHERNET.size, b"\0"))
    return Peer(address, source if kind in IP_TYPES else b"")
