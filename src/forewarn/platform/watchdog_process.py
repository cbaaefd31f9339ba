"""The process of a `Watchdog`: a script with the standard library only, so that it is small.

    python watchdog_process.py SILENT_SECONDS GRACE_SECONDS

Its standard input has a line for each process group that begins (`+PID`) and ends (`-PID`), and an
empty line each second while there are any. At the end of the input its parent is gone. If nothing
comes while a group runs, the parent is stopped. In both cases the groups are ended.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

LOOK_SECONDS = 0.05
READ_BYTES = 65_536


class Groups:
    """The process groups of the parent.

    RUNNING -> ENDING: SIGTERM was sent -> SIGKILL is sent at its deadline -> gone

    Each has a deadline of its own, because a parent that is stopped twice begins others in between.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self.running = set[int]()
        self.ending = dict[int, float]()

    def note(self, line: bytes) -> None:
        """A group has begun or ended, as the parent says."""
        group = int(line[1:])
        if line[:1] == b"+":
            self.running.add(group)
        else:
            self.running.discard(group)
            self.ending.pop(group, None)

    def terminate(self) -> None:
        deadline = time.monotonic() + self._grace_seconds
        self.ending |= {group: deadline for group in self.running if send(group, signal.SIGTERM)}
        self.running.clear()

    def look(self) -> None:
        """Kill what is left after the grace period.

        A group whose last process is reaped is not looked at again: its id may be used again.
        """
        for group, deadline in list(self.ending.items()):
            is_late = time.monotonic() >= deadline
            if not send(group, signal.SIGKILL if is_late else 0) or is_late:
                del self.ending[group]


def main(silent_seconds: float, grace_seconds: float) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # systemd sends it to the whole unit
    groups, incomplete = Groups(grace_seconds), b""
    silent_at = time.monotonic() + silent_seconds
    while True:  # ends with the input
        wait_seconds = None
        if groups.ending:
            wait_seconds = LOOK_SECONDS
        elif groups.running:
            wait_seconds = max(silent_at - time.monotonic(), 0)
        is_readable, _, _ = select.select([0], [], [], wait_seconds)
        if is_readable:
            received = os.read(0, READ_BYTES)
            if not received:
                break
            *lines, incomplete = (incomplete + received).split(b"\n")
            for line in filter(None, lines):
                groups.note(line)
            silent_at = time.monotonic() + silent_seconds
        elif time.monotonic() >= silent_at:
            groups.terminate()
        groups.look()
    groups.terminate()
    while groups.ending:
        time.sleep(LOOK_SECONDS)
        groups.look()


def send(group: int, number: int) -> bool:
    """Whether there is such a group."""
    with suppress(ProcessLookupError):
        with suppress(PermissionError):  # all of its processes are setuid
            os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main(*map(float, sys.argv[1:3]))
