"""The nftables table of a bridge, with guests and hosts in network namespaces.

A guest that was migrated still sends to the MAC of the host that it has left.
"""

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from forewarn.client import AsyncClient, Client, Document, EndpointError
from forewarn.hostd.bridge_listener import FOLLOW_SECONDS
from tests.e2e.bridge_world import (
    ALIAS,
    ALIAS_V6,
    POLL,
    BridgeWorld,
    Guest,
    GuestClient,
    in_namespace,
)
from tests.e2e.raw_tcp import ETH_P_ARP, ETH_P_IP, SYN, Wire, split_packet, tcp_packet
from tests.e2e.test_relay import FLEET, WEB_0, WEB_1
from tests.e2e.waiting import eventually

MAC_A, MAC_B, NO_MAC = "02:00:00:00:00:0a", "02:00:00:00:00:0b", "02:00:00:00:00:99"
ANSWER_SECONDS_MAX = 5.0
"""After a migration; two of them are the doubt about a MAC that is new at a port."""
POLL_EVERY_SECONDS = 0.05
"""A guest that connects more often reaches the limit itself."""
WAIT = POLL.replace(b"Metadata:", b"If-None-Match: %b\r\nPrefer: wait=60\r\nMetadata:")
RTMGRP_ADDRESSES = 0x10 | 0x100
"""Of IPv4 and IPv6."""
CLAIM_MAC = bytes.fromhex(NO_MAC.replace(":", ""))
CLAIM = b"".join(
    (
        struct.pack("!HHBBH", 1, ETH_P_IP, 6, 4, 2),
        CLAIM_MAC + socket.inet_aton(ALIAS),
        b"\xff" * 6 + socket.inet_aton("192.168.122.50"),
    )
)
"""An ARP response."""

OWN_NUMBERS = count(200)

pytestmark = [pytest.mark.xdist_group("relay"), pytest.mark.system]


def own_address() -> str:
    """Of a guest that moves. It stays where it is, and another one with its address would get no
    answer while the host has the MAC of the first one in its neighbor table.
    """
    return f"192.168.122.{next(OWN_NUMBERS)}/24"


