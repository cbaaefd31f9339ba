"""A lease file on shared storage: who holds it leads. No clock is compared with another machine's.

Taking it is an exclusive create. The holder renews it by touching it. Whoever else has watched it
stay untouched for SECONDS, by its own clock, may take it over: first an exclusive create beside it,
so that one of many does, then a rename over the old one. A VM that is frozen or rebooted so loses
its lease; it finds another's name in the file when it is back.

Shared storage may hang for minutes. So the agent has a Keeper, whose thread is the only one that
touches the file.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

SECONDS = 15.0
WORD_SECONDS_MAX = 5.0
"""How long "it is ours" is true without being said again: well below SECONDS, after which others
may take it.
"""
RENEW_SECONDS = 1.0
HOLDER_BYTES_MAX = 256

Sight = tuple[bytes, int]
"""The holder, and when it last touched the file by the storage's clock."""


class Leadership(Protocol):
    """What the approver asks."""

    def hold(self) -> bool: ...

    def release(self) -> None: ...


class Lease:
    """Not thread-safe: one thread asks.

    OSError never leaves: storage that cannot be reached means that we do not lead.
    """

    def __init__(self, path: Path, holder: str, *, monotonic: Callable[[], float]) -> None:
        self._path = path
        self._beside = path.with_name(f"{path.name}.next")
        self._holder = holder.encode()[:HOLDER_BYTES_MAX]
        self._monotonic = monotonic
        self._watched: dict[Path, tuple[Sight, float]] = {}
        self._is_held = False

    def hold(self) -> bool:
        """Take the lease or renew it. Whether it is ours now."""
        try:
            self._is_held = self._create(self._path) or self._renew() or self._take_over()
        except OSError:
            self._is_held = False
        return self._is_held

    def release(self) -> None:
        """Let others have it at once, if it is still ours."""
        with suppress(OSError):
            if self._is_held and self._is_ours():
                self._path.unlink()
        self._is_held = False

    def _create(self, path: Path) -> bool:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(self._holder)
            file.flush()
            os.fsync(handle)
        return True

    def _renew(self) -> bool:
        if not self._is_ours():
            return False
        os.utime(self._path)
        return True

    def _take_over(self) -> bool:
        if not self._is_abandoned(self._path):
            return False
        if self._is_abandoned(self._beside):
            self._beside.unlink()
        if not self._create(self._beside):
            return False
        if self._is_abandoned(self._path):
            self._beside.replace(self._path)
            return self._is_ours()
        self._beside.unlink()
        return False

    def _is_abandoned(self, path: Path) -> bool:
        """Whether the file has looked the same for all of SECONDS."""
        sight = _see(path)
        if sight is None:
            self._watched.pop(path, None)
            return False
        known, since = self._watched.get(path, (None, 0.0))
        if known != sight:
            self._watched[path] = (sight, self._monotonic())
            return False
        return self._monotonic() - since >= SECONDS

    def _is_ours(self) -> bool:
        sight = _see(self._path)
        return sight is not None and sight[0] == self._holder


class Keeper:
    """A lease, asked from another thread without waiting: `hold` says that it is wanted, and the
    last word on whether it is ours.

    `keep` is for a thread of its own. `on_word` is called when a new word differs from the one
    before.
    """

    def __init__(
        self, lease: Leadership, *, monotonic: Callable[[], float], on_word: Callable[[], object]
    ) -> None:
        self._lease = lease
        self._monotonic = monotonic
        self._on_word = on_word
        self._turn = threading.Lock()
        self._wake = threading.Event()
        self._is_wanted = False
        self._held_at: float | None = None

    def hold(self) -> bool:
        with self._turn:
            is_new, self._is_wanted = not self._is_wanted, True
            is_held = self._is_held()
        if is_new:
            self._wake.set()
        return is_held

    def release(self) -> None:
        with self._turn:
            was_wanted, self._is_wanted = self._is_wanted, False
            self._held_at = None
        if was_wanted:
            self._wake.set()

    def keep(self, stop: threading.Event) -> None:
        while not stop.is_set():  # ends with the agent, which calls `wake` then
            self._wake.wait(RENEW_SECONDS if self._is_wanted else None)
            self._wake.clear()
            if not stop.is_set():
                self._touch()

    def wake(self) -> None:
        self._wake.set()

    def _touch(self) -> None:
        with self._turn:
            is_wanted, was_held = self._is_wanted, self._is_held()
        if not is_wanted:
            self._lease.release()
            return
        began = self._monotonic()
        is_held = self._lease.hold()
        with self._turn:
            self._held_at = began if is_held and self._is_wanted else None
        if is_held != was_held:
            self._on_word()

    def _is_held(self) -> bool:
        return self._held_at is not None and self._monotonic() - self._held_at < WORD_SECONDS_MAX


def _see(path: Path) -> Sight | None:
    try:
        with path.open("rb") as file:
            return file.read(HOLDER_BYTES_MAX), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
