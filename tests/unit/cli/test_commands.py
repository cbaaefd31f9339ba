"""What commands print, and their exit codes, against a server with one canned response."""

import json
from pathlib import Path
from typing import Any

import pytest

from forewarn.cli.campaign import print_plan
from forewarn.cli.main import run
from tests.unit.cli.test_api import recording

Capture = pytest.CaptureFixture[str]
NOT_A_LAB = (
    "forewarn: this service is not a lab; start one with `forewarn lab serve`, and set"
    " FOREWARN_CONTROL if it is elsewhere\n"
)


def refusal(code: str, message: str, **facts: object) -> bytes:
    return json.dumps({"error": code, "message": message, "facts": facts}).encode()


def forewarn(status: int, body: bytes, *arguments: str) -> tuple[int, list[Any]]:
    """The exit code of a command, and the requests that it sent."""
    with recording(status, body) as (url, requests):
        code = run(["--control-url", url, *arguments])
    return code, requests


def test_whole_message_about_a_flag_is_printed(capsys: Capture) -> None:
    """Also one that does not begin with the field."""
    body = refusal("invalid", "no host matches hots-*; expected rack7-*", field="hosts")

    code, _ = forewarn(400, body, "campaign", "start", "--type", "reboot", "--hosts", "hots-*")

    assert (code, capsys.readouterr().err) == (
        2,
        "forewarn: --hosts: no host matches hots-*; expected rack7-*\n",
    )


@pytest.mark.parametrize("command", ["apply", "diff"])
def test_error_in_an_applied_file_names_the_file(
    command: str, tmp_path: Path, capsys: Capture
) -> None:
    """The service knows the file as the body of a request."""
    file = tmp_path / "bad.yaml"
    file.write_text("scopes: []")
    body = refusal("invalid", "body:4: scopes[0].name: expected one not used by body:2: scopes[1]")

    forewarn(400, body, "fleet", command, str(file))

    assert capsys.readouterr().err == (
        f"forewarn: {file}:4: scopes[0].name: expected one not used by {file}:2: scopes[1]\n"
    )


def test_clock_jumps_by_a_duration_of_the_lab(capsys: Capture) -> None:
    """The lab's clock is the base, not that of this machine."""
    lab = b'{"now": "2030-01-31T12:00:00Z"}'

    code, requests = forewarn(200, lab, "lab", "clock", "jump", "+15m")

    assert (code, requests[-1][:2]) == (0, ("PUT", "/api/v1/clock"))
    assert json.loads(requests[-1][3]) == {"now": "2030-01-31T12:15:00Z"}
    assert forewarn(200, lab, "lab", "clock", "jump", "yesterday")[0] == 2
    assert capsys.readouterr().err == (
        "forewarn: TIME: expected a time such as +15m, 2h or 2030-01-31T12:00:00Z,"
        " got 'yesterday'\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("clock", "show"),
        ("clock", "advance", "15m"),
        ("fault", "list"),
        ("transcript",),
        ("exec", "--vm", "web-0", "--", "true"),
    ],
)
def test_service_that_is_not_a_lab_is_named(arguments: tuple[str, ...], capsys: Capture) -> None:
    """The path that it does not have means nothing to a user."""
    body = refusal("not_found", "no such path: /api/v1/clock; see /api/openapi.json")

    code, _ = forewarn(404, body, "lab", *arguments)

    assert (code, capsys.readouterr().err) == (3, NOT_A_LAB)


@pytest.mark.parametrize(
    ("arguments", "start"),
    [(("lab", "clock", "show"), "forewarn lab serve"), (("vm", "list"), "forewarn demo")],
)
def test_missing_service_gets_the_command_that_starts_it(
    arguments: tuple[str, ...], start: str, capsys: Capture
) -> None:
    """Port 9 of the loopback address has no listener."""
    assert run(["--control-url", "http://127.0.0.1:9", *arguments]) == 4
    assert capsys.readouterr().err.endswith(f"or start one with `{start}`\n")


def test_events_are_listed_by_time_and_started_ones_have_none(capsys: Capture) -> None:
    """The document that VMs read has no NotBefore for a Started event either."""
    columns = ("type", "resources", "scope", "source", "cause")
    events = [
        {"id": "E3", "status": "Scheduled", "not_before": "2030-01-31T14:00:00Z"},
        {"id": "E1", "status": "Started", "not_before": "2030-01-31T12:00:00Z"},
        {"id": "E2", "status": "Scheduled", "not_before": "2030-01-31T13:00:00Z"},
    ]
    items = [{**dict.fromkeys(columns, "x"), **event} for event in events]
    body = json.dumps({"events": items, "total": 3, "next": None}).encode()

    assert forewarn(200, body, "event", "list")[0] == 0
    _, *lines = capsys.readouterr().out.splitlines()

    assert [line.split()[:4] for line in lines] == [
        ["E1", "x", "Started", "-"],
        ["E2", "x", "Scheduled", "2030-01-31T13:00:00Z"],
        ["E3", "x", "Scheduled", "2030-01-31T14:00:00Z"],
    ]
    event_id = "1B2C3D4E-0F33-41B9-B7D1-9390A9009A3E"
    forewarn(200, json.dumps(items[1]).encode(), "event", "show", event_id)
    assert "not before  -\n" in capsys.readouterr().out


