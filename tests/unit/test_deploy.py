"""What lies in `deploy/` is understood by those it is for, and names only what exists."""

import json
import re
import subprocess
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.store.memory import MemoryStore
from forewarn.web.connection import Limits
from forewarn.web.metadata import Metadata
from forewarn.web.metrics import Numbers
from forewarn.web.poll import Polls
from forewarn.web.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NAME = re.compile(r"\bforewarn_[a-z_]+\b")


def numbers() -> Numbers:
    engine, settings = Engine(MemoryStore(), RealClock(), Timing()), Settings()
    return Numbers(engine, Metadata(engine, settings), Polls(engine, settings, Limits()))


def told(command: list[str], given: bytes = b"") -> tuple[int, str]:
    ended = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    return ended.returncode, (ended.stdout + ended.stderr).decode()


def base(name: str) -> str:
    return re.sub(r"_(total|bucket|sum|count)$", "", name)


def test_the_services_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    """A key that systemd does not know is ignored by it, with a line that nobody reads."""
    unit = tmp_path / "forewarn.service"
    unit.write_text((DEPLOY / "forewarn.service").read_text().replace("/opt/forewarn/bin/forewarn", "/bin/true"))
    assert told(["systemd-analyze", "verify", str(unit)]) == (0, "")


def test_the_services_unit_asks_for_the_watchdog_and_gives_up_what_it_can() -> None:
    unit = (DEPLOY / "forewarn.service").read_text()
    for line in ("Type=notify", "WatchdogSec=30", "DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes"):
        assert f"\n{line}\n" in unit


def test_the_alert_rules_are_understood_by_prometheus() -> None:
    code, words = told(["promtool", "check", "rules", str(DEPLOY / "alerts.yaml")])
    assert code == 0, words


def test_each_alert_fires_in_its_main_case_and_only_then() -> None:
    code, words = told(["promtool", "test", "rules", str(Path(__file__).with_name("alerts.yaml"))])
    assert code == 0, words


def test_the_numbers_are_named_as_prometheus_wants_them() -> None:
    registry = CollectorRegistry()
    registry.register(numbers())
    assert told(["promtool", "check", "metrics"], generate_latest(registry)) == (0, "")


def test_alerts_and_dashboard_name_only_numbers_that_exist() -> None:
    existing = {metric.name for metric in numbers().collect()}
    rules = [rule["expr"] for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
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