class Hosts(NamedTuple):
    """Two hosts on one LAN, and the server, which runs on the first one."""

    a: BridgeWorld
    b: BridgeWorld


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Their bridges have different MACs. `lan` is the port of each to the LAN."""
    with ExitStack() as stack:
        folders = (tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b"))
        a, b = (BridgeWorld(stack, folder) for folder in folders)
        a.add_bridge("br0", "192.168.122.1/24", MAC_A)
        b.add_bridge("br0", "192.168.122.1/24", MAC_B)
        a.run(a.host, f"ip link add lan type veth peer name lan netns {b.host}")
        a.run(a.host, f"ip link add server type veth peer name server netns {b.host}")
        for host, address in ((a, "10.7.0.1/24"), (b, "10.7.0.2/24")):
            host.run(host.host, "ip link set lan master br0 up")
            host.run(host.host, f"ip address add {address} dev server")
            host.run(host.host, "ip link set server up")
        (a.folder / "fleet.yaml").write_text(json.dumps(FLEET))
        a.start_server(0, "--fleet", str(a.folder / "fleet.yaml"))
        token = a.create_host_token("h")
        for host in (a, b):
            assert host.start_relay("http://10.7.0.1:8080", token=token) == "ready\n"
        yield Hosts(a, b)


def rules(host: BridgeWorld) -> str:
    return host.run(host.host, "nft -t list table bridge forewarn_br0")


def use_old_mac(host: BridgeWorld, guest: Guest, address: str, mac: str) -> None:
    host.run(guest.namespace, f"ip neigh replace {address} lladdr {mac} nud reachable dev eth0")


def poll_once(guest: Guest, host: str = ALIAS) -> int:
    """The status, or 0 if there is no answer in a second."""
    try:
        with GuestClient(guest.namespace, host, seconds_max=1.0) as client:
            return client.ask().status
    except (OSError, EOFError):
        return 0


@pytest.mark.parametrize("alias", [ALIAS, ALIAS_V6])
def test_guest_that_sends_to_another_mac_is_answered_by_its_host(hosts: Hosts, alias: str) -> None:
    guest = hosts.a.add_guest("br0", "192.168.122.20/24", WEB_0)
    eventually(lambda: "tentative" not in hosts.a.run(guest.namespace, "ip -6 address show"))
    for mac in (NO_MAC, MAC_B):
        use_old_mac(hosts.a, guest, alias, mac)
        assert poll_once(guest, alias) == 200


def test_host_does_not_send_its_own_packets_from_the_relays_ipv6_address(hosts: Hosts) -> None:
    """The table drops them at the port to the LAN: neighbours and routers could not be reached."""
    host = hosts.b

    def source() -> str:
        return host.run(host.host, "ip -6 route get fe80::1 oif br0").partition(" src ")[2]

    def is_own() -> bool:
        return source().startswith("fe80::ff:fe00:b ")

    eventually(is_own)
    host.run(host.host, f"ip address change {ALIAS_V6}/128 dev br0 preferred_lft forever")
    eventually(is_own)  # another program, or an earlier daemon, may have added it


def test_address_that_the_bridge_has_is_not_changed_again_and_again(hosts: Hosts) -> None:
    """Each change wakes all programs that follow the addresses of the host."""

    def follow_addresses() -> socket.socket:
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        made.bind((0, RTMGRP_ADDRESSES))
        return made

    with in_namespace(hosts.b.host, follow_addresses) as changes:
        changes.settimeout(3 * FOLLOW_SECONDS)
        with pytest.raises(TimeoutError):
            changes.recv(65536)


@pytest.mark.parametrize(
    ("alias", "next_hop"),
    [(ALIAS, ALIAS), (ALIAS, "192.168.122.1"), (ALIAS_V6, ALIAS_V6)],
    ids=["lan", "nat", "ipv6"],
)
def test_moved_guest_is_answered_by_its_new_host_within_5_seconds(
    hosts: Hosts, alias: str, next_hop: str
) -> None:
    """On a LAN it knows the relay's MAC, behind NAT that of its router, both of the old host. What
    is left of its connection to the old host, with a long poll, is reset.
    """
    a, b = hosts
    guest = a.add_guest("br0", own_address(), WEB_1)
    eventually(lambda: "tentative" not in a.run(guest.namespace, "ip -6 address show"))
    if next_hop != alias:
        a.run(guest.namespace, f"ip route replace {alias} via {next_hop} dev eth0")
    with a.connect(guest, alias) as kept:
        known = kept.ask().headers["etag"].encode()
        kept.send(WAIT % known)
        a.unplug(guest, to=b)
        use_old_mac(a, guest, next_hop, MAC_A)
        b.tell_ports({guest.port: WEB_1})
        moved_at = time.monotonic()
        statuses = [0]
        while statuses[-1] != 200:
            assert time.monotonic() < moved_at + ANSWER_SECONDS_MAX, statuses
            statuses.append(poll_once(guest, alias))
            time.sleep(0.1)

        assert set(statuses) <= {0, 503, 200}  # and not 403, from the old host
        with pytest.raises(ConnectionResetError):
            kept.ask()


class Polls:
    """What the client of a guest gets, each with its time, until `is_last` of it."""

    def __init__(self, is_last: Callable[[Document | EndpointError], bool]) -> None:
        self.results: list[tuple[float, Document | EndpointError]] = []
        self.begun = 0
        self._is_last = is_last

    def run_in_thread(self) -> None:
        with Client(f"http://{ALIAS}") as client:
            for result in client.documents(may_wait=self._begin):
                if self._add(result):
                    return

    def run_in_loop(self) -> None:
        async def run() -> None:
            async with AsyncClient(f"http://{ALIAS}") as client:
                async for result in client.documents(may_wait=self._begin):
                    if self._add(result):
                        return

        asyncio.run(run())

    def _begin(self) -> bool:
        self.begun += 1
        return True

    def _add(self, result: Document | EndpointError) -> bool:
        self.results.append((time.monotonic(), result))
        return self._is_last(result)


either_client = pytest.mark.parametrize("run", [Polls.run_in_thread, Polls.run_in_loop])


@contextmanager
def long_poll(guest: Guest, run: Callable[[Polls], None], polls: Polls) -> Iterator[None]:
    """While the guest's client has a document, and a long poll open. Then until its last poll."""
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(in_namespace, guest.namespace, lambda: run(polls))
        eventually(lambda: polls.begun == 2)
        yield
        ended.result()


