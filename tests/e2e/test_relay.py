"""Guests in network namespaces, behind bridges, against real servers.

A guest is where it is plugged in, whatever addresses it uses.
"""

import json
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.e2e.bridge_world import ALIAS, ALIAS_V6, POLL, TARGET, BridgeWorld, Guest
from tests.e2e.metadata_world import RawResponse
from tests.e2e.raw_tcp import ETH_P_IP, SlowConnection, Wire
from tests.e2e.waiting import eventually

WEB_0, WEB_1, DB, CACHE = (f"00000000-0000-4000-8000-00000000000{number}" for number in range(4))
FLEET = {
    "scopes": [
        {
            "name": "web",
            "kind": "availability-set",
            "vms": [
                {"name": "web-0", "id": WEB_0, "host": "h", "address": "192.168.122.64"},
                {"name": "web-1", "id": WEB_1, "host": "h", "update_domain": 1},
            ],
        },
        {
            "name": "db",
            "kind": "vm",
            "vms": [{"name": "db", "id": DB, "host": "h", "address": "192.168.122.65"}],
        },
        {"name": "cache", "kind": "vm", "vms": [{"name": "cache", "id": CACHE, "host": "other"}]},
    ]
}
DIRECT = "http://192.168.122.1:8080"
SERVERS = ("http://127.0.0.1:8080", "http://127.0.0.1:8081")

pytestmark = [pytest.mark.xdist_group("relay"), pytest.mark.system]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeWorld]:
    """A host with two bridges, one server, and the relay."""
    with ExitStack() as stack:
        yield start(stack, tmp_path_factory.mktemp("relay"))


def start(
    stack: ExitStack, folder: Path, servers: int = 1, bridges: tuple[str, ...] = ("br0", "br1")
) -> BridgeWorld:
    (folder / "fleet.yaml").write_text(json.dumps(FLEET))
    world = BridgeWorld(stack, folder)
    world.add_bridge("br0", "192.168.122.1/24")
    world.add_bridge("br1")
    for number in range(servers):
        world.servers.append(world.start_server(number, "--fleet", str(folder / "fleet.yaml")))
    token = world.create_host_token("h")
    ready = world.start_relay(*SERVERS[:servers], token=token, bridges=bridges)
    assert ready == "ready\n"
    return world


def name_of(response: RawResponse) -> str:
    """The VM that got instance metadata, or the status."""
    if response.status != 200:
        return str(response.status)
    name: str = json.loads(response.body)["compute"]["name"]
    return name


INSTANCE = POLL.replace(TARGET.encode(), b"/metadata/instance?api-version=2021-02-01")


def who(world: BridgeWorld, guest: Guest, host: str = ALIAS, source: str = "") -> str:
    with world.connect(guest, host, source) as client:
        return name_of(client.ask(INSTANCE))


def who_if_answered(world: BridgeWorld, guest: Guest) -> str:
    """While two guests use one MAC, packets get lost."""
    with world.connect(guest) as client:
        client.wait_at_most(2.0)
        try:
            return name_of(client.ask(INSTANCE))
        except OSError:
            return "no answer"


def test_guests_with_the_same_address_are_told_apart(host: BridgeWorld) -> None:
    web_0 = host.add_guest("br0", "192.168.122.10/24", WEB_0)
    db = host.add_guest("br1", "192.168.122.10/24", DB)
    host.poll(web_0)  # without a poll, restarts are not announced
    host.forewarn("vm", "restart", "web-1")
    for alias in (ALIAS, ALIAS_V6):
        (event,) = json.loads(host.poll(web_0, alias).body)["Events"]
        assert event["Resources"] == ["web-1"]
        assert json.loads(host.poll(db, alias).body)["Events"] == []
        assert who(host, web_0, alias) == "web-0"
        assert who(host, db, alias) == "db"
    host.forewarn("event", "cancel", event["EventId"])


def test_guest_without_an_address_in_the_bridges_network_is_served(host: BridgeWorld) -> None:
    """The relay answers where the request came from, whatever the routes of the host."""
    assert who(host, host.add_guest("br0", "10.99.0.1/24", WEB_0)) == "web-0"


