"""What was seen, run and approved, on disk before the agent acts on it: lines of JSON, append
only, each with an fsync.

A torn last line is what a crash leaves, and is dropped. Any other invalid line is logged, and a
copy of the file is kept as `*.damaged-N`. When the file is opened, and again after `lines_max`
lines or when it has doubled and grown by `growth_bytes_max`, it is compacted: the fewest lines that
mean the same go to a new file, which is fsynced and renamed into place. So its size is bounded by
that of the events that are not over. One agent at a time may use the file.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, ClassVar, Self

from forewarn.agent.fact_log import log
from forewarn.agent.progress import (
    EntryKind,
    Facts,
    Progress,
    drop_details,
    event_to_json,
    fold,
    for_journal,
    minimal_entries,
)
from forewarn.client import ClientClock, Event
from forewarn.errors import Unavailable

DAMAGED_COPIES_MAX = 10
CLOCK = ClientClock()


class JournalLost(Unavailable):
    """The journal cannot be written, so the agent must not act."""

    code = "journal_lost"


class Journal:
    """`progress` is what the entries fold to, by the event's key. It is replaced, never changed:
    read it from any thread.

    `done_max` events that are over are remembered, in case a lagging endpoint shows one again.
    """

    lines_max: ClassVar[int] = 1000
    growth_bytes_max: ClassVar[int] = 1024 * 1024
    done_max: ClassVar[int] = 256

    def __init__(self, path: Path, *, clock: ClientClock = CLOCK) -> None:
        self.progress: Mapping[str, Progress] = {}
        self._path = path
        self._now = clock.now
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._lines = 0
        self._compacted_bytes = 0
        self._appended_bytes = 0
        with ExitStack() as on_failure, _translate_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock_path = path.with_name(f"{path.name}.lock")
            self._lock_file = on_failure.enter_context(_lock_exclusively(lock_path))
            self.progress = self._read()
            self._compact()
            on_failure.pop_all()

    @classmethod
    def open(cls, path: Path, *, clock: ClientClock = CLOCK) -> Self:
        """The journal at this path, created if it does not exist.

        Raises JournalLost if it cannot be used, or another agent uses it.
        """
        return cls(path, clock=clock)

    def close(self) -> None:
        with self._lock:
            self._close_file()
            self._lock_file.close()

    def write_event(self, event: Event, rule: str) -> None:
        """The event appeared or changed. The rule of the first time is kept."""
        self.write(event.key, EntryKind.SEEN, event=event_to_json(for_journal(event)), rule=rule)

    def write(self, key: str, kind: EntryKind, **facts: object) -> None:
        """Put an entry on disk before returning. Raises JournalLost: then nothing may be done."""
        with self._lock:
            before = self.progress.get(key)
            after = fold(before, kind, facts)
            if after == before:
                return
            with _translate_errors(self._path):
                self._append(self._encode(key, kind, facts))
            self.progress = {**self.progress, key: after}

    def _append(self, line: bytes) -> None:
        if self._file is None or self._has_grown:
            self._compact()
        assert self._file is not None
        try:
            self._write_synced(self._file, line)
        except OSError:
            self._close_file()  # its content is uncertain, so the next entry writes a new file
            raise
        self._lines += 1
        self._appended_bytes += len(line)

    @property
    def _has_grown(self) -> bool:
        bytes_max = max(self.growth_bytes_max, self._compacted_bytes)
        return self._lines >= self.lines_max or self._appended_bytes >= bytes_max

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a full disk was already reported by the failed write
                file.close()

    @staticmethod
    def sync(handle: int) -> None:
        os.fsync(handle)

    @classmethod
    def _write_synced(cls, file: IO[bytes], lines: bytes) -> None:
        file.write(lines)
        file.flush()
        cls.sync(file.fileno())

    def _encode(self, key: str, kind: EntryKind, facts: Facts) -> bytes:
        entry = {"id": key, "what": kind, "at": self._now().isoformat(), **facts}
        return json.dumps(entry, separators=(",", ":")).encode() + b"\n"

    def _compact(self) -> None:
        self._close_file()
        done = [key for key, progress in self.progress.items() if progress.is_done]
        forgotten = set(done[: max(0, len(done) - self.done_max)])
        self.progress = {
            key: drop_details(progress) if progress.is_done else progress
            for key, progress in self.progress.items()
            if key not in forgotten
        }
        content = b"".join(
            self._encode(key, kind, facts)
            for key, progress in self.progress.items()
            for kind, facts in minimal_entries(progress)
        )
        new = self._path.with_name(f"{self._path.name}.new")
        with new.open("wb") as file:
            self._write_synced(file, content)
        new.replace(self._path)
        self._sync_directory()
        self._file = self._path.open("ab")
        self._lines, self._appended_bytes = 0, 0
        self._compacted_bytes = len(content)

    def _sync_directory(self) -> None:
        """A rename is durable when its directory is."""
        handle = os.open(self._path.parent, os.O_RDONLY)
        try:
            self.sync(handle)
        finally:
            os.close(handle)

    def _read(self) -> dict[str, Progress]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        *lines, torn = content.split(b"\n")
        if torn:
            message = "dropped the torn last line of the journal"
            log.warning(message, path=self._path, bytes=len(torn))
        progress: dict[str, Progress] = {}
        damaged = [
            number for number, line in enumerate(lines, start=1) if not _apply(line, progress)
        ]
        if damaged:
            log.error(
                "the journal has invalid lines",
                path=self._path,
                lines=damaged[:10],
                damaged=len(damaged),
                kept=self._keep_copy(),
            )
        return progress

    def _keep_copy(self) -> Path:
        """The last copy is overwritten when there are too many."""
        paths = [
            self._path.with_name(f"{self._path.name}.damaged-{number}")
            for number in range(1, DAMAGED_COPIES_MAX + 1)
        ]
        free = next((path for path in paths if not path.exists()), paths[-1])
        shutil.copyfile(self._path, free)
        return free


def _apply(line: bytes, progress: dict[str, Progress]) -> bool:
    """Fold a line into `progress`. False if it is not valid."""
    try:
        entry = json.loads(line)
        key = entry["id"]
        if not isinstance(key, str):
            return False
        progress[key] = fold(progress.get(key), EntryKind(entry["what"]), entry)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False
    return True


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalLost(f"cannot use the journal {path}: {error}", path=str(path)) from error


def _lock_exclusively(path: Path) -> IO[bytes]:
    """Held until the file is closed or the process ends."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        reason = f"another agent uses it, or {path} cannot be locked"
        raise OSError(error.errno, reason) from error
    return file
