"""Where the endpoint is.

Inside a virtual network it has a fixed address; for a classic cloud service or VM outside one, DHCP
tells it in option 245 (protocol 7). What only reads and writes bytes is pure; a socket is opened by
`ask_dhcp` alone.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping

from forewarn.client.errors import ConnectionFailed, brief
from forewarn.client.http1 import Endpoint
from forewarn.client.protocol import DEFAULT_ENDPOINT
from forewarn.errors import Invalid

VARIABLE = "SCHEDULEDEVENTSIP"
OPTION = 245
TIMEOUT_SECONDS = 10.0
PACKET_BYTES_MAX = 4096

_COOKIE = bytes((99, 130, 83, 99))
_OPTIONS_AT = 240


def discover(
    environ: Mapping[str, str], *, endpoint: str = "", ask_dhcp: Callable[[], str] | None = None
) -> str:
    """The endpoint's URL: the one given, or what SCHEDULEDEVENTSIP says, or what DHCP says if it
    may be asked, or the usual one.

    `ask_dhcp` gives an address, or nothing; `forewarn.client.ask_dhcp` is one that asks the
    network.
    """
    if endpoint:
        return _checked(endpoint, "endpoint")
    if told := environ.get(VARIABLE, "").strip():
        return _checked(told, VARIABLE)
    if ask_dhcp is not None and (told := ask_dhcp()):
        return _checked(told, "what DHCP says")
    return DEFAULT_ENDPOINT


def ask_dhcp(
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    server: tuple[str, int] = ("255.255.255.255", 67),
    own: tuple[str, int] = ("0.0.0.0", 68),
) -> str:
    """Ask every DHCP server in reach, once; the address in the first offer that has one, or nothing
    when the time is up.

    Needs the right to use port 68. It asks for an offer and takes none, so the machine's own lease
    stays as it is.
    """
    import uuid  # it may look for the network card when it is first asked

    transaction, card = os.urandom(4), uuid.getnode().to_bytes(6, "big")
    deadline = time.monotonic() + timeout_seconds
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asking.bind(own)
            asking.sendto(dhcp_request(transaction, card), server)
            while (
                rest := deadline - time.monotonic()
            ) > 0:  # ends with an offer for us, or with the time
                asking.settimeout(rest)
                if found := dhcp_endpoint(asking.recv(PACKET_BYTES_MAX), transaction, card):
                    return found
    except TimeoutError:
        pass
    except OSError as error:
        raise ConnectionFailed(
            f"DHCP cannot be asked: {error.strerror or error}; it needs the right to use port {own[1]}"
        ) from error
    return ""


def dhcp_request(transaction: bytes, card: bytes) -> bytes:
    """A DHCPDISCOVER: a BOOTREQUEST over Ethernet with the one option that says so.

    The rest of the head is zero.
    """
    assert (len(transaction), len(card)) == (4, 6)
    head = bytes((1, 1, 6, 0)) + transaction + bytes(20) + card
    return head.ljust(_OPTIONS_AT - len(_COOKIE), b"\0") + _COOKIE + bytes((53, 1, 1, 255))


def dhcp_endpoint(packet: bytes, transaction: bytes, card: bytes) -> str:
    """The address in option 245 of an answer to our request.

    Nothing if there is none, or if the packet is for somebody else.
    """
    is_ours = packet[:1] == b"\x02" and packet[4:8] == transaction and packet[28:34] == card
    if not is_ours or packet[_OPTIONS_AT - len(_COOKIE) : _OPTIONS_AT] != _COOKIE:
        return ""
    at = _OPTIONS_AT
    while at + 1 < len(packet) and packet[at] != 255:  # ends with the packet, or where it says so
        if packet[at] == 0:  # padding: the one option without a length
            at += 1
            continue
        value = packet[at + 2 : at + 2 + packet[at + 1]]
        if packet[at] == OPTION and len(value) == packet[at + 1] == 4:
            return ".".join(map(str, value))
        at += 2 + packet[at + 1]
    return ""


def _checked(told: str, where: str) -> str:
    """A URL. An address, with a port or without, is made one."""
    url = told
    if "://" not in told:
        url = (
            f"http://[{told}]"
            if told.count(":") > 1 and not told.startswith("[")
            else f"http://{told}"
        )
    try:
        Endpoint.parse(url)
    except Invalid as problem:
        raise Invalid(
            f"{where} is {brief(told)}; expected an address or a URL like {DEFAULT_ENDPOINT}"
        ) from problem
    return url
