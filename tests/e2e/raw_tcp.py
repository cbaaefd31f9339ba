"""TCP packets with a source MAC of one's choice, from a guest's interface."""

import socket
import struct
from contextlib import suppress

from tests.e2e.bridge_world import in_namespace

ETH_P_ALL, ETH_P_IP, ETH_P_ARP = 3, 0x0800, 0x0806
SYN, PUSH, ACK = 0x02, 0x08, 0x10
MORE_FRAGMENTS = 0x2000
SECONDS_MAX = 20.0


def checksum(data: bytes) -> int:
    padded = data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    total = (total & 0xFFFF) + (total >> 16)
    return ~int(total + (total >> 16)) & 0xFFFF


def tcp_packet(
    source: str, target: str, port: int, flags: int, number: int, theirs: int = 0, data: bytes = b""
) -> bytes:
    """An IPv4 packet from a port to port 80."""
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    length = 20 + len(data)
    tcp = struct.pack("!HHIIBBHHH", port, 80, number, theirs, 5 << 4, flags, 65535, 0, 0)
    pseudo = addresses + struct.pack("!BBH", 0, 6, length)
    tcp = tcp[:16] + struct.pack("!H", checksum(pseudo + tcp + data)) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 1, 0, 64, 6, 0)
    return ip[:10] + struct.pack("!H", checksum(ip + addresses)) + addresses + tcp + data


def split_packet(packet: bytes, number: int) -> list[bytes]:
    """An IPv4 packet as two fragments; the flags of TCP are in the second one."""
    parts = []
    for data, offset in ((packet[20:28], MORE_FRAGMENTS), (packet[28:], 1)):
        lengths = struct.pack("!HHH", 20 + len(data), number & 0xFFFF, offset)
        head = packet[:2] + lengths + packet[8:10] + b"\0\0" + packet[12:20]
        parts.append(head[:10] + struct.pack("!H", checksum(head)) + head[12:] + data)
    return parts


class Wire:
    """The interface `eth0` of a guest: what it sends and receives, byte by byte.

    Without a namespace, of the one that this process is in.
    """

    def __init__(self, namespace: str = "") -> None:
        def open_socket() -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            made.bind(("eth0", ETH_P_ALL))
            made.settimeout(SECONDS_MAX)
            return made

        self._socket = in_namespace(namespace, open_socket) if namespace else open_socket()

    def close(self) -> None:
        self._socket.close()

    def send(self, source: bytes, target: bytes, kind: int, payload: bytes) -> None:
        self._socket.send(target + source + struct.pack("!H", kind) + payload)

    def receive(self, kind: int, *parts: bytes) -> bytes:
        """The payload of the next packet that contains all of these."""
        while True:  # ends with the timeout of the socket
            frame, (_, _, direction, *_) = self._socket.recvfrom(65536)
            is_kind = frame[12:14] == struct.pack("!H", kind)
            is_received = is_kind and direction != socket.PACKET_OUTGOING
            if is_received and all(part in frame[14:] for part in parts):
                return frame[14:]

    def received(self) -> list[bytes]:
        """The frames that have arrived and were not read yet."""
        frames = []
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:  # ends when there are no more
                frame, (_, _, direction, *_) = self._socket.recvfrom(65536)
                if direction != socket.PACKET_OUTGOING:
                    frames.append(frame)
        self._socket.settimeout(SECONDS_MAX)
        return frames


class SlowConnection:
    """A connection from an address that only these packets use, with any MAC."""

    def __init__(self, wire: Wire, mac: bytes, gateway: bytes, source: str, target: str) -> None:
        self._wire, self._mac, self._gateway = wire, mac, gateway
        self._source, self._target = (socket.inet_aton(each) for each in (source, target))
        self._number = 1000

    def begin(self) -> None:
        """Send the first packet, answer the ARP request, and read the server's number."""
        self._send(self._mac, SYN, self._number, 0)
        self._wire.receive(ETH_P_ARP, self._source)
        arp = struct.pack("!HHBBH", 1, ETH_P_IP, 6, 4, 2) + self._mac + self._source
        reply = arp + self._gateway + self._target
        self._wire.send(self._mac, self._gateway, ETH_P_ARP, reply)
        packet = self._wire.receive(ETH_P_IP, self._target + self._source)
        self._theirs = struct.unpack_from("!I", packet, 24)[0] + 1
        self._number += 1

    def finish(self, mac: bytes, request: bytes) -> None:
        self._send(mac, ACK, self._number, self._theirs)
        self._send(mac, ACK | PUSH, self._number, self._theirs, request)

    def _send(self, mac: bytes, flags: int, number: int, theirs: int, data: bytes = b"") -> None:
        source, target = (socket.inet_ntoa(each) for each in (self._source, self._target))
        packet = tcp_packet(source, target, 40000, flags, number, theirs, data)
        self._wire.send(mac, self._gateway, ETH_P_IP, packet)
