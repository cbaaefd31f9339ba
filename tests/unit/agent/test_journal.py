"""What is on disk, whatever happened to the disk."""

import json
import logging
import os
import stat
from pathlib import Path
from typing import IO

import pytest

from forewarn.agent.journal import DAMAGED_MAX, Journal, JournalLost
from forewarn.agent.progress import What, plain
from forewarn.agent.step import Phase
from tests.unit.agent.agent_world import reboot, started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal"


class Short(Journal):
    """With limits that a test reaches."""

    lines_max = 10
    done_max = 2


def told(journal: Journal) -> None:
    """A story of one event, up to its approval."""
    journal.see(reboot(), "drain")
    journal.write("E1", What.BEGUN, phase=Phase.PREPARE)
    journal.write("E1", What.STEP_BEGUN, phase=Phase.PREPARE, index=0)
    journal.write("E1", What.STEP_DONE, phase=Phase.PREPARE, index=0, seconds=1.5)
    journal.write("E1", What.STEP_BEGUN, phase=Phase.PREPARE, index=1)
    journal.write("E1", What.APPROVING)


def whats(path: Path) -> list[str]:
    return [json.loads(line)["what"] for line in path.read_bytes().splitlines()]


def test_what_was_written_is_there_in_the_next_life(path: Path) -> None:
    """The journal survives the reboot that the event was about."""
    first = Journal.open(path)
    told(first)
    first.close()

    second = Journal.open(path)
    second.close()

    assert second.progress == first.progress
    progress = second.progress["E1"]
    assert progress.event == reboot()
    assert progress.rule == "drain"
    assert progress.is_settled(Phase.PREPARE, 0, "")
    assert not progress.is_settled(Phase.PREPARE, 1, ""), "begun and without an end: in doubt"
    assert progress.took == {(Phase.PREPARE, 0): 1.5}
    assert What.APPROVING in progress.marks
    assert What.APPROVED not in progress.marks


def test_each_line_is_on_disk_before_write_returns(path: Path) -> None:
    """Who is told that it is written may act, and may be killed then."""
    journal = Journal.open(path)
    journal.see(reboot(), "drain")

    assert whats(path) == ["seen"]
    journal.write("E1", What.BEGUN, phase=Phase.PREPARE)
    assert whats(path) == ["seen", "begun"]
    journal.close()


def test_a_line_is_synced_whole_before_write_returns_and_a_new_file_before_its_folder(
    path: Path,
) -> None:
    """What only the operating system has is lost with the power: on disk means fsync, of the folder
    too after a rename.
    """
    sync_fleet: list[int | str] = []

    class Watched(Journal):
        @staticmethod
        def sync(handle: int) -> None:
            found = os.fstat(handle)
            sync_fleet.append("folder" if stat.S_ISDIR(found.st_mode) else found.st_size)

    journal = Watched.open(path)
    assert sync_fleet == [0, "folder"]
    journal.see(reboot(), "drain")
    assert sync_fleet[2:] == [path.stat().st_size]
    journal.write("E1", What.APPROVING)
    assert sync_fleet[3:] == [path.stat().st_size]
    journal.close()


def test_saying_a_thing_again_writes_nothing(path: Path) -> None:
    """An agent that crashes at the same place for ever must not fill the disk."""
    journal = Journal.open(path)
    told(journal)
    before = path.read_bytes()
    journal.write("E1", What.BEGUN, phase=Phase.PREPARE)
    journal.write("E1", What.APPROVING)

    assert path.read_bytes() == before
    journal.close()


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_is_dropped(path: Path, cut: int) -> None:
    """That is what a crash in the middle of a write leaves.

    Nothing was done about it, since write had not returned.
    """
    journal = Journal.open(path)
    told(journal)
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])

    again = Journal.open(path)

    assert What.APPROVING not in again.progress["E1"].marks
    assert not list(path.parent.glob("*.damaged-*"))
    again.write("E1", What.APPROVING)
    again.close()
    assert whats(path)[-1] == "approving", (
        "the torn bytes are gone: the next line stands on its own"
    )


