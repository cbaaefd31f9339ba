"""When the approval is sent, and when it is sent again."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest

from forewarn.agent.approver import IDS_MAX, Approver
from forewarn.agent.journal import Journal, JournalLost
from forewarn.agent.progress import EntryKind
from forewarn.agent.rules import ApproveWhen, Rule
from forewarn.agent.workflow import Workflow
from forewarn.client import (
    Client,
    ConnectionFailed,
    Document,
    Event,
    HttpError,
    RetryableError,
)
from tests.unit.agent.agent_world import World, reboot, shows, started


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


class FakeEndpoint:
    """Receives approvals, or fails with the given errors in order. Records what the journal knew.

    Each response takes `response_seconds`; it fails if that exceeds the timeout. Ids in `unknown`
    get `unknown_status`.
    """

    def __init__(self, world: World, *problems: ConnectionFailed | RetryableError) -> None:
        self.world = world
        self.problems = list(problems)
        self.response_seconds = 0.0
        self.unknown: set[str] = set()
        self.unknown_status = 400
        self.requests: list[tuple[str, ...]] = []
        self.timeouts: list[float] = []
        self.arrived: list[tuple[str, float]] = []
        self.known: list[frozenset[EntryKind]] = []
        self.approved: set[str] = set()
        self.rules = [world.rule()]

    def approver(self) -> "RuledApprover":
        return RuledApprover(self)

    def approve(self, *event_ids: str, timeout_seconds: float) -> None:
        self.requests.append(event_ids)
        self.timeouts.append(timeout_seconds)
        self.arrived += [(event_id, self.world.time.monotonic - 1000) for event_id in event_ids]
        self.known += [self.world.journal.progress[event_id].marks for event_id in event_ids]
        assert self.approved >= set(event_ids)
        self.world.time.advance(min(self.response_seconds, timeout_seconds))
        if self.response_seconds > timeout_seconds:
            raise ConnectionFailed("hung")
        if self.problems:
            raise self.problems.pop(0)
        if self.unknown & set(event_ids):
            raise HttpError("unknown id", status=self.unknown_status)


class RuledApprover(Approver):
    """Takes the current rules from the endpoint of the test."""

    def __init__(self, endpoint: FakeEndpoint) -> None:
        super().__init__(endpoint.world.context(), cast("Client", endpoint), endpoint.approved)
        self.endpoint = endpoint

    def turn(
        self,
        workflows: Iterable[Workflow],
        document: Document | None,
        rules: Iterable[Rule] | None = None,
    ) -> bool:
        return super().turn(workflows, document, rules or self.endpoint.rules)


HOUR = 3600.0


def prepared(world: World, event: Event | None = None, **rule: object) -> Workflow:
    workflow = world.workflow(world.rule(**rule), event or reboot())
    workflow.run()
    return workflow


def notice(world: World, key: str, seconds: float) -> Workflow:
    """An event that is prepared for, so many seconds before its NotBefore."""
    event = reboot(key)
    return prepared(world, replace(event, not_before=world.time.now + timedelta(seconds=seconds)))


def turns(world: World, approver: RuledApprover, workflow: Workflow, *, seconds: int) -> None:
    for _ in range(seconds):
        approver.turn([workflow], shows(1))
        world.time.advance(1)


def test_approval_is_journaled_before_it_is_sent_once(world: World) -> None:
    """A crash in between must not lose it."""
    endpoint = FakeEndpoint(world)
    turns(world, endpoint.approver(), prepared(world), seconds=5)

    assert endpoint.arrived == [("E1", 0)]
    assert endpoint.known == [{EntryKind.APPROVING}]
    assert EntryKind.APPROVED in world.journal.progress["E1"].marks


def test_failed_approval_is_retried_with_growing_pauses(world: World) -> None:
    """After 1, 2, 4, 8 and then every 10 seconds."""
    endpoint = FakeEndpoint(world, *[ConnectionFailed("away")] * 6)
    turns(world, endpoint.approver(), prepared(world), seconds=60)

    assert [at for _, at in endpoint.arrived] == [0, 1, 3, 7, 15, 25, 35]


def test_retry_after_is_respected(world: World) -> None:
    endpoint = FakeEndpoint(world, RetryableError("too many", status=429, retry_after_seconds=9))
    turns(world, endpoint.approver(), prepared(world), seconds=30)

    assert [at for _, at in endpoint.arrived] == [0, 9]


@pytest.mark.parametrize("change", ["started", "over"])
def test_approval_is_not_retried_after_start_or_end(world: World, change: str) -> None:
    """There is nothing left to approve."""
    endpoint = FakeEndpoint(world, *[ConnectionFailed("away")] * 100)
    approver, workflow = endpoint.approver(), prepared(world)
    approver.turn([workflow], shows(1))
    if change == "started":
        workflow.update(started(reboot()))
    else:
        workflow.finish()
    turns(world, approver, workflow, seconds=60)

    assert len(endpoint.arrived) == 1


def test_approver_asks_for_another_turn_while_events_wait(world: World) -> None:
    """Otherwise it sleeps: an idle agent costs nothing."""
    endpoint = FakeEndpoint(world, ConnectionFailed("away"))
    approver, workflow = endpoint.approver(), prepared(world)

    assert approver.turn([workflow], shows(1))
    world.time.advance(1)
    assert not approver.turn([workflow], shows(1))


def test_scope_is_not_quiet_without_a_trusted_document(world: World) -> None:
    """The last one may be from before another VM started."""
    endpoint = FakeEndpoint(world)
    approver, workflow = (
        endpoint.approver(),
        prepared(world, approve=ApproveWhen.WHEN_PREPARED_AND_QUIET),
    )

    assert approver.turn([workflow], None)
    assert endpoint.arrived == []
    approver.turn([workflow], shows(1))
    assert [key for key, _ in endpoint.arrived] == ["E1"]


@pytest.mark.parametrize(
    "now", [[Rule("all", approve=ApproveWhen.AT_ONCE, hold=True)], [Rule("all")], []]
)
def test_reloaded_or_removed_rule_holds_a_prepared_event(world: World, now: list[Rule]) -> None:
    """An operator edits the file in a hurry, to stop just this event."""
    endpoint = FakeEndpoint(world)
    endpoint.rules = now
    turns(world, endpoint.approver(), prepared(world), seconds=3)

    assert endpoint.arrived == []


def test_ready_events_share_one_request_most_urgent_first(world: World) -> None:
    """One after the other, each would wait for the responses to those before it."""
    endpoint = FakeEndpoint(world)
    endpoint.approver().turn(
        [notice(world, "E1", 900), notice(world, "E2", 30), notice(world, "E3", 300)], shows(1)
    )

    assert endpoint.requests == [("E2", "E3", "E1")]
    assert all(EntryKind.APPROVED in progress.marks for progress in world.journal.progress.values())


@pytest.mark.parametrize("status", [400, 404, 413])
def test_rejected_id_does_not_block_other_approvals(world: World, status: int) -> None:
    """One unknown id rejects a whole request, so each event is then sent alone.

    The rejected one is retried.
    """
    endpoint = FakeEndpoint(world)
    endpoint.unknown, endpoint.unknown_status = {"E2"}, status
    approver, workflows = (
        endpoint.approver(),
        [notice(world, f"E{number}", HOUR + number) for number in (1, 2, 3)],
    )
    approver.turn(workflows, shows(1))

    assert endpoint.requests == [("E1", "E2", "E3"), ("E1",), ("E2",), ("E3",)]
    assert [
        key for key, one in world.journal.progress.items() if EntryKind.APPROVED in one.marks
    ] == [
        "E1",
        "E3",
    ]
    for _ in range(15):
        world.time.advance(1)
        approver.turn(workflows, shows(1))
    assert [(key, at) for key, at in endpoint.arrived[6:]] == [
        ("E2", 1),
        ("E2", 3),
        ("E2", 7),
        ("E2", 15),
    ]


@pytest.mark.parametrize("status", [429, 503])
def test_busy_endpoint_gets_no_request_per_event(world: World, status: int) -> None:
    """That would make it busier. All wait for the requested pause."""
    endpoint = FakeEndpoint(world, RetryableError("busy", status=status, retry_after_seconds=9))
    approver, workflows = (
        endpoint.approver(),
        [notice(world, "E1", HOUR), notice(world, "E2", HOUR)],
    )
    for _ in range(12):
        approver.turn(workflows, shows(1))
        world.time.advance(1)

    assert endpoint.requests == [("E1", "E2")] * 2
    assert [at for _, at in endpoint.arrived] == [0, 0, 9, 9]


def test_hanging_request_delays_others_by_two_seconds_at_most(world: World) -> None:
    """A Preempt has 3 of its 30 seconds for the approval, and the endpoint may hang before."""
    endpoint = FakeEndpoint(world)
    endpoint.response_seconds = HOUR
    approver, slow = (
        endpoint.approver(),
        [notice(world, f"E{number}", HOUR) for number in (1, 2, 3)],
    )
    approver.turn(slow, shows(1))
    assert world.time.monotonic - 1000 <= 2

    endpoint.response_seconds = 0.0
    preempt = notice(world, "P", 3)
    approver.turn([*slow, preempt], shows(1))
    assert endpoint.requests[-1] == ("P",), "the others wait for their second attempt"
    assert EntryKind.APPROVED in world.journal.progress["P"].marks


def test_urgent_event_overtakes_a_slow_series_of_requests(world: World) -> None:
    """A turn has an end. The next one sends the rest, after events that are more urgent by then."""
    endpoint = FakeEndpoint(world)
    endpoint.unknown, endpoint.response_seconds = {"E9"}, 0.4
    approver, workflows = (
        endpoint.approver(),
        [notice(world, f"E{number}", HOUR + number) for number in range(10)],
    )
    approver.turn(workflows, shows(1))
    assert world.time.monotonic - 1000 <= 2
    assert endpoint.requests == [tuple(f"E{number}" for number in range(10)), ("E0",), ("E1",)]

    approver.turn([*workflows, notice(world, "P", 30)], shows(1))
    assert endpoint.requests[3:5] == [("P",), ("E2",)]


@pytest.mark.parametrize(
    ("seconds_left", "timeout_seconds"), [(HOUR, 2), (30, 2), (3, 1.5), (1, 1), (0.2, 1)]
)
def test_attempt_leaves_time_for_another_before_not_before(
    world: World, seconds_left: float, timeout_seconds: float
) -> None:
    """Half of the time left, but at least a second: a healthy endpoint responds within that."""
    endpoint = FakeEndpoint(world)
    endpoint.approver().turn(
        [notice(world, "E1", seconds_left), notice(world, "E2", HOUR)], shows(1)
    )

    assert endpoint.timeouts == [pytest.approx(timeout_seconds)]


def test_many_events_are_sent_in_several_requests(world: World) -> None:
    """A request has a limit, like everything else."""
    endpoint = FakeEndpoint(world)
    endpoint.approver().turn(
        [notice(world, f"E{number:03}", HOUR + number) for number in range(IDS_MAX + 1)], shows(1)
    )

    assert [len(ids) for ids in endpoint.requests] == [IDS_MAX, 1]


def test_slow_disk_delays_the_most_urgent_approval_only_briefly(world: World) -> None:
    """A whole request is on disk before it is sent, so it is closed early where that takes long."""

    class Slow(Journal):
        def write(self, key: str, kind: EntryKind, **facts: object) -> None:
            if kind is EntryKind.APPROVING and kind not in self.progress[key].marks:
                world.time.advance(0.2)
            super().write(key, kind, **facts)

    world.use_journal(Slow)
    endpoint = FakeEndpoint(world)
    approver, workflows = (
        endpoint.approver(),
        [notice(world, f"E{number}", HOUR + number) for number in range(8)],
    )
    approver.turn(workflows, shows(1))
    assert endpoint.requests[0] == ("E0", "E1", "E2")
    assert world.time.monotonic - 1000 <= 2

    approver.turn(workflows, shows(1))
    assert {key for key, _ in endpoint.arrived} == {f"E{number}" for number in range(8)}, (
        "the next turn sends the rest"
    )


def test_event_that_cannot_be_journaled_is_not_sent(world: World) -> None:
    """The agent acts only on what is on disk. The other event is on disk, and is sent."""

    class Spotty(Journal):
        def write(self, key: str, kind: EntryKind, **facts: object) -> None:
            if key == "E1" and kind is EntryKind.APPROVING:
                raise JournalLost("full")
            super().write(key, kind, **facts)

    world.use_journal(Spotty)
    endpoint = FakeEndpoint(world)
    with pytest.raises(JournalLost):
        endpoint.approver().turn([notice(world, "E1", HOUR), notice(world, "E2", HOUR)], shows(1))

    assert endpoint.requests == [("E2",)]


def test_full_disk_does_not_block_events_that_are_sent_alone(world: World) -> None:
    """All are in the journal, and the result of the first one cannot be written."""

    class Spotty(Journal):
        def write(self, key: str, kind: EntryKind, **facts: object) -> None:
            if key == "E1" and kind is EntryKind.APPROVED:
                raise JournalLost("full")
            super().write(key, kind, **facts)

    world.use_journal(Spotty)
    endpoint = FakeEndpoint(world)
    endpoint.unknown = {"E2"}
    workflows = [notice(world, f"E{number}", HOUR + number) for number in (1, 2, 3)]
    with pytest.raises(JournalLost):
        endpoint.approver().turn(workflows, shows(1))

    assert endpoint.requests == [("E1", "E2", "E3"), ("E1",), ("E2",), ("E3",)]
