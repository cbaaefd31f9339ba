"""What was seen, run and approved, on disk before the agent acts on it: lines of JSON, append
only, each with an fsync.

A last line without an end is what a crash leaves, and is ignored. When the file is opened, and when
it has doubled and grown by GROWTH_BYTES_MAX, it is compacted: a new file with the fewest lines that
mean the same is renamed into place. So its size is bounded by that of the events that are not over.
One agent at a time may use it.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, ClassVar

from forewarn.agent.progress import (
    EntryKind,
    Facts,
    Progress,
    drop_details,
    entries,
    event_to_json,
    fold,
    for_journal,
)
from forewarn.client import Event
from forewarn.errors import Unavailable
from forewarn.log import log

GROWTH_BYTES_MAX = 1024 * 1024


class JournalLost(Unavailable, code="journal_lost"):
    """The journal cannot be written, so the agent must not act."""


class Journal:
    """The journal at a path, created if it does not exist. Raises JournalLost if it cannot be
    used, or another agent uses it.

    `progress` is what the entries fold to, by the event's key. It is replaced, never changed: read
    it from any thread.

    `done_max` events that are over are remembered, in case a lagging endpoint shows one again.
    """

    done_max: ClassVar[int] = 256

    def __init__(self, path: Path) -> None:
        self.progress: Mapping[str, Progress] = {}
        self._path = path
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        with ExitStack() as on_failure, _translate_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock_path = path.with_name(f"{path.name}.lock")
            self._lock_file = on_failure.enter_context(_lock_exclusively(lock_path))
            self.progress = self._read()
            self._rewrite()
            on_failure.pop_all()

    def close(self) -> None:
        with self._lock:
            self._close_file()
            self._lock_file.close()

    def write_event(self, event: Event, rule: str) -> None:
        """The event appeared or changed. The rule of the first time is kept."""
        self.write(event.key, EntryKind.SEEN, event=event_to_json(for_journal(event)), rule=rule)

    def write(self, key: str, kind: EntryKind, **facts: object) -> None:
        """Put an entry on disk before returning. Raises JournalLost: then nothing may be done."""
        with self._lock, _translate_errors(self._path):
            before = self.progress.get(key)
            after = fold(before, kind, facts)
            if after != before:
                self._append(_encode(key, kind, facts))
                self.progress = {**self.progress, key: after}

    def _append(self, line: bytes) -> None:
        if self._lock_file.closed:  # another agent may use the file by now
            raise OSError("it is closed")
        if self._file is None or self._file.tell() > self._size_max:
            self._rewrite()
        assert self._file is not None
        try:
            self._write_synced(self._file, line)
        except OSError:
            self._close_file()  # its content is uncertain, so the next entry writes a new file
            raise

    def _rewrite(self) -> None:
        self._close_file()
        done = [key for key, progress in self.progress.items() if progress.is_done]
        forgotten = set(done[: -self.done_max])
        self.progress = {
            key: drop_details(progress) if progress.is_done else progress
            for key, progress in self.progress.items()
            if key not in forgotten
        }
        lines = (
            _encode(key, kind, facts)
            for key, progress in self.progress.items()
            for kind, facts in entries(progress)
        )
        new = self._path.with_name(f"{self._path.name}.new")
        with new.open("wb") as file:
            self._write_synced(file, b"".join(lines))
        new.replace(self._path)
        if sys.platform != "win32":  # a rename is durable when its directory is
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                self.sync(directory)
            finally:
                os.close(directory)
        self._file = self._path.open("ab")
        self._size_max = 2 * self._file.tell() + GROWTH_BYTES_MAX

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a full disk was already reported by the failed write
                file.close()

    def _write_synced(self, file: IO[bytes], content: bytes) -> None:
        file.write(content)
        file.flush()
        self.sync(file.fileno())

    @staticmethod
    def sync(handle: int) -> None:
        os.fsync(handle)

    def _read(self) -> dict[str, Progress]:
        """An invalid line is logged, and a copy of the file is kept."""
        progress: dict[str, Progress] = {}
        damaged = 0
        content = self._path.read_bytes() if self._path.exists() else b""
        for line in content.split(b"\n")[:-1]:
            try:
                entry = json.loads(line)
                key, kind = entry["id"], EntryKind(entry["what"])
                if not isinstance(key, str):
                    raise TypeError(f"id is {key!r}; expected text")
                progress[key] = fold(progress.get(key), kind, entry)
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                damaged += 1
        if damaged:
            kept = self._path.with_name(f"{self._path.name}.damaged")
            shutil.copyfile(self._path, kept)
            log.error("the journal has invalid lines", path=self._path, lines=damaged, kept=kept)
        return progress


def _encode(key: str, kind: EntryKind, facts: Facts) -> bytes:
    entry = {"id": key, "what": kind, **facts}
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


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
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        reason = f"another agent uses it, or {path} cannot be locked"
        raise OSError(error.errno, reason) from error
    return file
