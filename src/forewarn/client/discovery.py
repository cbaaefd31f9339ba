"""Finding the endpoint.

In a virtual network it has a fixed address. For a classic cloud service or VM outside of one, DHCP
option 245 has it (protocol 7). Only `ask_dhcp` opens a socket.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping

from forewarn.client.errors import ConnectionFailed, brief
from forewarn.client.http1 import Endpoint
from forewarn.client.protocol import DEFAULT_ENDPOINT
from forewarn.errors import Invalid

VARIABLES = ("FOREWARN_ENDPOINT", "SCHEDULEDEVENTSIP")
OPTION = 245
TIMEOUT_SECONDS = 10.0
PACKET_BYTES_MAX = 4096

_COOKIE = bytes((99, 130, 83, 99))
_OPTIONS_AT = 240


def discover(
    environ: Mapping[str, str], *, endpoint: str = "", ask_dhcp: Callable[[], str] | None = None
) -> str:
    """The endpoint's URL: `endpoint`, else a variable, else DHCP, else the usual one.

    The variables are FOREWARN_ENDPOINT and SCHEDULEDEVENTSIP, a URL or an address.

    `ask_dhcp` returns an address or an empty string; `forewarn.client.ask_dhcp` asks the network.
    """
    if endpoint:
        return _parse(endpoint, "endpoint")
    for variable in VARIABLES:
        if address := environ.get(variable, "").strip():
            return _parse(address, variable)
    if ask_dhcp is not None and (address := ask_dhcp()):
        return _parse(address, "the address from DHCP")
    return DEFAULT_ENDPOINT


def ask_dhcp(
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    server: tuple[str, int] = ("255.255.255.255", 67),
    own: tuple[str, int] = ("0.0.0.0", 68),  # noqa: S104 - offers arrive before there is an address
) -> str:
    """The address in the first DHCP offer that has one; empty after the timeout.

    Needs permission to use port 68. It requests an offer and accepts none, so the machine's own
    lease is unchanged.
    """
    import uuid  # slow to import on some systems

    transaction, card = os.urandom(4), uuid.getnode().to_bytes(6, "big")
    deadline = time.monotonic() + timeout_seconds
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            udp.bind(own)
            udp.sendto(dhcp_request(transaction, card), server)
            while (remaining := deadline - time.monotonic()) > 0:
                udp.settimeout(remaining)
                if address := dhcp_endpoint(udp.recv(PACKET_BYTES_MAX), transaction, card):
                    return address
    except TimeoutError:
        pass
    except OSError as error:
        raise ConnectionFailed(
            f"cannot send a DHCP request: {error.strerror or error};"
            f" it needs permission to use port {own[1]}"
        ) from error
    return ""


def dhcp_request(transaction: bytes, card: bytes) -> bytes:
    """A DHCPDISCOVER: a BOOTREQUEST over Ethernet with only the message type option."""
    assert (len(transaction), len(card)) == (4, 6)
    head = bytes((1, 1, 6, 0)) + transaction + bytes(20) + card
    return head.ljust(_OPTIONS_AT - len(_COOKIE), b"\0") + _COOKIE + bytes((53, 1, 1, 255))


def dhcp_endpoint(packet: bytes, transaction: bytes, card: bytes) -> str:
    """The address in option 245 of a reply to our request; empty without one."""
    is_ours = packet[:1] == b"\x02" and packet[4:8] == transaction and packet[28:34] == card
    if not is_ours or packet[_OPTIONS_AT - len(_COOKIE) : _OPTIONS_AT] != _COOKIE:
        return ""
    at = _OPTIONS_AT
    while at + 1 < len(packet) and packet[at] != 255:
        if packet[at] == 0:  # padding is the only option without a length
            at += 1
            continue
        value = packet[at + 2 : at + 2 + packet[at + 1]]
        if packet[at] == OPTION and len(value) == packet[at + 1] == 4:
            return ".".join(map(str, value))
        at += 2 + packet[at + 1]
    return ""


def _parse(text: str, source: str) -> str:
    """A URL, or one made from an address with or without a port."""
    url = text
    if "://" not in text:
        is_ipv6 = text.count(":") > 1 and not text.startswith("[")
        url = f"http://[{text}]" if is_ipv6 else f"http://{text}"
    try:
        Endpoint.parse(url)
    except Invalid as error:
        raise Invalid(
            f"{source} is {brief(text)}; expected an address or a URL like {DEFAULT_ENDPOINT}"
        ) from error
    return url
