"""Which port a peer is at: what is cached, and what is refused."""

from collections.abc import Callable

import pytest

from forewarn.errors import Unavailable
from forewarn.hostd.netlink import AF_BRIDGE, LinkChange, Neighbour, Netlink
from forewarn.hostd.ports import DOUBT_SECONDS, ENTRIES_MAX, BridgePorts, Peer, check_bridge

BRIDGE, PORT, OTHER_PORT = 2, 3, 4
MAC, OTHER_MAC = b"\x02\0\0\0\0\x01", b"\x02\0\0\0\0\x02"
PEER = Peer("10.9.0.2", MAC)
REACHABLE, STATIC, PERMANENT = 0x02, 0x40, 0x80


class Kernel(Netlink):
    """Its tables, and how often it was asked. Without a queue, notices were lost.

    `during` happens while it is asked for a port.
    """

    def __init__(self) -> None:
        self.macs = {"10.9.0.2": MAC}
        self.ports = {MAC: PORT}
        self.state = REACHABLE
        self.problem: OSError | None = None
        self.requests = 0
        self.queue: list[Neighbour | LinkChange] | None = []
        self.during: Callable[[], None] = lambda: None

    def neighbour(self, interface: int, address: str) -> bytes:
        assert interface == BRIDGE
        self.requests += 1
        return self.macs.get(address, b"")

    def forwarding_entry(self, bridge: int, mac: bytes) -> Neighbour | None:
        assert bridge == BRIDGE
        self.requests += 1
        self.during()
        if self.problem:
            raise self.problem
        port = self.ports.get(mac)
        return Neighbour(AF_BRIDGE, port, self.state, mac, "", BRIDGE) if port else None

    def notices(self) -> list[Neighbour | LinkChange] | None:
        queue, self.queue = self.queue, []
        return queue

    def report(self, *notices: Neighbour | LinkChange) -> None:
        assert self.queue is not None
        self.queue += notices

    def learn(self, mac: bytes, port: int) -> None:
        self.ports[mac] = port
        self.report(Neighbour(AF_BRIDGE, port, REACHABLE, mac, "", BRIDGE))

    def delete(self, mac: bytes) -> None:
        entry = Neighbour(AF_BRIDGE, self.ports.pop(mac), REACHABLE, mac, "", BRIDGE)
        self.report(entry._replace(is_deleted=True))

    def resolve(self, address: str, mac: bytes) -> None:
        self.macs[address] = mac
        self.report(Neighbour(2, BRIDGE, REACHABLE, mac, address, 0))


def ports_of(kernel: Kernel) -> BridgePorts:
    return BridgePorts(BRIDGE, kernel, {PORT: "web-0", OTHER_PORT: "web-1"})


def is_doubted(table: BridgePorts, now: float, peer: Peer = PEER) -> bool:
    try:
        table.vm_of(peer, now)
    except Unavailable:
        return True
    return False


def test_peer_is_the_vm_at_the_port_of_its_mac() -> None:
    assert ports_of(Kernel()).vm_of(PEER, 0.0) == "web-0"


def test_second_lookup_asks_the_kernel_nothing() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    before = kernel.requests

    assert table.vm_of(PEER, 1.0) == "web-0"
    assert kernel.requests == before


def test_peer_with_a_mac_that_is_at_no_port_is_no_vm() -> None:
    assert ports_of(Kernel()).vm_of(Peer("10.9.0.9", OTHER_MAC), 0.0) == ""


def test_peer_whose_mac_the_kernel_has_not_kept_is_in_doubt() -> None:
    """As when it uses SYN cookies: the peer may well succeed when it connects again."""
    with pytest.raises(Unavailable):
        ports_of(Kernel()).vm_of(Peer("10.9.0.2", b""), 0.0)


def test_peer_that_is_gone_is_no_vm() -> None:
    """It has reset its connection, so it has no address. A guest can do that very often."""
    kernel = Kernel()

    assert ports_of(kernel).vm_of(Peer("", MAC), 0.0) == ""
    assert kernel.requests == 0


def test_kernel_that_cannot_be_asked_leaves_the_peer_in_doubt() -> None:
    """As when this process has no file descriptor left."""
    kernel = Kernel()
    kernel.problem = OSError(24, "Too many open files")

    assert is_doubted(ports_of(kernel), 0.0)


def test_guest_with_a_static_entry_is_not_served_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A neighbour could use its MAC, and the entry would still name the guest's port."""
    kernel = Kernel()
    kernel.state = STATIC
    table = ports_of(kernel)
    with caplog.at_level("WARNING", logger="forewarn"):
        assert table.vm_of(PEER, 0.0) == ""
        assert table.vm_of(PEER, 1.0) == ""

    assert [record.getMessage() for record in caplog.records] == [
        "a guest is not served: its forwarding entry is static or sticky"
    ]


def test_entry_that_becomes_static_ends_the_service_of_its_guest() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    assert table.vm_of(PEER, 0.0) == "web-0"
    kernel.state = STATIC
    kernel.report(Neighbour(AF_BRIDGE, PORT, STATIC, MAC, "", BRIDGE))

    assert table.vm_of(PEER, 1.0) == ""


def test_port_that_comes_or_goes_is_reported() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    kernel.report(LinkChange(9))
    table.follow(0.0)

    assert table.links_changed.is_set()
    assert table.vm_of(PEER, 0.0) == "web-0"