def test_event_that_cannot_be_read_says_so(capsys: Capture) -> None:
    event = {
        "id": "1B2C3D4E-0F33-41B9-B7D1-9390A9009A3E",
        "status": "Scheduled",
        "not_before": "2030-01-31T14:00:00Z",
        "unreadable_since": "2030-01-31T13:50:00Z",
        "unreadable_seconds": 60,
        "waits_for": "the daemon of ha: away",
    }
    forewarn(200, json.dumps(event).encode(), "event", "show", str(event["id"]))
    shown = capsys.readouterr().out
    assert "unreadable since    2030-01-31T13:50:00Z" in shown
    assert "unreadable seconds  60" in shown
    assert "waits for           the daemon of ha: away" in shown


def test_list_marks_events_that_cannot_be_read(capsys: Capture) -> None:
    """They do not start at their NotBefore, which may have passed."""
    columns = ("type", "resources", "scope", "source", "cause")
    events = [
        {"id": name, "status": "Scheduled", "not_before": "2030-01-31T13:00:00Z"}
        | {"unreadable_since": since, "waits_for": waits}
        | dict.fromkeys(columns, "x")
        for name, since, waits in (
            ("E1", "2030-01-31T12:50:00Z", "the daemon of ha: away"),
            ("E2", None, ""),
            ("E3", None, "update domain 0 of web, under impact"),
        )
    ]
    forewarn(
        200, json.dumps({"events": events, "total": 3, "next": None}).encode(), "event", "list"
    )
    _, *lines = capsys.readouterr().out.splitlines()

    assert [line.split("2030")[0].split() for line in lines] == [
        ["E1", "x", "Scheduled", "(unreadable)"],
        ["E2", "x", "Scheduled"],
        ["E3", "x", "Scheduled", "(waiting)"],
    ]


PROBLEMS = [
    {"code": "host-unreachable", "message": "its host ha is unreachable: away, since noon"},
    {"code": "unserved", "message": "gets only errors since noon"},
]


def test_list_marks_vms_with_problems_and_show_has_the_reasons(capsys: Capture) -> None:
    """A VM of a dead host must not look like any other that runs."""
    columns = ("scope", "host", "seen_at", "events", "update_domain", "address")
    items = [
        {"name": name, "power": "running", "problems": problems} | dict.fromkeys(columns, "x")
        for name, problems in (("web-0", PROBLEMS), ("web-1", []))
    ]
    body = json.dumps({"vms": items, "total": 2, "next": None}).encode()
    assert forewarn(200, body, "vm", "list")[0] == 0
    titles, *lines = capsys.readouterr().out.splitlines()

    assert titles.split()[:3] == ["NAME", "POWER", "PROBLEMS"]
    assert lines[0].startswith("web-0  running  host-unreachable, unserved  x")
    assert lines[1].split()[:3] == ["web-1", "running", "-"]

    forewarn(200, json.dumps(items[0]).encode(), "vm", "show", "web-0")
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[2].strip() for line in shown if line.startswith("problems")] == [
        "its host ha is unreachable: away, since noon; gets only errors since noon"
    ]


def test_list_of_hosts_has_the_reasons_and_no_word_twice(capsys: Capture) -> None:
    problems = [
        {"code": "unreachable", "message": "its daemon has been away since noon"},
        {"code": "left-running", "message": "its daemon was forgotten"},
    ]
    items = [
        {"name": name, "state": state, "problems": found} | dict.fromkeys(("events", "vms"), 0)
        for name, state, found in (("ha", "unreachable", problems), ("hb", "connected", []))
    ]
    body = json.dumps(
        {"hosts": [each | {"scopes": []} for each in items], "total": 2, "next": None}
    ).encode()
    assert forewarn(200, body, "host", "list")[0] == 0
    _, *lines = capsys.readouterr().out.splitlines()

    assert lines[0].startswith(
        "ha    unreachable  its daemon has been away since noon;"
        " left-running: its daemon was forgotten  0"
    )
    assert lines[1].split()[:3] == ["hb", "connected", "-"]


