"""The unit of the host daemon under systemd itself, with libvirt, a bridge and a real domain: what
its sandbox allows is enough.
"""

import json
import re
from typing import Any

from tests.systemd_machine import SystemdMachine, systemd_machine
from tests.vm.real_libvirt import DOMAIN, QEMU_CONF

LIBVIRTD_CONF = """
auth_unix_rw = "none"
unix_sock_group = "libvirt"
unix_sock_rw_perms = "0770"
"""
HOSTD_CONF = """
host = "host-a"
server = ["http://127.0.0.1:8081"]
metadata_server = ["http://127.0.0.1:8080"]
bridge = ["br0"]
libvirt_uri = ["qemu:///system", "qemu+tls://{host}/system"]
libvirt_grace_seconds = 1
"""
WEB_0 = "9a3f1c52-0f0e-4c6b-9d0e-2f7b6f1c0a11"
INTERFACE = (
    "<interface type='bridge'><source bridge='br0'/><mac address='52:54:00:00:00:01'/></interface>"
)
NEIGHBOUR = """
ip link add br0 type bridge && ip link set br0 up
ip netns add neighbour
ip link add port type veth peer name lan netns neighbour
ip link set port master br0 up
ip -n neighbour link set lan up
ip -n neighbour address add 169.254.7.7/16 dev lan
"""
TOKEN = (
    "runuser -u forewarn -- /opt/forewarn/bin/forewarn token create --store"
    " sqlite:////var/lib/forewarn/forewarn.db"
)
CAP_NET_BIND_SERVICE, CAP_NET_ADMIN = 1 << 10, 1 << 12
RESIDENT_KB_MAX = 60 * 1024


def start_libvirt(machine: SystemdMachine) -> None:
    machine.run("rm -rf /etc/libvirt && mkdir /etc/libvirt && getent group libvirt")
    machine.write("/etc/libvirt/libvirtd.conf", LIBVIRTD_CONF)
    machine.write("/etc/libvirt/qemu.conf", QEMU_CONF)
    unit = "[Service]\nType=notify\nExecStart=/usr/sbin/libvirtd\nKillMode=process\n"
    machine.write("/etc/systemd/system/libvirtd.service", unit)
    machine.run("systemctl daemon-reload && systemctl start libvirtd")
    xml = DOMAIN.format(name="web-0", uuid=WEB_0, bios="", disks=INTERFACE)
    machine.write("/run/web-0.xml", xml)
    machine.run("virsh define /run/web-0.xml && virsh start web-0")


def start_server(machine: SystemdMachine) -> str:
    """Returns the token of an administrator."""
    machine.write("/etc/forewarn/forewarn.toml", "")
    machine.install("forewarn.service", log="/run/forewarn.log")
    machine.run("install -d -o forewarn -g forewarn -m 0700 /var/lib/forewarn")
    token = machine.run(f"{TOKEN} root --role admin").strip()
    of_host = machine.run(f"{TOKEN} host-a --role host --host host-a")
    machine.run("systemctl start forewarn")
    machine.write("/etc/forewarn/hostd.token", of_host)
    machine.path("/etc/forewarn/hostd.token").chmod(0o600)
    return token


def changes(page: Any) -> list[str]:
    return [entry["what"] for entry in page["history"]]


def test_host_daemon_works_within_its_sandbox() -> None:
    with systemd_machine() as machine:
        machine.run(NEIGHBOUR)
        token = start_server(machine)
        machine.write("/etc/forewarn/hostd.toml", HOSTD_CONF)
        machine.install("forewarn-hostd.service", log="/run/hostd.log")
        start_libvirt(machine)

        def ask(path: str, method: str = "GET") -> Any:
            url = f"http://127.0.0.1:8081/api/v1{path}"
            return json.loads(
                machine.run(f"curl -sS -X {method} -H 'Authorization: Bearer {token}' {url}")
            )

        machine.run("systemctl start forewarn-hostd")
        machine.wait_for(lambda: [vm["power"] for vm in ask("/vms")["vms"]] == ["running"])
        (vm,) = ask("/vms")["vms"]
        assert (vm["name"], vm["host"], vm["id"]) == ("web-0", "host-a", WEB_0)

        status = machine.status_of("forewarn-hostd")
        assert status["Uid"].split()[0] == machine.run("id -u forewarn-hostd").strip()
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert int(status["CapBnd"], 16) == CAP_NET_ADMIN | CAP_NET_BIND_SERVICE
        assert int(status["VmRSS"].split()[0]) < RESIDENT_KB_MAX

        assert "%br0:80" in machine.run("ss -Hltn src 169.254.169.254")
        rules = machine.run("nft list table bridge forewarn_br0")
        assert re.search(r'iif "vnet\d+" goto guest_request', rules)
        address = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
        code = machine.run(
            "ip netns exec neighbour curl -sS -m 3 -o /dev/null -w '%{http_code}'"
            f" -H Metadata:true '{address}' || true"
        )
        assert code == "000"  # it is at a port of the bridge, but not at that of a VM
        assert "nft" not in machine.path("/run/hostd.log").read_text()
        assert (
            "/etc/libvirt/qemu.conf has no lock_manager"
            in machine.path("/run/hostd.log").read_text()
        )

        ask("/vms/web-0/restart", "POST")  # nobody polls, so there is no notice
        machine.wait_for(lambda: "completed" in changes(ask("/history?limit=100")))
        assert "impact-failed" not in changes(ask("/history?limit=100"))

        machine.run("systemctl kill --signal KILL forewarn-hostd")
        machine.wait_for(
            lambda: machine.run("systemctl show --value -p NRestarts forewarn-hostd").strip() == "1"
        )
        machine.run("systemctl is-active forewarn-hostd || systemctl start forewarn-hostd")
        machine.run("virsh destroy web-0")
        machine.wait_for(lambda: [vm["power"] for vm in ask("/vms")["vms"]] == ["stopped"])
        machine.run("systemctl stop forewarn-hostd && rm /etc/libvirt/qemu.conf")
        machine.run("systemctl start forewarn-hostd")
        log = machine.path("/run/hostd.log")  # the daemon is ready before it looks at disks
        machine.wait_for(lambda: "cannot tell whether disks" in log.read_text())
        machine.run("systemctl stop forewarn-hostd")
        result = machine.run("systemctl show --value --property Result forewarn-hostd")
        assert result.strip() == "success"
