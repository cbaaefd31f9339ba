"""What was seen, run and approved, on disk before the agent acts on it: a file with lines of JSON.

Each entry writes the whole file anew and renames it into place, so a crash leaves the file as it
was before the entry or after it. The file has the fewest lines that mean the same: its size is
bounded by that of the events that are not over. One agent at a time may use it.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, ClassVar, Self

from forewarn.agent.progress import (
    EntryKind,
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


class JournalLost(Unavailable):
    """The journal cannot be written, so the agent must not act."""

    code = "journal_lost"


class Journal:
    """`progress` is what the entries fold to, by the event's key. It is replaced, never changed:
    read it from any thread.

    `done_max` events that are over are remembered, in case a lagging endpoint shows one again.
    """

    done_max: ClassVar[int] = 256

    def __init__(self, path: Path) -> None:
        self.progress: Mapping[str, Progress] = {}
        self._path = path
        self._lock = threading.Lock()
        self._lines: dict[str, bytes] = {}
        with ExitStack() as on_failure, _translate_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock_path = path.with_name(f"{path.name}.lock")
            self._lock_file = on_failure.enter_context(_lock_exclusively(lock_path))
            self._save(self._read())
            on_failure.pop_all()

    @classmethod
    def open(cls, path: Path) -> Self:
        """The journal at this path, created if it does not exist.

        Raises JournalLost if it cannot be used, or another agent uses it.
        """
        return cls(path)

    def close(self) -> None:
        self._lock_file.close()

    def write_event(self, event: Event, rule: str) -> None:
        """The event appeared or changed. The rule of the first time is kept."""
        self.write(event.key, EntryKind.SEEN, event=event_to_json(for_journal(event)), rule=rule)

    def write(self, key: str, kind: EntryKind, **facts: object) -> None:
        """Put an entry on disk before returning. Raises JournalLost: then nothing may be done."""
        with self._lock, _translate_errors(self._path):
            before = self.progress.get(key)
            after = fold(before, kind, facts)
            if after.is_done:
                after = drop_details(after)
            if after != before:
                self._save({**self.progress, key: after})

    def _save(self, progress: Mapping[str, Progress]) -> None:
        """Only the lines of a changed event are encoded again."""
        done = [key for key, one in progress.items() if one.is_done]
        forgotten = set(done[: -self.done_max])
        progress = {key: one for key, one in progress.items() if key not in forgotten}
        lines = {
            key: self._lines[key] if one is self.progress.get(key) else _encode(key, one)
            for key, one in progress.items()
        }
        self._write_file(b"".join(lines.values()))
        self.progress, self._lines = progress, lines

    def _write_file(self, content: bytes) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            self.sync(file.fileno())
        new.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            self.sync(directory)  # a rename is durable when its directory is
        finally:
            os.close(directory)

    @staticmethod
    def sync(handle: int) -> None:
        os.fsync(handle)

    def _read(self) -> dict[str, Progress]:
        """An invalid line is logged, and a copy of the file is kept."""
        progress: dict[str, Progress] = {}
        damaged = 0
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        for line in lines:
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


def _encode(key: str, progress: Progress) -> bytes:
    lines = (
        json.dumps({"id": key, "what": kind, **facts}, separators=(",", ":"))
        for kind, facts in entries(progress)
    )
    return "".join(f"{line}\n" for line in lines).encode()


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