def test_all_nics_of_a_guest_are_the_guest(host: BridgeWorld) -> None:
    for bridge in ("br0", "br1"):
        assert who(host, host.add_guest(bridge, "192.168.122.21/24", WEB_1)) == "web-1"


def test_vm_of_another_host_is_refused_by_the_server(host: BridgeWorld) -> None:
    refused = host.poll(host.add_guest("br0", "192.168.122.30/24", CACHE))

    assert refused.status == 403
    assert json.loads(refused.body) == {"error": f"Forbidden. {CACHE} is not a VM on host h"}


def test_peer_at_a_guests_port_without_a_vm_gets_403(host: BridgeWorld) -> None:
    """As when two VMs are listed with one port."""
    stranger = host.add_guest("br0", "192.168.122.31/24", "")

    message = "Forbidden. 192.168.122.31 is not a VM of this host"
    assert json.loads(host.poll(stranger).body) == {"error": message}
    assert host.poll(stranger, ALIAS_V6).status == 403


def test_forged_identity_is_ignored(host: BridgeWorld) -> None:
    guest = host.add_guest("br0", "192.168.122.32/24", WEB_0)
    forged = f"X-Instance-ID: {DB}\r\nx-instance-id: {DB}\r\nX-Forewarn-Host: h\r\n".encode()
    with host.connect(guest) as client:
        assert name_of(client.ask(INSTANCE.replace(b"Metadata:", forged + b"Metadata:"))) == "web-0"
        refused = client.ask(POLL.replace(b"Metadata:", b"X-Forwarded-For: 1.2.3.4\r\nMetadata:"))
        assert (refused.status, b"X-Forwarded-For" in refused.body) == (400, True)


def test_guest_that_takes_its_neighbours_address_is_still_itself(host: BridgeWorld) -> None:
    victim = host.add_guest("br0", "192.168.122.40/24", WEB_0)
    thief = host.add_guest("br0", "192.168.122.41/24", DB)
    assert who(host, victim) == "web-0"
    host.run(thief.namespace, "ip address add 192.168.122.40/24 dev eth0")
    announce_until_known(host, thief, "192.168.122.40")
    assert who(host, thief, source="192.168.122.40") == "db"

    host.run(thief.namespace, "ip address delete 192.168.122.40/24 dev eth0")
    announce_until_known(host, victim, "192.168.122.40")
    assert who(host, victim) == "web-0"


def test_request_is_refused_once_the_address_is_another_guests(host: BridgeWorld) -> None:
    """The response would go to that guest."""
    guest = host.add_guest("br0", "192.168.122.42/24", WEB_0)
    taken, own = "02:00:00:00:00:99", mac(host, guest)
    with host.connect(guest) as kept:
        assert name_of(kept.ask(INSTANCE)) == "web-0"
        host.run(host.host, f"ip neigh replace 192.168.122.42 lladdr {taken} dev br0")
        kept.send(INSTANCE)
        eventually(lambda: "FIN-WAIT-1" in host.run(host.host, "ss -Htan dst 192.168.122.42"))
        host.run(host.host, f"ip neigh replace 192.168.122.42 lladdr {own} dev br0")
        assert kept.read_to_end().startswith(b"HTTP/1.1 403 ")


def test_mac_that_moves_to_another_port_is_never_its_owner_there(host: BridgeWorld) -> None:
    victim = host.add_guest("br0", "192.168.122.50/24", WEB_0)
    with host.connect(victim) as kept:
        assert name_of(kept.ask(INSTANCE)) == "web-0"
        thief = host.add_guest("br0", "192.168.122.50/24", DB, mac=mac(host, victim))
        eventually(lambda: is_at_port_of(host, thief, "192.168.122.50"))
        names = {who_if_answered(host, thief) for _ in range(5)}
        eventually(lambda: who_if_answered(host, thief) == "db")

        assert names <= {"503", "403", "db", "no answer"}
        # While both are plugged in, a response may go to the thief, which resets the connection.
        host.run(thief.namespace, "ip link set eth0 down")
        moved_back = kept.ask(INSTANCE)
        assert name_of(moved_back) in {"503", "web-0"}  # in doubt, or long enough at its port


