"""The units in `deploy/` under systemd itself, with their users, sandboxes and watchdogs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.systemd_machine import SystemdMachine, systemd_machine
from tools import make_agent

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("units")]

FLEET = """
scopes:
  - {name: web, kind: availability-set, vms: [{name: web-0, address: 127.0.0.1, host: host-a}]}
"""
CONFIG = """
fleet = "/etc/forewarn/fleet.yaml"
simulate_duration = ["Reboot=10ms"]
"""
AGENT = """
endpoint = "http://127.0.0.1:8080"

[[rule]]
name = "everything"
approve = "when-prepared"
prepare = [
    {signal = {send = "TERM", unit = "worker.service", until_exit = true}},
    {systemd = ["app.service"]},
]
recover = [{systemd = ["app.service"]}]
"""
SLEEPS = "[Service]\nExecStart=/bin/sleep 3600\n"


@pytest.fixture(scope="module")
def booted() -> Iterator[SystemdMachine]:
    with systemd_machine() as machine:
        machine.write("/etc/forewarn/forewarn.toml", CONFIG)
        machine.write("/etc/forewarn/fleet.yaml", FLEET)
        for unit in ("forewarn.service", "forewarn@.service"):
            machine.install(unit, log="/run/forewarn.log")
        yield machine


@pytest.fixture
def machine(booted: SystemdMachine) -> Iterator[SystemdMachine]:
    yield booted
    booted.run("systemctl stop '*.service'; systemctl reset-failed")


def ask(machine: SystemdMachine, path: str, *options: str) -> Any:
    given = " ".join(options)
    return json.loads(machine.run(f"curl -sS -m 30 {given} http://127.0.0.1:8081/api/v1{path}"))


def show(machine: SystemdMachine, unit: str, name: str) -> str:
    return machine.run(f"systemctl show --value --property {name} {unit}").strip()


def test_service_runs_confined_and_survives_a_kill(machine: SystemdMachine) -> None:
    machine.run("systemctl start forewarn")
    status = machine.status_of("forewarn")
    user = machine.run("id -u forewarn").strip()
    assert (status["Uid"].split()[0], status["NoNewPrivs"], status["Seccomp"]) == (user, "1", "2")
    assert int(status["CapBnd"], 16) == 1 << 10  # CAP_NET_BIND_SERVICE
    assert show(machine, "forewarn", "StatusText") == (
        "metadata 127.0.0.1:8080, control 127.0.0.1:8081, "
        "store sqlite:////var/lib/forewarn/forewarn.db"
    )
    assert machine.run("stat -c '%U %a' /var/lib/forewarn").strip() == "forewarn 700"

    machine.run("systemctl kill --signal KILL forewarn")
    machine.wait_for(lambda: show(machine, "forewarn", "NRestarts") == "1")
    machine.wait_for(lambda: show(machine, "forewarn", "ActiveState") == "active")
    assert [vm["name"] for vm in ask(machine, "/vms")["vms"]] == ["web-0"]
    machine.run("systemctl stop forewarn")
    assert show(machine, "forewarn", "Result") == "success"


def test_service_with_a_wrong_option_is_not_restarted(machine: SystemdMachine) -> None:
    machine.write("/etc/forewarn/forewarn.toml", "fleat = 1\n")
    try:
        assert machine.try_run("systemctl start forewarn").returncode != 0
        assert show(machine, "forewarn", "ActiveState") == "failed"
        assert show(machine, "forewarn", "ExecMainStatus") == "2"
        assert "fleat" in machine.run("tail -n 1 /run/forewarn.log")
    finally:
        machine.write("/etc/forewarn/forewarn.toml", CONFIG)


@pytest.mark.parametrize("unit", ["forewarn", "forewarn@1"])
def test_unit_uses_the_store_of_the_file(machine: SystemdMachine, unit: str) -> None:
    """A unit that names a store itself would win over `store = "etcd://…"` without a word."""
    machine.write("/etc/forewarn/forewarn.toml", f'store = "memory"\n{CONFIG}')
    try:
        machine.run(f"systemctl start {unit}")
        assert show(machine, unit, "StatusText").endswith("store memory")
    finally:
        machine.write("/etc/forewarn/forewarn.toml", CONFIG)


def test_two_servers_of_the_template_share_the_ports(machine: SystemdMachine) -> None:
    machine.run("systemctl start forewarn@1 forewarn@2")
    for name in ("forewarn@1", "forewarn@2"):
        assert show(machine, name, "ActiveState") == "active"
    assert machine.run("ss -Hltn 'sport = 8080'").count("LISTEN") == 2


def test_agent_stops_and_starts_units_around_a_reboot(machine: SystemdMachine) -> None:
    make_agent.build(machine.path("/usr/local/lib/forewarn/forewarn-agent.pyz"))
    machine.write("/etc/forewarn-agent.toml", AGENT)
    for unit in ("app", "worker"):
        machine.write(f"/etc/systemd/system/{unit}.service", SLEEPS)
    machine.install("forewarn-agent.service", log="/run/agent.log")
    machine.run("systemctl start forewarn app worker forewarn-agent")
    before = show(machine, "app", "MainPID")
    machine.wait_for(lambda: bool(ask(machine, "/scopes/web")["is_enabled"]))

    ask(machine, "/vms/web-0/restart", "-X POST")
    machine.wait_for(lambda: "phase=recover  is_stopped=False" in machine.run("cat /run/agent.log"))
    machine.wait_for(lambda: ask(machine, "/events")["events"] == [])
    assert show(machine, "app", "ActiveState") == "active"
    assert show(machine, "app", "MainPID") != before
    assert show(machine, "worker", "ActiveState") == "inactive"
    assert machine.run("stat -c '%U %a' /var/lib/forewarn-agent").strip() == "root 700"
