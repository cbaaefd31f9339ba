"""The software under test: a process that runs as long as the scenario."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress

from forewarn.errors import Invalid
from forewarn.lab import azure_address
from forewarn.lab.environment import make_environment
from forewarn.platform.process_group import ProcessGroup

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
) -> AsyncIterator[ProcessGroup]:
    """Run a program that plays a VM, in its own process group.

    `url` is the endpoint of the VM; `write` gets each line of the program's output. At Azure's
    address the program has no other network.
    """
    endpoint = azure_address.URL if is_at_azure else url
    arguments = [argument.replace(ENDPOINT, endpoint) for argument in command]
    if is_at_azure:
        arguments = azure_address.wrap(url, arguments)
    environ = {**os.environ, **make_environment(endpoint, vm)}
    outlet, inlet = os.pipe()
    try:
        program = ProcessGroup(arguments, environ, stdout=inlet, stderr=inlet)
    except OSError as error:
        os.close(outlet)
        raise Invalid(
            f"{arguments[0]!r} cannot be started: {error.strerror or error}", command=arguments[0]
        ) from error
    finally:
        os.close(inlet)
    reading = asyncio.create_task(_read_lines(outlet, write))
    try:
        yield program
    finally:
        await program.end(stop_seconds_max)
        program.close()
        with suppress(TimeoutError):  # a process that has left the group may keep the pipe open
            await asyncio.wait_for(reading, stop_seconds_max)


async def _read_lines(outlet: int, write: Callable[[str], None]) -> None:
    output, rest = asyncio.StreamReader(), b""
    pipe = open(outlet, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), pipe
    )
    with closing(transport):
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
