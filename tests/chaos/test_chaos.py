"""Every fault once, and six runs with a fault in the code that must be found. As root, about ten
minutes.

One run at a time, whatever worker it is on: each has nine processes and a load of its own.
"""

import fcntl
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.checker import Promise, check
from tests.chaos.cluster import ROOT
from tests.chaos.faults import FAULTS, QUORUM_LOST
from tests.chaos.history import RUN_FILE, Recording, Stage, read_recording
from tests.chaos.report import find_late, render

RUN_SECONDS_MAX = 400
SEED = 3
CALM = ("--calm-seconds", "7")

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Wait for the run of another worker to end."""
    with (Path(tempfile.gettempdir()) / "forewarn-chaos.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def record(folder: Path, *options: str) -> Recording:
    command = [sys.executable, "-m", "tests.chaos", "--seed", str(SEED), "--folder", str(folder)]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )
    assert (folder / RUN_FILE).exists(), done.stdout + done.stderr
    return read_recording(folder)


def test_all_promises_hold_under_every_fault(tmp_path: Path) -> None:
    recording = record(tmp_path)
    violations = check(recording)
    assert not violations, render(recording, violations)
    assert [fault.name for fault in recording.run.faults] == list(FAULTS)
    # The faults hit something: an impact was interrupted and repeated, responses were lost.
    tries = Counter((it.event, it.vm) for it in recording.impacts if it.stage is Stage.BEGUN)
    assert max(tries.values()) > 1
    assert {0, 200, 202, 503} <= {call.status for call in recording.calls}
    # Announcements were in the log of a leader without quorum, and were committed afterwards.
    (quorum_lost,) = (each for each in recording.run.faults if each.name == QUORUM_LOST)
    assert find_late(recording, quorum_lost), render(recording, violations)
    # Guests of an outage got documents from memory, which the checker does not count.
    assert any(call.age > 0 for call in recording.calls)


@pytest.mark.parametrize(
    ("planted", "options", "promise"),
    [
        ("acknowledge-without-commit", CALM, Promise.KEPT),
        ("start-early", CALM, Promise.NOTICE),
        ("ignore-gaps", ("--only", "all servers stopped"), Promise.READ),
        ("ignore-gaps", ("--only", QUORUM_LOST), Promise.READ),
        ("count-old-documents", ("--only", QUORUM_LOST), Promise.READ),
        ("ignore-claims", CALM, Promise.RECORDED_ONCE),
    ],
)
def test_a_fault_in_the_code_is_found(
    tmp_path: Path, planted: str, options: tuple[str, ...], promise: Promise
) -> None:
    recording = record(tmp_path, "--planted", planted, *options)
    assert {violation.promise for violation in check(recording)} == {promise}
