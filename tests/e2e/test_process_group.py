"""Process groups of commands, as real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from forewarn.platform.process_group import ProcessGroup
from forewarn.process_table import has_members
from tests.e2e.cli_service import soon


def start(script: str) -> ProcessGroup:
    return ProcessGroup(
        ("sh", "-c", script), os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def state_of(pid: int) -> str:
    """Its state as in /proc; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # in another test, there may be no file descriptor left to look
        return ""


SIGNALED: list[tuple[int, int, str]] = []
"""The group of each `os.killpg`, the signal, and the state of the leader at that time."""


def note_signal(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.killpg":
        group, number = arguments
        SIGNALED.append((group, number, state_of(group)))


sys.addaudithook(note_signal)


def signals_to(group: int) -> list[tuple[int, str]]:
    return [(number, state) for found, number, state in SIGNALED if found == group]


async def read_when_written(path: Path) -> list[int]:
    while not path.exists() or not path.read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


def test_id_of_a_group_stays_taken_until_the_group_is_killed(tmp_path: Path) -> None:
    """Else the last signal, sent after every command, could reach a stranger's group."""

    async def run() -> None:
        group = start(f"sleep 600 & echo $$ $! > {tmp_path}/pids")
        leader, child = await read_when_written(tmp_path / "pids")
        await group.wait()
        assert has_members(leader)

        assert group.close() == 0
        assert signals_to(leader) == [(signal.SIGKILL, "Z")]
        assert state_of(leader) == ""
        soon(lambda: state_of(child) in ("", "Z"))

    asyncio.run(run())


def test_id_of_a_leader_without_children_stays_taken_until_its_group_is_killed() -> None:
    """The signal is sent even if nothing is left to kill."""

    async def run() -> None:
        group = start("exit 7")
        await group.wait()
        leader = group._leader.pid
        assert not has_members(leader)

        assert group.close() == 7
        assert signals_to(leader) == [(signal.SIGKILL, "Z")]
        assert state_of(leader) == ""
        assert group.close() == 7
        assert len(signals_to(leader)) == 1

    asyncio.run(run())


def test_ending_a_group_waits_for_its_processes_and_no_longer(tmp_path: Path) -> None:
    """The leader that has exited is still in the group. It must not use up the grace period."""

    async def run() -> None:
        clean_up = f"trap 'sleep 0.2; echo clean > {tmp_path}/end; exit' TERM"
        child = f"{clean_up}; echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"
        group = start(f"({child}) & wait")
        [leader] = await read_when_written(tmp_path / "pid")
        await group.end(grace_seconds=600)

        assert (tmp_path / "end").read_text() == "clean\n"
        assert state_of(leader) == "Z"
        assert not has_members(leader)
        assert group.close() == -15

    asyncio.run(run())


def test_group_is_ended_where_there_are_no_pidfds() -> None:
    """On macOS the leader is reaped at its exit; after that nothing is signaled."""
    program = """if True:
        import asyncio, os, subprocess
        del os.pidfd_open
        from forewarn.platform.process_group import ProcessGroup

        async def run(script):
            group = ProcessGroup(
                ("sh", "-c", script), os.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            await (group.end(grace_seconds=60) if "sleep" in script else group.wait())
            print(group.returncode, group.close())

        asyncio.run(run("exec sleep 600"))
        asyncio.run(run("exit 7"))
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("-15 -15\n7 7\n", "")
