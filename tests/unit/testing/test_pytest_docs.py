"""The page about the plugin: every member stands there, every row is true."""

import inspect
import re
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path

from forewarn.lab.environment import make_environment
from forewarn.testing import Lab
from forewarn.testing.objects import LabEvent, LabFault, LabHost, LabVm
from tests.builders import NOON

PAGE = (Path(__file__).parents[3] / "docs" / "pytest.md").read_text()
CLASSES: dict[str, type] = {
    "lab": Lab,
    "vm": LabVm,
    "host": LabHost,
    "event": LabEvent,
    "fault": LabFault,
}


def members(kind: type) -> set[str]:
    held = (
        {field.name for field in fields(kind)}
        if is_dataclass(kind)
        else {"id"}
        if kind is LabFault
        else set()
    )
    return {name for name in held | set(vars(kind)) if not name.startswith("_")}


def test_every_member_is_documented_once() -> None:
    rows = re.findall(r"^\| `(\w+)\.(\w+)", PAGE, re.MULTILINE)

    assert {name: {row for owner, row in rows if owner == name} for name in CLASSES} == {
        name: members(kind) for name, kind in CLASSES.items()
    }
    assert len(set(rows)) == len(rows)


def test_every_event_row_is_true() -> None:
    rows = re.findall(r"^\| `vm\.(\w+)\(\)` \| (\w+) \| (\w+) \| ([\w ]+) \|", PAGE, re.MULTILINE)
    notices = {"15 min": 900, "10 min": 600, "5 min": 300, "30 s": 30, "7 days": 604_800, "none": 0}

    assert len(rows) == 10
    with Lab(start=NOON) as lab:
        for number, (call, type_, source, notice) in enumerate(rows):
            event = getattr(lab.vm(f"vm-{number}"), call)()
            expected = (type_, source, timedelta(seconds=notices[notice]))
            assert (event.type, event.source, event.not_before - NOON) == expected, call


def test_every_option_and_variable_is_documented() -> None:
    options = [*inspect.signature(Lab).parameters, "environment", "intercept"]

    assert [name for name in options if f"\n| `{name}` |" not in PAGE] == []
    assert [name for name in make_environment("http://h") if f"`{name}`" not in PAGE] == []
