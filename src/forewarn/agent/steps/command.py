"""Steps that run commands: `run`, `systemd` and `hooks`.

A command runs in its own process group and within a time limit. The event is in its environment,
never in its arguments, so a hostile value cannot reach a shell.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from forewarn.agent.config_reader import SettingError, names, number, path_of
from forewarn.agent.ownership import check_ownership
from forewarn.agent.steps.base import (
    CHECK_SECONDS,
    StepContext,
    StepFailed,
    WorkflowPhase,
    event_environment,
    run_each,
)
from forewarn.errors import Invalid
from forewarn.process_table import has_members

OUTPUT_BYTES_MAX = 4096
GRACE_SECONDS = 2.0
GRACE_SECONDS_MAX = 60
SETTLE_SECONDS = 0.5
GROUP_CHECK_SECONDS, GROUP_CHECK_SECONDS_MAX = 0.02, 0.5
HOOKS_MAX = 256
HOOK_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""As run-parts wants them, so that leftovers of editors and packages do not run."""
COMMAND_FORM = "a list of a command and its arguments (or a text, with shell = true)"


def _convert_command(value: object, path: str) -> str | tuple[str, ...]:
    if isinstance(value, str) and value and "\0" not in value:
        return value
    command: tuple[str, ...] = names(COMMAND_FORM)(value, path)
    return command


@dataclass(frozen=True, slots=True)
class RunStep:
    """`run`: a command. Exit code 0 is success.

    A command that takes too long gets SIGTERM `grace_seconds` before its limit, and SIGKILL at the
    limit.
    """

    command: Annotated[tuple[str, ...] | str, _convert_command]
    shell: bool = False
    directory: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_seconds: Annotated[float, number(0, GRACE_SECONDS_MAX)] = GRACE_SECONDS

    SHORT: ClassVar[str] = "command"

    def __post_init__(self) -> None:
        if isinstance(self.command, str) is not self.shell:
            raise SettingError("command", "a text for the shell" if self.shell else COMMAND_FORM)

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("/bin/sh", "-c", self.command) if isinstance(self.command, str) else self.command

    @property
    def name(self) -> str:
        return os.path.basename(self.arguments[0])

    def describe(self) -> str:
        return f"run {' '.join(self.arguments)}"

    def run(self, context: StepContext) -> None:
        run_command(self, context)


@dataclass(frozen=True, slots=True)
class SystemdStep:
    """`systemd`: stops units in order, and in recover starts them in the reverse order.

    systemctl waits for the job itself, and does nothing for a unit that is already in the state.
    """

    units: Annotated[tuple[str, ...], names("a list of units")]
    action: Literal["by-phase", "stop", "start", "restart", "reload"] = "by-phase"

    SHORT: ClassVar[str] = "units"

    def describe(self) -> str:
        action = "stop, or in recover start," if self.action == "by-phase" else self.action
        return f"{action} {' '.join(self.units)}"

    def run(self, context: StepContext) -> None:
        action: str = self.action
        if action == "by-phase":
            action = "start" if context.phase is WorkflowPhase.RECOVER else "stop"
        units = self.units if action in ("stop", "reload") else self.units[::-1]
        run_all([RunStep(("systemctl", action, "--", unit)) for unit in units], context)


@dataclass(frozen=True, slots=True)
class HooksStep:
    """`hooks`: runs the executables of a drop-in directory's `prepare.d`, `start.d` or `recover.d`
    in the order of their names.
    """

    directory: Annotated[Path, path_of("a directory")]

    SHORT: ClassVar[str] = "directory"

    def describe(self) -> str:
        return f"run the hooks in {self.directory}"

    def run(self, context: StepContext) -> None:
        """A phase without a directory has no hooks. A missing parent directory is an error."""
        if not self.directory.is_dir():
            raise StepFailed(f"directory {self.directory} does not exist")
        hooks = _find_hooks(self.directory / f"{context.phase.value}.d")
        run_all([HookStep((str(hook),)) for hook in hooks], context)

    def files(self) -> list[Path]:
        """What runs with the agent's rights: the hooks of all phases, and their directories."""
        found = [self.directory]
        for phase in WorkflowPhase:
            directory = self.directory / f"{phase.value}.d"
            found.append(directory)
            with contextlib.suppress(StepFailed):  # another user, who only checks the file
                found += _find_hooks(directory)
        return found


class HookStep(RunStep):
    """One hook. It and its folder are checked each time: others may have changed them since the
    start.
    """

    def run(self, context: StepContext) -> None:
        hook = Path(self.arguments[0])
        try:
            check_ownership(hook.parent, is_run=True)
            check_ownership(hook, is_run=True)
        except Invalid as error:
            raise StepFailed(f"{self.name} was not run: {error.message}") from error
        RunStep.run(self, context)