@either_client
def test_guest_that_moves_during_a_long_poll_gets_an_event_within_5_seconds(
    hosts: Hosts, run: Callable[[Polls], None]
) -> None:
    """Also if it was moved by hand, so that no daemon has ended its poll. The old host is silent,
    so only the keepalive of the client shows that nothing will come on that connection.
    """
    a, b = hosts
    guest = a.add_guest("br0", own_address(), WEB_0)
    polls = Polls(lambda result: isinstance(result, Document) and bool(result.events))
    with long_poll(guest, run, polls):
        a.unplug(guest, to=b)
        b.tell_ports({guest.port: WEB_0})
        moved_at = time.monotonic()
        event = json.loads(a.forewarn("vm", "restart", "web-0", "--json"))["event"]["id"]
        announced = time.monotonic() - moved_at  # the command may take seconds to start
    a.forewarn("event", "cancel", event)

    times = [(round(at - moved_at, 1), result) for at, result in polls.results]
    assert times[-1][0] < max(ANSWER_SECONDS_MAX, announced + 1), times


@either_client
def test_long_poll_ends_within_7_seconds_when_its_peer_vanishes(
    hosts: Hosts, run: Callable[[Polls], None]
) -> None:
    """Else it lasts for 40 seconds, which is longer than the notice of a Preempt."""
    guest = hosts.a.add_guest("br0", own_address(), WEB_0)
    polls = Polls(lambda result: isinstance(result, EndpointError))
    with long_poll(guest, run, polls):
        hosts.a.run(hosts.a.host, f"ip link set {guest.port} nomaster")
        gone_at = time.monotonic()

    assert polls.results[-1][0] < gone_at + 7


def test_relay_is_silent_to_what_is_not_a_guests_port(hosts: Hosts) -> None:
    """The LAN is such a port: guests of other hosts have a relay of their own."""
    stranger = hosts.a.add_guest("br0", "192.168.122.40/24")
    guest = hosts.a.add_guest("br0", "192.168.122.41/24", WEB_0)
    hosts.a.run(hosts.a.host, "ip neigh flush dev br0")
    with closing(Wire(stranger.namespace)) as wire:
        assert poll_once(guest) == 200  # its host looks for it, from the relay's address
        assert poll_once(stranger) == 0
        use_old_mac(hosts.a, stranger, ALIAS, MAC_A)
        use_old_mac(hosts.a, stranger, ALIAS_V6, MAC_A)
        assert (poll_once(stranger), poll_once(stranger, ALIAS_V6)) == (0, 0)

        relays = (socket.inet_aton(ALIAS), socket.inet_pton(socket.AF_INET6, ALIAS_V6))
        assert not [frame for frame in wire.received() if any(each in frame for each in relays)]


@pytest.mark.parametrize("tags", [(), (0x8100,), (0x88A8,), (0x8100, 0x8100)], ids=str)
def test_guest_cannot_answer_in_the_relays_place(hosts: Hosts, tags: tuple[int, ...]) -> None:
    """Its neighbour would send its requests to it, also if VLAN tags have only a priority."""
    victim = hosts.a.add_guest("br0", "192.168.122.50/24", WEB_0)
    thief = hosts.a.add_guest("br0", "192.168.122.51/24", WEB_1)
    hosts.a.run(thief.namespace, f"ip address add {ALIAS}/32 dev eth0")
    with closing(Wire(victim.namespace)) as seen, closing(Wire(thief.namespace)) as wire:
        send_claim(wire, tags, vlan=0)
        hosts.a.run(victim.namespace, "ip neigh flush dev eth0")
        assert poll_once(victim) == 200

        assert not [frame for frame in seen.received() if CLAIM in frame]
    assert MAC_A in hosts.a.run(victim.namespace, f"ip neigh show {ALIAS}")


def test_frames_of_another_vlan_pass(hosts: Hosts) -> None:
    """Another network may have an endpoint of its own."""
    guest = hosts.a.add_guest("br0", "192.168.122.50/24", WEB_0)
    router = hosts.a.add_guest("br0", "192.168.122.51/24", WEB_1)
    with closing(Wire(guest.namespace)) as seen, closing(Wire(router.namespace)) as wire:
        send_claim(wire, (0x8100,), vlan=5)
        seen.receive(ETH_P_ARP, CLAIM)


def send_claim(wire: Wire, tags: tuple[int, ...], vlan: int) -> None:
    """A frame that claims the relay's address, with these kinds of tags."""
    kinds = (*tags, ETH_P_ARP)
    more = b"".join(struct.pack("!HH", vlan, kind) for kind in kinds[1:])
    wire.send(CLAIM_MAC, b"\xff" * 6, kinds[0], more + CLAIM)


