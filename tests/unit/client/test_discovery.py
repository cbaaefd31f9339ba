"""Finding the endpoint, and the packets of DHCP."""

import pytest

from forewarn.client import AsyncClient, Client, discover
from forewarn.client.discovery import dhcp_endpoint, dhcp_request
from forewarn.errors import Invalid

TRANSACTION = bytes.fromhex("01020304")
CARD = bytes.fromhex("000d3a46e876")
USUAL = "http://169.254.169.254"


def offer(
    *options: bytes, operation: int = 2, transaction: bytes = TRANSACTION, card: bytes = CARD
) -> bytes:
    """A DHCPOFFER with these options."""
    head = bytes((operation, 1, 6, 0)) + transaction + bytes(20) + card
    return head.ljust(236, b"\0") + bytes.fromhex("63825363") + b"".join(options)


ENDPOINT = bytes((245, 4, 168, 63, 129, 16))
END = b"\xff"


def never() -> str:
    raise AssertionError("DHCP was used")


def test_explicit_endpoint_comes_first() -> None:
    assert (
        discover(
            {"SCHEDULEDEVENTSIP": "10.0.0.1"}, endpoint="http://127.0.0.1:8080", ask_dhcp=never
        )
        == "http://127.0.0.1:8080"
    )


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("168.63.129.16", "http://168.63.129.16"),
        (" 168.63.129.16 ", "http://168.63.129.16"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("fd00::1", "http://[fd00::1]"),
        ("[fd00::1]:81", "http://[fd00::1]:81"),
        ("http://127.0.0.1:8080/as/web-0", "http://127.0.0.1:8080/as/web-0"),
    ],
)
def test_variable_of_the_published_samples_comes_second(value: str, url: str) -> None:
    """It has an address; a lab may need a port or a whole URL."""
    assert discover({"SCHEDULEDEVENTSIP": value}, ask_dhcp=never) == url


def test_own_variable_comes_before_that_of_the_samples() -> None:
    variables = {"FOREWARN_ENDPOINT": "http://127.0.0.1:81", "SCHEDULEDEVENTSIP": "10.0.0.1"}
    assert discover(variables, ask_dhcp=never) == "http://127.0.0.1:81"
    assert discover({**variables, "FOREWARN_ENDPOINT": " "}) == "http://10.0.0.1"


@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_client_without_an_argument_discovers_its_endpoint(
    make: type[Client | AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Client()` is what one types first."""
    monkeypatch.delenv("FOREWARN_ENDPOINT", raising=False)
    monkeypatch.delenv("SCHEDULEDEVENTSIP", raising=False)
    assert repr(make()) == f"<{make.__name__} of 169.254.169.254>"
    monkeypatch.setenv("FOREWARN_ENDPOINT", "http://127.0.0.1:81")
    assert repr(make()) == f"<{make.__name__} of 127.0.0.1:81>"
    assert repr(make("http://h")) == f"<{make.__name__} of h>"


def test_dhcp_comes_third_and_only_if_requested() -> None:
    assert discover({}, ask_dhcp=lambda: "168.63.129.16") == "http://168.63.129.16"
    assert discover({}) == USUAL


def test_usual_address_comes_last() -> None:
    assert discover({"SCHEDULEDEVENTSIP": ""}, ask_dhcp=lambda: "") == USUAL


@pytest.mark.parametrize("value", ["not an address", "https://host", "1.2.3.4:port", "host\r\n.x"])
def test_invalid_variable_is_rejected(value: str) -> None:
    """Silently using another address would hide the mistake."""
    with pytest.raises(Invalid, match="SCHEDULEDEVENTSIP"):
        discover({"SCHEDULEDEVENTSIP": value})


def test_dhcp_request_is_that_of_the_published_sample() -> None:
    """Head of a BOOTREQUEST, transaction at 4, hardware address at 28, cookie at 236, message type
    DISCOVER, end.
    """
    request = dhcp_request(TRANSACTION, CARD)

    assert len(request) == 244
    assert request[:12] == bytes.fromhex("01010600 01020304 00000000")
    assert request[28:34] == CARD
    assert request[236:] == bytes.fromhex("63825363 350101 ff")
    assert set(request[12:28] + request[34:236]) == {0}


@pytest.mark.parametrize(
    "packet",
    [
        offer(ENDPOINT, END),
        offer(ENDPOINT),
        offer(b"\x35\x01\x02", b"\0\0\0", b"\x03\x04\x0a\x00\x00\x01", ENDPOINT, END),
        offer(ENDPOINT, END) + bytes(60),
    ],
)
def test_option_245_has_the_endpoint(packet: bytes) -> None:
    """Padding has no length byte, which the published sample overlooks."""
    assert dhcp_endpoint(packet, TRANSACTION, CARD) == "168.63.129.16"


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x02",
        offer(),
        offer(END, ENDPOINT),
        offer(b"\x35\x01\x02", END),
        offer(b"\xf5"),
        offer(b"\xf5\x04\xa8\x3f\x81"),
        offer(b"\xf5\x03\xa8\x3f\x81", END),
        offer(b"\xf5\x08" + bytes(8), END),
        offer(b"\xf5\x08" + bytes(4)),
        offer(b"\x03\xff" + ENDPOINT),
        offer(ENDPOINT, operation=1),
        offer(ENDPOINT, transaction=bytes(4)),
        offer(ENDPOINT, card=bytes(6)),
        offer(ENDPOINT).replace(bytes.fromhex("63825363"), bytes(4)),
    ],
)
def test_other_packets_are_ignored(packet: bytes) -> None:
    assert dhcp_endpoint(packet, TRANSACTION, CARD) == ""
