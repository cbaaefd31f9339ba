"""The software under test, started for a run and ended with it."""

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
async def running(
    command: Sequence[str],
    *,
    endpoint: str,
    environment: Mapping[str, str],
    tell: Callable[[str], None],
) -> AsyncIterator["Program"]:
    """Within this the program runs, in a process group of its own.

    `tell` is given each line that it prints.
    """
    words = [word.replace(ENDPOINT, endpoint) for word in command]
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise Invalid(
            f"{words[0]!r} cannot be started: {error.strerror or error}", command=words[0]
        ) from error
    program = Program(process, words)
    assert process.stdout is not None
    listening = asyncio.create_task(_listen(process.stdout, tell))
    try:
        yield program
    finally:
        await program.stop()
        with suppress(TimeoutError):  # whoever it left behind may hold its output open
            await asyncio.wait_for(listening, STOP_SECONDS_MAX)


class Program:
    """A process at work."""

    def __init__(self, process: asyncio.subprocess.Process, words: Sequence[str]) -> None:
        self.words = words
        self._process = process

    @property
    def exit_code(self) -> int | None:
        """What it ended with by itself; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        """TERM, then KILL, to the whole group: a program may have started others."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS_MAX)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def _listen(output: asyncio.StreamReader, tell: Callable[[str], None]) -> None:
    rest = b""
    while chunk := await output.read(LINE_BYTES_MAX):  # ends with the output
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            tell(_text(line))
        if len(rest) > LINE_BYTES_MAX:
            tell(_text(rest))
            rest = b""
    if rest:
        tell(_text(rest))


def _text(line: bytes) -> str:
    """As a terminal may show it: what it would obey is replaced."""
    return "".join(
        letter if letter.isprintable() else " " for letter in line.decode(errors="replace").rstrip()
    )