def test_table_that_was_removed_is_restored(hosts: Hosts) -> None:
    """As by `systemctl restart nftables`, which flushes everything."""
    a = hosts.a
    before = rules(a)
    for removed in ("flush ruleset", "flush chain bridge forewarn_br0 request"):
        a.run(a.host, f"nft {removed}")
        eventually(lambda: "forewarn_br0" in a.run(a.host, "nft list tables"))
        eventually(lambda: rules(a) == before)

    log = (a.folder / "relay.txt").read_text()
    restored = log.count("nftables rules were removed or changed; restored  table=forewarn_br0")
    assert restored in (1, 2)  # the second change may come while the table is loaded


def test_table_follows_the_mac_of_the_bridge(hosts: Hosts) -> None:
    """A bridge without a MAC of its own takes that of a port."""
    hosts.b.run(hosts.b.host, f"ip link set br0 address {NO_MAC}")
    eventually(lambda: f"ether daddr set {NO_MAC}" in rules(hosts.b))
    hosts.b.run(hosts.b.host, f"ip link set br0 address {MAC_B}")
    eventually(lambda: f"ether daddr set {MAC_B}" in rules(hosts.b))


def test_tap_device_is_a_guests_port_before_the_vm_is_listed(hosts: Hosts) -> None:
    """A VM that arrives by migration has its port first."""
    b = hosts.b
    b.run(b.host, "ip tuntap add tap7 mode tap")
    b.run(b.host, "ip link set tap7 master br0 up")
    eventually(lambda: re.search('iif .*"tap7".* goto guest_request', rules(b)))


@pytest.mark.parametrize("is_fragmented", [False, True], ids=["whole", "fragments"])
def test_half_open_connections_of_one_guest_do_not_refuse_the_others(
    hosts: Hosts, *, is_fragmented: bool
) -> None:
    """Without a limit the kernel uses SYN cookies, and does not know the port of a connection."""
    guest = hosts.a.add_guest("br0", "192.168.122.60/24", WEB_0)
    hostile = hosts.a.add_guest("br0", "192.168.122.61/24", WEB_1)
    own = hosts.a.run(hostile.namespace, "cat /sys/class/net/eth0/address").strip()
    source_mac, target_mac = (bytes.fromhex(mac.replace(":", "")) for mac in (own, MAC_A))
    statuses = []
    with closing(Wire(hostile.namespace)) as wire:
        end = time.monotonic() + 4.0
        number = 0
        while time.monotonic() < end:
            pause_end = time.monotonic() + POLL_EVERY_SECONDS
            while time.monotonic() < pause_end:
                number += 1
                source = f"192.168.122.{100 + number % 100}"
                packet = tcp_packet(source, ALIAS, 1024 + number % 60_000, SYN, number)
                for part in split_packet(packet, number) if is_fragmented else [packet]:
                    wire.send(source_mac, target_mac, ETH_P_IP, part)
            statuses.append(poll_once(guest))

    assert number > 6000
    assert set(statuses) == {200}
    assert "SYN cookies" not in (hosts.a.folder / "relay.txt").read_text()


def test_port_that_does_not_learn_ends_the_service_with_the_reason(tmp_path: Path) -> None:
    """Its guest could act as another one, and nothing would show it."""
    with ExitStack() as stack:
        world = BridgeWorld(stack, tmp_path)
        world.add_bridge("br0", "192.168.122.1/24")
        (tmp_path / "fleet.yaml").write_text(json.dumps(FLEET))
        world.start_server(0, "--fleet", str(tmp_path / "fleet.yaml"))
        world.start_relay("http://127.0.0.1:8080", token=world.create_host_token("h"))
        guest = world.add_guest("br0", "192.168.122.70/24", WEB_0)
        assert poll_once(guest) == 200

        world.run(world.host, f"bridge link set dev {guest.port} learning off")
        eventually(lambda: poll_once(guest) == 0)
        problem = f"the port {guest.port} of the bridge br0 does not learn MACs"
        eventually(lambda: problem in (tmp_path / "relay.txt").read_text())

        world.run(world.host, f"bridge link set dev {guest.port} learning on")
        eventually(lambda: poll_once(guest) == 200)


def test_reset_connections_leave_neither_descriptors_nor_log_lines(hosts: Hosts) -> None:
    guest = hosts.a.add_guest("br0", "192.168.122.80/24", WEB_0)
    log = hosts.a.folder / "relay.txt"
    lines, before = log.read_text(), hosts.a.relay_descriptors
    for _ in range(100):
        client = hosts.a.connect(guest)
        client.reset()
    eventually(lambda: hosts.a.relay_descriptors <= before)

    assert log.read_text() == lines
