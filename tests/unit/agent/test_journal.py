"""The journal on disk, whatever happens to the disk."""

import json
import logging
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from forewarn.agent.journal import GROWTH_BYTES_MAX, Journal, JournalLost
from forewarn.agent.progress import EntryKind, event_to_json
from forewarn.agent.steps.base import WorkflowPhase
from tests.unit.agent.agent_world import reboot, started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal"


class Short(Journal):
    """With a limit that a test reaches."""

    done_max = 2


def write_story(journal: Journal) -> None:
    """A story of one event, up to its approval."""
    journal.write_event(reboot(), "drain")
    journal.write("E1", EntryKind.BEGUN, phase=WorkflowPhase.PREPARE)
    journal.write("E1", EntryKind.STEP_BEGUN, phase=WorkflowPhase.PREPARE, index=0)
    journal.write("E1", EntryKind.STEP_DONE, phase=WorkflowPhase.PREPARE, index=0, seconds=1.5)
    journal.write("E1", EntryKind.STEP_BEGUN, phase=WorkflowPhase.PREPARE, index=1)
    journal.write("E1", EntryKind.APPROVING)


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["what"] for line in path.read_bytes().splitlines()]


def test_entries_survive_a_restart(path: Path) -> None:
    """The journal survives the reboot that the event is about."""
    first = Journal(path)
    write_story(first)
    first.close()

    second = Journal(path)
    second.close()

    assert second.progress == first.progress
    progress = second.progress["E1"]
    assert progress.event == reboot()
    assert progress.rule == "drain"
    assert progress.is_step_over(WorkflowPhase.PREPARE, 0, "")
    assert not progress.is_step_over(WorkflowPhase.PREPARE, 1, ""), (
        "begun and without an end: in doubt"
    )
    assert progress.steps[WorkflowPhase.PREPARE, 0].seconds == 1.5
    assert EntryKind.APPROVING in progress.marks
    assert EntryKind.APPROVED not in progress.marks


def test_entry_is_in_the_file_before_write_returns(path: Path) -> None:
    """The caller acts then, and may be killed."""
    journal = Journal(path)
    journal.write_event(reboot(), "drain")

    assert kinds(path) == ["seen"]
    journal.write("E1", EntryKind.BEGUN, phase=WorkflowPhase.PREPARE)
    assert kinds(path) == ["seen", "begun"]
    journal.close()


def test_entry_is_fsynced_before_write_returns(
    path: Path,
) -> None:
    """What only the operating system has is lost with the power.

    A rename also needs an fsync of its directory.
    """
    synced: list[int | str] = []

    class Watched(Journal):
        @staticmethod
        def sync(handle: int) -> None:
            found = os.fstat(handle)
            synced.append("folder" if stat.S_ISDIR(found.st_mode) else found.st_size)

    journal = Watched(path)
    assert synced == [0, "folder"]
    journal.write_event(reboot(), "drain")
    assert synced[2:] == [path.stat().st_size]
    journal.write("E1", EntryKind.APPROVING)
    assert synced[3:] == [path.stat().st_size]
    journal.close()


def test_repeated_entry_writes_nothing(path: Path) -> None:
    """An agent that crashes at the same place forever must not fill the disk."""
    journal = Journal(path)
    write_story(journal)
    before = path.read_bytes()
    journal.write("E1", EntryKind.BEGUN, phase=WorkflowPhase.PREPARE)
    journal.write("E1", EntryKind.APPROVING)

    assert path.read_bytes() == before
    journal.close()


