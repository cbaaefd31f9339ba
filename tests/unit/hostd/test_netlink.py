"""Messages of the kernel, as captured on Linux 6.18 (little-endian), and broken ones."""

import pytest

from forewarn.hostd.netlink import (
    AF_BRIDGE,
    Neighbour,
    Notice,
    messages,
    parse_neighbour,
    parse_notices,
)

NEIGHBOUR = bytes.fromhex(
    "4c0000001c00000007000000b0510000020000000200000008000001080001000a0900020a00020066072c2cd9570000"
    "080004000000000014000300aa1700003a0000003a00000002000000"
)
"""The response for 10.9.0.2 on interface 2, in state DELAY."""
FORWARDING = bytes.fromhex(
    "4c0000001c00000007000000b05100000700000003000000020000000a00020066072c2cd957000008000900"
    "0200000008000f00000000001400030000000000400000003a00000000000000"
)
"""The response for a MAC at port 3 of bridge 2."""
MAC = bytes.fromhex("66072c2cd957")


def parse(data: bytes) -> Neighbour:
    ((_, payload),) = messages(data)
    return parse_neighbour(payload)


def changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def test_neighbour_has_the_mac_of_an_address() -> None:
    assert parse(NEIGHBOUR) == Neighbour(2, 2, 0x08, MAC, "10.9.0.2", 0)


def test_forwarding_entry_has_the_port_and_the_bridge() -> None:
    entry = parse(FORWARDING)

    assert entry == Neighbour(AF_BRIDGE, 3, 0x02, MAC, "", 2)
    assert entry.is_learned


def test_permanent_entry_is_not_a_guests() -> None:
    """Ports and the bridge have addresses of their own in the forwarding table."""
    assert not parse(changed(FORWARDING, 24, 0x80)).is_learned


def test_entry_of_an_interface_itself_is_not_a_guests() -> None:
    """`self` entries have no bridge: multicast addresses that an interface receives."""
    without_bridge = FORWARDING.replace(bytes.fromhex("0800090002000000"), b"")
    shorter = changed(without_bridge, 0, len(without_bridge))

    assert not parse(shorter).is_learned


def test_entry_of_a_vlan_is_not_a_guests() -> None:
    vlan = FORWARDING[:28] + bytes.fromhex("0600050002000000") + FORWARDING[28:]

    assert not parse(changed(vlan, 0, len(vlan))).is_learned


def test_ipv6_neighbour_has_its_address_in_the_usual_form() -> None:
    payload = bytes.fromhex("0a000000020000000200000114000100fe80000000000000009a67fffe1bd623")

    assert parse_neighbour(payload).address == "fe80::9a:67ff:fe1b:d623"


def test_notices_are_read_from_several_messages() -> None:
    link = bytes.fromhex("20000000110000000000000000000000000001000500000043100000ffffffff")
    deleted = changed(FORWARDING, 4, 29)

    assert list(parse_notices(link + NEIGHBOUR + deleted)) == [
        Notice(5, is_deleted=True),
        Notice(2, neighbour=parse(NEIGHBOUR)),
        Notice(3, is_deleted=True, neighbour=parse(FORWARDING)),
    ]


def test_other_messages_are_ignored() -> None:
    assert list(parse_notices(changed(FORWARDING, 4, 99))) == []


@pytest.mark.parametrize("length", [0, 15, 200])
def test_message_with_a_wrong_length_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match=f"message of {length} bytes, with 76 left"):
        list(messages(changed(NEIGHBOUR, 0, length)))


@pytest.mark.parametrize("size", range(28, len(FORWARDING), 5))
def test_cut_attributes_do_not_break_the_parser(size: int) -> None:
    parse_neighbour(FORWARDING[16:size])
