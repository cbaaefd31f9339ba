"""Which port a peer is at: what is cached, and what is refused."""

import pytest

from forewarn.errors import Unavailable
from forewarn.hostd.netlink import AF_BRIDGE, Neighbour, Netlink, Notice
from forewarn.hostd.ports import DOUBT_SECONDS, ENTRIES_MAX, BridgePorts, Peer, open_bridge

BRIDGE, PORT, OTHER_PORT = 2, 3, 4
MAC, OTHER_MAC = b"\x02\0\0\0\0\x01", b"\x02\0\0\0\0\x02"
PEER = Peer("10.9.0.2", MAC)
REACHABLE, PERMANENT = 0x02, 0x80


class Kernel(Netlink):
    """Its tables, and how often it was asked. Without a queue, notices were lost."""

    def __init__(self) -> None:
        self.macs = {"10.9.0.2": MAC}
        self.ports = {MAC: PORT}
        self.names = {PORT: "vnet0", OTHER_PORT: "vnet1"}
        self.requests = 0
        self.queue: list[Notice] | None = []

    def neighbour(self, interface: int, address: str) -> bytes:
        assert interface == BRIDGE
        self.requests += 1
        return self.macs.get(address, b"")

    def bridge_port(self, bridge: int, mac: bytes) -> int:
        assert bridge == BRIDGE
        self.requests += 1
        return self.ports.get(mac, 0)

    def name(self, interface: int) -> str:
        self.requests += 1
        return self.names.get(interface, "")

    def notices(self) -> list[Notice] | None:
        queue, self.queue = self.queue, []
        return queue

    def report(self, *notices: Notice) -> None:
        assert self.queue is not None
        self.queue += notices

    def learn(self, mac: bytes, port: int) -> None:
        self.ports[mac] = port
        self.report(Notice(port, neighbour=Neighbour(AF_BRIDGE, port, REACHABLE, mac, "", BRIDGE)))

    def resolve(self, address: str, mac: bytes) -> None:
        self.macs[address] = mac
        self.report(Notice(BRIDGE, neighbour=Neighbour(2, BRIDGE, REACHABLE, mac, address, 0)))


def ports_of(kernel: Kernel) -> BridgePorts:
    return BridgePorts("br0", BRIDGE, kernel)


def test_peer_is_at_the_port_of_its_mac() -> None:
    assert ports_of(Kernel()).port_of(PEER, 0.0) == "vnet0"


def test_second_lookup_asks_the_kernel_nothing() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    table.port_of(PEER, 0.0)
    before = kernel.requests

    assert table.port_of(PEER, 1.0) == "vnet0"
    assert kernel.requests == before


@pytest.mark.parametrize("peer", [Peer("10.9.0.2", b""), Peer("10.9.0.9", OTHER_MAC)])
def test_peer_with_an_unknown_mac_is_at_no_port(peer: Peer) -> None:
    assert ports_of(Kernel()).port_of(peer, 0.0) == ""


def test_peer_whose_address_another_mac_has_is_refused() -> None:
    """The response would go to the other one."""
    kernel = Kernel()
    table = ports_of(kernel)
    assert table.port_of(PEER, 0.0) == "vnet0"
    kernel.resolve("10.9.0.2", OTHER_MAC)

    assert table.port_of(PEER, 1.0) == ""


def test_peer_without_a_neighbour_entry_is_known_by_its_mac() -> None:
    """Entries expire, and a response may go by a router."""
    kernel = Kernel()
    kernel.macs.clear()

    assert ports_of(kernel).port_of(PEER, 0.0) == "vnet0"


def test_mac_that_moved_is_refused_for_a_while_and_then_at_its_new_port() -> None:
    """Two guests with one MAC: the entry only shows which of them sent a packet last."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.port_of(PEER, 0.0)
    kernel.learn(MAC, OTHER_PORT)
    with pytest.raises(Unavailable, match="two ports"):
        table.port_of(PEER, 1.0)
    with pytest.raises(Unavailable):
        table.port_of(PEER, 1.0 + DOUBT_SECONDS - 0.01)

    assert table.port_of(PEER, 1.0 + DOUBT_SECONDS) == "vnet1"


def test_mac_that_moved_back_and_forth_is_noticed() -> None:
    """Even if nobody asked in between."""
    kernel = Kernel()
    table = ports_of(kernel)
    kernel.learn(MAC, OTHER_PORT)
    kernel.learn(MAC, PORT)

    with pytest.raises(Unavailable):
        table.port_of(PEER, 0.0)


def test_replugged_mac_is_at_its_new_port_at_once() -> None:
    """The entry is deleted with its port, so this is not a move."""
    kernel = Kernel()
    table = ports_of(kernel)
    table.port_of(PEER, 0.0)
    gone = Neighbour(AF_BRIDGE, PORT, REACHABLE, MAC, "", BRIDGE)
    kernel.report(Notice(PORT, is_deleted=True, neighbour=gone), Notice(PORT, is_deleted=True))
    kernel.learn(MAC, OTHER_PORT)

    assert table.port_of(PEER, 1.0) == "vnet1"


def test_renamed_port_has_its_new_name() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    table.port_of(PEER, 0.0)
    kernel.names[PORT] = "vnet7"
    kernel.report(Notice(PORT))

    assert table.port_of(PEER, 1.0) == "vnet7"


def test_entries_of_other_bridges_and_own_addresses_change_nothing() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    table.port_of(PEER, 0.0)
    other = Neighbour(AF_BRIDGE, OTHER_PORT, REACHABLE, MAC, "", BRIDGE + 7)
    kernel.report(Notice(OTHER_PORT, neighbour=other))
    kernel.report(Notice(9, neighbour=Neighbour(2, 9, REACHABLE, OTHER_MAC, "10.9.0.2", 0)))
    before = kernel.requests

    assert table.port_of(PEER, 1.0) == "vnet0"
    assert kernel.requests == before


def test_lost_notices_empty_the_cache() -> None:
    kernel = Kernel()
    table = ports_of(kernel)
    table.port_of(PEER, 0.0)
    kernel.ports[MAC], kernel.queue = OTHER_PORT, None

    assert table.port_of(PEER, 1.0) == "vnet1"


def test_cache_has_a_limit() -> None:
    """A guest can make up any number of addresses."""
    kernel = Kernel()
    table = ports_of(kernel)
    for number in range(1, ENTRIES_MAX):
        peer = Peer(f"fe80::{number:x}", number.to_bytes(6, "big"))
        kernel.macs[peer.address] = peer.mac
        kernel.learn(peer.mac, PORT)
        assert table.port_of(peer, 0.0) == "vnet0"
        assert table.entries <= ENTRIES_MAX + 3


def test_missing_bridge_is_named() -> None:
    with pytest.raises(Unavailable, match="the bridge nobr0 does not exist; expected a bridge"):
        open_bridge("nobr0")


def test_interface_that_is_not_a_bridge_is_named() -> None:
    with pytest.raises(Unavailable, match="the bridge lo is not a bridge; expected a bridge"):
        open_bridge("lo")