def test_slow_handshake_with_a_neighbours_mac_is_not_the_neighbour(host: BridgeWorld) -> None:
    """The first packet comes with the neighbour's MAC; the last one when the neighbour has its port
    back, and has had it for so long that it is not in doubt any more.
    """
    victim = host.add_guest("br0", "192.168.122.54/24", WEB_0)
    thief = host.add_guest("br0", "192.168.122.55/24", DB)
    victims, own = (bytes.fromhex(mac(host, each).replace(":", "")) for each in (victim, thief))
    gateway = bytes.fromhex(host.run(host.host, "cat /sys/class/net/br0/address").replace(":", ""))
    with closing(Wire(thief.namespace)) as wire, closing(Wire(victim.namespace)) as seen:
        slow = SlowConnection(wire, victims, gateway, "192.168.122.56", ALIAS)
        slow.begin()
        assert thief.port in port_of_mac(host, mac(host, victim))
        host.settle(victim)
        slow.finish(own, INSTANCE)

        answer = seen.receive(ETH_P_IP, socket.inet_aton("192.168.122.56"), b"HTTP/1.1 ")
        assert b"HTTP/1.1 503" in answer
        assert b"web-0" not in answer


def test_replugged_nic_is_served_and_its_old_port_is_anothers(host: BridgeWorld) -> None:
    """libvirt uses the names of ports again."""
    guest = host.add_guest("br0", "192.168.122.60/24", WEB_0)
    address = mac(host, guest)
    assert who(host, guest) == "web-0"
    host.run(host.host, f"ip link delete {guest.port}")
    again = guest._replace(port=guest.port[:-1] + "x")
    host.plug(again, WEB_0, address)
    host.run(guest.namespace, "ip address add 192.168.122.60/24 dev eth0")
    host.run(guest.namespace, f"ip route add {ALIAS} dev eth0")
    host.settle(again)
    assert who(host, again) == "web-0"

    other = Guest(host.add_namespace(), "br0", guest.port)
    host.plug(other, DB)
    host.run(other.namespace, "ip address add 192.168.122.61/24 dev eth0")
    host.run(other.namespace, f"ip route add {ALIAS} dev eth0")
    host.settle(other)
    assert who(host, other) == "db"


def test_port_given_to_another_vm_ends_the_connection(host: BridgeWorld) -> None:
    guest = host.add_guest("br0", "192.168.122.62/24", WEB_0)
    with host.connect(guest) as kept:
        assert name_of(kept.ask(INSTANCE)) == "web-0"
        host.tell_ports({guest.port: DB})
        kept.send(INSTANCE)
        assert kept.read_to_end().startswith(b"HTTP/1.1 403 ")
    assert who(host, guest) == "db"


def test_long_poll_returns_with_the_event(host: BridgeWorld) -> None:
    guest = host.add_guest("br0", "192.168.122.63/24", DB)
    with host.connect(guest) as waiting, host.connect(guest) as client:
        known = client.ask().headers["etag"]
        more = f"If-None-Match: {known}\r\nPrefer: wait=60\r\nMetadata:".encode()
        waiting.send(POLL.replace(b"Metadata:", more))
        assert client.ask().status == 200
        host.forewarn("vm", "restart", "db")
        changed = waiting.response()
        (event,) = json.loads(changed.body)["Events"]
        host.forewarn("event", "cancel", event["EventId"])

        assert event["Resources"] == ["db"]
        assert changed.headers["preference-applied"] == "wait=60"


