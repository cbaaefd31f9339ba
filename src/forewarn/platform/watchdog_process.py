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
from collections.abc import Iterable
from contextlib import suppress

LOOK_SECONDS = 0.05
READ_BYTES = 65_536


def main(silent_seconds: float, grace_seconds: float) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # systemd sends it to the whole unit
    groups, incomplete = set[int](), b""
    while True:  # ends with the input
        is_readable, _, _ = select.select([0], [], [], silent_seconds if groups else None)
        if not is_readable:
            end(groups, grace_seconds)
            groups.clear()
            continue
        received = os.read(0, READ_BYTES)
        if not received:
            end(groups, grace_seconds)
            return
        *lines, incomplete = (incomplete + received).split(b"\n")
        for line in filter(None, lines):
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))


def end(groups: Iterable[int], grace_seconds: float) -> None:
    """Send SIGTERM, and SIGKILL to what is left after the grace period.

    A group whose last process is reaped is not looked at again: its id may be used again.
    """
    left = {group for group in groups if send(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_seconds
    while left and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        left = {group for group in left if send(group, 0)}
    for group in left:
        send(group, signal.SIGKILL)


def send(group: int, number: int) -> bool:
    """Whether there is such a group."""
    with suppress(ProcessLookupError):
        with suppress(PermissionError):  # all of its processes are setuid
            os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main(*map(float, sys.argv[1:3]))
