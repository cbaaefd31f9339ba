"""Commands run for a step: in a process group of their own, within a time, their last words kept
for the message.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forewarn.agent.step import Occasion, StepFailed, StepTimedOut
from forewarn.agent.steps.fact import environment
from forewarn.agent.steps.wait import LOOK_SECONDS, together

OUTPUT_BYTES_MAX = 4096
GRACE_SECONDS = 2.0
SETTLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """What to run.

    `grace_seconds` lie between TERM and KILL for one that is ended; KILL falls at the limit, not
    after it.
    """

    words: tuple[str, ...]
    directory: str | None = None
    variables: Mapping[str, str] | None = None
    grace_seconds: float = GRACE_SECONDS

    @property
    def name(self) -> str:
        return os.path.basename(self.words[0])


def run(command: Command, occasion: Occasion) -> str:
    """Run it to its end, and give back its last words. An exit code other than 0 is a failure.

    What it leaves running in the background is not touched, unless it is ended at its limit: then
    its whole group is.
    """
    if occasion.seconds_left <= 0:
        raise StepTimedOut(f"{command.name} was not run: no time was left")
    grace_seconds = min(
        command.grace_seconds, occasion.seconds_left / 2
    )  # the work has at least half of the time
    process = _start(command, occasion)
    said = bytearray()
    listener = threading.Thread(
        target=_listen, args=(process, said), name="forewarn-step-output", daemon=True
    )
    listener.start()
    code = _wait(process, replace(occasion, deadline=occasion.deadline - grace_seconds))
    if code is None:
        _end(process, grace_seconds)
    listener.join(SETTLE_SECONDS)  # a child in the background may hold the pipe open for ever
    last_words = bytes(said).decode("utf-8", "replace").strip()
    if code != 0:
        raise _failure(command, code, occasion, f": {last_words}" if last_words else "")
    return last_words


def run_each(commands: Sequence[Command], occasion: Occasion) -> None:
    """One after the other, each within its even share of the time left.

    The rest is run even where one fails, and all is told.
    """
    failures: list[StepFailed] = []
    for index, command in enumerate(commands):
        if occasion.stop.is_set():
            failures.append(StepFailed(f"{command.name} was not run: the agent has to end"))
            break
        share = occasion.seconds_left / (len(commands) - index)
        try:
            run(command, replace(occasion, deadline=occasion.now() + share))
        except StepFailed as failure:
            failures.append(failure)
    if failures:
        raise together(failures)


def find(name: str) -> str:
    """The full path of a command that this machine should have."""
    path = shutil.which(name)
    if path is None:
        raise StepFailed(f"there is no {name} on this machine", command=name)
    return path


def _start(command: Command, occasion: Occasion) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command.words,
            cwd=command.directory,
            env={**os.environ, **(command.variables or {}), **environment(occasion)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise StepFailed(f"{command.words[0]} cannot be run: {error.strerror or error}") from error


def _listen(process: "subprocess.Popen[bytes]", said: bytearray) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        while part := os.read(
            output.fileno(), OUTPUT_BYTES_MAX
        ):  # ends when nobody holds the pipe any more
            said += part
            del said[:-OUTPUT_BYTES_MAX]


def _wait(process: "subprocess.Popen[bytes]", occasion: Occasion) -> int | None:
    """Its exit code, or None if it is to be ended."""
    while True:  # ends with the command, at the limit, or when the agent has to end
        try:
            return process.wait(min(LOOK_SECONDS, occasion.seconds_left))
        except subprocess.TimeoutExpired:
            if occasion.seconds_left <= 0 or occasion.stop.is_set():
                return None


def _end(process: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """TERM, and after the grace KILL, to everybody in the group: a shell that ends leaves its
    children behind.
    """
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
            while (
                grace_seconds > 0
            ):  # ends with the grace, or when the group is empty: the last line raises then
                _look(process, min(LOOK_SECONDS, grace_seconds))
                grace_seconds -= LOOK_SECONDS
                os.killpg(process.pid, 0)
            os.killpg(process.pid, signal.SIGKILL)
            for _ in range(10):  # the kernel may need a moment to end them all
                _look(process, SETTLE_SECONDS / 10)
                os.killpg(process.pid, 0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SETTLE_SECONDS)  # not even KILL ends what hangs in a lost disk


def _look(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Until the group's first process ends.

    Where it has ended already, the others still have their time.
    """
    if process.poll() is not None:
        time.sleep(seconds)
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _failure(command: Command, code: int | None, occasion: Occasion, last_words: str) -> StepFailed:
    if code is not None:
        return StepFailed(f"{command.name} {_exit(code)}{last_words}", exit_code=code)
    if occasion.stop.is_set():
        return StepFailed(f"{command.name} was ended because the agent has to end{last_words}")
    return StepTimedOut(f"{command.name} was ended at its limit{last_words}")


def _exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