def test_relayed_responses_have_the_bytes_of_direct_ones(host: BridgeWorld) -> None:
    """The server identifies this guest by its address, so it can be asked directly too."""
    guest = host.add_guest("br0", "192.168.122.64/24", WEB_0)
    head = POLL.decode()
    body = json.dumps({"StartRequests": [{"EventId": "nope"}]})
    requests = [
        head,
        head.replace("scheduledevents", "SCHEDULEDEVENTS/"),
        head.replace("Metadata: true\r\n", ""),
        head.replace("2020-07-01", "1999-01-01"),
        head.replace("?api-version=2020-07-01", ""),
        head.replace("GET", "HEAD"),
        head.replace("GET", "DELETE"),
        head.replace("Metadata:", 'If-None-Match: "1"\r\nMetadata:'),
        head.replace("Metadata:", "If-None-Match: *\r\nPrefer: wait=1\r\nMetadata:"),
        head.replace("Metadata:", "Origin: http://page\r\nMetadata:"),
        head.replace("Metadata:", "X-Forwarded-For: 1.2.3.4\r\nMetadata:"),
        head.replace("Metadata:", "Connection: close\r\nMetadata:"),
        head.replace("Host:", "X-Host:"),
        head.replace("HTTP/1.1", "HTTP/1.0"),
        head.replace("/metadata/", "/nothing/"),
        head.replace("GET /", f"GET http://{ALIAS}/"),
        head.replace("Metadata:", "X-Big: " + "x" * 70_000 + "\r\nMetadata:"),
        head.replace(TARGET, "/metadata/versions"),
        head.replace(TARGET, "/metadata/instance?api-version=2021-02-01"),
        head.replace(TARGET, "/metadata/instance/compute/name?api-version=2021-02-01&format=text"),
        head.replace("GET", "POST").replace("\r\n\r\n", f"\r\nContent-Length: {len(body)}\r\n\r\n")
        + body,
        head.replace("GET", "POST").replace("\r\n\r\n", "\r\nContent-Length: 70000\r\n\r\n"),
        head.replace("GET", "POST").replace(
            "\r\n\r\n",
            f"\r\nTransfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n",
        ),
        "nonsense\r\n\r\n",
    ]
    for request in requests:
        answers = []
        for address, port in ((ALIAS, 80), ("192.168.122.1", 8080)):
            with host.connect(guest, address, port=port) as client:
                client.send(request.encode())
                answers.append(client.response(has_body="HEAD" not in request).undated)
        assert answers[0] == answers[1], request[:200]


def test_conformance_suite_has_the_same_results_through_the_relay(host: BridgeWorld) -> None:
    guest = host.add_guest("br0", "192.168.122.65/24", DB)
    who(host, guest)
    relayed, direct = (conform(host, guest, url) for url in (f"http://{ALIAS}", DIRECT))
    assert relayed == direct
    assert "failed" not in relayed.values()
    assert [*relayed.values()].count("passed") > 50


def conform(host: BridgeWorld, guest: Guest, url: str) -> dict[str, str]:
    """The verdict of each check."""
    command = f"{sys.executable} -m forewarn conform {url} --json"
    checks = json.loads(host.run(guest.namespace, command))["checks"]
    return {check["name"]: check["verdict"] for check in checks}


