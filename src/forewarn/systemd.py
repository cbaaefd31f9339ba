"""Telling systemd how the service or the agent is (sd_notify): ready, reloading, stopping, in
words, and that it lives.

Without NOTIFY_SOCKET nobody asked, and nothing is said. A word that cannot be said is lost:
systemd's trouble is not the VM's.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping

WORDS_MAX = 200


class Notifier:
    """`feed_seconds` is how often the watchdog wants to be fed: at half of its time.

    None if there is no watchdog for us.
    """

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

    def ready(self, words: str) -> None:
        self._say("READY=1", _status(words))

    def status(self, words: str) -> None:
        self._say(_status(words))

    def reloading(self) -> None:
        """READY follows when it is done, well or not."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={int(self._monotonic() * 1_000_000)}")

    def stopping(self, words: str) -> None:
        self._say("STOPPING=1", _status(words))

    def feed(self) -> None:
        """Only for who has seen that the loop turns: a watchdog that is fed by a clock guards
        nothing.
        """
        self._say("WATCHDOG=1")

    def _say(self, *lines: str) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaking,
        ):
            speaking.settimeout(1.0)
            speaking.connect(self._address)
            speaking.send("\n".join(lines).encode(errors="replace"))


class Pulse:
    """Whether a loop still turns, told by something that changes at every turn.

    `still_seconds_max` is its longest turn.
    """

    def __init__(self, still_seconds_max: float, now: float) -> None:
        self._still_seconds_max = still_seconds_max
        self._last: object = None
        self._changed_at = now

    def is_there(self, sign: object, now: float) -> bool:
        if sign != self._last:
            self._last, self._changed_at = sign, now
        return now - self._changed_at <= self._still_seconds_max


def _address(told: str) -> str:
    """A path, or a name that begins with `@` and has no file.

    Other kinds (vsock) are for whoever runs machines.
    """
    if not hasattr(socket, "AF_UNIX") or told[:1] not in ("/", "@"):
        return ""
    return f"\0{told[1:]}" if told.startswith("@") else told


def _feed_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """WATCHDOG_PID says whom it is for, since children have the same environment."""
    told, whom = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(pid))
    if not (told.isascii() and told.isdigit() and int(told) > 0) or whom != str(pid):
        return None
    return int(told) / 2_000_000


def _status(words: str) -> str:
    """One line: a second one would be a statement of its own."""
    return f"STATUS={' '.join(words.split())[:WORDS_MAX]}"
