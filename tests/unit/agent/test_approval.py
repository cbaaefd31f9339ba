"""When the approval is sent, and when it is sent again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.agent.approval import Approver
from forewarn.agent.handling import Handling
from forewarn.agent.lease import Lease
from forewarn.agent.progress import What
from forewarn.agent.rule import Approve, Leader, Rule
from forewarn.client import Event, NoAnswer, TryLater
from tests.unit.agent.agent_world import World, reboot, shows, started


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


class Desk:
    """Where approvals arrive, or fail with the problems given, in order. It notes when, and what the journal knew then."""

    def __init__(self, world: World, *problems: NoAnswer | TryLater) -> None:
        self.world = world
        self.problems = list(problems)
        self.arrived: list[tuple[str, float]] = []
        self.known: list[frozenset[What]] = []
        self.approved: set[str] = set()
        self.rules = [world.rule()]

    def approver(self, lease: Lease | None = None) -> Approver:
        return Approver(self.world.here(), self.send, lease=lease, approved=self.approved, rules=lambda: self.rules)

    def send(self, event_id: str) -> None:
        self.arrived.append((event_id, self.world.hands.monotonic - 1000))
        self.known.append(self.world.journal.progress[event_id].marks)
        assert event_id in self.approved
        if self.problems:
            raise self.problems.pop(0)


def prepared(world: World, **rule: object) -> Handling:
    handling = world.handling(world.rule(**rule), reboot())
    handling.work()
    return handling


def turns(world: World, approver: Approver, handling: Handling, *, seconds: int) -> None:
    for _ in range(seconds):
        approver.turn([handling], shows(1))
        world.hands.pass_(1)


def test_an_approval_is_written_down_before_it_is_sent_and_sent_once(world: World) -> None:
    """A crash in between must not lose it; approving is over when it was accepted."""
    desk = Desk(world)
    turns(world, desk.approver(), prepared(world), seconds=5)

    assert desk.arrived == [("E1", 0)]
    assert desk.known == [{What.APPROVING}]
    assert What.APPROVED in world.journal.progress["E1"].marks


def test_an_approval_that_fails_is_sent_again_later_and_later(world: World) -> None:
    """After 1, 2, 4, 8 and then each 10 seconds: an endpoint in trouble is not helped by haste."""
    desk = Desk(world, *[NoAnswer("away")] * 6)
    turns(world, desk.approver(), prepared(world), seconds=60)

    assert [at for _, at in desk.arrived] == [0, 1, 3, 7, 15, 25, 35]


def test_an_endpoint_that_asks_for_a_pause_gets_it(world: World) -> None:
    """Retry-After."""
    desk = Desk(world, TryLater("too many", status=429, retry_after_seconds=9))
    turns(world, desk.approver(), prepared(world), seconds=30)

    assert [at for _, at in desk.arrived] == [0, 9]


@pytest.mark.parametrize("news", ["started", "over"])
def test_an_approval_is_no_longer_tried_when_the_event_has_started_or_is_over(world: World, news: str) -> None:
    """There is nothing left to approve."""
    desk = Desk(world, *[NoAnswer("away")] * 100)
    approver, handling = desk.approver(), prepared(world)
    approver.turn([handling], shows(1))
    if news == "started":
        handling.read(started(reboot()))
    else:
        handling.finish()
    turns(world, approver, handling, seconds=60)

    assert len(desk.arrived) == 1


def test_the_approver_comes_back_soon_while_something_waits(world: World) -> None:
    """And rests when nothing does: an idle agent costs nothing."""
    desk = Desk(world, NoAnswer("away"))
    approver, handling = desk.approver(), prepared(world)

    assert approver.turn([handling], shows(1))
    world.hands.pass_(1)
    assert not approver.turn([handling], shows(1))


def test_without_a_document_to_trust_it_is_not_quiet(world: World) -> None:
    """The last one may be from before another VM started."""
    desk = Desk(world)
    approver, handling = desk.approver(), prepared(world, approve=Approve.WHEN_PREPARED_AND_QUIET)

    assert approver.turn([handling], None)
    assert desk.arrived == []
    approver.turn([handling], shows(1))
    assert [key for key, _ in desk.arrived] == ["E1"]


def test_a_lease_is_kept_until_what_was_approved_by_it_is_over(world: World) -> None:
    """Then it is released: the next VM need not wait for its lapse."""
    desk, path = Desk(world), world.folder / "lease"
    clock = world.hands.clock()
    approver = desk.approver(Lease(path, "web-0", monotonic=clock.monotonic))
    other = Lease(path, "web-1", monotonic=clock.monotonic)
    handling = prepared(world, approve=Approve.WHEN_PREPARED_AND_LEADER, leader=Leader.LEASE)
    assert approver.turn([handling], shows(1))
    handling.read(started(reboot()))
    assert approver.turn([handling], shows(2)), "it comes back to renew the lease"
    assert not other.hold()

    handling.finish()
    handling.work()
    assert not approver.turn([], shows(3))
    assert other.hold()


def test_a_lease_is_kept_when_the_answer_to_the_approval_was_lost(world: World) -> None:
    """It may have been accepted: while we wait to send it again, and when the event has started, nobody else may lead."""
    desk, path = Desk(world, *[NoAnswer("lost")] * 9), world.folder / "lease"
    clock = world.hands.clock()
    approver = desk.approver(Lease(path, "web-0", monotonic=clock.monotonic))
    other = Lease(path, "web-1", monotonic=clock.monotonic)
    handling = prepared(world, approve=Approve.WHEN_PREPARED_AND_LEADER, leader=Leader.LEASE)
    for second in range(40):
        if second == 20:
            handling.read(started(reboot()))
        assert approver.turn([handling], shows(1))
        assert not other.hold()
        world.hands.pass_(1)


@pytest.mark.parametrize("now", [[Rule("all", approve=Approve.AT_ONCE, hold=True)], [Rule("all")], []])
def test_an_event_in_hand_is_held_when_its_rule_now_says_so_or_is_gone(world: World, now: list[Rule]) -> None:
    """Somebody edits the file in haste, to stop just this."""
    desk = Desk(world)
    desk.rules = now
    turns(world, desk.approver(), prepared(world), seconds=3)

    assert desk.arrived == []


def test_trouble_with_one_event_does_not_keep_the_others_from_being_approved(world: World) -> None:
    """It is told when all have had their turn."""

    class Broken(Handling):
        @property
        def wants_approval(self) -> bool:
            raise ZeroDivisionError

    desk = Desk(world)
    with pytest.raises(ZeroDivisionError):
        desk.approver().turn([Broken(world.rule(), Event("E0", "", ""), world.here()), prepared(world)], shows(1))

    assert [key for key, _ in desk.arrived] == ["E1"]
