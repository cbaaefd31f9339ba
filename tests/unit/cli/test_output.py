"""What the commands print, apart from where it goes."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forewarn.cli.config import DEMO, shown
from forewarn.cli.output import show_events, show_list, show_one
from forewarn.cli.serve import invitation, tell
from forewarn.cli.watch import SHOWN
from forewarn.config import Address, Config, resolve
from forewarn.core.change import Change, ChangeKind
from forewarn.engine.entry import Note
from forewarn.fleetfile.parser import parse

EVENT = {
    "id": "E1",
    "type": "Reboot",
    "status": "Scheduled",
    "resources": ["a", "b"],
    "not_before": "2030-01-31T12:15:00Z",
}


def test_nothing_that_a_terminal_obeys_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A description is free text, and the terminal that shows it is an operator's."""
    show_one({"description": "\x1b[2Jgone\r\n"}, as_json=False)

    assert capsys.readouterr().out == "description  \ufffd[2Jgone\ufffd\ufffd\n"


def test_markup_in_a_name_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich reads [red] as a colour unless it is told not to."""
    show_list(
        {"vms": [{"name": "[red]a[/red]", "events": []}], "total": 1},
        "vms",
        ("name", "events"),
        as_json=False,
    )

    assert capsys.readouterr().out == "NAME          EVENTS\n[red]a[/red]  -\n"


def test_an_empty_list_still_has_its_titles(capsys: pytest.CaptureFixture[str]) -> None:
    """Silence could be an error; a header without rows is an answer."""
    show_list({"events": [], "total": 0}, "events", ("id", "not_before"), as_json=False)

    assert capsys.readouterr().out == "ID  NOT BEFORE\n"


@pytest.mark.parametrize(
    ("answer", "done", "text"),
    [
        ({"event": EVENT}, "", "Reboot E1 of a, b is Scheduled, not before 2030-01-31T12:15:00Z\n"),
        ({"events": [EVENT | {"status": "Started"}]}, "", "Reboot E1 of a, b is Started\n"),
        ({"event": EVENT}, "canceled", "Reboot E1 of a, b is canceled\n"),
        ({"event": None}, "", "nobody to tell\n"),
        ({"events": []}, "", "nobody to tell\n"),
    ],
)
def test_an_operation_is_answered_with_a_sentence(
    capsys: pytest.CaptureFixture[str], answer: dict[str, object], done: str, text: str
) -> None:
    """The operator learns the id, whom it concerns and when, at one glance."""
    show_events(answer, "nobody to tell", done=done, as_json=False)

    assert capsys.readouterr().out == text


def test_json_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get what the API said, members that the table leaves out included."""
    answer = {"vms": [{"name": "a", "more": None}], "total": 9}
    show_list(answer, "vms", ("name",), as_json=True)

    assert json.loads(capsys.readouterr().out) == answer


def test_the_demo_tells_a_change_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Scheduled, approved, Started, through it, Completed: the story of an event, a line each."""
    at = datetime(2030, 1, 31, 12, 0, 5, tzinfo=UTC)

    for change in (
        Change(ChangeKind.SCHEDULED, event_id="0123456789", detail="Reboot of web-0"),
        Change(ChangeKind.APPROVED, event_id="0123456789", detail="web-0"),
        Change(ChangeKind.CLAIMED, event_id="0123456789", vm="web-0"),
        Change(ChangeKind.ENABLED),
    ):
        tell(Note(at, "operator", "web", change))

    assert capsys.readouterr().out.splitlines() == [
        "12:00:05  web         Scheduled: Reboot of web-0  (01234567)",
        "12:00:05  web         approved by web-0  (01234567)",
        "12:00:05  web         a VM polls: from now on it is told before anything is done to it",
    ]


def test_the_demo_speaks_of_changes_that_exist() -> None:
    """A word that no change has would never be heard."""
    assert set(SHOWN) <= {what.value for what in ChangeKind}


def test_the_demo_names_other_ports_where_it_stands_on_them() -> None:
    """The pasted lines must reach this service, not the default one."""
    usual = invitation(Address("127.0.0.1", 8080), Address("127.0.0.1", 8081), 60)
    other = invitation(Address("127.0.0.1", 8080), Address("127.0.0.1", 9), 30)

    assert "FOREWARN_CONTROL" not in usual
    assert "A 15-minute notice takes 15 seconds here" in usual
    assert "   FOREWARN_CONTROL=http://127.0.0.1:9 " in other
    assert "A 15-minute notice takes 30 seconds here" in other


def test_the_demo_fleet_has_every_kind_of_scope_and_is_this_machine_first() -> None:
    """A plain curl from 127.0.0.1 must be a VM, and there should be something of everything to try."""
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


def test_a_value_is_shown_as_it_would_be_typed() -> None:
    """What `config --show` prints can be pasted into a flag."""
    flags = {
        "simulate_duration": ["Freeze=90s"],
        "identify": ["address", "path"],
        "rate": "2.5",
        "legacy_path": True,
    }
    config = resolve(Config, flags=flags, environ={}, file=Path("/dev/null")).config

    told = {name: shown(getattr(config, name)) for name in (*flags, "metadata", "fleet")}

    assert told == {
        "simulate_duration": "Freeze=90s",
        "identify": "address,path",
        "rate": "2.5",
        "legacy_path": "true",
        "metadata": "127.0.0.1:8080",
        "fleet": "",
    }
