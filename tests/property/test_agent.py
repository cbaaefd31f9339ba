"""Properties of the agent that hold for any sequence of events and crashes."""

import json
import re
import tempfile
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.agent.journal import Journal
from forewarn.agent.participants import Participants
from forewarn.agent.progress import (
    EntryKind,
    Progress,
    StepRecord,
    drop_details,
    entries,
    event_to_json,
    fold,
    for_journal,
    parse_event,
)
from forewarn.agent.rules import (
    STEP_SECONDS_MIN,
    ApproveWhen,
    OnFailure,
    PlannedStep,
    Rule,
    prepare_deadline,
    seconds_for_step,
)
from forewarn.agent.settings import AgentSettings, parse
from forewarn.agent.status import Counters
from forewarn.agent.steps.base import StepContext, StepFailed, WorkflowPhase
from forewarn.agent.workflow import AgentContext, Workflow
from forewarn.client import Event
from forewarn.errors import Invalid
from tests.unit.agent.agent_world import FakeTime, UnsyncedJournal, reboot, started
from tests.unit.agent.test_settings import FULL

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
events = st.builds(
    Event,
    id=st.text(min_size=1),
    type=st.text(min_size=1),
    status=st.sampled_from(["Scheduled", "Started", "Other"]),
    source=st.text(),
    resources=st.lists(st.text(), max_size=3).map(tuple),
    not_before=st.none() | st.datetimes(timezones=st.just(UTC)),
    duration_seconds=st.integers(-1, 10**6),
    description=st.text(),
    extra=st.dictionaries(st.text(), json_values, max_size=3),
)
phases = st.sampled_from(WorkflowPhase)
steps = st.sampled_from(
    [EntryKind.STEP_BEGUN, EntryKind.STEP_DONE, EntryKind.STEP_FAILED, EntryKind.STEP_CUT]
)
lines: st.SearchStrategy[tuple[EntryKind, dict[str, object]]] = st.one_of(
    st.tuples(
        st.sampled_from(
            [EntryKind.LATE, EntryKind.APPROVING, EntryKind.APPROVED, EntryKind.FINISHED]
        ),
        st.just({}),
    ),
    st.tuples(st.just(EntryKind.BEGUN), st.fixed_dictionaries({"phase": phases})),
    st.tuples(
        st.just(EntryKind.ENDED),
        st.fixed_dictionaries({"phase": phases, "is_stopped": st.booleans()}),
    ),
    st.tuples(
        steps,
        st.fixed_dictionaries(
            {"phase": phases, "index": st.integers(0, 3), "seconds": st.floats(0, 900)}
        ),
    ),
    st.tuples(
        st.just(EntryKind.SEEN),
        st.fixed_dictionaries({"event": events.map(event_to_json), "rule": st.just("another")}),
    ),
)


@given(
    weights=st.lists(st.floats(0.01, 1000), min_size=1, max_size=20),
    seconds=st.floats(0, 1000),
    takes=st.floats(0, 1),
)
def test_steps_fit_into_the_time_and_only_the_last_are_cut(
    weights: list[float], seconds: float, takes: float
) -> None:
    """Whatever the weights, and however fast the steps."""
    deadline, now, given_seconds = prepare_deadline(seconds, 0.0), 0.0, []
    for index in range(len(weights)):
        given_seconds.append(seconds_for_step(deadline, weights[index:], None, now))
        now += given_seconds[-1] * takes

    assert now <= deadline + 1e-6
    cut = [one == 0.0 for one in given_seconds]
    assert cut == sorted(cut), "after one that is cut, all are"
    assert all(one >= STEP_SECONDS_MIN for one in given_seconds if one)


@given(event=events)
def test_event_survives_the_journal(event: Event) -> None:
    """A step that runs after a restart sees the same event; no step can see `extra`."""
    kept = for_journal(event)

    assert parse_event(event_to_json(event)) == kept
    assert parse_event(json.loads(json.dumps(event_to_json(kept)))) == kept
    assert replace(kept, description=event.description, extra=event.extra) == event


@settings(deadline=None)
@given(event=events, main=st.lists(lines, max_size=20))
def test_compaction_changes_nothing(
    event: Event, main: list[tuple[EntryKind, dict[str, object]]]
) -> None:
    progress = Progress(for_journal(event), "rule")
    for kind, facts in main:
        progress = fold(progress, kind, facts)
        assert fold(progress, kind, facts) == progress, "a repeated entry changes nothing"

    again = None
    for kind, minimal in entries(progress):
        again = fold(again, kind, minimal)
    assert again == progress


