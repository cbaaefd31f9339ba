"""What was seen, run and approved, on disk before it is acted on: lines of JSON, only ever added
to, each fsynced.

A torn last line is what a crash leaves, and is dropped. Any other line that cannot be read is said,
and the file as it was is kept beside the new one, as `*.damaged-N`. When the file is opened, and
again after `lines_max` lines or when it has doubled and grown by `growth_bytes_max`, it is written
anew with the fewest lines that say the same: a new file, fsynced, renamed into place. So its size
is bounded by that of the events that are not over. The file is for one agent at a time.
"""

import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, ClassVar, Self

from forewarn.agent.progress import (
    Facts,
    Progress,
    What,
    fold,
    forget_details,
    journaled,
    lines_of,
    plain,
)
from forewarn.client import Clock, Event
from forewarn.errors import Unavailable

log = logging.getLogger("forewarn.agent")

DAMAGED_MAX = 10
CLOCK = Clock()


class JournalLost(Unavailable):
    """What must be on disk before we act cannot be put there."""

    code = "journal_lost"


class Journal:
    """`progress` is what the lines come to, by the event's key. It is never changed, only replaced:
    read it from any thread.

    `done_max` events that are over are remembered, in case an endpoint that lags shows one again.
    """

    lines_max: ClassVar[int] = 1000
    growth_bytes_max: ClassVar[int] = 1024 * 1024
    done_max: ClassVar[int] = 256

    def __init__(self, path: Path, *, clock: Clock = CLOCK) -> None:
        self.progress: Mapping[str, Progress] = {}
        self._path = path
        self._now = clock.now
        self._turn = threading.Lock()
        self._file: IO[bytes] | None = None
        self._lines = 0
        self._bytes_at_rewrite = 0
        self._bytes_since_rewrite = 0
        with ExitStack() as undone, _translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = undone.enter_context(_lock(path.with_name(f"{path.name}.lock")))
            self.progress = self._read()
            self._write_anew()
            undone.pop_all()

    @classmethod
    def open(cls, path: Path, *, clock: Clock = CLOCK) -> Self:
        """The journal at this path, made if there is none.

        JournalLost if it cannot be used, or another agent uses it.
        """
        return cls(path, clock=clock)

    def close(self) -> None:
        with self._turn:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._lock.close()

    def see(self, event: Event, rule: str) -> None:
        """An event is there, or is different now. The rule is that of the first time."""
        self.write(event.key, What.SEEN, event=plain(journaled(event)), rule=rule)

    def write(self, key: str, what: What, **facts: object) -> None:
        """Put a line on disk.

        When this returns it is there; when it raises JournalLost, nothing must be done about it.
        """
        with self._turn:
            before = self.progress.get(key)
            after = fold(before, what, facts)
            if after == before:
                return
            with _translated(self._path):
                self._append(key, what, facts)
            self.progress = {**self.progress, key: after}

    def _append(self, key: str, what: What, facts: Facts) -> None:
        if self._file is None or self._has_grown:
            self._write_anew()
        assert self._file is not None
        line = self._line(key, what, facts)
        try:
            self._put(self._file, line)
        except OSError:
            self._give_up()
            raise
        self._lines += 1
        self._bytes_since_rewrite += len(line)

    @property
    def _has_grown(self) -> bool:
        """Whether a smaller file would say the same.

        What is large when it is written anew may double before the next time.
        """
        return self._lines >= self.lines_max or self._bytes_since_rewrite >= max(
            self.growth_bytes_max, self._bytes_at_rewrite
        )

    def _give_up(self) -> None:
        """After trouble nobody knows what is in the file, so the next line makes a new one."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a full disk is told once, by the line that did not fit
                file.close()

    @staticmethod
    def sync(handle: int) -> None:
        """From the operating system to the disk itself."""
        os.fsync(handle)

    @classmethod
    def _put(cls, file: IO[bytes], lines: bytes) -> None:
        """The one way to the disk."""
        file.write(lines)
        file.flush()
        cls.sync(file.fileno())

    def _line(self, key: str, what: What, facts: Facts) -> bytes:
        line = {"id": key, "what": what, "at": self._now().isoformat(), **facts}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _write_anew(self) -> None:
        self._give_up()
        done = [key for key, progress in self.progress.items() if progress.is_done]
        spare = set(done[: max(0, len(done) - self.done_max)])
        self.progress = {
            key: forget_details(progress) if progress.is_done else progress
            for key, progress in self.progress.items()
            if key not in spare
        }
        lines = [
            self._line(key, what, facts)
            for key, progress in self.progress.items()
            for what, facts in lines_of(progress)
        ]
        new = self._path.with_name(f"{self._path.name}.new")
        with new.open("wb") as file:
            self._put(file, b"".join(lines))
        new.replace(self._path)
        self._sync_folder()
        self._file = self._path.open("ab")
        self._lines, self._bytes_since_rewrite = 0, 0
        self._bytes_at_rewrite = sum(map(len, lines))

    def _sync_folder(self) -> None:
        """A rename is on disk when its folder is. Windows opens no folders."""
        if os.name != "posix":
            return
        handle = os.open(self._path.parent, os.O_RDONLY)
        try:
            self.sync(handle)
        finally:
            os.close(handle)

    def _read(self) -> dict[str, Progress]:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        *lines, torn = text.split(b"\n")
        if torn:
            log.warning(
                "the journal's last line was torn",
                extra={"facts": {"path": str(self._path), "bytes": len(torn)}},
            )
        progress: dict[str, Progress] = {}
        damaged = [
            number for number, line in enumerate(lines, start=1) if not _take(line, progress)
        ]
        if damaged:
            aside = self._put_aside()
            facts = {
                "path": str(self._path),
                "lines": damaged[:10],
                "damaged": len(damaged),
                "kept": str(aside),
            }
            log.error("lines of the journal cannot be read", extra={"facts": facts})
        return progress

    def _put_aside(self) -> Path:
        """A copy, so that at no moment there is no journal.

        Of too many the last is written over.
        """
        names = [
            self._path.with_name(f"{self._path.name}.damaged-{number}")
            for number in range(1, DAMAGED_MAX + 1)
        ]
        free = next((name for name in names if not name.exists()), names[-1])
        shutil.copyfile(self._path, free)
        return free


def _take(line: bytes, progress: dict[str, Progress]) -> bool:
    """Whether the line could be understood."""
    try:
        said = json.loads(line)
        key = said["id"]
        if not isinstance(key, str):
            return False
        progress[key] = fold(progress.get(key), What(said["what"]), said)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False
    return True


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalLost(f"the journal {path} cannot be used: {error}", path=str(path)) from error


def _lock(path: Path) -> IO[bytes]:
    """The right to use the journal, until the file is closed or the process is gone.

    OSError if another has it.
    """
    file = path.open("ab")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OSError(error.errno, f"another agent uses it, or {path} cannot be locked") from error
    return file
