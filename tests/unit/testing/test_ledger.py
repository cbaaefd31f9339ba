"""The ledger: the last state of every event, and its approvals."""

import pytest

from forewarn.core.change import Change, ChangeKind
from forewarn.core.fleet import Scope
from forewarn.core.machine import decide
from forewarn.engine.board import Board
from forewarn.engine.entry import make_entry
from forewarn.testing.ledger import EventLedger
from tests.builders import NOON, STANDARD, approve, guid, restart, scope_of


def publish(ledger: EventLedger, board: Board, scope: Scope, *changes: Change) -> None:
    """Publish the scope, then pass on its changes, as the engine does."""
    board.publish(scope, board.scopes[scope.name].revision + 1 if scope.name in board.scopes else 1)
    for change in changes:
        ledger.add_change(make_entry(change, at=NOON, by="clock", scope=scope.name))


@pytest.fixture
def board() -> Board:
    return Board(3600)


@pytest.fixture
def ledger(board: Board) -> EventLedger:
    ledger, outcome = EventLedger(board), decide(scope_of(), restart(number=10), NOON, STANDARD)
    publish(ledger, board, outcome.scope, *outcome.changes)
    return ledger


def test_ended_event_stays_readable(board: Board, ledger: EventLedger) -> None:
    publish(ledger, board, scope_of(), Change(ChangeKind.FAILED, guid(10)))

    record = ledger.find(guid(10))
    assert (record.status, record.ending, record.event.resources) == (
        "Failed",
        "Failed",
        ("web-0",),
    )
    assert not record.has_reached("Started")


def test_silent_operation_is_not_an_event(board: Board, ledger: EventLedger) -> None:
    publish(
        ledger,
        board,
        scope_of(),
        Change(ChangeKind.EXECUTED_SILENTLY, guid(2)),
        Change(ChangeKind.COMPLETED, guid(2)),
    )

    assert ledger.ids() == (guid(10),)


def test_events_of_a_deleted_scope_stay_readable(board: Board, ledger: EventLedger) -> None:
    board.withdraw("web", 9)
    ledger.add_change(
        make_entry(Change(ChangeKind.CANCELED, guid(10)), at=NOON, by="operator", scope="web")
    )

    assert ledger.find(guid(10)).status == "Canceled"


def test_approvals_of_one_event_or_of_all(board: Board, ledger: EventLedger) -> None:
    scope = board.scopes["web"].scope
    outcome = decide(scope, approve("web-1", 10), NOON, STANDARD)
    publish(ledger, board, outcome.scope, *outcome.changes)

    assert [(one.by, one.event_id) for one in ledger.approvals()] == [("web-1", guid(10))]
    assert ledger.approvals(guid(10)) == ledger.approvals()
    assert ledger.approvals(guid(2)) == ()
