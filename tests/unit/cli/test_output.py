"""What the commands print."""

import io
import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from forewarn.cli.history import SENTENCES, format_entry
from forewarn.cli.options import DEMO
from forewarn.cli.output import SERVICE_TIME, show_events, show_list, show_one
from forewarn.cli.serve import format_welcome, is_taken, print_change
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
        (
            {"event": None, "reason": {"code": "vm-down", "message": "a is stopped"}},
            "",
            "the VM is restarted now, without an event: a is stopped\n",
        ),
        (
            {"event": None, "reason": {"code": "ended", "message": "event E1 was canceled before"}},
            "canceled",
            "event E1 was canceled before\n",
        ),
        (
            {"event": EVENT | {"status": "Started"}, "waits_for": "the daemon of h: it is away"},
            "",
            "Reboot E1 of a, b is Started\nthe impact waits for the daemon of h: it is away\n",
        ),
        (
            {
                "event": None,
                "reason": {"code": "not-polled", "message": "no VM has polled"},
                "waits_for": "the daemon of h: it is away",
            },
            "",
            (
                "the VM is restarted, without an event: no VM has polled\n"
                "the impact waits for the daemon of h: it is away\n"
            ),
        ),
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
    usual = format_welcome(Address("127.0.0.1", 8080), Address("127.0.0.1", 8081), 60, "memory")
    other = format_welcome(Address("127.0.0.1", 8080), Address("127.0.0.1", 9), 30, "memory")

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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(columns: int, show: Callable[[], None]) -> list[str]:
    """What a person sees on a terminal of this width."""
    screen = Terminal()
    before = dict(os.environ)
    os.environ.update(COLUMNS=str(columns), TERM="xterm", NO_COLOR="1")
    reset = SERVICE_TIME.set(lambda: datetime(2030, 1, 31, 12, tzinfo=UTC))
    try:
        with redirect_stdout(screen):
            show()
    finally:
        SERVICE_TIME.reset(reset)
        os.environ.clear()
        os.environ.update(before)
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    return [line.rstrip() for line in text.splitlines()]


EVENTS = {
    "events": [
        EVENT
        | {
            "id": "1B2C3D4E-0F33-41B9-B7D1-9390A9009A3E",
            "resources": [f"a-name-of-some-length-{number}" for number in range(3)],
            "scope": "workers",
            "source": "Platform",
            "cause": "live-migration",
        }
    ],
    "total": 1,
}
COLUMNS = ("id", "type", "status", "not_before", "resources", "scope", "source", "cause")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_narrow_table_drops_columns_and_cuts_nothing(width: int) -> None:
    """An id that is cut cannot be pasted."""
    lines = on_terminal(width, lambda: show_list(EVENTS, "events", COLUMNS))
    text = "\n".join(lines)

    assert max(map(len, lines)) <= width
    assert "1B2C3D4E  Reboot  Scheduled" in text
    assert "…" not in text
    assert "in 15m" in text
    assert ("Platform" in text, "live-migration" in text) == (width > 60, width > 80)
    assert [f"length-{number}" in text for number in range(3)] == [width > 60] * 3


def test_name_wider_than_the_terminal_is_wrapped_whole() -> None:
    """Better two lines than a name that is not there."""
    name = "n" * 90
    response = {"vms": [{"name": name, "power": "running"}], "total": 1}
    lines = on_terminal(60, lambda: show_list(response, "vms", ("name", "power")))

    assert "".join(line.split()[0] for line in lines[2:]) == name
    assert lines[2].endswith("running")


def test_ids_are_short_in_tables_and_whole_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight characters are enough to type; a program wants all."""
    show_list(EVENTS, "events", ("id", "not_before"))
    show_list(EVENTS, "events", ("id",), as_json=True)
    piped, _, printed = capsys.readouterr().out.partition("{")

    assert piped == "ID        NOT BEFORE\n1B2C3D4E  2030-01-31T12:15:00Z\n"
    assert '"id": "1B2C3D4E-0F33-41B9-B7D1-9390A9009A3E"' in printed


def test_ids_in_a_problem_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """They are ids of libvirt, whose commands accept only whole ones, and may begin alike."""
    first, second = (f"00000000-0000-4000-8000-00000000000{number}" for number in (1, 2))
    problem = f"two VMs are named 'web-1': {first} on host-a and {second} on host-a"
    show_list({"hosts": [{"problems": problem}], "total": 1}, "hosts", ("problems",))

    assert capsys.readouterr().out == f"PROBLEMS\n{problem}\n"


def test_long_list_is_a_number_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A scope may have a thousand VMs, and a line of `host list | grep` should fit a screen."""
    response = {"scopes": [{"vms": [f"web-{number}" for number in range(6)]}], "total": 1}
    show_list(response, "scopes", ("vms",))

    assert on_terminal(80, lambda: show_list(response, "scopes", ("vms",)))[2:] == ["6 vms"]
    assert capsys.readouterr().out == "VMS\n6 vms\n"


def test_times_are_relative_on_a_terminal() -> None:
    """Relative to the service's clock, which in a lab is not the real time."""
    event = EVENT | {"id": "1B2C3D4E-0F33-41B9-B7D1-9390A9009A3E"}

    assert on_terminal(80, lambda: show_one({"seen_at": "2030-01-31T11:57:00.5Z"})) == [
        "seen at  2030-01-31T11:57:00Z (3m ago)"
    ]
    assert on_terminal(80, lambda: show_events({"event": event})) == [
        "Reboot 1B2C3D4E of a, b is Scheduled, starts in 15m"
    ]


def test_demo_takes_another_port_only_if_its_own_is_taken() -> None:
    """Whether a process listens there, which is seen without disturbing it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        assert is_taken(address)
    assert not is_taken(address)
