"""`forewarn hostd` with a guest behind a bridge, in namespaces: ports come, bridges fail."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from forewarn.core.timing import Timing
from tests.e2e.bridge_world import ALIAS, BridgeWorld, Guest
from tests.e2e.test_bridge_table import ANSWER_SECONDS_MAX, poll_once
from tests.e2e.waiting import eventually

WEB_0 = "00000000-0000-4000-8000-000000000000"
GAP_SECONDS = Timing().gap_min_preempt.total_seconds() + 3.0
PROBLEMS = {
    "bridge link set dev {port} learning off": "does not learn MACs",
    "ip link set br0 type bridge ageing_time 0": "has an ageing_time of 0",
    "ip link delete br0": "does not exist",
}
pytestmark = [pytest.mark.xdist_group("relay"), pytest.mark.system]


class DaemonWorld(BridgeWorld):
    """A server, and the daemon of the host `h`, which lists its VMs once, and when a port comes.

    Its bridge `br0` has no guest, and `br1` is never used.
    """

    def start(self) -> None:
        self.add_bridge("br0", "192.168.122.1/24")
        self.add_bridge("br1", "192.168.123.1/24", mac="02:00:00:00:00:02")
        self.list_vms()
        (self.folder / "fleet.yaml").write_text("scopes: []\n")
        self.start_server(0, "--fleet", str(self.folder / "fleet.yaml"))
        (self.folder / "token").write_text(self.create_host_token("h"))
        daemon = self.popen(
            self.host,
            *("forewarn", "hostd", "--config", "/dev/null", "--host", "h"),
            *("--server", "http://127.0.0.1:9080", "--token-file", str(self.folder / "token")),
            *("--metadata-server", "http://127.0.0.1:8080", "--bridge", "br0", "--bridge", "br1"),
            *("--inventory-command", f"cat {self.folder}/vms.json", "--inventory-seconds", "3600"),
            *("--platform", "exec", "--exec-command", "*=true", "--machine", "m"),
            log="hostd.txt",
        )
        assert daemon.stdout is not None
        ready = daemon.stdout.readline()
        assert "is ready" in ready, ready + (self.folder / "hostd.txt").read_text()

    def list_vms(self, *ports: str) -> None:
        vms = [{"name": "web-0", "id": WEB_0, "ports": [port]} for port in ports]
        (self.folder / "new.json").write_text(json.dumps(vms))
        (self.folder / "new.json").rename(self.folder / "vms.json")

    def add_vm(self) -> Guest:
        """It is listed before it has its port, as a VM that arrives by migration."""
        guest = Guest(self.add_namespace(), "br0", "vnet3")
        self.list_vms(guest.port)
        self.plug(guest)
        self.run(guest.namespace, "ip address add 192.168.122.70/24 dev eth0")
        self.run(guest.namespace, f"ip route add {ALIAS} dev eth0")
        return guest

    def problems(self) -> list[dict[str, str]]:
        (host,) = json.loads(self.forewarn("host", "list", "--json"))["hosts"]
        found: list[dict[str, str]] = host["problems"]
        return found

    def event(self) -> Any:
        (event,) = json.loads(self.forewarn("event", "list", "--json"))["events"]
        return event

    def history(self) -> list[str]:
        entries = json.loads(self.forewarn("history", "--json"))["history"]
        return [entry["detail"] for entry in entries]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DaemonWorld]:
    with ExitStack() as stack:
        made = DaemonWorld(stack, tmp_path)
        made.start()
        yield made


def test_vm_is_served_within_seconds_of_its_port_although_it_is_listed_rarely(
    world: DaemonWorld,
) -> None:
    """Without libvirt's events, only the bridge shows that a VM has arrived."""
    time.sleep(1.0)  # the daemon has listed its VMs for the first time, and lists them in an hour
    guest = world.add_vm()
    plugged_at = time.monotonic()
    eventually(lambda: poll_once(guest) == 200)
    assert time.monotonic() - plugged_at < ANSWER_SECONDS_MAX


@pytest.mark.parametrize("change", PROBLEMS)
def test_bridge_that_is_not_served_is_shown_and_its_time_is_not_notice(
    world: DaemonWorld, change: str
) -> None:
    """Its guests get `connection refused`, which no relay can count."""
    guest = world.add_vm()
    eventually(lambda: poll_once(guest) == 200)
    assert world.problems() == []
    world.forewarn("vm", "evict", "web-0")
    before = world.event()["not_before"]

    world.run(world.host, change.format(port=guest.port))
    (problem,) = eventually(world.problems, lambda found: len(found) == 1)
    assert problem["code"] == "bridge-unserved"
    assert problem["message"].startswith("the bridge br0, with 1 VM, is not served: ")
    assert PROBLEMS[change] in problem["message"]
    assert poll_once(guest) == 0
    assert "bridge-unserved" in world.forewarn("host", "list")
    assert PROBLEMS[change] in world.forewarn("host", "show", "h")
    time.sleep(GAP_SECONDS)

    if change == "ip link delete br0":
        world.add_bridge("br0", "192.168.122.1/24")
        world.run(world.host, f"ip link set {guest.port} master br0")
    world.run(world.host, f"bridge link set dev {guest.port} learning on")
    world.run(world.host, "ip link set br0 type bridge ageing_time 30000")
    eventually(world.problems, lambda found: found == [])
    assert eventually(lambda: world.event()["not_before"], lambda after: after > before)
    eventually(lambda: poll_once(guest) == 200)
    lines = [line for line in world.history() if line.startswith("bridge br0 of h")]
    assert sorted(line.partition(":")[0] for line in lines) == [
        "bridge br0 of h is not served",
        "bridge br0 of h is served again",
    ]


def test_bridge_without_a_vm_delays_nothing(world: DaemonWorld) -> None:
    guest = world.add_vm()
    eventually(lambda: poll_once(guest) == 200)
    world.forewarn("vm", "evict", "web-0")
    before = world.event()["not_before"]

    world.run(world.host, "ip link delete br1")
    (problem,) = eventually(world.problems, lambda found: len(found) == 1)
    assert problem["message"].startswith("the bridge br1, with no VM at present, is not served: ")
    time.sleep(GAP_SECONDS)
    world.add_bridge("br1", mac="02:00:00:00:00:02")
    eventually(world.problems, lambda found: found == [])
    assert (world.event()["not_before"], world.event()["unreadable_seconds"]) == (before, 0)
