"""Linux's neighbor tables, bridge forwarding tables and addresses, by netlink messages.

Only the few messages that the relay needs, without a library: see rtnetlink(7),
linux/neighbour.h and linux/netfilter/nf_tables.h.
"""

import asyncio
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

AF_BRIDGE = 7
NLM_F_REQUEST, NLM_F_ACK = 0x1, 0x4
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLMSG_ERROR = 2
RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR = 16, 17, 20
RTM_NEWNEIGH, RTM_DELNEIGH, RTM_GETNEIGH = 28, 29, 30
RTMGRP_LINK, RTMGRP_NEIGH = 0x1, 0x4
NDA_DST, NDA_LLADDR, NDA_VLAN, NDA_MASTER = 1, 2, 5, 9
IFA_ADDRESS, IFA_LOCAL, IFA_CACHEINFO = 1, 2, 6
IFA_F_NODAD, IFA_F_DEPRECATED, RT_SCOPE_LINK = 0x02, 0x20, 253
NUD_INCOMPLETE, NUD_FAILED, NUD_NOARP, NUD_PERMANENT = 0x01, 0x20, 0x40, 0x80
NTF_STICKY = 0x40
NETLINK_NETFILTER, NFT_MSG_GETGEN, NFTA_GEN_ID = 12, 10 << 8 | 16, 1

HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
NEIGHBOUR = struct.Struct("=BxxxiHBB")  # ndmsg: family, index, state, flags, type
LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
LIFETIMES = struct.Struct("=IIII")  # ifa_cacheinfo: preferred, valid, created, updated
UNLIMITED = 0xFFFFFFFF
NETFILTER = struct.Struct("!BBH")  # nfgenmsg: family, version, resource

IPV6_ADDRESSES = Path("/proc/net/if_inet6")
RECEIVE_BYTES = 64 * 1024
RECEIVE_SECONDS_MAX = 2.0
SO_RCVBUFFORCE = 33
NOTICES_BYTES = 4 << 20
"""What the kernel may queue for us: some thousand changes."""
NOTICES_MAX = 4096
"""Read at a time. A guest that floods its bridge must not keep us from everything else."""


class Neighbour(NamedTuple):
    """An entry of a neighbor table, or with family AF_BRIDGE of a forwarding table.

    `interface` is its index: of a forwarding table, the port that leads to `mac`.
    """

    family: int
    interface: int
    state: int
    mac: bytes
    address: str
    bridge: int
    vlan: int = 0
    is_deleted: bool = False
    flags: int = 0

    @property
    def is_guests(self) -> bool:
        """Of a forwarding table: whether it is an address behind a port, and not the port's own."""
        return bool(self.bridge) and not self.vlan and not self.state & NUD_PERMANENT

    @property
    def is_fixed(self) -> bool:
        """Of a forwarding table: whether it may name a port where the address is not.

        An operator made the entry. The bridge has not learned it, and may not change it.
        """
        return bool(self.state & NUD_NOARP or self.flags & NTF_STICKY)


class LinkChange(NamedTuple):
    """An interface was made, changed or deleted, or is a port of a bridge now."""

    interface: int
    is_deleted: bool = False