def _find_hooks(directory: Path) -> list[Path]:
    try:
        found = sorted(path for path in directory.iterdir() if HOOK_NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StepFailed(f"cannot read {directory}: {error.strerror}") from error
    if len(found) > HOOKS_MAX:
        raise StepFailed(f"{directory} has {len(found)} hooks; expected at most {HOOKS_MAX}")
    return [path for path in found if path.is_file() and os.access(path, os.X_OK)]


def run_command(command: RunStep, context: StepContext) -> str:
    """Run a command to its end and return the end of its output. Raises StepFailed for any exit
    code but 0.

    Background processes that it leaves behind keep running, unless it reaches its limit: then its
    whole process group is terminated.
    """
    if context.seconds_left <= 0:
        raise StepFailed(f"{command.name} was not run: no time left")
    # The command gets at least half of the time before SIGTERM.
    grace_seconds = min(command.grace_seconds, context.seconds_left / 2)
    process = _start(command, context)
    output = bytearray()
    reader = threading.Thread(
        target=_read_output, args=(process, output), name="forewarn-step-output", daemon=True
    )
    try:
        reader.start()
    except RuntimeError as error:  # the limit of threads or of memory is reached
        _terminate(process, grace_seconds)
        assert process.stdout is not None
        process.stdout.close()
        raise StepFailed(f"{command.name} was terminated: {error}") from error
    code = _wait(process, replace(context, deadline=context.deadline - grace_seconds))
    if code is None:
        _terminate(process, grace_seconds)
    reader.join(SETTLE_SECONDS)  # a background process may keep the pipe open forever
    text = bytes(output).decode("utf-8", "replace").strip()
    if code != 0:
        raise _failure(command, code, context, f": {text}" if text else "")
    return text


def run_all(commands: Sequence[RunStep], context: StepContext) -> None:
    """Run commands one after the other, each within an even share of the time left."""

    def run(index: int, command: RunStep) -> None:
        if context.stop.is_set():
            raise StepFailed(f"{command.name} was not run: stopped early")
        share = context.seconds_left / (len(commands) - index)
        command.run(replace(context, deadline=context.now() + share))

    run_each(partial(run, index, command) for index, command in enumerate(commands))


def _start(command: RunStep, context: StepContext) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(  # noqa: S603 - running what the configuration names is its job
            command.arguments,
            cwd=command.directory or None,
            env={**os.environ, **command.environment, **event_environment(context)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        reason = error.strerror or error
        raise StepFailed(f"cannot run {command.arguments[0]}: {reason}") from error


def _read_output(process: "subprocess.Popen[bytes]", output: bytearray) -> None:
    assert process.stdout is not None
    with process.stdout as pipe:
        while part := os.read(pipe.fileno(), OUTPUT_BYTES_MAX):  # ends when the pipe is closed
            output += part
            del output[:-OUTPUT_BYTES_MAX]


def _wait(process: "subprocess.Popen[bytes]", context: StepContext) -> int | None:
    """The exit code, or None if the command must be terminated."""
    while True:  # ends with the command, at the limit, or when the step must stop
        try:
            return process.wait(min(CHECK_SECONDS, context.seconds_left))
        except subprocess.TimeoutExpired:
            if context.seconds_left <= 0 or context.stop.is_set():
                return None


def _terminate(process: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """SIGTERM, and after the grace SIGKILL, to the whole group: a shell that exits leaves its
    children behind. The command itself is reaped after that; `process_table.py` has the reason.
    """
    for each, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, SETTLE_SECONDS)):
        if process.returncode is None:  # else it is reaped, and its id may be another group's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, each)
        end, pause = time.monotonic() + seconds, GROUP_CHECK_SECONDS
        while not _has_exited(process) or has_members(process.pid):
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, GROUP_CHECK_SECONDS_MAX)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # SIGKILL does not end a process blocked on unreachable storage
        process.wait(SETTLE_SECONDS)


def _has_exited(process: "subprocess.Popen[bytes]") -> bool:
    """Without reaping it, where the system can tell: macOS can since Python 3.13."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return bool(os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def _failure(command: RunStep, code: int | None, context: StepContext, output: str) -> StepFailed:
    if code is None and context.stop.is_set():
        return StepFailed(f"{command.name} was terminated: stopped early{output}")
    if code is None:
        return StepFailed(f"{command.name} was terminated at its time limit{output}")
    if code >= 0:
        return StepFailed(f"{command.name} ended with exit code {code}{output}", exit_code=code)
    names = {number.value: number.name for number in signal.Signals}
    killer = names.get(-code, f"signal {-code}")
    return StepFailed(f"{command.name} was killed by {killer}{output}", exit_code=code)
