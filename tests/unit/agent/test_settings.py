"""The agent's configuration file: what it may contain, and how errors are reported."""

import time
from pathlib import Path

import pytest

from forewarn.agent.rules import ApproveWhen, Bounds, Concerns, OnFailure
from forewarn.agent.settings import BYTES_MAX, RULES_MAX, AgentSettings, load, parse
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.errors import Invalid

FULL = """\
endpoint = "http://127.0.0.1:8080"
name = "web-0"
journal = "/state/journal"
socket = "/run/agent.sock"
listen = "127.0.0.1:9480"
poll_seconds = 2
wait_seconds = 0
api_version = "2019-08-01"

[[rule]]
name = "drain before a reboot"
types = ["Reboot", "Redeploy"]
sources = ["Platform"]
concerns = "any"
duration_seconds = {min = 0, max = 30}
lead_seconds = {min = 60}
scope = ["web-*"]
approve = "when-prepared-and-leader"
leader = "first"
hold = true
applications = false
prepare = [
    {systemd = ["app.service"], weight = 2, limit_seconds = 60, on_failure = "stop"},
    {run = ["/bin/true"]},
]
recover = [{systemd = ["app.service"]}]

[[rule]]
name = "rest"
"""


def read(text: str) -> AgentSettings:
    return parse(text, "agent.toml")


def rejection(text: str) -> str:
    with pytest.raises(Invalid) as caught:
        read(text)
    return caught.value.message


def test_file_with_every_key_is_read() -> None:
    settings = read(FULL)
    drain, rest = settings.rules

    assert (settings.endpoint, settings.name) == ("http://127.0.0.1:8080", "web-0")
    assert settings.listen == "127.0.0.1:9480"
    assert (settings.journal, settings.socket) == (Path("/state/journal"), Path("/run/agent.sock"))
    assert (settings.poll_seconds, settings.wait_seconds) == (2, 0)
    assert settings.api_version == "2019-08-01"
    assert (drain.types, drain.sources) == (("Reboot", "Redeploy"), ("Platform",))
    assert (drain.concerns, drain.scope) == (Concerns.ANY, ("web-*",))
    assert (drain.duration_seconds, drain.lead_seconds) == (Bounds(0, 30), Bounds(60))
    assert (drain.approve, drain.leader) == (ApproveWhen.WHEN_PREPARED_AND_LEADER, "first")
    assert (drain.hold, drain.applications) == (True, False)
    stop, run = drain.prepare
    assert stop.step.describe() == "stop, or in recover start, app.service"
    assert (stop.weight, stop.limit_seconds) == (2, 60)
    assert stop.on_failure is OnFailure.STOP
    assert (run.weight, run.limit_seconds) == (1, None)
    assert len(drain.steps(WorkflowPhase.RECOVER)) == 1
    assert drain.steps(WorkflowPhase.START) == ()
    assert (rest.name, rest.approve, rest.concerns) == ("rest", ApproveWhen.NEVER, Concerns.OWN)


def test_empty_file_is_an_agent_that_only_watches() -> None:
    """The smallest start: see which events come before deciding what to do."""
    assert read("") == AgentSettings()


