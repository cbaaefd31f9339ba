"""What the commands print."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from forewarn.cli.history import SENTENCES, format_entry
from forewarn.cli.options import DEMO
from forewarn.cli.output import format_age, show_events, show_list, show_one
from forewarn.cli.serve import format_welcome, print_change
from forewarn.core.change import Change, ChangeKind
from forewarn.engine.entry import make_entry
from forewarn.fleetfile.parser import parse
from forewarn.option_kind import Address

EVENT = {
    "id": "E1",
    "type": "Reboot",
    "status": "Scheduled",
    "resources": ["a", "b"],
    "not_before": "2030-01-31T12:15:00Z",
}


def test_control_characters_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A description is free text; it must not control the operator's terminal."""
    show_one({"description": "\x1b[2Jgone\r\n"})

    assert capsys.readouterr().out == "description  \ufffd[2Jgone\ufffd\ufffd\n"


def test_markup_in_a_name_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would read [red] as a colour."""
    show_list(
        {"vms": [{"name": "[red]a[/red]", "events": []}], "total": 1},
        "vms",
        ("name", "events"),
    )

    assert capsys.readouterr().out == "NAME          EVENTS\n[red]a[/red]  -\n"


def test_empty_list_still_has_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    """No output at all could be an error."""
    show_list({"events": [], "total": 0}, "events", ("id", "not_before"))

    assert capsys.readouterr().out == "ID  NOT BEFORE\n"


@pytest.mark.parametrize(
    ("response", "result", "text"),
    [
        ({"event": EVENT}, "", "Reboot E1 of a, b is Scheduled, not before 2030-01-31T12:15:00Z\n"),
        ({"events": [EVENT | {"status": "Started"}]}, "", "Reboot E1 of a, b is Started\n"),
        ({"event": EVENT}, "canceled", "Reboot E1 of a, b is canceled\n"),
        ({"event": None}, "", "no events\n"),
        ({"events": []}, "", "no events\n"),
    ],
)
def test_operation_prints_one_sentence_per_event(
    capsys: pytest.CaptureFixture[str], response: dict[str, object], result: str, text: str
) -> None:
    """The operator sees the id, the resources and the time."""
    show_events(response, "no events", result)

    assert capsys.readouterr().out == text


def test_demo_prints_changes_as_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    """The life of an event, one line per change; internal changes are left out."""
    at = datetime(2030, 1, 31, 12, 0, 5, tzinfo=UTC)

    for change in (
        Change(ChangeKind.SCHEDULED, event="0123456789", detail="Reboot of web-0"),
        Change(ChangeKind.APPROVED, event="0123456789", detail="web-0"),
        Change(ChangeKind.CLAIMED, event="0123456789", vm="web-0"),
        Change(ChangeKind.ENABLED),
    ):
        print_change(make_entry(change, at=at, by="operator", scope="web"))

    assert capsys.readouterr().out.splitlines() == [
        "12:00:05  web         Scheduled: Reboot of web-0  (01234567)",
        "12:00:05  web         approved by web-0  (01234567)",
        "12:00:05  web         first poll: from now on VMs get notice",
    ]


def test_watch_says_how_a_restarted_vm_came_back() -> None:
    """An operator who follows a restart sees that the VM is not up yet, or never came up."""
    at = datetime(2030, 1, 31, 12, 0, 5, tzinfo=UTC)
    lines = [
        format_entry(
            json.loads(msgspec.json.encode(make_entry(change, at=at, by="x", scope="web")))
        )
        for change in (
            Change(ChangeKind.RESTARTED, vm="web-0", detail="reset"),
            Change(ChangeKind.IMPACTED, vm="web-0", detail="not back after 300 seconds"),
            Change(ChangeKind.IMPACTED, vm="web-0"),
        )
    ]

    assert lines == [
        "12:00:05  web         web-0: restarted, not back yet",
        "12:00:05  web         web-0: impact finished: not back after 300 seconds",
        "12:00:05  web         web-0: impact finished",
    ]


def test_every_sentence_belongs_to_a_change() -> None:
    """A sentence for an unknown change would never be printed."""
    assert set(SENTENCES) <= {what.value for what in ChangeKind}


def test_demo_commands_name_other_ports() -> None:
    """The pasted commands must reach this service, not the default one."""
    usual = format_welcome(Address("127.0.0.1", 8080), Address("127.0.0.1", 8081), 60)
    other = format_welcome(Address("127.0.0.1", 8080), Address("127.0.0.1", 9), 30)

    assert "FOREWARN_CONTROL" not in usual
    assert "A 15-minute notice takes 15 seconds here" in usual
    assert "   FOREWARN_CONTROL=http://127.0.0.1:9 " in other
    assert "A 15-minute notice takes 30 seconds here" in other


def test_demo_fleet_has_every_kind_of_scope() -> None:
    """A plain curl from 127.0.0.1 must be a VM, and there is one of everything to try."""
    assert isinstance(DEMO["fleet"], Path)
    fleet = parse(DEMO["fleet"].read_bytes(), "demo.yaml")

    assert fleet.scopes[0].vms[0].address == "127.0.0.1"
    assert {scope.kind.value for scope in fleet.scopes} == {
        "vm",
        "cloud-service",
        "availability-set",
        "scale-set",
    }
    assert len({vm.host for scope in fleet.scopes for vm in scope.vms}) == 3


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (timedelta(seconds=-5), "0s ago"),
        (timedelta(seconds=30), "30s ago"),
        (timedelta(minutes=2, seconds=30), "2m ago"),
        (timedelta(hours=23, minutes=30), "23h ago"),
        (timedelta(days=3, hours=1), "3d ago"),
    ],
)
def test_age_is_shown_in_the_largest_unit(age: timedelta, expected: str) -> None:
    assert format_age((datetime.now(UTC) - age).isoformat()) == expected
    assert format_age(None) == "never"
