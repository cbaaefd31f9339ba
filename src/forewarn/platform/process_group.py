"""A program in a process group of its own, and how the whole group is ended.

The first process of the group, its leader, is reaped last; `process_table.py` has the reason. A
pidfd (Linux 5.3) shows that it has exited without reaping it, which `asyncio.subprocess` would do
at once. Where there are no pidfds, as on macOS, the leader is reaped when it exits, and what it
left behind gets no signal.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from forewarn.process_table import has_members

LOOK_SECONDS, LOOK_SECONDS_MAX = 0.02, 0.5
"""How often the group is looked at while its leader has exited and others may still clean up."""


class ProcessGroup:
    """States:  RUNNING -> EXITED: the leader is a zombie, others may run -> REAPED by `close`."""

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdout: int,
        stderr: int,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Start the program. OSError if it cannot be started, or its exit could not be noticed."""
        spare = os.open("/dev/null", os.O_RDONLY)  # so that there is a descriptor for the pidfd
        try:
            self._leader = subprocess.Popen(  # noqa: S603 - the operator's own program
                words,
                env=environ,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        finally:
            os.close(spare)
        self._exited = asyncio.Event()
        self._pidfd = -1
        if not hasattr(os, "pidfd_open"):
            return
        try:
            self._pidfd = os.pidfd_open(self._leader.pid)
        except OSError:
            self.close()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        """The id of the leader and of the group."""
        return self._leader.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of the leader, negative: a signal. None until it has exited."""
        if self._pidfd < 0:
            return self._leader.poll()
        found = os.waitid(os.P_PID, self._leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    async def wait(self) -> None:
        """Wait until the leader has exited."""
        while self._pidfd < 0 and self.returncode is None:
            await asyncio.sleep(LOOK_SECONDS)
        if self._pidfd >= 0:
            await self._exited.wait()

    async def end(self, grace_seconds: float) -> None:
        """Send SIGTERM, and SIGKILL to what is left after the grace period, or at its end.

        A shell often exits first, while its children still clean up: they have the same time.
        """
        self._signal(signal.SIGTERM)
        pause = LOOK_SECONDS
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self.wait()
                while self._pidfd >= 0 and await asyncio.to_thread(has_members, self._leader.pid):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LOOK_SECONDS_MAX)
        self._signal(signal.SIGKILL)
        with suppress(TimeoutError):  # a process may hang in the kernel
            await asyncio.wait_for(self.wait(), grace_seconds)

    def close(self) -> int:
        """Kill what is left of the group, and reap the leader. Its exit code; negative: a signal.

        A leader that hangs in the kernel is reaped by a later call of `subprocess`.
        """
        self._signal(signal.SIGKILL)
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        code = self._leader.poll()
        return -signal.SIGKILL if code is None else code

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._exited.set()

    def _signal(self, number: int) -> None:
        if self._leader.returncode is not None:
            return  # it is reaped: the id of the group may be that of another
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: they are all setuid
            os.killpg(self._leader.pid, number)