def test_host_shows_unmovable_vms_with_their_reasons(capsys: Capture) -> None:
    stuck = [
        {"vm": "web-0", "why": "disk vdb on a local file system: /var/a,b.img"},
        {"vm": "web-1", "why": "PCI device 3b:00"},
    ]
    for unmovable in (stuck, []):
        host = {"name": "ha", "problems": [], "unmovable": unmovable}
        forewarn(200, json.dumps(host).encode(), "host", "show", "ha")
    lines = [line for line in capsys.readouterr().out.splitlines() if "unmovable" in line]

    assert lines == [
        "unmovable  web-0: disk vdb on a local file system: /var/a,b.img; web-1: PCI device 3b:00",
        "unmovable  -",
    ]


@pytest.mark.parametrize("kind", ["vm", "event"])
def test_list_can_be_limited_to_a_host_and_a_scope(kind: str) -> None:
    body = json.dumps({f"{kind}s": [], "total": 0, "next": None}).encode()
    code, requests = forewarn(200, body, kind, "list", "--host", "ha", "--scope", "web")

    assert code == 0
    assert f"/api/v1/{kind}s?host=ha&scope=web&limit=1000" in str(requests[-1])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("lab", "run", "host-rebot"), 2, "there is no scenario 'host-rebot'; did you mean 'host-"),
        (("lab", "fault", "add", "stauts"), 2, "; did you mean 'status'?"),
        (
            ("lab", "exec", "--vm", "web0", "--", "true"),
            3,
            "the lab has no VM 'web0'; did you mean",
        ),
        (("lab", "exec", "--vm", "x", "--", "true"), 3, "no VM 'x'; expected one of web-0, web-1"),
    ],
)
def test_mistyped_name_in_the_lab_gets_a_suggestion(
    arguments: tuple[str, ...], code: int, message: str, capsys: Capture
) -> None:
    """As mistyped VMs, hosts and scopes do elsewhere."""
    body = b'{"listeners": {"web-0": "http://127.0.0.1:1", "web-1": "http://127.0.0.1:2"}}'

    assert forewarn(200, body, *arguments)[0] == code
    assert message in capsys.readouterr().err


def test_rejected_word_is_repeated_as_typed(capsys: Capture) -> None:
    assert run(["host", "reboot", "x"]) == 2
    assert capsys.readouterr().err == (
        "forewarn: No such command 'reboot'; try 'forewarn host --help'\n"
    )


def test_types_to_choose_from_are_written_as_in_documents(capsys: Capture) -> None:
    assert run(["host", "maintain", "x", "--type", "rebot"]) == 2
    assert capsys.readouterr().err == (
        "forewarn: Invalid value for '--type': 'rebot' is not one of 'Freeze', 'Reboot',"
        " 'Redeploy'; did you mean 'Reboot'? Try 'forewarn host maintain --help'\n"
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("host maintain", "expected '--type', one of Freeze, Reboot, Redeploy"),
        ("campaign start", "expected '--type', one of Freeze, Reboot, Redeploy"),
        ("token create", "expected '--role', one of viewer, operator, admin, host"),
    ],
)
def test_missing_option_is_named_with_its_choices(
    command: str, expected: str, capsys: Capture
) -> None:
    assert run([*command.split(), *["x"] * (command != "campaign start")]) == 2
    assert capsys.readouterr().err == f"forewarn: {expected}; try 'forewarn {command} --help'\n"


