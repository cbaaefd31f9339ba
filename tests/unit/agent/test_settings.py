"""The agent's file: what it may say, and what it is told when it says something else."""

import time
from pathlib import Path

import pytest

from forewarn.agent.rules import Approve, Bounds, Concerns, Leader, OnFailure
from forewarn.agent.settings import BYTES_MAX, RULES_MAX, Settings, load, parse
from forewarn.agent.step import Phase, Step
from forewarn.errors import Invalid
from tests.unit.agent.agent_world import Noted

FULL = """\
endpoint = "http://127.0.0.1:8080"
name = "web-0"
journal = "/state/journal"
socket = "/run/agent.sock"
listen = "127.0.0.1:9480"
lease = "/shared/lease"
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
leader = "lease"
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


def made(kind: str, spec: object, where: str) -> Step:
    """A step of any kind, made without looking at its spec."""
    return Noted(f"{kind} {spec}", [])


def read(text: str) -> Settings:
    return parse(text, "agent.toml", make=made)


def refusal(text: str) -> str:
    with pytest.raises(Invalid) as caught:
        read(text)
    return caught.value.message


def test_a_file_that_says_everything_is_read() -> None:
    """Every key of the contract, once."""
    settings = read(FULL)
    drain, rest = settings.rules

    assert (settings.endpoint, settings.name, settings.listen) == (
        "http://127.0.0.1:8080",
        "web-0",
        "127.0.0.1:9480",
    )
    assert (settings.journal, settings.socket) == (Path("/state/journal"), Path("/run/agent.sock"))
    assert (settings.poll_seconds, settings.wait_seconds, settings.api_version) == (
        2,
        0,
        "2019-08-01",
    )
    assert (drain.types, drain.sources, drain.concerns) == (
        ("Reboot", "Redeploy"),
        ("Platform",),
        Concerns.ANY,
    )
    assert (drain.duration_seconds, drain.lead_seconds) == (Bounds(0, 30), Bounds(60, None))
    assert (drain.scope, drain.approve, drain.leader) == (
        ("web-*",),
        Approve.WHEN_PREPARED_AND_LEADER,
        Leader.LEASE,
    )
    assert (drain.hold, drain.applications) == (True, False)
    stop, run = drain.prepare
    assert stop.step.describe() == "systemd ['app.service']"
    assert (stop.weight, stop.limit_seconds, stop.on_failure) == (2, 60, OnFailure.STOP)
    assert (run.weight, run.limit_seconds, run.on_failure) == (1, None, OnFailure.CONTINUE)
    assert len(drain.steps(Phase.RECOVER)) == 1
    assert drain.steps(Phase.START) == ()
    assert (rest.name, rest.approve, rest.concerns, rest.applications) == (
        "rest",
        Approve.NEVER,
        Concerns.OWN,
        True,
    )


def test_an_empty_file_is_an_agent_that_only_watches() -> None:
    """The smallest start: see what comes before deciding what to do."""
    assert read("") == Settings()


RULE = '[[rule]]\nname = "r"\n'
WRONG = [
    ('endpint = "http://x"', "agent.toml:1: endpint: unknown key; did you mean 'endpoint'?"),
    ("\n\nzebra = 1", "agent.toml:3: zebra: unknown key; expected one of endpoint,"),
    ('endpoint = "ftp://x"', "agent.toml:1: endpoint: "),
    ("name = 7", "agent.toml:1: name: expected text, got 7"),
    (
        'listen = "9480"',
        "agent.toml:1: listen: expected an address and a port, such as 127.0.0.1:9480, got '9480'",
    ),
    ('listen = "h:99999"', "agent.toml:1: listen: expected an address and a port"),
    ("poll_seconds = 0.5", "agent.toml:1: poll_seconds: expected a number from 1 to 60, got 0.5"),
    ("poll_seconds = nan", "agent.toml:1: poll_seconds: expected a number from 1 to 60, got nan"),
    (
        "wait_seconds = true",
        "agent.toml:1: wait_seconds: expected a number from 0 to 300, got True",
    ),
    ("rule = 1", "agent.toml:1: rule: expected a list of at most 256 tables, got 1"),
    ("rule = [1]", "agent.toml:1: rule[0]: expected a table, got 1"),
    ("[[rule]]\n", "agent.toml:1: rule[0].name: expected a name of its own, got nothing"),
    (RULE + RULE, "agent.toml:4: rule[1].name: expected a name of its own, got 'r' again"),
    (
        RULE + 'aprove = "never"',
        "agent.toml:3: rule[0].aprove: unknown key; did you mean 'approve'?",
    ),
    (
        RULE + 'approve = "yes"',
        "agent.toml:3: rule[0].approve: expected one of never, at-once, when-prepared, when-prepared-and",
    ),
    (
        RULE + 'types = ["Rebot"]',
        "agent.toml:3: rule[0].types: expected a list of Freeze, Reboot, Redeploy, Preempt, Terminate",
    ),
    (RULE + "types = []", "agent.toml:3: rule[0].types: expected a list of Freeze"),
    (RULE + "scope = [1]", "agent.toml:3: rule[0].scope: expected a list of names, got [1]"),
    (RULE + "hold = 1", "agent.toml:3: rule[0].hold: expected true or false, got 1"),
    (
        RULE + 'leader = "lease"',
        "agent.toml:3: rule[0].leader: expected 'first', or a lease file at the top",
    ),
    (
        RULE + "lead_seconds = 5",
        "agent.toml:3: rule[0].lead_seconds: expected a table with min, max or both, got 5",
    ),
    (
        RULE + "lead_seconds = {mim = 5}",
        "agent.toml:3: rule[0].lead_seconds.mim: unknown key; did you mean 'min'?",
    ),
    (
        RULE + "lead_seconds = {min = -5}",
        "agent.toml:3: rule[0].lead_seconds.min: expected a number from 0 to inf, got -5",
    ),
    (
        RULE + "lead_seconds = {min = 5, max = 4}",
        "agent.toml:3: rule[0].lead_seconds: expected a min that is not above its max",
    ),
    (
        RULE + "start = [{weight = 2}]",
        "agent.toml:3: rule[0].start[0]: expected one kind of step (run, systemd,",
    ),
    (RULE + 'start = [{run = ["x"], log = "y"}]', "got run, log"),
    (
        RULE + 'start = [\n  {log = "a"},\n  {log = "b", weight = 0}]',
        "agent.toml:5: rule[0].start[1].weight: expected a number from 0.01 to 1000, got 0",
    ),
    (
        RULE + 'start = [  # {\n  {log = "a"},  # first, ]\n  # second\n  {log = "b", weight = 0}]',
        "agent.toml:6: rule[0].start[1].weight: expected",
    ),
    (
        RULE + '[[rule.recover]]\nlog = "a"\n[[rule.recover]]\nlog = "b"\non_failure = "panic"',
        "agent.toml:7: rule[0].recover[1].on_failure: expected one of continue, stop, got 'panic'",
    ),
    ("a = [\n\n", "agent.toml:3: expected TOML: "),
    ("a = 1\nb c", "agent.toml:2: expected TOML: "),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[:60] for _, message in WRONG])
def test_what_is_wrong_is_refused_with_its_line_its_field_and_what_was_expected(
    text: str, message: str
) -> None:
    """Who edits the file at night must not have to guess."""
    assert message in refusal(text)


def test_a_wrong_step_is_refused_by_its_kind_with_its_place() -> None:
    """The kinds know their own members; they are told where they stand."""
    with pytest.raises(Invalid, match=r"agent.toml:4: rule\[0\].prepare\[0\].run: expected a list"):
        parse(RULE + "prepare = [\n {run = 1}]", "agent.toml")


def test_hooks_end_each_phase_of_every_rule() -> None:
    """A drop-in directory works without being named in every rule."""
    settings = read('hooks = "/etc/hooks.d"\n' + RULE + 'prepare = [{log = "a"}]')

    assert [one.step.describe() for one in settings.rules[0].prepare] == [
        "log a",
        "hooks /etc/hooks.d",
    ]
    assert [one.step.describe() for one in settings.rules[0].recover] == ["hooks /etc/hooks.d"]


def test_lines_are_counted_through_comments_texts_and_nested_values() -> None:
    """The places where a simple search for the key would find another one."""
    text = '''\
# hold = 1
name = """
hold = 2
"""
[[rule]]
name = 'hold = 3 # ]'   # [[rule]]
scope = ["hold = 4", "[[rule]]"]
"duration_seconds" = { min = 1, max = 2 }
prepare = [ { run = ["a", { hold = [[5], [6]] }] },  # {
]
hold = 7
'''
    assert "agent.toml:11: rule[0].hold: expected true or false, got 7" in refusal(text)


def test_a_file_that_is_missing_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    """The old rules stay then: whoever reloads gets a problem, and no settings."""
    missing, large, binary = (tmp_path / name for name in ("missing", "large", "binary"))
    large.write_bytes(b"#" * (BYTES_MAX + 1))
    binary.write_bytes(b'name = "a"\n\xff')

    for path, words in (
        (missing, "No such file"),
        (large, "at most"),
        (binary, "binary:2: expected UTF-8, got byte 0xff"),
    ):
        with pytest.raises(Invalid, match=words):
            load(path)


def test_a_file_is_loaded(tmp_path: Path) -> None:
    """The same as its text."""
    path = tmp_path / "agent.toml"
    path.write_text(FULL)

    assert load(path, make=made) == parse(FULL, str(path), make=made)


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
)
def test_numbers_and_nesting_beyond_reason_are_refused(text: str) -> None:
    """A file that is wrong is refused, never the end of the agent."""
    with pytest.raises(Invalid, match=r"agent.toml:\d+: "):
        parse(text, "agent.toml")


STEP = '{run = ["/usr/bin/drain", "--now", "web"], limit_seconds = 30}'
STEPS = "".join(f'{phase} = [\n  {STEP},\n  {{log = "{phase}"}},\n]\n' for phase in Phase)


def many_rules(count: int) -> str:
    return "".join(
        f'[[rule]]\nname = "rule {number}"\napprove = "when-prepared"\n{STEPS}\n'
        for number in range(count)
    )


def test_a_file_with_all_the_rules_it_may_have_is_loaded() -> None:
    """SIGHUP loads it in the thread that feeds the watchdog, and at start systemd waits for it."""
    text = many_rules(RULES_MAX)
    text += "#" * (BYTES_MAX - len(text))

    assert len(parse(text, "agent.toml").rules) == RULES_MAX


def test_a_mistake_in_the_last_of_many_rules_has_its_line() -> None:
    """The lines are indexed once for all rules, so the last one must not be off."""
    text = many_rules(RULES_MAX) + "aprove = 1\n"

    assert refusal(text).startswith(
        f"agent.toml:{text.count(chr(10))}: rule[{RULES_MAX - 1}].aprove: unknown key"
    )


def test_loading_takes_time_in_proportion_to_the_number_of_rules() -> None:
    """A text that is searched for each key makes it the square or the cube:

    16 or 64 times for four times the rules.
    """
    few, many = (min(load_seconds(many_rules(count)) for _ in range(3)) for count in (10, 40))

    assert many < 10 * few


def load_seconds(text: str) -> float:
    """Of CPU: what else the machine does has no say."""
    began = time.thread_time()
    read(text)
    return time.thread_time() - began