SEEN = json.dumps(
    {"id": "E2", "what": "seen", "rule": "r", "event": plain(started(reboot("E2")))},
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
def test_a_line_that_cannot_be_read_is_said_and_the_file_is_kept_aside(
    path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """What we do understand still counts; what we do not is for a person to look at."""
    journal = Journal.open(path)
    told(journal)
    journal.close()
    damaged = line + b"\n" + path.read_bytes()
    damaged = path.read_bytes() + line + b"\n" if b"E1" in line else damaged
    path.write_bytes(damaged)

    with caplog.at_level(logging.ERROR):
        again = Journal.open(path)
    again.close()

    assert again.progress == journal.progress
    assert path.with_name("journal.damaged-1").read_bytes() == damaged
    assert "cannot be read" in caplog.text


def test_files_kept_aside_have_a_limit(path: Path) -> None:
    """A disk that damages the file at every start must not be filled by copies."""
    path.parent.mkdir()
    for _ in range(DAMAGED_MAX + 2):
        path.write_bytes(b"?\n")
        Journal.open(path).close()

    assert len(list(path.parent.glob("*.damaged-*"))) == DAMAGED_MAX


def test_the_file_is_written_anew_when_it_has_grown(path: Path) -> None:
    """An endpoint that changes an event each second makes lines, and not a file without end."""
    journal = Short.open(path)
    for number in range(Short.lines_max * 3):
        journal.see(reboot(description=str(number)), "drain")
        assert len(whats(path)) <= Short.lines_max + 1
    journal.close()
    again = Journal.open(path)
    assert again.progress == journal.progress
    again.close()


def test_journal_stays_small_when_every_poll_changes_much(path: Path) -> None:
    """A thousand lines of a megabyte would be a full disk.

    The file may double, but not grow with the number of polls.
    """
    journal = Journal.open(path)
    sizes = []
    for number in range(60):
        journal.see(reboot(resources=(f"web-{number}", "x" * 100_000)), "drain")
        sizes.append(path.stat().st_size)
    journal.close()

    again = Journal.open(path)
    again.close()
    assert max(sizes) < Journal.growth_bytes_max + 500_000
    assert again.progress == journal.progress


def test_large_journal_may_double_before_it_is_compacted(path: Path) -> None:
    """Written anew at every line, a large journal would cost its whole size each time."""
    folders_synced: list[int] = []

    class Counted(Journal):
        growth_bytes_max = 10_000

        @staticmethod
        def sync(handle: int) -> None:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                folders_synced.append(handle)

    journal = Counted.open(path)
    for number in range(100):
        journal.see(reboot(f"E{number}", resources=("x" * 5_000,)), "drain")
    journal.close()

    assert 2 < len(folders_synced) < 10


def test_long_description_is_cut_and_unknown_members_left_out(path: Path) -> None:
    """The endpoint chooses them, and may change them at every poll."""
    journal = Journal.open(path)
    journal.see(reboot(description="x" * 1_000_000, extra={"Note": "y" * 1_000_000}), "drain")
    journal.close()

    assert path.stat().st_size < 10_000
    assert journal.progress["E1"].event == reboot(description="x" * 4096)


def test_details_of_a_finished_event_are_not_kept(path: Path) -> None:
    """256 of them are remembered, and nothing more is done for any."""
    journal = Journal.open(path)
    journal.see(reboot(resources=("x" * 100_000,)), "drain")
    journal.write("E1", What.FINISHED)
    journal.close()
    again = Journal.open(path)
    again.close()

    assert path.stat().st_size < 1_000
    assert again.progress["E1"].is_done


def test_events_that_are_over_are_remembered_up_to_a_limit(path: Path) -> None:
    """The last of them, in case an endpoint that lags shows one again; never one that is still in
    hand.
    """
    journal = Short.open(path)
    journal.see(reboot("LIVE"), "drain")
    for number in range(5):
        journal.see(reboot(f"E{number}"), "drain")
        journal.write(f"E{number}", What.FINISHED)
    journal.close()

    again = Short.open(path)
    again.close()

    assert list(again.progress) == ["LIVE", "E3", "E4"]


class Full(Journal):
    """A journal on a disk that is full while `is_full`, after half of the line."""

    is_full = False

    @classmethod
    def _put(cls, file: IO[bytes], lines: bytes) -> None:
        if cls.is_full:
            file.write(lines[: len(lines) // 2])
            file.flush()
            raise OSError(28, "No space left on device")
        super()._put(file, lines)


def test_a_full_disk_is_a_problem_and_what_was_not_written_is_not_known(path: Path) -> None:
    """Who gets the problem does not act.

    When there is space again, half a line must not spoil the next.
    """

    class OnDisk(Full):
        pass

    journal = OnDisk.open(path)
    journal.see(reboot(), "drain")
    OnDisk.is_full = True
    with pytest.raises(JournalLost, match="No space left"):
        journal.write("E1", What.BEGUN, phase=Phase.PREPARE)
    with pytest.raises(JournalLost, match="No space left"):
        journal.write("E1", What.BEGUN, phase=Phase.PREPARE)
    assert journal.progress["E1"].begun == frozenset()

    OnDisk.is_full = False
    journal.write("E1", What.APPROVING)
    journal.close()

    assert whats(path) == ["seen", "approving"]


def test_two_agents_cannot_use_one_journal(path: Path) -> None:
    """Both would prepare, each without knowing of the other. The right ends with its holder."""
    first = Journal.open(path)
    with pytest.raises(JournalLost, match="another agent"):
        Journal.open(path)
    first.close()

    Journal.open(path).close()


def test_a_journal_that_cannot_be_made_is_a_problem_that_names_it(tmp_path: Path) -> None:
    """A typing error in the path is found at the start, not when the first event comes."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalLost, match="file/journal cannot be used"):
        Journal.open(tmp_path / "file" / "journal")


def test_an_event_seen_differently_keeps_its_rule_and_its_progress(path: Path) -> None:
    """NotBefore may move, an event starts; what was prepared stays prepared."""
    journal = Journal.open(path)
    told(journal)
    journal.see(started(reboot()), "another rule")
    journal.close()

    progress = journal.progress["E1"]
    assert progress.event.is_started
    assert progress.rule == "drain"
    assert progress.is_settled(Phase.PREPARE, 0, "")