def test_option_after_the_command_is_told_its_place(capsys: Capture) -> None:
    """Many programs accept such options anywhere."""
    assert run(["vm", "list", "--control-url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == (
        "forewarn: No such option: --control-url;"
        " put it before the command: forewarn --control-url …\n"
    )


@pytest.mark.parametrize("command", [(), ("vm",), ("vm", "list"), ("lab", "clock", "jump")])
def test_short_flag_prints_the_help(command: tuple[str, ...], capsys: Capture) -> None:
    """As in the commands that do without typer."""
    assert run([*command, "-h"]) == 0
    assert f"Usage: {' '.join(('forewarn', *command))} [OPTIONS]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("fleet", "check"), ("lab", "run")])
def test_wrong_file_on_the_command_line_is_exit_code_2(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """As a wrong command line is: retrying does not help."""
    file = tmp_path / "bad.yaml"
    file.write_text("scopes:\n- {nam: a}\n")

    assert run([*arguments, str(file)]) == 2
    assert run(["store", "check", str(file)]) == 2


def test_wrong_value_that_the_service_refuses_is_exit_code_2() -> None:
    """The flag of `lab serve` with the same value is exit code 2."""
    body = refusal("invalid", "the rate is 0; expected 0.001 to 1000000", rate=0)

    assert forewarn(400, body, "lab", "clock", "rate", "0")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "body", "shown"),
    [
        (("remove", "f1"), b'{"fault": {"id": "f1", "fault": "status"}}', "removed f1\n"),
        (
            ("clear",),
            b'{"faults": [{"id": "f1"}, {"id": "f2"}], "total": 2}',
            "removed f1\nremoved f2\n",
        ),
        (("clear",), b'{"faults": [], "total": 0}', "no faults\n"),
    ],
)
def test_removed_fault_is_not_shown_as_active(
    arguments: tuple[str, ...], body: bytes, shown: str, capsys: Capture
) -> None:
    """A table of faults looked as if they were still on."""
    assert forewarn(200, body, "lab", "fault", *arguments)[0] == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("verb", "done"), [("restart", "restarted"), ("evict", "evicted"), ("delete", "deleted")]
)
def test_operation_without_an_event_says_what_happens(
    verb: str, done: str, capsys: Capture
) -> None:
    """Who expected a notice learns that there is none."""
    body = (
        b'{"event": null, "reason": {"code": "not-polled", "message": "no VM of web has polled"}}'
    )

    assert forewarn(200, body, "vm", verb, "web-0")[0] == 0
    assert capsys.readouterr().out == (
        f"the VM is {done} now, without an event: no VM of web has polled\n"
    )


PLAN: dict[str, Any] = {
    "waves": [],
    "waiting": [],
    "too_large": [],
    "total": 0,
    "unreachable": [],
    "unmovable": [],
}


@pytest.mark.parametrize(
    ("waves", "shown"), [([["a"]], "1 host in 1 wave"), ([["a"], ["b"]], "2 hosts in 2 waves")]
)
def test_plan_counts_hosts_and_waves(waves: list[list[str]], shown: str, capsys: Capture) -> None:
    print_plan(PLAN | {"waves": waves, "total": len(waves)})

    assert capsys.readouterr().out.endswith(f"{shown}; nothing was done\n")


def test_plan_names_unreachable_hosts_and_unmovable_vms(capsys: Capture) -> None:
    """Before anything is announced."""
    away = {"host": "a", "why": "its daemon has been away since 2030-01-31T12:00:00+00:00"}
    stuck = {"host": "b", "vm": "web-0", "why": "PCI device 0000:3b:00.1 is passed through to it"}
    print_plan(PLAN | {"unreachable": [away], "unmovable": [stuck]})

    assert capsys.readouterr().out.splitlines()[:2] == [
        "unreachable: a: its daemon has been away since 2030-01-31T12:00:00+00:00",
        "cannot move: web-0 on b: PCI device 0000:3b:00.1 is passed through to it",
    ]


def test_host_operation_without_events_names_vms_that_run_there(capsys: Capture) -> None:
    """An operator must not read that the host is empty."""
    warning = "hc runs web-0, which the fleet does not have there: it is not notified"
    body = json.dumps({"events": [], "warnings": [warning]}).encode()
    forewarn(202, body, "host", "maintain", "hc", "--type", "Reboot")
    assert capsys.readouterr().out.splitlines() == [
        "no event: the fleet has no VMs on the host, or they are deallocated",
        f"warning: {warning}",
    ]
    planned = {"plan": PLAN | {"waves": [["hc"]], "total": 1}, "warnings": [warning]}
    arguments = ("campaign", "start", "--type", "Reboot", "--hosts", "hc", "--plan")
    forewarn(202, json.dumps(planned).encode(), *arguments)
    assert capsys.readouterr().out.splitlines() == [
        "wave 1: hc",
        "1 host in 1 wave; nothing was done",
        f"warning: {warning}",
    ]


def test_every_kind_of_line_of_a_plan_is_documented(capsys: Capture) -> None:
    each = {"host": "a", "vm": "web-0", "why": "so"}
    print_plan(PLAN | {name: [each] for name in PLAN.keys() - {"waves", "total"}})
    *lines, _ = capsys.readouterr().out.splitlines()
    page = (Path(__file__).parents[3] / "docs" / "campaigns.md").read_text()

    kinds = [line.partition(":")[0] for line in lines]
    assert len(kinds) == 4
    assert [kind for kind in kinds if f"- *{kind}*: " not in page] == []


def test_wrong_number_is_repeated_in_the_message(capsys: Capture) -> None:
    assert run(["vm", "list", "--limit", "x"]) == 2
    assert capsys.readouterr().err == (
        "forewarn: Invalid value for '--limit': expected a valid integer, got 'x';"
        " try 'forewarn vm list --help'\n"
    )
