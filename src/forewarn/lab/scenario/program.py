"""The software under test: a process that runs as long as the scenario."""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from forewarn.errors import Invalid
from forewarn.lab import azure_address
from forewarn.lab.environment import make_environment
from forewarn.platform.exec import end_group

LINE_BYTES_MAX = 4096
STOP_SECONDS_MAX = 5.0
ENDPOINT = "{endpoint}"


@asynccontextmanager
async def start_program(
    command: Sequence[str],
    vm: str,
    url: str,
    write: Callable[[str], None],
    *,
    is_at_azure: bool = False,
    stop_seconds_max: float = STOP_SECONDS_MAX,
) -> AsyncIterator[Process]:
    """Run a program that plays a VM, in its own process group.

    `url` is the endpoint of the VM; `write` gets each line of the program's output. At Azure's
    address the program has no other network.
    """
    endpoint = azure_address.URL if is_at_azure else url
    arguments = [argument.replace(ENDPOINT, endpoint) for argument in command]
    if is_at_azure:
        arguments = azure_address.wrap(url, arguments)
    variables = make_environment(endpoint, vm)
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except OSError as error:
        raise Invalid(
            f"{arguments[0]!r} cannot be started: {error.strerror or error}", command=arguments[0]
        ) from error
    assert process.stdout is not None
    reading = asyncio.create_task(_read_lines(process.stdout, write))
    try:
        yield process
    finally:
        await end_group(process, stop_seconds_max)
        with suppress(TimeoutError):  # a process that it left behind may keep the pipe open
            await asyncio.wait_for(reading, stop_seconds_max)


async def _read_lines(output: asyncio.StreamReader, write: Callable[[str], None]) -> None:
    rest = b""
    while chunk := await output.read(LINE_BYTES_MAX):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            lines, rest = [*lines, rest], b""
        for line in lines:
            write(_decode(line))
    if rest:
        write(_decode(rest))


def _decode(line: bytes) -> str:
    """Decode a line, without terminal control characters."""
    text = line.decode(errors="replace").rstrip()
    return "".join(letter if letter.isprintable() else " " for letter in text)
