"""The process of the software under test: its output, and its end."""

import asyncio
from pathlib import Path

from forewarn.lab.scenario.program import LINE_BYTES_MAX, start_program

IGNORE_TERM = 'trap "" TERM; echo ready; sleep 1000 & wait; wait'


def run_shell(
    script: str, ready: str, stop_seconds_max: float = 5.0
) -> tuple[int | None, list[str]]:
    """Run a script until it has printed `ready`, then stop it."""
    lines: list[str] = []

    async def run() -> int | None:
        is_ready = asyncio.Event()

        def write(line: str) -> None:
            lines.append(line)
            if ready in line:
                is_ready.set()

        async with start_program(
            ["sh", "-c", script], "web-0", "http://e", write, stop_seconds_max=stop_seconds_max
        ) as program:
            async with asyncio.timeout(10):
                await is_ready.wait()
        return program.returncode

    return asyncio.run(run()), lines


def test_id_of_a_program_that_has_exited_stays_taken_until_its_group_is_killed() -> None:
    """Else the signals at the end could reach a stranger that got the same id meanwhile."""

    async def run() -> None:
        lines: asyncio.Queue[str] = asyncio.Queue()
        command = ["sh", "-c", "sleep 600 & echo $$ $!; exit 7"]
        async with start_program(command, "web-0", "http://e", lines.put_nowait) as it:
            leader, child = (await lines.get()).split()
            await asyncio.wait_for(it.wait(), 10)
            assert it.returncode == 7
            assert state_of(leader) == "Z"
            assert state_of(child) != ""
        assert it.returncode == 7
        assert state_of(leader) == ""
        assert state_of(child) in ("", "Z")

    asyncio.run(run())


def state_of(pid: str) -> str:
    """Its state as in /proc; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_program_that_ignores_sigterm_is_killed() -> None:
    assert run_shell(IGNORE_TERM, "ready", stop_seconds_max=0.05) == (-9, ["ready"])


def test_output_is_passed_on_line_by_line_without_control_characters() -> None:
    script = r"printf 'a\033[31mb\nunfinished {endpoint}'; sleep 0.01; echo; echo ready; sleep 1000"
    _, lines = run_shell(script, "ready")

    assert lines == ["a [31mb", "unfinished http://e", "ready"]


def test_endless_line_is_passed_on_in_pieces() -> None:
    size = 3 * LINE_BYTES_MAX
    _, lines = run_shell(
        f"head -c {size} /dev/zero | tr '\\0' x; echo; echo ready; sleep 1000", "ready"
    )

    assert len(lines) > 2
    assert "".join(lines) == "x" * size + "ready"
