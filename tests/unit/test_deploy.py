"""What lies in `deploy/` is understood by those it is for, and names only what exists."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from forewarn.cli.exit_codes import Exit, exit_of
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.errors import StoreDenied
from forewarn.store.memory import MemoryStore
from forewarn.web.control.routes.metrics import Numbers
from forewarn.web.http.connection import Limits
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from forewarn.web.service import build_service

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "forewarn.service").read_text()
NAME = re.compile(r"\bforewarn_[a-z_]+\b")


def numbers() -> Numbers:
    service = build_service(MemoryStore(), RealClock(), Timing(), lambda: "")
    engine, settings = service.engine, service.settings
    return Numbers(service, Metadata(engine, settings), Polls(engine, settings, Limits()))


def told(command: list[str], given: bytes = b"") -> tuple[int, str]:
    ended = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    return ended.returncode, (ended.stdout + ended.stderr).decode()


def base(name: str) -> str:
    return re.sub(r"_(total|bucket|sum|count)$", "", name)


@pytest.mark.system
def test_the_services_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    """A key that systemd does not know is ignored by it, with a line that nobody reads."""
    unit = tmp_path / "forewarn.service"
    unit.write_text(UNIT.replace("/opt/forewarn/bin/forewarn", "/bin/true"))
    drop_ins = tmp_path / "forewarn.service.d"
    drop_ins.mkdir()
    (drop_ins / "libvirt.conf").write_text((DEPLOY / "forewarn-libvirt.conf").read_text())
    assert told(["systemd-analyze", "verify", str(unit)]) == (0, "")


def test_the_services_unit_asks_for_the_watchdog_and_gives_up_what_it_can() -> None:
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
def test_the_services_unit_is_exposed_as_little_as_was_promised(
    tmp_path: Path, drop_in: str
) -> None:
    """systemd's own measure, from 0 to 10; docs/security.md tells ours."""
    unit = tmp_path / "forewarn.service"
    unit.write_text(f"{UNIT}\n{(DEPLOY / drop_in).read_text() if drop_in else ''}")
    code, words = told(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", str(unit)]
    )
    assert code == 0, words[-200:]


def test_the_services_unit_is_not_restarted_for_what_only_a_person_can_mend() -> None:
    """A store that root has put back belongs to root.

    The same line every second would help nobody.
    """
    (line,) = [line for line in UNIT.splitlines() if line.startswith("RestartPreventExitStatus=")]
    assert line == f"RestartPreventExitStatus={Exit.USAGE.value}"
    assert exit_of(StoreDenied("")) is Exit.USAGE


@pytest.mark.system
@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ,
    reason="only root can make users, here in a file system of its own",
)
def test_ssh_knows_the_services_user_and_finds_its_keys(tmp_path: Path) -> None:
    """Without an entry in the user database ssh says "No user exists for uid", and no qemu+ssh
    works.
    """
    (tmp_path / "etc").mkdir()
    code, words = told(
        ["systemd-sysusers", f"--root={tmp_path}", str(DEPLOY / "forewarn.sysusers")]
    )
    assert code == 0, words
    name, _, number, group, _, home, _ = (tmp_path / "etc/passwd").read_text().strip().split(":")
    assert f"\nUser={name}\nGroup={name}\nStateDirectory={home.removeprefix('/var/lib/')}\n" in UNIT

    confined = f"setpriv --reuid={number} --regid={group} --clear-groups --no-new-privs --bounding-set=-all"
    code, words = told(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f"mount --bind {tmp_path}/etc/passwd /etc/passwd && exec {confined} ssh -G host-a",
        ]
    )
    assert code == 0, words
    assert f"userknownhostsfile {home}/.ssh/known_hosts " in words


@pytest.mark.system
def test_the_alert_rules_are_understood_by_prometheus() -> None:
    code, words = told(["promtool", "check", "rules", str(DEPLOY / "alerts.yaml")])
    assert code == 0, words


@pytest.mark.system
def test_each_alert_fires_in_its_main_case_and_only_then() -> None:
    code, words = told(["promtool", "test", "rules", str(Path(__file__).with_name("alerts.yaml"))])
    assert code == 0, words


@pytest.mark.system
def test_the_numbers_are_named_as_prometheus_wants_them() -> None:
    registry = CollectorRegistry()
    registry.register(numbers())
    assert told(["promtool", "check", "metrics"], generate_latest(registry)) == (0, "")


def test_alerts_and_dashboard_name_only_numbers_that_exist() -> None:
    existing = {metric.name for metric in numbers().collect()}
    rules = [
        rule["expr"]
        for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    asked = {
        name
        for text in [*rules, *(target["expr"] for panel in panels for target in panel["targets"])]
        for name in NAME.findall(text)
    }
    assert len(asked) > 10
    assert {base(name) for name in asked} <= existing


def test_every_number_is_documented() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    for metric in numbers().collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert f"| `{name}`" in page, name