@settings(deadline=None, max_examples=50)
@given(main=st.lists(lines, min_size=1, max_size=10), part=st.floats(0, 1))
def test_torn_journal_is_an_earlier_state(
    main: list[tuple[EntryKind, dict[str, object]]], part: float
) -> None:
    """A power cut leaves the beginning of the file.

    No partial line counts, and no complete one is lost.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        journal = UnsyncedJournal(path)
        states = [dict(journal.progress)]
        journal.write_event(reboot(), "rule")
        for kind, facts in main:
            states.append(dict(journal.progress))
            journal.write("E1", kind, **facts)
        states.append(dict(journal.progress))
        journal.close()
        text = path.read_bytes()
        path.write_bytes(text[: int(len(text) * part)])

        again = UnsyncedJournal(path)
        again.close()

        assert again.progress in [compacted(state) for state in states]
        assert not list(Path(folder).glob("*.damaged"))


def compacted(progress: dict[str, Progress]) -> dict[str, Progress]:
    return {key: drop_details(one) if one.is_done else one for key, one in progress.items()}


STORY: tuple[tuple[EntryKind, dict[str, object]], ...] = (
    (EntryKind.BEGUN, {"phase": WorkflowPhase.PREPARE}),
    (EntryKind.STEP_BEGUN, {"phase": WorkflowPhase.PREPARE, "index": 0, "step": "run x"}),
    (
        EntryKind.STEP_DONE,
        {"phase": WorkflowPhase.PREPARE, "index": 0, "step": "run x", "seconds": 1.5},
    ),
    (EntryKind.ENDED, {"phase": WorkflowPhase.PREPARE, "is_stopped": False}),
    (EntryKind.APPROVING, {}),
)
ODD_VALUES = (
    *(
        "1e999",
        "-1e999",
        "NaN",
        "9" * 400,
        "9" * 5000,
        "-1",
        "1.5",
        "true",
        "null",
        "{}",
        "[[1]]",
        '[["a", 1]]',
    ),
    *(
        '""',
        '"\\ud800"',
        '"2026-03-04T12:15:00"',
        '"0001-01-01T00:00:00+14:00"',
        "[" * 300 + "]" * 300,
        "[" * 900 + "]" * 900,
    ),
)
VALUE = re.compile(rb'(?<=:)("[^"]*"|[-0-9.]+|\[[^]]*\]|true|false|null)')


def damaged(line: bytes, data: st.DataObject) -> bytes:
    """The line with one value replaced by an odd one, or some bytes by others."""
    if data.draw(st.booleans()):
        found = data.draw(st.sampled_from(list(VALUE.finditer(line))))
        return (
            line[: found.start()]
            + data.draw(st.sampled_from(ODD_VALUES)).encode()
            + line[found.end() :]
        )
    start, length = data.draw(st.integers(0, len(line))), data.draw(st.integers(0, 5))
    return (
        line[:start] + data.draw(st.binary(max_size=5)).replace(b"\n", b"") + line[start + length :]
    )


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_agent_starts_with_any_damaged_line(data: st.DataObject) -> None:
    """One damaged line must not leave the VM without its agent.

    What was read can be written and run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, clock = Path(folder, "journal"), FakeTime().clock()
        journal = UnsyncedJournal(path)
        journal.write_event(reboot(), "r")
        for kind, facts in STORY:
            journal.write("E1", kind, **facts)
        journal.close()
        lines = path.read_bytes().splitlines()
        index = data.draw(st.integers(0, len(lines) - 1))
        lines[index] = damaged(lines[index], data)
        path.write_bytes(b"\n".join(lines) + b"\n")

        journal = UnsyncedJournal(path)
        shared = AgentContext("web-0", journal, Participants(), clock, Counters())
        for progress in journal.progress.values():
            workflow = Workflow(Rule("r"), progress.event, shared)
            workflow.update(progress.event)
            workflow.status()
            workflow.finish()
            workflow.run()
            assert workflow.progress.is_done
        journal.close()
        again = UnsyncedJournal(path)
        again.close()
        assert list(again.progress) == list(journal.progress)


class Killed(BaseException):
    """Like kill -9: nothing after it runs."""


class MortalJournal(UnsyncedJournal):
    """Kills the agent right after its nth write."""

    writes_left = -1

    def write(self, key: str, kind: EntryKind, **facts: object) -> None:
        super().write(key, kind, **facts)
        self.writes_left -= 1
        if self.writes_left == 0:
            raise Killed


