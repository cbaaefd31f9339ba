"""The exec platform: runs the operator's own command for each type of impact.

The command gets arguments and environment variables, and its exit code decides. It runs without a
shell in a process group of its own, and no process of that group outlives the try. At its time
limit, or when the service stops, the group gets SIGTERM, a grace period, then SIGKILL; if the
service is killed, from a watchdog.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from operator import attrgetter

from forewarn.core.event import EventType
from forewarn.core.fleet import RedeployMethod
from forewarn.errors import ImpactFailed, Invalid
from forewarn.option_kind import PLACEHOLDER, PLACEHOLDERS, ExecCommand
from forewarn.platform.base import (
    COMMAND_GRACE_SECONDS,
    SHORTAGES,
    STARTS,
    ImpactRequest,
    ImpactResult,
)
from forewarn.platform.process_group import ProcessGroup
from forewarn.platform.watchdog import SILENT_SECONDS, Watchdog

OUTPUT_BYTES_MAX = 2048
PIPE_BYTES = 65_536
"""How much a pipe holds, so one read empties it."""
HOST_LINE = re.compile(r"^host=([A-Za-z0-9_][A-Za-z0-9._-]{0,127})\s*$", re.MULTILINE)

PLACEHOLDER_VALUES = attrgetter(
    *("event_id", "type", "cause", "tries", "duration_seconds", "scope"),
    *("vm.name", "vm.id", "vm.address", "vm.host", "method"),
)


class ExecPlatform:
    """Runs each command for at most `seconds_max`, then SIGTERM, then SIGKILL.

    `option` is where the commands come from, for error messages.
    """

    def __init__(
        self,
        commands: Iterable[ExecCommand],
        *,
        seconds_max: float,
        environ: Mapping[str, str],
        grace_seconds: float = COMMAND_GRACE_SECONDS,
        option: str = "exec_command",
    ) -> None:
        self._commands = {
            command.type: resolve_program(command.words, environ, option) for command in commands
        }
        if not self._commands:
            raise Invalid(
                "the exec platform has no command; expected exec_command, such as"
                " Reboot='/usr/sbin/qm reboot {vm}'"
            )
        self._seconds_max = seconds_max
        self._grace_seconds = grace_seconds
        self.stop_seconds = SILENT_SECONDS + grace_seconds  # if this process is stopped
        self._watchdog = Watchdog(grace_seconds)
        self._environ = {
            name: value for name, value in environ.items() if not name.startswith("FOREWARN_")
        }

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        words = self._commands.get(request.type) or self._commands.get("*")
        if words is None:
            raise ImpactFailed(
                f"no command for {request.type}; set exec_command for it", type=request.type
            )
        values = dict(zip(PLACEHOLDERS, map(str, PLACEHOLDER_VALUES(request)), strict=True))
        variables = {f"FOREWARN_{name.upper()}": value for name, value in values.items()}
        words = tuple(PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in words)
        with closing(Output()) as output:
            outputs, limits = (output, output), (self._seconds_max, self._grace_seconds)
            problem = await run_command(
                words, self._environ | variables, outputs, limits, self._watchdog
            )
        text = output.text()
        if problem:
            # A cold move stops the VM, and another try would stop it again.
            is_final = request.moves and request.method is RedeployMethod.COLD
            raise ImpactFailed(f"{words[0]} {problem}", output=text, is_final=is_final)
        hosts = HOST_LINE.findall(text)
        if request.moves and request.type is EventType.FREEZE and not hosts:
            # It was announced as a live migration, and the command may have suspended the VM only.
            raise ImpactFailed(
                f"{words[0]} printed no host=NAME: the VM was not moved", output=text, is_final=True
            )
        stays_off = request.vm.power.is_off and request.cause not in STARTS
        return ImpactResult(host=hosts[-1] if hosts else "", detail=text, is_back=stays_off)


class Output:
    """The last bytes that a command wrote; with `bytes_max` all of them, until these are too many.

    It is our own pipe: a child that inherits it can neither keep us waiting nor fill our memory.
    """

    def __init__(self, bytes_max: int = 0) -> None:
        self._outlet, self.inlet = os.pipe()
        os.set_blocking(self._outlet, False)
        self._bytes_max = bytes_max
        self.content = bytearray()

    def start(self) -> None:
        """Start to read. Only the command holds the write end from now on."""
        os.close(self.inlet)
        self.inlet = -1
        asyncio.get_running_loop().add_reader(self._outlet, self._read)

    def text(self) -> str:
        return self.content.decode(errors="replace").strip()

    def close(self) -> None:
        """Read what is left in the pipe, and close it."""
        if self.inlet >= 0:
            os.close(self.inlet)
        self._read()
        asyncio.get_running_loop().remove_reader(self._outlet)
        os.close(self._outlet)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            chunk = os.read(self._outlet, PIPE_BYTES)
            self.content += chunk
            if not self._bytes_max:
                del self.content[:-OUTPUT_BYTES_MAX]
            if not chunk or 0 < self._bytes_max < len(self.content):
                asyncio.get_running_loop().remove_reader(self._outlet)


def resolve_program(
    words: Sequence[str], environ: Mapping[str, str], option: str
) -> tuple[str, ...]:
    """Resolve the program's path. It must exist when the service starts."""
    program = shutil.which(words[0], path=environ.get("PATH"))
    if program is None:
        raise Invalid(
            f"{option}: {words[0]!r} is not found or not executable;"
            " expected the path of a program, or its name in PATH",
            option=option,
        )
    return (program, *words[1:])


async def run_command(
    words: Sequence[str],
    environ: Mapping[str, str],
    outputs: tuple[Output, Output],
    limits: tuple[float, float],
    watchdog: Watchdog | None = None,
) -> str:
    """Return what went wrong, empty if the command succeeded. ImpactFailed: it did not start.

    `outputs` are for stdout and stderr, `limits` its seconds and those of the grace period. With a
    `watchdog`, it does not outlive this process.
    """
    seconds_max, grace_seconds = limits
    stdout, stderr = outputs[0].inlet, outputs[1].inlet
    try:
        if watchdog is None:
            group = ProcessGroup(words, environ, stdout=stdout, stderr=stderr)
        else:
            group = watchdog.start(words, environ, stdout=stdout, stderr=stderr)
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        raise ImpactFailed(
            f"{words[0]} cannot be started: {error.strerror or error}", program=words[0]
        ) from error
    problem, code = "", 0
    try:
        with watchdog.watching(group) if watchdog else nullcontext():
            for each in {*outputs}:
                each.start()
            try:
                await asyncio.wait_for(group.wait(), seconds_max)
            except TimeoutError:
                await group.end(grace_seconds)
                problem = f"did not finish within {seconds_max:g} seconds and was killed"
            except asyncio.CancelledError:
                await group.end(grace_seconds)
                raise
    finally:
        code = group.close()  # kills what it left behind
    if problem:
        return problem
    if code < 0:
        return f"was killed by signal {-code}"
    return f"exited with {code}" if code else ""
