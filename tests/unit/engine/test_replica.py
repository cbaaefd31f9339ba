"""A record is replaced only by a newer revision, however late the older one arrives."""

import pytest

from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.record import DECLARED, SCOPE
from forewarn.engine.record_cache import ABSENT, Records
from forewarn.lab.clock import VirtualClock
from forewarn.log import facts_of
from forewarn.store.base import Record
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, vm

WEB = Scope(name="web", vms=(vm("web-0", address="10.0.0.1", host="host-a"),))
NEWER = Scope(name="web", vms=(vm("web-0", address="10.0.0.2", host="host-a"),))


def engine() -> Engine:
    return Engine(MemoryStore(), VirtualClock(NOON), Timing())


def learn(engine: Engine, scope: Scope | None, revision: int) -> None:
    value = None if scope is None else SCOPE.encode(scope)
    engine.learn(Record("scope/web/", value, revision))


def test_a_lease_that_ended_after_the_last_commit_is_gone() -> None:
    """Its end is not a commit, so it is absent as of the revision at which it was written."""
    replica = engine()
    replica.learn(Record("lease/a", b"1", 3))
    replica.learn(Record("lease/a", None, 3))
    assert replica.read("lease/a") == ABSENT
    replica.learn(Record("lease/a", b"1", 3))
    assert replica.read("lease/a") == ABSENT


def test_older_revision_is_ignored() -> None:
    """A watch may report late what this server has committed itself."""
    replica = engine()
    learn(replica, NEWER, 3)
    learn(replica, WEB, 2)
    learn(replica, WEB, 3)

    assert replica.board.scopes["web"].scope == NEWER


def test_older_revision_does_not_restore_a_deleted_scope() -> None:
    replica = engine()
    learn(replica, WEB, 1)
    learn(replica, None, 5)
    learn(replica, WEB, 4)
    board = replica.board
    assert (board.scopes, board.vms, board.addresses, board.hosts) == ({}, {}, {}, {})

    learn(replica, WEB, 6)
    assert board.find_vm("web-0")[0].revision == 6


def test_deletion_of_an_unknown_scope_is_remembered() -> None:
    replica = engine()
    learn(replica, None, 5)
    learn(replica, WEB, 4)

    assert replica.board.scopes == {}


def test_record_that_a_callback_cannot_handle_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every server sees every record: one that raised in `follow` would end all of them."""
    replica, shown = engine(), list[str]()

    def fail(*_: object) -> None:
        raise KeyError("")

    replica.board.subscribe(fail)
    replica.board.subscribe(lambda published: shown.append(published.scope.name))
    replica.on_change("declared", fail)
    replica.on_change("declared", lambda before, after: shown.append(str(after)))
    learn(replica, WEB, 1)
    replica.learn(Record("declared/0/", DECLARED.encode(("host-b",)), 2))
    learn(replica, NEWER, 3)

    assert shown == ["web", "('host-b',)", "web"]
    assert replica.board.scopes["web"].scope == NEWER
    assert [(line.message, facts_of(line)["subject"]) for line in caplog.records] == [
        ("bug in a callback", "scope web"),
        ("bug in a callback", "declared 0"),
    ]


def test_lasting_bug_of_a_callback_is_logged_once_in_half_a_minute_for_each_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A scope may change often: the tracebacks would hide everything else in the log."""
    replica = engine()

    def fail(*_: object) -> None:
        raise KeyError("")

    replica.board.subscribe(fail)
    replica.on_change("declared", fail)
    for revision in range(1, 11):
        learn(replica, WEB, revision)
        replica.learn(Record("declared/0/", DECLARED.encode(("host-b",)), revision))

    assert [facts_of(line)["subject"] for line in caplog.records] == ["scope web", "declared 0"]


def test_lasting_bug_while_showing_a_record_is_logged_once_in_half_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = engine()
    learn(replica, WEB, 1)
    del replica.board.hosts["host-a"]
    for revision in range(2, 12):
        learn(replica, NEWER, revision)

    assert [line.message for line in caplog.records] == ["bug while showing a record"]


def test_deletion_of_a_record_that_was_never_readable_is_no_change() -> None:
    """Callbacks rely on a value before the change or after it."""
    replica, changes = engine(), list[object]()
    replica.on_change("declared", lambda before, after: changes.append((before, after)))
    replica.learn(Record("declared/0/", b'{"format":99,"value":{}}', 1))
    assert list(replica.unreadable) == ["declared/0/"]

    replica.learn(Record("declared/0/", None, 2))

    assert (changes, replica.unreadable) == ([], {})


def test_scope_that_the_board_cannot_show_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Such as when an index of the board has a bug."""
    replica = engine()
    learn(replica, WEB, 1)
    del replica.board.hosts["host-a"]
    learn(replica, NEWER, 2)
    other = Scope(name="db", vms=(vm("db-0"),))
    replica.learn(Record("scope/db/", SCOPE.encode(other), 3))

    assert replica.board.scopes["db"].scope == other
    assert [line.message for line in caplog.records] == ["bug while showing a record"]


def test_records_may_change_while_they_are_read() -> None:
    """A thread reads the declared hosts while the event loop applies a fleet."""
    records = Records()
    records.set("declared/0/", ("host-a",), 1)
    found = []
    for key, value in records.values("declared"):
        found.append((key, value))
        records.set("declared/1/", ("host-b",), 2)

    assert found == [("declared/0/", ("host-a",))]