RULE = '[[rule]]\nname = "r"\n'
WRONG = [
    ('endpint = "http://x"', "agent.toml: endpint: unknown key; did you mean 'endpoint'?"),
    ("zebra = 1", "agent.toml: zebra: unknown key; expected one of endpoint,"),
    ('endpoint = "ftp://x"', "agent.toml: endpoint: expected the URL of an endpoint ("),
    ("name = 7", "agent.toml: name: expected text, got 7"),
    ('journal = ""', "agent.toml: journal: expected the path of a file, got ''"),
    ("socket = false", "agent.toml: socket: expected the path of a file, got False"),
    ("socket = []", "agent.toml: socket: expected the path of a file, got []"),
    ("hooks = 0", "agent.toml: hooks: expected the path of a file, got 0"),
    ('listen = "9480"', "listen: expected an address and a port, such as 127.0.0.1:9480, got"),
    ('listen = "h:99999"', "agent.toml: listen: expected an address and a port"),
    ("poll_seconds = 0.5", "agent.toml: poll_seconds: expected a number from 1 to 60, got 0.5"),
    ("poll_seconds = nan", "agent.toml: poll_seconds: expected a number from 1 to 60, got nan"),
    ("wait_seconds = true", "wait_seconds: expected a number from 0 to 300, got True"),
    ('lease = "/x"', "agent.toml: lease: unknown key; expected one of endpoint, name, journal"),
    ("rule = 1", "agent.toml: rule: expected a list of at most 256 tables, got 1"),
    ("rule = [1]", "agent.toml: rule[0]: expected a table, got 1"),
    ("\n[[rule]]\n", "agent.toml:2: rule[0].name: expected a unique name, got nothing"),
    (RULE + RULE, "agent.toml:3: rule[1].name: expected a unique name, got 'r'"),
    (
        RULE + 'aprove = "never"',
        "agent.toml:1: rule[0].aprove: unknown key; did you mean 'approve'",
    ),
    (RULE + 'approve = "yes"', "rule[0].approve: expected one of never, at-once, when-prepared, "),
    (RULE + 'types = ["Rebot"]', "rule[0].types: expected a list of Freeze, Reboot, Redeploy"),
    (RULE + "types = []", "agent.toml:1: rule[0].types: expected a list of Freeze"),
    (RULE + "scope = [1]", "agent.toml:1: rule[0].scope: expected a list of names, got [1]"),
    (RULE + "hold = 1", "agent.toml:1: rule[0].hold: expected true or false, got 1"),
    (RULE + 'leader = "lease"', "rule[0].leader: expected 'first', got 'lease'"),
    (
        RULE + "prepare = [{kubernetes = {node = 'n'}}]\nrecover = [{kubernetes = {node = 'm'}}]",
        (
            "rule[0].recover: expected the same target as in prepare or start,"
            ' kubernetes = {node = "n"}, got'
        ),
    ),
    (
        RULE + "prepare = [{kubernetes = {server = 'https://n:6443'}}]\n"
        "recover = [{kubernetes = {node = 'n', server = 'https://m:6443'}}]",
        "rule[0].recover: expected the same target as in prepare or start, kubernetes = {server = ",
    ),
    (RULE + "lead_seconds = 5", "rule[0].lead_seconds: expected a table with min, max, got 5"),
    (
        RULE + "lead_seconds = {mim = 5}",
        "rule[0].lead_seconds.mim: unknown key; did you mean 'min'",
    ),
    (RULE + "lead_seconds = {min = -5}", "rule[0].lead_seconds.min: expected a number from 0 to"),
    (RULE + "lead_seconds = {min = 5, max = 4}", "expected a min that is not above its max"),
    (RULE + "start = [{weight = 2}]", "rule[0].start[0]: expected one kind of step (run, systemd,"),
    (RULE + 'start = [{run = ["x"], log = "y"}]', "got run, log"),
    (
        RULE + 'start = [\n  {log = "a"},\n  {log = "b", weight = 0}]',
        "rule[0].start[1].weight: expected a number from 0.01 to 1000, got 0",
    ),
    (
        RULE + '[[rule.recover]]\nlog = "a"\n[[rule.recover]]\nlog = "b"\non_failure = "panic"',
        "rule[0].recover[1].on_failure: expected one of continue, stop, got 'panic'",
    ),
    (
        RULE + "prepare = [\n {run = 1}]",
        "agent.toml:1: rule[0].prepare[0].run: expected a list of a command",
    ),
    (
        RULE + 'prepare = [{http = {url = "x"}}]',
        "agent.toml:1: rule[0].prepare[0].http.url: expected a URL with http://",
    ),
    ("a = [\n\n", "agent.toml:3: expected TOML: "),
    ("a = 1\nb c", "agent.toml:2: expected TOML: "),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_error_names_the_field_and_what_was_expected(text: str, message: str) -> None:
    """Whoever edits the file at night should not have to guess."""
    assert message in rejection(text)


def test_empty_path_is_none() -> None:
    settings = read('socket = ""\nhooks = ""')

    assert (settings.socket, settings.hooks) == (None, None)


def test_error_names_no_line_where_it_could_be_wrong() -> None:
    """A wrong line is worse than none."""
    text = '[[rule]]\nname = """\n[[rule]]\n"""\nhold = 7\n'

    assert rejection(text).startswith("agent.toml: rule[0].hold: expected true or false, got 7")


def test_hooks_run_at_the_end_of_each_phase_of_every_rule() -> None:
    """A drop-in directory works without being named in every rule."""
    (rule,) = read('hooks = "/etc/hooks.d"\n' + RULE + 'prepare = [{log = "a"}]').rules

    assert [one.step.describe() for one in rule.prepare] == [
        "log 'a'",
        "run the hooks in /etc/hooks.d",
    ]
    assert [one.step.describe() for one in rule.recover] == ["run the hooks in /etc/hooks.d"]


def test_file_that_cannot_be_decoded_or_read_is_rejected(tmp_path: Path) -> None:
    missing, large, binary = (tmp_path / name for name in ("missing", "large", "binary"))
    large.write_bytes(b"#" * (BYTES_MAX + 1))
    binary.write_bytes(b'name = "a"\n\xff')

    for path, message in (
        (missing, "No such file"),
        (large, "at most"),
        (binary, "binary: expected UTF-8: .* byte 0xff in position 11"),
    ):
        with pytest.raises(Invalid, match=message):
            load(path)


def test_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(FULL)

    assert load(path) == parse(FULL, str(path))


@pytest.mark.parametrize(
    "text",
    [
        "poll_seconds = " + "9" * 400,
        "poll_seconds = " + "9" * 5000,
        "poll_seconds = 0x" + "f" * 5000,
        "rule = [" + "[" * 400 + "]" * 400 + "]",
        '[[rule]]\nname = "r"\nprepare = [{log = "x", weight = ' + "9" * 400 + "}]",
        '[[rule]]\nname = "r"\nprepare = [{http = {url = "http://127.0.0.1/", body = "'
        + "[" * 100_000
        + '"}}]',
    ],
    ids=["400 digits", "5000 digits", "hexadecimal", "nested", "weight", "body"],
)
def test_huge_numbers_and_deep_nesting_are_rejected(text: str) -> None:
    """A wrong file must never end the agent."""
    with pytest.raises(Invalid, match=r"agent.toml(:\d+)?: "):
        read(text)


STEP = '{run = ["/usr/bin/drain", "--now", "web"], limit_seconds = 30}'
STEPS = "".join(f'{phase} = [\n  {STEP},\n  {{log = "{phase}"}},\n]\n' for phase in WorkflowPhase)


def many_rules(count: int) -> str:
    return "".join(
        f'[[rule]]\nname = "rule {number}"\napprove = "when-prepared"\n{STEPS}\n'
        for number in range(count)
    )


def test_file_with_the_most_rules_is_loaded() -> None:
    """SIGHUP loads it in the thread that feeds the watchdog, and at start systemd waits for it."""
    text = many_rules(RULES_MAX)
    text += "#" * (BYTES_MAX - len(text))

    assert len(read(text).rules) == RULES_MAX


def test_error_in_the_last_rule_names_the_line_of_the_rule() -> None:
    text = many_rules(RULES_MAX) + "aprove = 1\n"
    line = text[: text.rindex("[[rule]]")].count("\n") + 1

    assert rejection(text).startswith(f"agent.toml:{line}: rule[255].aprove: unknown key")


def test_load_time_grows_linearly_with_the_rules() -> None:
    """An earlier version was cubic, and systemd's watchdog killed the agent on reload."""
    few, many = (min(load_seconds(many_rules(count)) for _ in range(3)) for count in (10, 40))

    assert many < 10 * few


def load_seconds(text: str) -> float:
    """CPU time, so that other processes do not matter."""
    began = time.thread_time()
    read(text)
    return time.thread_time() - began
