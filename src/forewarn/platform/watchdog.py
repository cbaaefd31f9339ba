"""Ends the commands of this process when it is killed or stopped, as it would end them itself.

Otherwise a command would act on its VM while another server, or the next run of this one, takes
the impact over. A small process watches: it notices when this one is gone, or says nothing.
"""

import asyncio
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from forewarn.platform.base import COMMAND_GRACE_SECONDS
from forewarn.platform.process_group import ProcessGroup

SCRIPT = Path(__file__).with_name("watchdog_process.py")
BEAT_SECONDS = 1.0
WAIT = 'read -r _ && exec "$@" </dev/null'
"""What a program waits with until it is watched. At the end of the input it does not begin."""
SILENT_SECONDS = 4.0
"""After this time without a beat, commands are ended. A server whose event loop is blocked for so
long is about to lose its lease, too.
"""


class Watchdog:
    """States:  IDLE -> WATCHING, while commands run: a beat each second -> IDLE

    The process is started before the first command, and ends with this object. If it is gone,
    another one is started.
    """

    def __init__(
        self,
        grace_seconds: float = COMMAND_GRACE_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._arguments = f"{silent_seconds:g}", f"{grace_seconds:g}"
        self._pids: set[int] = set()
        self._gates: dict[ProcessGroup, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._beat: asyncio.TimerHandle | None = None

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], *, stdout: int, stderr: int
    ) -> ProcessGroup:
        """Start a program that waits for `watching`: if this process is killed before, it ends."""
        self._require_process()
        outlet, inlet = os.pipe()
        try:
            waiting = ("/bin/sh", "-c", WAIT, "sh", *words)
            group = ProcessGroup(waiting, environ, stdin=outlet, stdout=stdout, stderr=stderr)
        except BaseException:
            os.close(inlet)
            raise
        finally:
            os.close(outlet)
        self._gates[group] = inlet
        return group

    @contextmanager
    def watching(self, group: ProcessGroup) -> Iterator[None]:
        """Let a program that was started begin. If this process cannot end it, the other does."""
        pid, gate = group.pid, self._gates.pop(group)
        self._pids.add(pid)
        try:
            try:
                self._require_process()
                self._send(b"+%d\n" % pid)
                os.write(gate, b"\n")
            finally:
                os.close(gate)
            if self._beat is None:
                self._beat_soon()
            yield
        finally:
            self._pids.discard(pid)
            self._send(b"-%d\n" % pid)
            if not self._pids and self._beat is not None:
                self._beat.cancel()
                self._beat = None

    def _beat_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._beat = loop.call_later(BEAT_SECONDS, self._on_beat)

    def _on_beat(self) -> None:
        self._beat_soon()
        with suppress(OSError):  # a shortage: the next beat tries again
            self._require_process()
            self._send(b"\n")

    def _send(self, line: bytes) -> None:
        """Send a line if the process lives. The next beat finds that it is gone.

        It never raises: once a command has begun, an OSError would hide how it ended, and be taken
        for one that was not started. A full pipe means that the process is ending commands: it
        reads on afterwards.
        """
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            with suppress(OSError):
                os.write(self._process.stdin.fileno(), line)

    def _require_process(self) -> None:
        """Start the process if it is gone. OSError: a shortage."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._open()
            self._send(b"".join(b"+%d\n" % pid for pid in self._pids))

    def _open(self) -> subprocess.Popen[bytes]:
        # The descriptors that are to be open as long as a command runs are marked as inheritable.
        process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", str(SCRIPT), *self._arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
            close_fds=False,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
