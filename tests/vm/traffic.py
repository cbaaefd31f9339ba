"""What a guest and the metadata address of its host send each other, as the host sees it.

Read at the guest's port of the bridge, so it is what the host's relay received and answered, and it
does not matter how long an emulated guest takes to print a result.
"""

import ctypes
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from tests.vm.network import Namespace

ALIAS = socket.inet_aton("169.254.169.254")
ETH_P_ALL, ETH_P_IP, TCP = 3, 0x0800, 6
FIN_OR_RESET = 0x05
STOP_SECONDS = 0.5
AGENT, WAIT = b"User-Agent: forewarn/", b"Prefer: wait="
WAIT_SECONDS_MAX = 35
"""The agent waits for 30 seconds. After this time a long poll without a response is a lost one."""
PORTS = "vnet"
"""How libvirt names the ports of guests."""
SO_ATTACH_FILTER = 26
LOAD_HALF, LOAD, JUMP_IF_EQUAL, RETURN = 0x28, 0x20, 0x15, 0x06
FILTER = (
    (LOAD_HALF, 0, 0, 12),
    (JUMP_IF_EQUAL, 0, 5, ETH_P_IP),
    (LOAD, 0, 0, 26),
    (JUMP_IF_EQUAL, 2, 0, int.from_bytes(ALIAS)),
    (LOAD, 0, 0, 30),
    (JUMP_IF_EQUAL, 0, 1, int.from_bytes(ALIAS)),
    (RETURN, 0, 0, 65536),
    (RETURN, 0, 0, 0),
)
"""For the kernel: packets to and from the metadata address, and nothing of a migration, which would
fill the buffer of the socket. See https://docs.kernel.org/networking/filter.html.
"""


class Message(NamedTuple):
    """A packet with data, or the last one of a connection.

    `port` is the guest's port of TCP; `at` is the time of the machine.
    """

    at: float
    is_request: bool
    port: int
    text: bytes


class Traffic:
    """The requests of a guest, and their responses, on one host within this."""

    def __init__(self, namespace: Namespace, mac: str) -> None:
        self._suffix = bytes.fromhex(mac.replace(":", ""))[3:]  # of both its interfaces
        with namespace.entered():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        attach_filter(self._socket)
        self._socket.settimeout(STOP_SECONDS)
        self._messages: list[Message] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        self._socket.close()

    def answered_at(self, since: float, client: bytes = b"") -> float:
        """When the host first sent a 200 to a request that it received after this time.

        0 if it has not. With `client`, only for requests with this in their header.
        """
        asked = set[int]()
        for message in list(self._messages):
            if message.at < since:
                continue
            if message.is_request and client in message.text:
                asked.add(message.port)
            elif message.port in asked and message.text.startswith(b"HTTP/1.1 200"):
                return message.at
        return 0.0

    def has_open_wait(self, at: float) -> bool:
        """Whether a long poll had been received and not been answered at a time."""
        last = {message.port: message for message in list(self._messages) if message.at <= at}
        return any(
            each.is_request and WAIT in each.text and at - each.at < WAIT_SECONDS_MAX
            for each in last.values()
        )

    def _run(self) -> None:
        while not self._has_ended.is_set():
            with suppress(TimeoutError):
                frame, (interface, *_) = self._socket.recvfrom(65536)
                if interface.startswith(PORTS):
                    self._add(frame, time.time())

    def _add(self, frame: bytes, at: float) -> None:
        ip = frame[14:]
        is_request = ip[16:20] == ALIAS
        own = frame[9:12] if is_request else frame[3:6]
        if own != self._suffix or ip[9] != TCP:
            return
        tcp = ip[(ip[0] & 15) * 4 : struct.unpack_from("!H", ip, 2)[0]]
        text = tcp[(tcp[12] >> 4) * 4 :]
        if text or tcp[13] & FIN_OR_RESET:
            ports = struct.unpack_from("!HH", tcp)
            self._messages.append(Message(at, is_request, ports[not is_request], text))


def attach_filter(to: socket.socket) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in FILTER))
    program = struct.pack("HL", len(FILTER), ctypes.addressof(code))
    to.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