SEEN = json.dumps(
    {"id": "E2", "what": "seen", "rule": "r", "event": event_to_json(started(reboot("E2")))},
    separators=(",", ":"),
).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"id":"E1","what":"flew"}',
        b'{"id":7,"what":"seen"}',
        b'{"id":"E9","what":"approved"}',
        b'{"id":"E1","what":"begun","phase":"dawn"}',
        b'{"id":"E1","what":"step-done","phase":"start","index":"x"}',
        b'{"id":"E2","what":"seen","rule":"r","event":{"id":"E2"}}',
        SEEN.replace(b'"duration_seconds":-1', b'"duration_seconds":1e999'),
        SEEN.replace(b'"not_before":null', b'"not_before":"2026-03-04T12:00:00"'),
        b'{"id":"E1","what":"step-done","phase":"start","index":0,"seconds":1e999}',
        b'{"id":"E1","what":"step-done","phase":"start","index":0,"seconds":' + b"9" * 400 + b"}",
        b"[" * 100_000,
    ],
)
def test_invalid_line_is_logged_and_a_copy_kept(
    path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Valid lines still count; an operator can inspect the others."""
    journal = Journal(path)
    write_story(journal)
    journal.close()
    damaged = line + b"\n" + path.read_bytes()
    damaged = path.read_bytes() + line + b"\n" if b"E1" in line else damaged
    path.write_bytes(damaged)

    with caplog.at_level(logging.ERROR):
        again = Journal(path)
    again.close()

    assert again.progress == journal.progress
    assert path.with_name("journal.damaged").read_bytes() == damaged
    assert "invalid lines" in caplog.text


def test_journal_stays_small_when_every_poll_changes_much(path: Path) -> None:
    """The file may double and grow by a limit, not grow with every poll."""
    journal = Journal(path)
    sizes = []
    for number in range(60):
        journal.write_event(reboot(resources=(f"web-{number}", "x" * 100_000)), "drain")
        sizes.append(path.stat().st_size)
    journal.close()

    again = Journal(path)
    again.close()
    assert max(sizes) < GROWTH_BYTES_MAX + 500_000
    assert again.progress == journal.progress


def test_long_description_is_cut_and_unknown_members_left_out(path: Path) -> None:
    """The endpoint chooses them, and may change them with every poll."""
    journal = Journal(path)
    journal.write_event(
        reboot(description="x" * 1_000_000, extra={"Note": "y" * 1_000_000}), "drain"
    )
    journal.close()

    assert path.stat().st_size < 10_000
    assert journal.progress["E1"].event == reboot(description="x" * 4096)


def test_details_of_a_finished_event_are_not_kept(path: Path) -> None:
    """256 such events are remembered, only to recognise them."""
    journal = Journal(path)
    journal.write_event(reboot(resources=("x" * 100_000,)), "drain")
    journal.write("E1", EntryKind.FINISHED)
    journal.close()
    again = Journal(path)
    again.close()

    assert path.stat().st_size < 1_000
    assert again.progress["E1"].is_done


def test_finished_events_are_remembered_up_to_a_limit(path: Path) -> None:
    """In case a lagging endpoint shows one again. Current events never count."""
    journal = Short(path)
    journal.write_event(reboot("LIVE"), "drain")
    for number in range(5):
        journal.write_event(reboot(f"E{number}"), "drain")
        journal.write(f"E{number}", EntryKind.FINISHED)
    journal.close()

    again = Short(path)
    again.close()

    assert list(again.progress) == ["LIVE", "E3", "E4"]


class Full(Journal):
    """A journal on a disk that is full while `is_full`, after half of the line."""

    is_full = False

    def _write_synced(self, file: IO[bytes], content: bytes) -> None:
        if self.is_full:
            file.write(content[: len(content) // 2])
            file.flush()
            raise OSError(28, "No space left on device")
        super()._write_synced(file, content)


def test_full_disk_raises_and_changes_nothing(path: Path) -> None:
    """The caller must not act. When there is space again, half a line must not spoil the next."""
    journal = Full(path)
    journal.write_event(reboot(), "drain")
    journal.is_full = True
    for _ in range(2):
        with pytest.raises(JournalLost, match="No space left"):
            journal.write("E1", EntryKind.BEGUN, phase=WorkflowPhase.PREPARE)
    assert journal.progress["E1"].begun == frozenset()

    journal.is_full = False
    journal.write("E1", EntryKind.APPROVING)
    journal.close()

    assert kinds(path) == ["seen", "approving"]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_torn_last_line_is_ignored(path: Path, cut: int) -> None:
    """A crash in the middle of a write leaves it.

    The agent has not acted on it: write had not returned.
    """
    journal = Journal(path)
    write_story(journal)
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])

    again = Journal(path)

    assert EntryKind.APPROVING not in again.progress["E1"].marks
    assert not list(path.parent.glob("*.damaged"))
    again.write("E1", EntryKind.APPROVING)
    again.close()
    assert kinds(path)[-1] == "approving", "the next line stands on its own"


def test_file_left_by_a_crash_while_it_is_compacted_is_ignored(path: Path) -> None:
    """It takes effect when it is complete and renamed."""
    journal = Journal(path)
    write_story(journal)
    journal.close()
    path.with_name("journal.new").write_bytes(b'{"id":"E1","what":"app')

    again = Journal(path)
    again.close()

    assert again.progress == journal.progress


def test_two_agents_cannot_use_one_journal(path: Path) -> None:
    """Both would prepare, without knowing of each other. The lock ends with its process."""
    first = Journal(path)
    with pytest.raises(JournalLost, match="another agent"):
        Journal(path)
    first.close()

    Journal(path).close()


def test_closed_journal_is_never_written(path: Path) -> None:
    """A step that was left behind may end when the next agent has the journal."""
    old = Journal(path)
    write_story(old)
    old.close()
    new = Journal(path)
    new.write_event(reboot("E2"), "drain")
    before = path.read_bytes()

    with pytest.raises(JournalLost, match=r"cannot use the journal .*: it is closed"):
        old.write("E1", EntryKind.APPROVED)
    assert path.read_bytes() == before
    assert EntryKind.APPROVED not in old.progress["E1"].marks
    new.close()


def test_journal_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    """A typo in the path is found at start, not when the first event comes."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalLost, match=r"cannot use the journal .*file/journal"):
        Journal(tmp_path / "file" / "journal")


def test_changed_event_keeps_its_rule_and_progress(path: Path) -> None:
    """NotBefore may move, an event starts; what was prepared stays prepared."""
    journal = Journal(path)
    write_story(journal)
    journal.write_event(started(reboot()), "another rule")
    journal.close()

    progress = journal.progress["E1"]
    assert progress.event.is_started
    assert progress.rule == "drain"
    assert progress.is_step_over(WorkflowPhase.PREPARE, 0, "")


VERSION_0_2 = """\
{"id":"E1","what":"seen","at":"2026-03-04T12:00:00+00:00","event":{"id":"E1","type":"Reboot",\
"status":"Scheduled","source":"Platform","resources":["web-0"],"resource_type":"VirtualMachine",\
"not_before":"2026-03-04T12:15:00+00:00","duration_seconds":-1,"description":"","extra":{}},\
"rule":"drain"}
{"id":"E1","what":"begun","at":"2026-03-04T12:00:00+00:00","phase":"prepare"}
{"id":"E1","what":"step-begun","at":"2026-03-04T12:00:00+00:00","phase":"prepare","index":0,\
"step":"run a"}
{"id":"E1","what":"step-done","at":"2026-03-04T12:00:01+00:00","phase":"prepare","index":0,\
"step":"run a","seconds":1.5}
{"id":"E1","what":"late","at":"2026-03-04T12:00:01+00:00","expected_seconds":99.0}
{"id":"E1","what":"ended","at":"2026-03-04T12:00:01+00:00","phase":"prepare","is_stopped":false}
{"id":"E1","what":"approving","at":"2026-03-04T12:00:01+00:00"}
"""


def test_journal_of_version_0_2_is_read(path: Path) -> None:
    """An agent upgraded in the middle of an event must continue it."""
    path.parent.mkdir()
    path.write_text(VERSION_0_2)
    journal = Journal(path)
    journal.close()

    progress = journal.progress["E1"]
    assert (progress.event, progress.rule, progress.resources) == (reboot(), "drain", ("web-0",))
    assert progress.is_prepared
    assert progress.steps[WorkflowPhase.PREPARE, 0].seconds == 1.5
    assert progress.marks == {EntryKind.LATE, EntryKind.APPROVING}
    assert not list(path.parent.glob("*.damaged"))
