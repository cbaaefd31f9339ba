"""The Store contract. Every store passes `tests/conformance/`; what it checks is written here in
words.

A store holds records: a key (text), a value (bytes) and the revision at which it was last written.
Revisions are positive integers of the whole store that only grow; each commit takes one new
revision and gives it to all it writes.

load(prefix)    Every live record whose key starts with the prefix, as of one moment, and the
revision of that moment.
                A key that was deleted is not there.
commit(writes, notes)
                All of the writes and notes, or nothing. A write names the revision its writer read:
                0 says "there is no
                such record". If any of them is no longer true, Conflict, and nothing is written. A
                value of None
                deletes. When commit returns, the change survives a crash of the process and of the
                machine (a store
                that lives in memory survives neither, and says so). If it raises StoreLost, nobody
                knows whether the
                change happened: load and look. Notes are appended to the history in the order
                given. More than
                WRITES_MAX writes, or two to one key, are Invalid. Deleting what is not there
                changes nothing.
watch(after)    Every record that changed after a revision, deletions included, in the order of
revisions, and then each
                further change as it happens, from this and from any other process, until it is
                closed. A record that
                changed several times may be told once, as it is last. The writes of one commit come
                in one batch. A batch
                is never empty and its revision never falls. Where deletions after the revision have
                been forgotten, StoreLost:
                whoever was away so long loads and looks.
history(after, limit)
                The notes after the given number, oldest first. The first note ever has number 1 and
                each further one the next
                number; so a hole at the beginning says how many were trimmed.
latest(before, limit)
                The notes before the given number (None: all), newest first. Both read only; they
                settle nothing.
trim(before, limit)
                Takes away the oldest notes whose numbers are below the given one, at most so many,
                and tells how many it took.
                The newest note of all is never taken, so that numbers go on where they were.
                Records are not touched.
forget(revision, limit)
                Lets go of what is remembered of records that were deleted up to this revision, the
                oldest first and at most so
                many, and tells how many. Live records are not touched. A watch from before the last
                one is StoreLost then.
close()         Lets go of everything. What is under way is finished or raises StoreLost, watches
end, and all that is asked
                later raises StoreLost. Closing twice is closing once.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

WRITES_MAX = 100


class Record(msgspec.Struct, frozen=True, gc=False):
    """What a key holds, or held until it was deleted at this revision (value None).

    A load makes a million of these, so it is a struct: made in C, and no work for the garbage
    collector.
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Records as of one moment. A watch after this revision misses nothing."""

    revision: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Put this value under the key (None: delete it), if its revision is still the one that was
    read (0: absent).
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Note:
    """One line of history and its number."""

    number: int
    body: bytes


class Store(Protocol):
    """Three verbs that settle everything, two that read the history, two that let go of what is
    old, and an end.
    """

    async def load(self, prefix: str = "") -> Snapshot: ...

    async def commit(self, writes: Sequence[Write], notes: Sequence[bytes] = ()) -> int: ...

    def watch(self, after: int) -> AsyncGenerator[Snapshot, None]: ...

    async def history(self, after: int = 0, limit: int = 1000) -> tuple[Note, ...]: ...

    async def latest(self, before: int | None = None, limit: int = 1000) -> tuple[Note, ...]: ...

    async def trim(self, before: int, limit: int = 1000) -> int: ...

    async def forget(self, revision: int, limit: int = 1000) -> int: ...

    async def close(self) -> None: ...
