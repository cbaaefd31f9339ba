"""sd_notify: report to systemd that the service or the agent is ready, reloading, stopping, alive.

Does nothing without NOTIFY_SOCKET. A message that cannot be sent is dropped: a problem of systemd
must not stop the VM's agent.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping

STATUS_LENGTH_MAX = 200


class Notifier:
    """`feed_seconds` is the interval for `feed`: half of the watchdog's timeout, or None."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        pid: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.feed_seconds = _feed_seconds(environ, pid)
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._monotonic = monotonic

    def ready(self, status: str) -> None:
        self._send("READY=1", _status(status))

    def status(self, status: str) -> None:
        self._send(_status(status))

    def reloading(self) -> None:
        """Call `ready` afterwards, whether the reload succeeded or not."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(self._monotonic() * 1_000_000)}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", _status(status))

    def feed(self) -> None:
        """Call this from the loop that the watchdog guards, so that a stuck loop misses it."""
        self._send("WATCHDOG=1")

    async def keep_feeding(self) -> None:
        """Feed from the event loop: if that is blocked, the service is restarted."""
        import asyncio  # here: with ssl, which it loads, it is a third of the agent's memory

        while self.feed_seconds:  # ends when cancelled
            self.feed()
            await asyncio.sleep(self.feed_seconds)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        ):
            notify.settimeout(1.0)
            notify.connect(self._address)
            notify.send("\n".join(lines).encode(errors="replace"))


class Pulse:
    """Whether a loop is alive, judged by a value that it changes in every iteration.

    `still_seconds_max` is the longest time an iteration may take.
    """

    def __init__(self, still_seconds_max: float, now: float) -> None:
        self._still_seconds_max = still_seconds_max
        self._last: object = None
        self._changed_at = now

    def is_there(self, sign: object, now: float) -> bool:
        if sign != self._last:
            self._last, self._changed_at = sign, now
        return now - self._changed_at <= self._still_seconds_max


def _address(path: str) -> str:
    """A path, or an abstract name that begins with `@`. Other kinds (vsock) are not supported."""
    if not hasattr(socket, "AF_UNIX") or path[:1] not in ("/", "@"):
        return ""
    return f"\0{path[1:]}" if path.startswith("@") else path


def _feed_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """WATCHDOG_PID names the process it is for: children inherit the environment."""
    timeout, for_pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(pid))
    if not (timeout.isascii() and timeout.isdigit() and int(timeout) > 0) or for_pid != str(pid):
        return None
    return int(timeout) / 2_000_000


def _status(status: str) -> str:
    """One line: a second line would be another statement."""
    return f"STATUS={' '.join(status.split())[:STATUS_LENGTH_MAX]}"