def test_peer_whose_address_another_mac_has_is_refused() -> None:
    """The response would go to the other one."""
    kernel = Kernel()
    table = ports_of(kernel)
    assert table.vm_of(PEER, 0.0) == "web-0"
    kernel.resolve("10.9.0.2", OTHER_MAC)

    assert table.vm_of(PEER, 1.0) == ""


def test_peer_without_a_neighbour_entry_is_known_by_its_mac() -> None:
    """Entries expire, and a response may go by a router."""
    kernel = Kernel()
    kernel.macs.clear()

    assert ports_of(kernel).vm_of(PEER, 0.0) == "web-0"


def test_mac_that_moved_is_refused_for_a_while_and_then_at_its_new_port() -> None:
    """Two guests with one MAC: the entry only shows which of them sent a packet last."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    kernel.learn(MAC, OTHER_PORT)
    with pytest.raises(Unavailable, match="in doubt"):
        table.vm_of(PEER, 1.0)
    assert is_doubted(table, 1.0 + DOUBT_SECONDS - 0.01)

    assert table.vm_of(PEER, 1.0 + DOUBT_SECONDS) == "web-1"


def test_mac_that_moved_back_and_forth_is_noticed() -> None:
    """Even if nobody asked in between."""
    kernel = Kernel()
    table = ports_of(kernel)
    kernel.learn(MAC, OTHER_PORT)
    kernel.learn(MAC, PORT)

    assert is_doubted(table, 0.0)


def test_mac_that_was_not_known_before_is_in_doubt() -> None:
    """It may have been at another port before the relay started."""
    kernel = Kernel()
    table = ports_of(kernel)
    kernel.learn(MAC, PORT)

    assert is_doubted(table, 1.0)
    assert table.vm_of(PEER, 1.0 + DOUBT_SECONDS) == "web-0"


def test_mac_that_moves_while_the_kernel_is_asked_is_in_doubt() -> None:
    kernel = Kernel()
    kernel.during = lambda: kernel.learn(MAC, PORT)

    assert is_doubted(ports_of(kernel), 1.0)


def test_mac_that_comes_back_to_its_port_is_served_at_once() -> None:
    """The bridge deletes the entry of a guest that sends nothing for five minutes."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    kernel.delete(MAC)
    assert table.vm_of(PEER, 1.0) == ""
    kernel.learn(MAC, PORT)

    assert table.vm_of(PEER, 1.0) == "web-0"


def test_mac_deleted_from_one_port_is_in_doubt_at_another() -> None:
    """A guest can have its own entries deleted: it switches its interface off and on."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    kernel.delete(MAC)
    kernel.learn(MAC, OTHER_PORT)

    assert is_doubted(table, 1.0)
    assert table.vm_of(PEER, 1.0 + DOUBT_SECONDS) == "web-1"


def test_deleted_interface_is_nobodys() -> None:
    """Whoever gets its index next is not that VM."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    kernel.report(LinkChange(PORT, is_deleted=True))

    assert table.vm_of(PEER, 1.0) == ""


def test_entries_of_other_bridges_and_own_addresses_change_nothing() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    kernel.report(Neighbour(AF_BRIDGE, OTHER_PORT, REACHABLE, MAC, "", BRIDGE + 7))
    kernel.report(Neighbour(2, 9, REACHABLE, OTHER_MAC, "10.9.0.2", 0))
    before = kernel.requests

    assert table.vm_of(PEER, 1.0) == "web-0"
    assert kernel.requests == before


def test_after_lost_notices_every_mac_is_in_doubt() -> None:
    """A guest can cause that: it floods its bridge, and takes its neighbour's MAC meanwhile."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    kernel.ports[MAC], kernel.queue = OTHER_PORT, None

    assert is_doubted(table, 1.0)
    assert is_doubted(table, 1.0 + DOUBT_SECONDS - 0.01)
    assert table.vm_of(PEER, 1.0 + DOUBT_SECONDS) == "web-1"


def test_mac_that_moves_back_after_lost_notices_is_in_doubt() -> None:
    """The move to the other port may have been among them."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    kernel.queue = None
    table.follow(1.0)
    kernel.learn(MAC, PORT)

    assert is_doubted(table, 1.0 + DOUBT_SECONDS)


def test_doubt_outlives_lost_notices() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    kernel.learn(MAC, OTHER_PORT)
    kernel.learn(MAC, PORT)
    table.follow(1.0)
    kernel.queue = None

    assert is_doubted(table, 1.0 + DOUBT_SECONDS - 0.01)


def test_more_macs_than_are_cached_put_every_mac_in_doubt() -> None:
    """A guest can make up any number, so that the others are forgotten."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.vm_of(PEER, 0.0)
    for number in range(ENTRIES_MAX):
        kernel.learn(number.to_bytes(6, "big"), OTHER_PORT)
    table.follow(5.0)
    kernel.requests = 0
    assert is_doubted(table, 5.0)

    assert table.vm_of(PEER, 5.0 + DOUBT_SECONDS) == "web-0"
    assert kernel.requests == 2  # it was forgotten


def test_missing_bridge_is_named() -> None:
    with pytest.raises(Unavailable, match="the bridge nobr0 does not exist; expected a bridge"):
        check_bridge("nobr0")


def test_interface_that_is_not_a_bridge_is_named() -> None:
    with pytest.raises(
        Unavailable, match="lo is not a Linux bridge; Open vSwitch and macvtap are not"
    ):
        check_bridge("lo")
