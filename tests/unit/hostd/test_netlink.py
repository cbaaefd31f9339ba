"""Messages of the kernel, as captured on Linux 6.18 (little-endian), and broken ones."""

import errno
import os
import socket
from collections.abc import Sequence
from typing import cast

import pytest

from forewarn.hostd.netlink import (
    AF_BRIDGE,
    NOTICES_MAX,
    LinkChange,
    Neighbour,
    Netlink,
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
DELETED_LINK = bytes.fromhex("20000000110000000000000000000000000001000500000043100000ffffffff")
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
    assert entry.is_guests


def test_permanent_entry_is_not_a_guests() -> None:
    """Ports and the bridge have addresses of their own in the forwarding table."""
    assert not parse(changed(FORWARDING, 24, 0x80)).is_guests


def test_entry_of_an_interface_itself_is_not_a_guests() -> None:
    """`self` entries have no bridge: multicast addresses that an interface receives."""
    without_bridge = FORWARDING.replace(bytes.fromhex("0800090002000000"), b"")
    shorter = changed(without_bridge, 0, len(without_bridge))

    assert not parse(shorter).is_guests


def test_entry_of_a_vlan_is_not_a_guests() -> None:
    vlan = FORWARDING[:28] + bytes.fromhex("0600050002000000") + FORWARDING[28:]

    assert not parse(changed(vlan, 0, len(vlan))).is_guests


def test_ipv6_neighbour_has_its_address_in_the_usual_form() -> None:
    payload = bytes.fromhex("0a000000020000000200000114000100fe80000000000000009a67fffe1bd623")

    assert parse_neighbour(payload).address == "fe80::9a:67ff:fe1b:d623"


def test_notices_are_read_from_several_messages() -> None:
    deleted = changed(FORWARDING, 4, 29)

    assert list(parse_notices(DELETED_LINK + NEIGHBOUR + deleted)) == [
        LinkChange(5, is_deleted=True),
        parse(NEIGHBOUR),
        parse(FORWARDING)._replace(is_deleted=True),
    ]


def test_interface_that_leaves_its_bridge_is_not_deleted() -> None:
    """The kernel reports that as a deletion, of the family AF_BRIDGE."""
    assert list(parse_notices(changed(DELETED_LINK, 16, AF_BRIDGE))) == [LinkChange(5)]


def test_static_and_sticky_entries_are_fixed() -> None:
    """Frames from another port do not change a sticky one, so it says nothing about its guest."""
    assert not parse(FORWARDING).is_fixed
    assert parse(changed(FORWARDING, 24, 0x40)).is_fixed
    assert parse(changed(FORWARDING, 26, 0x40)).is_fixed


class Queue:
    """A socket with messages and errors to read. An empty one would block."""

    def __init__(self, *items: bytes | int) -> None:
        self.items = [*items]

    def recv(self, size: int) -> bytes:
        item = self.items.pop(0) if self.items else errno.EAGAIN
        if isinstance(item, int):
            raise OSError(item, os.strerror(item))
        return item


def netlink(*items: bytes | int) -> Netlink:
    return Netlink(cast("socket.socket", Queue(*items)))


@pytest.mark.parametrize(
    "items", [(errno.ENOBUFS, FORWARDING), (FORWARDING, errno.ENOBUFS, FORWARDING, FORWARDING)]
)
def test_notices_around_a_gap_are_lost_too(items: Sequence[bytes | int]) -> None:
    """What the kernel has queued is older than what it dropped, and it drops until all is read."""
    kernel = netlink(*items)

    assert kernel.notices() is None
    assert kernel.notices() == []


def test_notices_are_incomplete_until_all_are_read() -> None:
    kernel = netlink(*[FORWARDING] * (NOTICES_MAX + 1))

    assert kernel.notices() is None
    assert kernel.notices() is None
    assert kernel.notices() == []


def test_other_messages_are_ignored() -> None:
    assert list(parse_notices(changed(FORWARDING, 4, 99))) == []


@pytest.mark.parametrize("length", [0, 15, 200])
def test_message_with_a_wrong_length_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match=f"message of {length} bytes, with 76 left"):
        list(messages(changed(NEIGHBOUR, 0, length)))


@pytest.mark.parametrize("size", range(28, len(FORWARDING), 5))
def test_cut_attributes_do_not_break_the_parser(size: int) -> None:
    parse_neighbour(FORWARDING[16:size])
