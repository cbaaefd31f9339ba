"""Three "VMs" in three network namespaces behind a host's bridge, as behind libvirt's: each calls
169.254.169.254 and is itself.

The test makes its own host: a namespace with the bridge, the service and the rules of
`deploy/forewarn.nft`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

ROOT = Path(__file__).parents[2]
URL = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
FLEET = """
scopes:
  - name: web
    kind: availability-set
    vms:
      - {name: web-0, address: 192.168.122.10, host: h, update_domain: 0}
      - {name: web-1, address: 192.168.122.11, host: h, update_domain: 1}
  - name: database
    kind: vm
    vms: [{name: database, address: 192.168.122.12, host: h}]
"""
READY_SECONDS_MAX = 30

pytestmark = [pytest.mark.xdist_group("namespaces"), pytest.mark.system]


class Host:
    """A namespace that plays the host of the VMs, and those of the VMs."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.name = self._namespace()
        self.run(self.name, "ip link add virbr0 type bridge")
        self.run(self.name, "ip address add 192.168.122.1/24 dev virbr0")
        self.run(self.name, "ip link set virbr0 up")

    def _namespace(self) -> str:
        name = f"fw{uuid4().hex[:10]}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        self._stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        self.run(name, "ip link set lo up")
        return name

    def run(self, namespace: str, command: str) -> str:
        arguments = ["ip", "netns", "exec", namespace, *command.split()]
        return subprocess.run(
            arguments, check=True, capture_output=True, text=True, timeout=30
        ).stdout

    def vm(self, address: str) -> str:
        """A namespace behind the bridge, with a default route as DHCP gives it."""
        name, cable = self._namespace(), f"v{uuid4().hex[:8]}"
        self.run(self.name, f"ip link add {cable} type veth peer name eth0 netns {name}")
        self.run(self.name, f"ip link set {cable} master virbr0 up")
        self.run(name, f"ip address add {address}/24 dev eth0")
        self.run(name, "ip link set eth0 up")
        self.run(name, "ip route add default via 192.168.122.1")
        return name

    def get(self, vm: str, *more: str) -> Any:
        command = [
            "ip",
            "netns",
            "exec",
            vm,
            "curl",
            "-sS",
            "--max-time",
            "20",
            "-H",
            "Metadata: true",
            URL,
            *more,
        ]
        response = subprocess.run(command, check=True, capture_output=True, timeout=30).stdout
        return json.loads(response) if response else None

    @contextmanager
    def serving(self, folder: Path, metadata: str) -> Iterator[None]:
        (folder / "fleet.yaml").write_text(FLEET)
        command = [
            "ip",
            "netns",
            "exec",
            self.name,
            sys.executable,
            "-m",
            "forewarn",
            "serve",
            "--store",
            "memory",
        ]
        command += [
            "--fleet",
            str(folder / "fleet.yaml"),
            "--metadata",
            metadata,
            "--control",
            "127.0.0.1:8081",
        ]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("FOREWARN_")
        }
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=folder
        )
        assert process.stdout is not None
        try:
            assert b"ready" in process.stdout.readline()
            yield
        finally:
            process.terminate()
            assert process.wait(READY_SECONDS_MAX) == 0
            process.stdout.close()


@pytest.fixture
def host() -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(stack)


def until_polled(host: Host, vm: str) -> Any:
    """The first packets may wait for the bridge to learn."""
    for _ in range(20):
        try:
            return host.get(vm)
        except subprocess.CalledProcessError:
            time.sleep(0.2)
    return host.get(vm)


def each_sees_its_own_scope_only(host: Host) -> None:
    web_0, web_1, database = (host.vm(f"192.168.122.{last}") for last in (10, 11, 12))
    stranger = host.vm("192.168.122.13")
    for vm in (web_0, web_1, database):
        assert until_polled(host, vm)["Events"] == []
    host.run(host.name, f"{sys.executable} -m forewarn vm restart web-1")

    (event,) = host.get(web_0)["Events"]
    assert (event["EventType"], event["Resources"]) == ("Reboot", ["web-1"])
    assert host.get(web_1)["Events"] == [event]
    assert host.get(database)["Events"] == []
    assert host.get(stranger) == {"error": "Forbidden. 192.168.122.13 is not a VM of this fleet"}

    approval = json.dumps({"StartRequests": [{"EventId": event["EventId"]}]})
    assert "error" in host.get(database, "-d", approval)
    assert host.get(web_0)["Events"][0]["EventStatus"] == "Scheduled"
    assert host.get(web_1, "-d", approval) is None
    assert host.get(web_0)["Events"][0]["EventStatus"] == "Started"


def test_nftables_setup_keeps_vm_addresses(host: Host, tmp_path: Path) -> None:
    """A DNAT that also rewrote the source would make all of them one."""
    host.run(host.name, f"nft -f {ROOT / 'deploy/forewarn.nft'}")
    with host.serving(tmp_path, "192.168.122.1:8080"):
        each_sees_its_own_scope_only(host)


def test_link_local_alias_keeps_vm_addresses(host: Host, tmp_path: Path) -> None:
    host.run(host.name, "ip address add 169.254.169.254/32 dev virbr0")
    with host.serving(tmp_path, "169.254.169.254:80"):
        each_sees_its_own_scope_only(host)


def test_vm_with_a_169_254_link_route_reaches_the_alias(host: Host, tmp_path: Path) -> None:
    """Many images have a route for the link-local net: then the VM asks for the address by ARP, not
    by the gateway.
    """
    host.run(host.name, "ip address add 169.254.169.254/32 dev virbr0")
    with host.serving(tmp_path, "169.254.169.254:80"):
        vm = host.vm("192.168.122.12")
        host.run(vm, "ip route add 169.254.0.0/16 dev eth0")
        assert until_polled(host, vm)["Events"] == []
