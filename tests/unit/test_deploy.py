"""The files in `deploy/` are valid, and refer only to what exists."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from forewarn.cli.exit_codes import Exit, exit_of
from forewarn.config import Config
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.errors import StoreDenied
from forewarn.platform.remote import RefusalReason
from forewarn.store.memory import MemoryStore
from forewarn.web.control.routes.metrics import ServiceCollector
from forewarn.web.http.admission import Limits
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from forewarn.web.service import build_service

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "forewarn.service").read_text()
UNITS = ("forewarn.service", "forewarn@.service")
HOSTD = "forewarn-hostd.service"
NAME = re.compile(r"\bforewarn_[a-z_]+\b")


def make_metrics() -> ServiceCollector:
    service = build_service(MemoryStore(), RealClock(), Timing(), lambda: "")
    engine, config = service.engine, Config()
    return ServiceCollector(service, Metadata(engine, config), Polls(engine, config, Limits()))


def run(command: list[str], given: bytes = b"") -> tuple[int, str]:
    ended = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    return ended.returncode, (ended.stdout + ended.stderr).decode()


def base(name: str) -> str:
    return re.sub(r"_(total|bucket|sum|count)$", "", name)


@pytest.mark.system
@pytest.mark.parametrize("name", [*UNITS, HOSTD])
def test_unit_is_valid(tmp_path: Path, name: str) -> None:
    """systemd ignores unknown keys, with a warning that nobody reads."""
    for each in (*UNITS, HOSTD):  # the template refers to the other one
        text = (DEPLOY / each).read_text()
        (tmp_path / each).write_text(text.replace("/opt/forewarn/bin/forewarn", "/bin/true"))
    drop_ins = tmp_path / f"{name}.d"
    drop_ins.mkdir()
    (drop_ins / "libvirt.conf").write_text((DEPLOY / "forewarn-libvirt.conf").read_text())
    instance = tmp_path / name.replace("@", "@1")
    assert run(["systemd-analyze", "verify", str(instance)]) == (0, "")


def test_template_differs_from_the_unit_in_what_several_servers_need() -> None:
    """A protection that is added to one of them is missing in the other otherwise."""
    before, after = (settings((DEPLOY / name).read_text()) for name in UNITS)
    serve = "ExecStart=/opt/forewarn/bin/forewarn --config /etc/forewarn/forewarn.toml serve"
    description = "Description=Forewarn: gives VMs notice before maintenance"

    assert before - after == {serve, description}
    assert after - before == {
        f"{serve} --reuse-port",
        f"{description} (server %i)",
        "EnvironmentFile=-/etc/forewarn/servers.env",
        "EnvironmentFile=-/etc/forewarn/server-%i.env",
        "Conflicts=forewarn.service",
        "After=forewarn.service",
    }


def test_units_leave_the_store_to_the_configuration() -> None:
    """A flag or a variable in a unit wins over forewarn.toml. The default is in its folder."""
    for name in UNITS:
        unit = settings((DEPLOY / name).read_text())
        assert "WorkingDirectory=/var/lib/forewarn" in unit
        assert not [line for line in unit if "--store" in line or "FOREWARN_STORE" in line]


def test_header_of_the_unit_names_the_extra_of_every_store_and_platform() -> None:
    """Without the extra, the service of the configuration cannot start."""
    header = UNIT.partition("[Unit]")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        name for text in re.findall(r"'forewarn\[([a-z,]+)\]'", header) for name in text.split(",")
    }
    assert named == {"server", "etcd", "libvirt"}
    assert named <= set(project["optional-dependencies"])


def test_header_of_the_unit_names_what_pip_needs_of_the_distribution() -> None:
    """A minimal installation has no venv, and nothing to compile libvirt's bindings with."""
    steps = [line.strip("# ") for line in UNIT.partition("[Unit]")[0].splitlines()]
    compiler = "gcc pkg-config libvirt-dev python3-dev"

    assert steps.index("apt install python3-venv") < steps.index(
        "python3 -m venv /opt/forewarn && /opt/forewarn/bin/pip install 'forewarn[server]'"
    )
    assert f"apt install {compiler}" in steps


def settings(unit: str) -> set[str]:
    return {line for line in unit.splitlines() if line and not line.startswith("#")}


def test_unit_has_a_watchdog_and_few_privileges() -> None:
    for line in (
        "Type=notify",
        "WatchdogSec=30",
        "User=forewarn",
        "ProtectSystem=strict",
        "NoNewPrivileges=yes",
    ):
        assert f"\n{line}\n" in UNIT


