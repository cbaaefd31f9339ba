"""The software under test: a process that runs as long as the scenario."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from forewarn.errors import Invalid

LINE_BYTES_MAX = 4096
STOP_SECONDS_MAX = 5.0
ENDPOINT = "{endpoint}"


@asynccontextmanager
async def start_program(
    command: Sequence[str],
    *,
    endpoint: str,
    environment: Mapping[str, str],
    write: Callable[[str], None],
    stop_seconds_max: float = STOP_SECONDS_MAX,
) -> AsyncIterator["Program"]:
    """Run a program in its own process group. `write` gets each line of its output."""
    arguments = [argument.replace(ENDPOINT, endpoint) for argument in command]
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise Invalid(
            f"{arguments[0]!r} cannot be started: {error.strerror or error}", command=arguments[0]
        ) from error
    program = Program(process, stop_seconds_max)
    assert process.stdout is not None
    reading = asyncio.create_task(_read_lines(process.stdout, write))
    try:
        yield program
    finally:
        await program.stop()
        with suppress(TimeoutError):  # a process that it left behind may keep the pipe open
            await asyncio.wait_for(reading, stop_seconds_max)


class Program:
    """A running process."""

    def __init__(self, process: asyncio.subprocess.Process, stop_seconds_max: float) -> None:
        self._process = process
        self._stop_seconds_max = stop_seconds_max

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def wait_for_failure(self) -> None:
        """Wait until it ends with another code than 0: then there is nothing left to test."""
        if await self.wait() == 0:
            await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        """Send TERM, then KILL, to the whole process group."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._stop_seconds_max)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def _read_lines(output: asyncio.StreamReader, write: Callable[[str], None]) -> None:
    rest = b""
    while chunk := await output.read(LINE_BYTES_MAX):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            write(_decode(line))
        if len(rest) > LINE_BYTES_MAX:
            write(_decode(rest))
            rest = b""
    if rest:
        write(_decode(rest))


def _decode(line: bytes) -> str:
    """Decode a line, without terminal control characters."""
    text = line.decode(errors="replace").rstrip()
    return "".join(letter if letter.isprintable() else " " for letter in text)