class Netlink:
    """What the relay asks the kernel, and what the kernel reports.

    The kernel drops notices when its queue is full, and goes on until all of the queue was read.
    Notices from before and after the gap must not be taken for all that has happened.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._notices = connection
        self._is_complete = True

    @classmethod
    def open(cls) -> "Netlink":
        connection = _open_socket()
        with suppress(PermissionError):  # and without CAP_NET_ADMIN, `add_address` fails
            connection.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, NOTICES_BYTES)
        connection.bind((0, RTMGRP_LINK | RTMGRP_NEIGH))
        connection.settimeout(0)
        return cls(connection)

    def on_notice(self, call: Callable[[], None]) -> None:
        """Have the event loop call this when there are notices to read, until `close`."""
        asyncio.get_running_loop().add_reader(self._notices, call)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._notices)
        self._notices.close()

    def neighbour(self, interface: int, address: str) -> bytes:
        """The MAC that packets to this address of an interface are sent to; empty if unknown."""
        family, packed = pack_address(address)
        found = _find(NEIGHBOUR.pack(family, interface, 0, 0, 0) + _attribute(NDA_DST, packed))
        return found.mac if found and not found.state & (NUD_INCOMPLETE | NUD_FAILED) else b""

    def forwarding_entry(self, bridge: int, mac: bytes) -> Neighbour | None:
        """Where a bridge has seen this MAC last; None if it has not."""
        master = _attribute(NDA_MASTER, struct.pack("=I", bridge))
        header = NEIGHBOUR.pack(AF_BRIDGE, 0, 0, 0, 0)
        found = _find(header + _attribute(NDA_LLADDR, mac) + master)
        return found if found and found.is_guests else None

    def notices(self) -> list[Neighbour | LinkChange] | None:
        """What has changed since the last call.

        None if the kernel had to drop some of it, or if there is more.
        """
        notices: list[Neighbour | LinkChange] = []
        for _ in range(NOTICES_MAX):
            try:
                notices += parse_notices(self._notices.recv(RECEIVE_BYTES))
            except BlockingIOError:
                was_complete, self._is_complete = self._is_complete, True
                return notices if was_complete else None
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self._is_complete = False
        self._is_complete = False
        return None


def add_address(interface: int, address: str) -> None:
    """Give an interface this address, unless it has it; OSError if that is not possible.

    An IPv6 address is used at once: every host has the same one, so a duplicate is expected. It
    is deprecated, which one that the interface has becomes too. So the kernel answers from it, and
    does not choose it for what the host itself sends, which the bridge's table would drop.
    """
    family, packed = pack_address(address)
    attributes = _attribute(IFA_LOCAL, packed) + _attribute(IFA_ADDRESS, packed)
    flags, if_present = 0, NLM_F_EXCL
    if family is socket.AF_INET6:
        if _is_deprecated(interface, packed):
            return  # a change wakes all programs that follow the addresses of the host
        attributes += _attribute(IFA_CACHEINFO, LIFETIMES.pack(0, UNLIMITED, 0, 0))
        flags, if_present = IFA_F_NODAD, NLM_F_REPLACE
    header = ADDRESS.pack(family, 8 * len(packed), flags, RT_SCOPE_LINK, interface)
    with suppress(FileExistsError):
        _call(RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | if_present, header + attributes)


def _is_deprecated(interface: int, address: bytes) -> bool:
    """Whether an interface has this IPv6 address, as a deprecated one."""
    try:
        lines = IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return False
    for found, index, _, _, flags, *_ in map(str.split, lines):
        if found == address.hex() and int(index, 16) == interface:
            return bool(int(flags, 16) & IFA_F_DEPRECATED)
    return False


def pack_address(address: str) -> tuple[socket.AddressFamily, bytes]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.inet_pton(family, address)


def _find(payload: bytes) -> Neighbour | None:
    try:
        return parse_neighbour(_call(RTM_GETNEIGH, 0, payload))
    except FileNotFoundError:
        return None


def nftables_generation() -> int:
    """A number that the kernel changes with every change of an nftables table; 0 if unknown."""
    try:
        response = _call(NFT_MSG_GETGEN, 0, NETFILTER.pack(0, 0, 0), NETLINK_NETFILTER)
    except OSError:
        return 0
    return int.from_bytes(_attributes(response, NETFILTER.size).get(NFTA_GEN_ID, b""), "big")


def _call(kind: int, flags: int, payload: bytes, family: int = socket.NETLINK_ROUTE) -> bytes:
    """The payload of the kernel's response, which comes at once; the OSError that it reports."""
    header = HEADER.pack(HEADER.size + len(payload), kind, NLM_F_REQUEST | flags, 0, 0)
    with _open_socket(family) as connection:
        connection.settimeout(RECEIVE_SECONDS_MAX)
        connection.send(header + payload)
        kind, response = next(messages(connection.recv(RECEIVE_BYTES)))
    if kind == NLMSG_ERROR and (number := -struct.unpack_from("=i", response)[0]):
        raise OSError(number, os.strerror(number))
    return response


def _open_socket(family: int = socket.NETLINK_ROUTE) -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family)


def parse_notices(data: bytes) -> Iterator[Neighbour | LinkChange]:
    for kind, payload in messages(data):
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            family, _, interface, _, _ = LINK.unpack_from(payload)
            # Of AF_BRIDGE, the interface has only left its bridge.
            yield LinkChange(interface, kind == RTM_DELLINK and family != AF_BRIDGE)
        elif kind in (RTM_NEWNEIGH, RTM_DELNEIGH):
            yield parse_neighbour(payload)._replace(is_deleted=kind == RTM_DELNEIGH)


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The type and payload of each message."""
    while len(data) >= HEADER.size:
        length, kind = HEADER.unpack_from(data)[:2]
        if not HEADER.size <= length <= len(data):
            raise ValueError(f"a netlink message of {length} bytes, with {len(data)} left")
        yield kind, data[HEADER.size : length]
        data = data[_align(length) :]


def parse_neighbour(payload: bytes) -> Neighbour:
    family, interface, state, flags, _ = NEIGHBOUR.unpack_from(payload)
    values = _attributes(payload, NEIGHBOUR.size)
    packed = values.get(NDA_DST, b"")
    kinds = {4: socket.AF_INET, 16: socket.AF_INET6}
    address = socket.inet_ntop(kinds[len(packed)], packed) if len(packed) in kinds else ""
    bridge, vlan = (
        int.from_bytes(values.get(kind, b""), sys.byteorder) for kind in (NDA_MASTER, NDA_VLAN)
    )
    mac = values.get(NDA_LLADDR, b"")
    return Neighbour(family, interface, state, mac, address, bridge, vlan, flags=flags)


def _attributes(payload: bytes, at: int) -> dict[int, bytes]:
    """The attributes that begin there, by their types."""
    values: dict[int, bytes] = {}
    while at + ATTRIBUTE.size <= len(payload):
        length, kind = ATTRIBUTE.unpack_from(payload, at)
        values[kind] = payload[at + ATTRIBUTE.size : at + length]
        at += _align(max(length, ATTRIBUTE.size))
    return values


def _attribute(kind: int, value: bytes) -> bytes:
    length = ATTRIBUTE.size + len(value)
    return ATTRIBUTE.pack(length, kind) + value.ljust(_align(len(value)), b"\0")


def _align(length: int) -> int:
    return (length + 3) & ~3