def test_servers_that_die_are_replaced_then_missed_then_back(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = start(stack, tmp_path, servers=2)
        guest = world.add_guest("br0", "192.168.122.70/24", WEB_0)
        with world.connect(guest) as client, world.connect(guest) as waiting:
            known = client.ask().headers["etag"]
            more = f"If-None-Match: {known}\r\nPrefer: wait=60\r\nMetadata:".encode()
            waiting.send(POLL.replace(b"Metadata:", more))
            client.ask()
            world.servers[0].kill()
            assert "age" in waiting.response().headers  # what the guest knows already
            for _ in range(20):
                assert "age" not in client.ask().headers
            approval = POLL.replace(b"GET", b"POST").replace(
                b"\r\n\r\n", b'\r\nContent-Length: 20\r\n\r\n{"StartRequests":[]}'
            )
            assert client.ask(approval).status in (200, 400)

            world.servers[1].kill()
            last = client.ask()
            assert (last.status, "age" in last.headers) == (200, True)
            refused = client.ask(approval)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert client.ask(INSTANCE).status == 503

            world.start_server(0)
            eventually(lambda: "age" not in client.ask().headers)
            assert name_of(client.ask(INSTANCE)) == "web-0"


def test_guest_that_waits_at_a_suspended_server_reads_from_another_within_seconds(
    tmp_path: Path,
) -> None:
    """The kernel keeps the connections of a process that is stopped."""
    with ExitStack() as stack:
        world = start(stack, tmp_path, servers=2)
        guest = world.add_guest("br0", "192.168.122.71/24", WEB_0)
        with world.connect(guest) as client, world.connect(guest) as waiting:
            known = client.ask().headers["etag"]
            more = f"If-None-Match: {known}\r\nPrefer: wait=60\r\nMetadata:".encode()
            waiting.send(POLL.replace(b"Metadata:", more))
            client.ask()
            world.servers[0].send_signal(signal.SIGSTOP)
            assert "age" in waiting.response().headers  # what the guest knows already
            assert "age" not in waiting.ask().headers


def test_bridge_that_is_made_again_is_served_again(tmp_path: Path) -> None:
    """As with `virsh net-destroy` and `net-start`."""
    with ExitStack() as stack:
        world = start(stack, tmp_path)
        world.run(world.host, "ip link delete br0")
        world.add_bridge("br0", "192.168.122.1/24")
        guest = world.add_guest("br0", "192.168.122.71/24", WEB_0)
        assert who(world, guest) == "web-0"
        world.run(world.host, f"ip address delete {ALIAS}/32 dev br0")
        assert who(world, guest) == "web-0"


def test_bridge_and_ipv6_that_appear_later_are_served(tmp_path: Path) -> None:
    """Guests of the other bridges do not wait for them, and the log has one line for each."""
    with ExitStack() as stack:
        world = start(stack, tmp_path, bridges=("later", "br0"))
        guest = world.add_guest("br0", "192.168.122.72/24", WEB_0)
        assert who(world, guest) == "web-0"
        world.run(world.host, "ip link add later type bridge")
        world.run(world.host, "sysctl -w net.ipv6.conf.later.disable_ipv6=1")
        world.run(world.host, "ip link set later up")
        late = world.add_guest("later", "192.168.122.73/24", DB)
        assert who(world, late) == "db"
        world.run(world.host, "sysctl -w net.ipv6.conf.later.disable_ipv6=0")
        assert who(world, late, ALIAS_V6) == "db"

        lines = (tmp_path / "relay.txt").read_text().splitlines()
        missing, without_ipv6 = [line for line in lines if "guests are" in line]
        assert "guests are not served" in missing
        assert "the bridge later does not exist" in missing
        assert "info" in without_ipv6
        assert "guests are served by IPv4 only" in without_ipv6
        assert "the bridge later has no IPv6" in without_ipv6


@pytest.mark.parametrize(
    ("bridge", "problem"),
    [
        ("nobr", "error: the bridge nobr does not exist; expected a bridge of this host\n"),
        ("lo", "error: lo is not a Linux bridge; Open vSwitch and macvtap are not supported\n"),
        (
            "br0",
            f"error: cannot listen on {ALIAS}:80 of the bridge br0: Address already in use\n",
        ),
    ],
)
def test_bridge_that_cannot_be_served_is_one_line(
    host: BridgeWorld, bridge: str, problem: str
) -> None:
    settings = {"bridges": [bridge], "servers": [SERVERS[0]], "token": "fw_h_0", "ports": {}}
    process = host.popen(host.host, "tests.e2e.relay_process")
    output, _ = process.communicate(json.dumps(settings) + "\n", timeout=30)

    assert output == problem


def announce(host: BridgeWorld, guest: Guest, address: str) -> None:
    """A gratuitous ARP packet, as a guest sends it that has a new address."""
    program = Path(__file__).with_name("gratuitous_arp.py")
    host.run(guest.namespace, f"{sys.executable} {program} eth0 {address}")


def announce_until_known(host: BridgeWorld, guest: Guest, address: str) -> None:
    """Linux ignores a second change of a neighbour within a second."""

    def is_known() -> bool:
        announce(host, guest, address)
        return mac(host, guest) in host.run(host.host, f"ip neigh show {address} dev br0")

    eventually(is_known)


def is_at_port_of(host: BridgeWorld, guest: Guest, address: str) -> bool:
    """Whether the bridge sends packets for the guest's MAC to it: another one may have it too."""
    announce(host, guest, address)
    return guest.port in port_of_mac(host, mac(host, guest))


def mac(host: BridgeWorld, guest: Guest) -> str:
    return host.run(guest.namespace, "cat /sys/class/net/eth0/address").strip()


def port_of_mac(host: BridgeWorld, address: str) -> str:
    lines = host.run(host.host, "bridge fdb show br br0").splitlines()
    return "\n".join(line for line in lines if line.startswith(address))