@pytest.mark.system
@pytest.mark.parametrize("drop_in", ["", "forewarn-libvirt.conf"])
@pytest.mark.parametrize("name", [*UNITS, HOSTD])
def test_unit_is_as_confined_as_promised(tmp_path: Path, name: str, drop_in: str) -> None:
    """systemd's exposure score, from 0 to 10; docs/security.md names ours."""
    unit = tmp_path / name.replace("@", "@1")
    text = (DEPLOY / name).read_text()
    unit.write_text(f"{text}\n{(DEPLOY / drop_in).read_text() if drop_in else ''}")
    code, output = run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", str(unit)]
    )
    assert code == 0, output[-200:]


def test_unit_does_not_restart_after_a_wrong_configuration() -> None:
    """A store that root restored belongs to root: restarting does not help."""
    (line,) = [line for line in UNIT.splitlines() if line.startswith("RestartPreventExitStatus=")]
    assert line == f"RestartPreventExitStatus={Exit.USAGE.value}"
    assert exit_of(StoreDenied("")) is Exit.USAGE


def test_host_daemon_has_two_capabilities_and_its_own_user() -> None:
    """docs/hostd.md promises them. The token is readable by root alone."""
    unit = settings((DEPLOY / HOSTD).read_text())
    capabilities = "CAP_NET_ADMIN CAP_NET_BIND_SERVICE"
    assert {
        "Type=notify",
        "WatchdogSec=30",
        "User=forewarn-hostd",
        "SupplementaryGroups=libvirt",
        f"AmbientCapabilities={capabilities}",
        f"CapabilityBoundingSet={capabilities}",
        "LoadCredential=token:/etc/forewarn/hostd.token",
        f"RestartPreventExitStatus={Exit.USAGE.value}",
    } <= unit


@pytest.mark.system
@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ,
    reason="only root can create users",
)
def test_user_of_the_host_daemon_may_use_libvirt(tmp_path: Path) -> None:
    """libvirt's polkit rules look for the group in the user database, not in the process."""
    (tmp_path / "etc").mkdir()
    path = DEPLOY / "forewarn-hostd.sysusers"
    code, output = run(["systemd-sysusers", f"--root={tmp_path}", str(path)])
    assert code == 0, output
    assert "forewarn-hostd:" in (tmp_path / "etc/passwd").read_text()
    groups = (tmp_path / "etc/group").read_text().splitlines()
    assert [line for line in groups if re.fullmatch(r"libvirt:x:\d+:forewarn-hostd", line)]


@pytest.mark.system
@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ,
    reason="only root can create users",
)
def test_ssh_works_as_the_user_of_the_service(tmp_path: Path) -> None:
    """Without a passwd entry, ssh and so qemu+ssh fail with "No user exists for uid"."""
    (tmp_path / "etc").mkdir()
    code, output = run(
        ["systemd-sysusers", f"--root={tmp_path}", str(DEPLOY / "forewarn.sysusers")]
    )
    assert code == 0, output
    name, _, number, group, _, home, _ = (tmp_path / "etc/passwd").read_text().strip().split(":")
    assert f"\nUser={name}\nGroup={name}\nStateDirectory={home.removeprefix('/var/lib/')}\n" in UNIT

    confined = (
        f"setpriv --reuid={number} --regid={group} --clear-groups --no-new-privs"
        " --bounding-set=-all"
    )
    code, output = run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f"mount --bind {tmp_path}/etc/passwd /etc/passwd && exec {confined} ssh -G host-a",
        ]
    )
    assert code == 0, output
    assert f"userknownhostsfile {home}/.ssh/known_hosts " in output


@pytest.mark.system
def test_alert_rules_are_valid() -> None:
    code, output = run(["promtool", "check", "rules", str(DEPLOY / "alerts.yaml")])
    assert code == 0, output


@pytest.mark.system
def test_each_alert_fires_when_it_should() -> None:
    code, output = run(["promtool", "test", "rules", str(Path(__file__).with_name("alerts.yaml"))])
    assert code == 0, output


@pytest.mark.system
def test_metric_names_follow_the_conventions() -> None:
    registry = CollectorRegistry()
    registry.register(make_metrics())
    assert run(["promtool", "check", "metrics"], generate_latest(registry)) == (0, "")


def test_alerts_and_dashboard_use_existing_metrics() -> None:
    existing = {metric.name for metric in make_metrics().collect()}
    rules = [
        rule["expr"]
        for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    used = {
        name
        for text in [*rules, *(target["expr"] for panel in panels for target in panel["targets"])]
        for name in NAME.findall(text)
    }
    assert len(used) > 10
    assert {base(name) for name in used} <= existing


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    for metric in make_metrics().collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert f"| `{name}`" in page, name


def test_every_reason_of_refused_guests_has_a_row_in_troubleshooting() -> None:
    """The alert about refused guests sends operators there."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    for reason in RefusalReason:
        assert f"`{reason}` " in page, reason