@dataclass
class Step:
    """Counts its runs in `runs`."""

    name: str
    runs: Counter[str] = field(compare=False)
    _: KW_ONLY
    is_failing: bool = field(compare=False)

    def describe(self) -> str:
        return self.name

    def run(self, context: StepContext) -> None:
        self.runs[self.name] += 1
        if self.is_failing:
            raise StepFailed("failed on purpose")


class Restarts:
    """Processes of one agent with one event, each killed."""

    def __init__(
        self, path: Path, *, failing: frozenset[str], on_failure: OnFailure, hold: bool
    ) -> None:
        self.path = path
        self.runs: Counter[str] = Counter()
        planned = {
            phase: tuple(self.step(f"{phase}{n}", failing, on_failure) for n in range(2))
            for phase in WorkflowPhase
        }
        self.rule = Rule("r", approve=ApproveWhen.WHEN_PREPARED, hold=hold, **planned)  # type: ignore[arg-type]

    def step(self, name: str, failing: frozenset[str], on_failure: OnFailure) -> PlannedStep:
        return PlannedStep(Step(name, self.runs, is_failing=name in failing), on_failure=on_failure)

    def run_until_killed(self, change: str, writes: int) -> Progress:
        """One process: it reads the change, works, and is killed after so many writes."""
        clock = FakeTime().clock()
        journal = MortalJournal(self.path)
        journal.writes_left = writes
        done = {
            place
            for place, step in self.steps(journal).items()
            if step.kind is not EntryKind.STEP_BEGUN
        }
        before = {name: self.runs[name] for name in self.runs}
        workflow = Workflow(
            self.rule, reboot(), AgentContext("web-0", journal, Participants(), clock, Counters())
        )
        try:
            if change == "over":
                workflow.finish()
            else:
                workflow.update(started(reboot()) if change == "started" else reboot())
            workflow.run()
        except Killed:
            pass
        finally:
            journal.close()
        for phase, index in done:
            assert self.runs[f"{phase}{index}"] == before[f"{phase}{index}"], (
                "a finished step never runs again"
            )
        progress = journal.progress.get("E1", Progress(reboot(), "r"))
        assert not (workflow.wants_approval and (self.rule.hold or not progress.is_prepared))
        return progress

    def steps(self, journal: Journal) -> dict[tuple[WorkflowPhase, int], StepRecord]:
        return dict(journal.progress["E1"].steps) if "E1" in journal.progress else {}


@settings(deadline=None, max_examples=60)
@given(
    scheduled=st.integers(0, 4),
    started_=st.integers(0, 4),
    crashes=st.lists(st.integers(1, 6), max_size=12),
    failing=st.frozensets(
        st.sampled_from([f"{phase}{n}" for phase in WorkflowPhase for n in range(2)])
    ),
    on_failure=st.sampled_from(OnFailure),
    hold=st.booleans(),
)
def test_killed_agent_reaches_the_same_end(
    scheduled: int,
    started_: int,
    crashes: list[int],
    failing: frozenset[str],
    on_failure: OnFailure,
    hold: bool,
) -> None:
    """Processes while the event is Scheduled, Started and over, each killed: recover runs once."""
    with tempfile.TemporaryDirectory() as folder:
        restarts = Restarts(
            Path(folder, "journal"), failing=failing, on_failure=on_failure, hold=hold
        )
        kills = [*crashes, *[-1] * 20]
        for _ in range(scheduled):
            restarts.run_until_killed("scheduled", kills.pop(0))
        for _ in range(started_):
            restarts.run_until_killed("started", kills.pop(0))
        progress = Progress(reboot(), "r")
        while not progress.is_done:  # ends: after the last crash nothing kills it
            progress = restarts.run_until_killed("over", kills.pop(0))

        assert (WorkflowPhase.RECOVER in progress.ended) == bool(progress.begun)
        before = restarts.runs.copy()
        restarts.run_until_killed("over", -1)
        assert restarts.runs == before, "nothing runs twice"
        if progress.begun and not failing:
            assert restarts.runs["recover0"] >= 1
            assert restarts.runs["recover1"] >= 1


@settings(deadline=None)
@given(
    text=st.text()
    | st.tuples(st.integers(0, len(FULL)), st.text(max_size=5)).map(
        lambda at: FULL[: at[0]] + at[1] + FULL[at[0] :]
    )
)
def test_any_text_is_valid_or_rejected(text: str) -> None:
    """A file that was edited in a hurry must not end the agent that reloads it."""
    try:
        outcome = parse(text, "agent.toml")
    except Invalid as problem:
        assert re.match(r"agent.toml(:\d+)?: ", problem.message), problem.message  # noqa: PT017 - either end is right
    else:
        assert isinstance(outcome, AgentSettings)
