"""A platform that is the operator's own commands: one per type of impact, told by words and
environment, judged by exit code.

A command runs without a shell, in a process group of its own. When its try is over, however it
ended, nothing of that group runs. What must be ended, at its limit or because the service stops,
gets TERM, a grace for all of the group, then KILL.
"""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress

from forewarn.config import PLACEHOLDER, PLACEHOLDERS, ExecCommand
from forewarn.errors import ImpactFailed, Invalid
from forewarn.platform.base import SHORTAGES, ImpactRequest, ImpactResult

OUTPUT_BYTES_MAX = 2048
READ_BYTES = 65_536
DRAIN_READS_MAX = 64
LOOK_SECONDS = 0.05
HOST_LINE = re.compile(r"^host=([A-Za-z0-9_][A-Za-z0-9._-]{0,127})\s*$", re.MULTILINE)


class ExecPlatform:
    """Runs `commands`, each for `seconds_max` at most; what must be ended is asked to, and killed
    after `grace_seconds`.
    """

    def __init__(
        self,
        commands: Iterable[ExecCommand],
        *,
        seconds_max: float,
        environ: Mapping[str, str],
        grace_seconds: float = 5.0,
    ) -> None:
        self._commands = {command.type: found(command, environ) for command in commands}
        if not self._commands:
            raise Invalid(
                "the exec platform has no command; exec_command gives it one, such as Reboot='/usr/sbin/qm reboot {vm}'"
            )
        self._seconds_max = seconds_max
        self._grace_seconds = grace_seconds
        self._environ = {
            name: value for name, value in environ.items() if not name.startswith("FOREWARN_")
        }

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        words = self._commands.get(order.type) or self._commands.get("*")
        if words is None:
            raise ImpactFailed(
                f"there is no command for {order.type}; exec_command can give one", type=order.type
            )
        facts = facts_of(order)
        told = {f"FOREWARN_{name.upper()}": value for name, value in facts.items()}
        output = Output()
        try:
            words = tuple(PLACEHOLDER.sub(lambda match: facts[match[1]], word) for word in words)
            code = await self._run(words, self._environ | told, output)
        finally:
            output.close()
        if code != 0:
            how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
            raise ImpactFailed(f"{words[0]} {how}", output=output.text(), code=code)
        hosts = HOST_LINE.findall(output.text())
        return ImpactResult(host=hosts[-1] if hosts else "", detail=output.text())

    async def _run(
        self, words: tuple[str, ...], environ: Mapping[str, str], output: "Output"
    ) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.inlet,
                stderr=output.inlet,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            raise ImpactFailed(
                f"{words[0]} cannot be started: {error.strerror or error}", program=words[0]
            ) from error
        output.start()
        try:
            return await asyncio.wait_for(process.wait(), self._seconds_max)
        except TimeoutError:
            await self._end(process)
            output.drain()
            why = f"{words[0]} was not done within {self._seconds_max:g} seconds, and was ended"
            raise ImpactFailed(why, output=output.text()) from None
        except asyncio.CancelledError:
            await self._end(process)
            raise
        finally:
            signal_group(process.pid, signal.SIGKILL)  # what it left behind

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """The grace is for the whole group: a shell often dies at once, and its children have to
        clean up.
        """
        signal_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_seconds):
                await process.wait()
                while signal_group(process.pid, 0):  # ends with the grace
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            signal_group(process.pid, signal.SIGKILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._grace_seconds)


class Output:
    """What a command writes, the last of it.

    A pipe of our own: who inherits it cannot keep us waiting, nor fill our memory.
    """

    def __init__(self) -> None:
        self._outlet, self.inlet = os.pipe()
        os.set_blocking(self._outlet, False)
        self._tail = b""

    def start(self) -> None:
        """Read from now on; the inlet is the command's alone."""
        os.close(self.inlet)
        self.inlet = -1
        asyncio.get_running_loop().add_reader(self._outlet, self._read)

    def text(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def drain(self) -> None:
        """Take what is in the pipe still."""
        for _ in range(DRAIN_READS_MAX):
            if not self._read():
                return

    def close(self) -> None:
        if self.inlet >= 0:
            os.close(self.inlet)
        else:
            self.drain()
            asyncio.get_running_loop().remove_reader(self._outlet)
        os.close(self._outlet)

    def _read(self) -> bool:
        try:
            chunk = os.read(self._outlet, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._outlet)
        self._tail = (self._tail + chunk)[-OUTPUT_BYTES_MAX:]
        return bool(chunk)


def facts_of(order: ImpactRequest) -> dict[str, str]:
    """What a command is told, by the names of PLACEHOLDERS."""
    vm = order.vm
    what = [order.event_id, order.type, order.cause, order.tries, order.duration_seconds]
    whom = [order.scope, vm.name, vm.id, vm.address, vm.host]
    return dict(zip(PLACEHOLDERS, map(str, [*what, *whom]), strict=True))


def found(command: ExecCommand, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words of a command with the path of its program, which must be there when the service
    starts.
    """
    program = shutil.which(command.words[0], path=environ.get("PATH"))
    if program is None:
        raise Invalid(
            f"exec_command for {command.type}: {command.words[0]!r} is not found or not executable; "
            f"expected the path of a program, or its name in PATH",
            program=command.words[0],
        )
    return (program, *command.words[1:])


def signal_group(group: int, number: int) -> bool:
    """Whether there is anybody left in the group to be told; 0 only asks."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
