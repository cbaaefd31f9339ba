"""Every kind of step is read from the configuration, and errors name the field."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forewarn.agent.steps import KINDS, make_step
from forewarn.errors import Invalid

PAGE = (Path(__file__).parents[4] / "docs" / "steps.md").read_text()
COMMON = ("weight", "limit_seconds", "on_failure")
EXAMPLES = re.findall(r"^## (\w+)\n.*?```toml\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)

WRONG = [
    (
        "run",
        "reboot now",
        "W: expected a list of a command and its arguments (or a text, with shell = true), got",
    ),
    ("run", [], "W: expected a list of a command"),
    ("run", ["a", 1], "W: expected a list of a command"),
    (
        "run",
        {"command": ["a"], "shell": True},
        "W.command: expected a text for the shell, got ['a']",
    ),
    ("run", {"command": ["a"], "shel": True}, "W.shel: unknown key; did you mean 'shell'?"),
    ("run", {"command": ["a"], "qqq": 1}, "W.qqq: unknown key; expected one of command, shell"),
    (
        "run",
        {"command": ["a"], "grace_seconds": 61},
        "W.grace_seconds: expected a number from 0 to 60, got 61",
    ),
    (
        "run",
        {"command": ["a"], "grace_seconds": True},
        "W.grace_seconds: expected a number from 0 to 60, got True",
    ),
    (
        "run",
        {"command": ["a"], "environment": {"A": 1}},
        "W.environment: expected a table of names and texts, got {'A': 1}",
    ),
    (
        "run",
        {"command": ["a"], "environment": {"A=B": "x"}},
        "expected a table of names and texts",
    ),
    (
        "run",
        {"command": ["a"], "environment": {"": "x"}},
        "W.environment: expected a table of names and texts",
    ),
    (
        "run",
        {"command": ["a"], "environment": {"A\0": "x"}},
        "W.environment: expected a table of names and texts",
    ),
    (
        "run",
        {"command": ["a"], "environment": {"A": "\0"}},
        "W.environment: expected a table of names and texts",
    ),
    ("run", {"command": ["a\0"]}, "W.command: expected a list"),
    (
        "run",
        {},
        "with shell = true), got nothing",
    ),
    ("systemd", "a.service", "W: expected a list of units, got 'a.service'"),
    (
        "systemd",
        {"units": ["a"], "action": "kill"},
        "W.action: expected one of by-phase, stop, start, restart, reload, got 'kill'",
    ),
    (
        "http",
        "ftp://x/",
        "W: expected a URL with http:// or https:// and without a password, got 'ftp://x/'",
    ),
    ("http", "http://me:secret@x/", "W: expected a URL with http://"),
    ("http", "http://x:99999/", "W: expected a URL with http://"),
    ("http", "http://x/a b", "W: expected a URL with http://"),
    ("http", {"url": "http://x", "method": "FETCH"}, "W.method: expected one of GET, POST"),
    ("http", {"url": "http://x", "to": "ops"}, "W.to: unknown key; expected one of url, method"),
    ("log", {"text": "x", "to": "syslog"}, "W.to: unknown key; expected one of text, level"),
    (
        "http",
        {"url": "http://x", "body": '{"a": {event_id}}'},
        "W.body: expected JSON (Expecting value",
    ),
    ("http", {"url": "http://x", "body": "{event_ids}"}, "did you mean 'event_id'?"),
    (
        "http",
        {"url": "http://x", "body": "a", "shape": "slack"},
        "W.body: expected no body together with shape = 'slack', got 'a'",
    ),
    (
        "http",
        {"url": "http://x", "shape": "teams"},
        "W.shape: expected one of cloudevents, slack, got 'teams'",
    ),
    (
        "http",
        {"url": "http://x", "expect": [99]},
        "W.expect: expected a list of HTTP statuses, got [99]",
    ),
    (
        "http",
        {"url": "http://x", "expect": [True]},
        "W.expect: expected a list of HTTP statuses, got [True]",
    ),
    (
        "http",
        {"url": "http://x", "headers": {"A": "b\r\nC: d"}},
        "W.headers: expected names of letters",
    ),
    ("haproxy", "/run/x.sock", "W: expected a table with socket, servers, wait, got '/run/x.sock'"),
    (
        "haproxy",
        {"socket": "host", "servers": ["a/b"]},
        "W.socket: expected the path of a socket, or host:port, got 'host'",
    ),
    (
        "haproxy",
        {"socket": "h:0", "servers": ["a/b"]},
        "W.socket: expected the path of a socket, or host:port, got 'h:0'",
    ),
    (
        "haproxy",
        {"socket": "/s", "servers": ["web"]},
        "W.servers: expected a list of backend/server,",
    ),
    (
        "haproxy",
        {"socket": "/s", "servers": ["a/b; shutdown"]},
        "W.servers: expected a list of backend/server,",
    ),
    (
        "file",
        {"path": "/x", "in_prepare": "gone"},
        "W.in_prepare: expected one of absent, present, got 'gone'",
    ),
    ("file", "", "W: expected the path of a file, got ''"),
    ("kubernetes", {"server": "10.0.0.1"}, "W.server: expected a URL"),
    ("kubernetes", {"evict": "no"}, "W.evict: expected true or false, got 'no'"),
    (
        "signal",
        {"send": "USR9", "pid_file": "/x"},
        "W.send: expected the name of a signal, like USR1, got 'USR9'",
    ),
    ("signal", {"send": "USR1"}, "W.pid_file: expected either pid_file or unit, got nothing"),
    (
        "signal",
        {"send": "USR1", "pid_file": "/x", "unit": "y"},
        "W.pid_file: expected either pid_file or unit, got '/x'",
    ),
    (
        "log",
        {"text": "x", "level": "loud"},
        "W.level: expected one of debug, info, warning, error, got 'loud'",
    ),
    ("log", "of {event_kind}", "W: expected known facts of an event ({event_kind} is unknown"),
    ("http", {"url": "http://x", "to": "ops"}, "W.to: unknown key; expected one of url, method"),
    ("hooks", ["a"], "W: expected the path of a directory, got ['a']"),
    ("rnu", [], "W: unknown kind of step; did you mean 'run'?"),
    ("zzz", [], "W: unknown kind of step; expected one of run, systemd"),
]


@pytest.mark.parametrize(("kind", "spec", "message"), WRONG)
def test_wrong_step_is_rejected_with_its_field(kind: str, spec: object, message: str) -> None:
    """It must be found when the file is read, not 30 seconds before a Preempt."""
    with pytest.raises(Invalid) as refusal:
        make_step(kind, spec, "W")

    assert message in refusal.value.message
    assert str(refusal.value.facts["field"]).startswith("W")


def test_every_kind_has_a_valid_example_in_the_page() -> None:
    """Users copy them."""
    assert [kind for kind, _ in EXAMPLES] == list(KINDS)
    for kind, text in EXAMPLES:
        tables = [table for phase in tomllib.loads(text).values() for table in phase]
        made = [
            make_step(name, spec, "page")
            for table in tables
            for name, spec in table.items()
            if name not in COMMON
        ]

        assert {name for table in tables for name in table} - set(COMMON) == {kind}
        assert all(step.describe() for step in made)


def test_every_key_of_every_kind_is_documented() -> None:
    for kind in KINDS:
        with pytest.raises(Invalid, match="expected one of") as refusal:
            make_step(kind, {"qqqqqq": 1}, "W")
        section = PAGE.split(f"\n## {kind}\n")[1].split("\n## ")[0]

        assert [
            name
            for name in str(refusal.value).split("expected one of ")[1].split(", ")
            if name not in section
        ] == []


def test_unused_kind_is_not_imported() -> None:
    """The agent may use 25 MB, and TLS alone needs several."""
    code = (
        "import sys; from forewarn.agent.steps import make_step;"
        "make_step('log', 'x', 'W'); sys.exit('ssl' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


DESCRIPTIONS = [
    ("run", ["a", "b c"], "run a b c"),
    ("run", {"command": "x; y", "shell": True}, "run /bin/sh -c x; y"),
    ("systemd", ["a", "b"], "stop, or in recover start, a b"),
    ("systemd", {"units": ["a"], "action": "reload"}, "reload a"),
    ("http", {"url": "http://x:1/a?b", "shape": "slack"}, "POST http://x:1"),
    (
        "haproxy",
        {"socket": "/s", "servers": ["w/{vm}"]},
        "drain w/{vm} in HAProxy at /s, or in recover make it ready",
    ),
    ("file", "/x//y", "make /x/y absent, or in recover the opposite"),
    ("kubernetes", {}, "cordon our node and evict its pods, or in recover uncordon it"),
    ("kubernetes", {"node": "n", "evict": False}, "cordon n, or in recover uncordon it"),
    (
        "signal",
        {"send": "usr1", "unit": "u", "until_exit": True},
        "send SIGUSR1 to u, wait for its end",
    ),
    (
        "signal",
        {"send": "HUP", "pid_file": "/p", "until_file": "/f"},
        "send SIGHUP to /p, wait for /f",
    ),
    ("log", "x", "log 'x'"),
    ("hooks", "/h/", "run the hooks in /h"),
]


@pytest.mark.parametrize(("kind", "value", "description"), DESCRIPTIONS)
def test_description_of_a_step_never_changes(kind: str, value: object, description: str) -> None:
    """The journal recognises a step by it: after an upgrade in the middle of an event, a step with
    another description would run again.
    """
    assert make_step(kind, value, "W").describe() == description
