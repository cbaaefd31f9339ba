"""Linux's neighbour tables, bridge forwarding tables and addresses, by rtnetlink messages.

Only the few messages that the relay needs, without a library: see rtnetlink(7) and
linux/neighbour.h. Each function is one request to the kernel, which is answered at once.
"""

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import NamedTuple

AF_BRIDGE = 7
NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
NLMSG_ERROR = 2
RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR = 16, 17, 20
RTM_NEWNEIGH, RTM_DELNEIGH, RTM_GETNEIGH = 28, 29, 30
RTMGRP_LINK, RTMGRP_NEIGH = 0x1, 0x4
NDA_DST, NDA_LLADDR, NDA_VLAN, NDA_MASTER = 1, 2, 5, 9
IFA_ADDRESS, IFA_LOCAL = 1, 2
IFA_F_NODAD = 0x02
RT_SCOPE_LINK = 253
NUD_INCOMPLETE, NUD_FAILED, NUD_PERMANENT = 0x01, 0x20, 0x80

HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
NEIGHBOUR = struct.Struct("=BxxxiHBB")  # ndmsg: family, index, state, flags, type
LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
ERROR = struct.Struct("=i")

RECEIVE_BYTES = 64 * 1024
RECEIVE_SECONDS_MAX = 2.0
NOTICES_BYTES = 4 << 20
"""What the kernel may queue for us: some thousand changes."""


class Neighbour(NamedTuple):
    """An entry of a neighbour table, or with family AF_BRIDGE of a forwarding table.

    `interface` is its index: of a forwarding table, the port that leads to `mac`.
    """

    family: int
    interface: int
    state: int
    mac: bytes
    address: str
    bridge: int
    vlan: int = 0

    @property
    def is_learned(self) -> bool:
        """Of a forwarding table: whether it is an address behind a port, and not the port's own.

        Entries of VLANs do not count: the relay gets untagged packets.
        """
        return bool(self.bridge) and not self.vlan and not self.state & NUD_PERMANENT


class Notice(NamedTuple):
    """A change: of an interface if `neighbour` is None, else of this entry."""

    interface: int
    is_deleted: bool = False
    neighbour: Neighbour | None = None


class Netlink:
    """One socket for requests, and one for the notices of changes."""

    def __init__(self) -> None:
        self._requests = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._requests.settimeout(RECEIVE_SECONDS_MAX)
        self._notices = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._notices.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NOTICES_BYTES)
        self._notices.bind((0, RTMGRP_LINK | RTMGRP_NEIGH))
        self._notices.settimeout(0)
        self._sequence = count(1)

    def close(self) -> None:
        self._requests.close()
        self._notices.close()

    def neighbour(self, index: int, address: str) -> bytes:
        """The MAC that packets to this address of an interface are sent to; empty if unknown."""
        packed = ipaddress.ip_address(address).packed
        family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
        header = NEIGHBOUR.pack(family, index, 0, 0, 0)
        found = self._get_neighbour(header + _encode_attribute(NDA_DST, packed))
        if found is None or found.state & (NUD_INCOMPLETE | NUD_FAILED):
            return b""
        return found.mac

    def bridge_port(self, bridge: int, mac: bytes) -> int:
        """The interface at which a bridge has seen this MAC last; 0 if it has not."""
        header = NEIGHBOUR.pack(AF_BRIDGE, 0, 0, 0, 0) + _encode_attribute(NDA_LLADDR, mac)
        master = _encode_attribute(NDA_MASTER, struct.pack("=I", bridge))
        found = self._get_neighbour(header + master)
        return found.interface if found is not None and found.is_learned else 0

    def add_address(self, index: int, address: str) -> None:
        """Give an interface this address, unless it has it; OSError if that is not possible.

        An IPv6 address is used at once: every host has the same one, so a duplicate is expected.
        """
        packed = ipaddress.ip_address(address).packed
        is_v4 = len(packed) == 4
        family = socket.AF_INET if is_v4 else socket.AF_INET6
        flags = 0 if is_v4 else IFA_F_NODAD
        header = ADDRESS.pack(family, 8 * len(packed), flags, RT_SCOPE_LINK, index)
        attributes = b"".join(_encode_attribute(kind, packed) for kind in (IFA_LOCAL, IFA_ADDRESS))
        with suppress(FileExistsError):
            self._call(RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, header + attributes)

    def name(self, interface: int) -> str:
        """The name of an interface; empty if it is gone."""
        try:
            return socket.if_indextoname(interface)
        except OSError:
            return ""

    def notices(self) -> list[Notice] | None:
        """What has changed since the last call; None if the kernel had to drop some of it."""
        notices: list[Notice] = []
        while True:
            try:
                notices += parse_notices(self._notices.recv(RECEIVE_BYTES))
            except BlockingIOError:
                return notices
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                return None

    def _get_neighbour(self, payload: bytes) -> Neighbour | None:
        try:
            return parse_neighbour(self._call(RTM_GETNEIGH, 0, payload))
        except FileNotFoundError:
            return None

    def _call(self, kind: int, flags: int, payload: bytes) -> bytes:
        """The payload of the response; the OSError that the kernel reports."""
        own = next(self._sequence) & 0xFFFFFFFF
        header = HEADER.pack(HEADER.size + len(payload), kind, NLM_F_REQUEST | flags, own, 0)
        self._requests.send(header + payload)
        while True:
            for kind, sequence, response in messages(self._requests.recv(RECEIVE_BYTES)):
                if sequence != own:
                    continue  # the response to a request that took too long
                if kind == NLMSG_ERROR and (number := -ERROR.unpack_from(response)[0]):
                    raise OSError(number, os.strerror(number))
                return response


def parse_notices(data: bytes) -> Iterator[Notice]:
    for kind, _, payload in messages(data):
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            yield Notice(LINK.unpack_from(payload)[2], kind == RTM_DELLINK)
        elif kind in (RTM_NEWNEIGH, RTM_DELNEIGH):
            neighbour = parse_neighbour(payload)
            yield Notice(neighbour.interface, kind == RTM_DELNEIGH, neighbour)


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The type, sequence number and payload of each message."""
    at = 0
    while at + HEADER.size <= len(data):
        length, kind, _, sequence, _ = HEADER.unpack_from(data, at)
        if not HEADER.size <= length <= len(data) - at:
            raise ValueError(f"a netlink message of {length} bytes, with {len(data) - at} left")
        yield kind, sequence, data[at + HEADER.size : at + length]
        at += _align(length)


def parse_neighbour(payload: bytes) -> Neighbour:
    family, index, state, _, _ = NEIGHBOUR.unpack_from(payload)
    attributes = dict(_attributes(payload[NEIGHBOUR.size :]))
    address = attributes.get(NDA_DST, b"")
    return Neighbour(
        family,
        index,
        state,
        attributes.get(NDA_LLADDR, b""),
        str(ipaddress.ip_address(address)) if len(address) in (4, 16) else "",
        int.from_bytes(attributes.get(NDA_MASTER, b""), sys.byteorder),
        int.from_bytes(attributes.get(NDA_VLAN, b""), sys.byteorder),
    )


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + ATTRIBUTE.size <= len(data):
        length, kind = ATTRIBUTE.unpack_from(data, at)
        if length < ATTRIBUTE.size:
            return
        yield kind, data[at + ATTRIBUTE.size : at + length]
        at += _align(length)


def _align(length: int) -> int:
    return (length + 3) & ~3


def _encode_attribute(kind: int, value: bytes) -> bytes:
    length = ATTRIBUTE.size + len(value)
    return ATTRIBUTE.pack(length, kind) + value.ljust(_align(len(value)), b"\0")
