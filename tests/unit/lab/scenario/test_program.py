"""The process of the software under test: its output, and its end."""

import asyncio

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
