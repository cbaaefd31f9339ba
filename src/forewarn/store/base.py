"""The store contract. Every store passes `tests/conformance/`, which tests each sentence here.

A store holds records: a key (text), a value (bytes) and the revision of its last write. Revisions
are positive integers of the whole store that only grow. Each commit takes one new revision and
gives it to everything it writes.

get(key)        One record. If it is absent: value None and the current revision of the store.
                No record has an empty key, whatever others write to etcd: get("") always returns
                that revision.
load(prefix)    All live records whose key starts with the prefix, in the order of their keys, as of
                one revision.
commit(writes, checks, entries)
                All or nothing. A write names the revision that was read (0: absent), a check
                compares without writing. If one of them no longer matches: Conflict, and nothing
                is written. A value of None deletes; deleting an absent record changes nothing.
                `entries` is the history of this commit, as one value at position = its revision.
                Limits (`check_commit`) are checked first, with the same errors in every store.
                Once commit returns, the change survives a crash of the machine (not in memory).
                StoreLost: it is unknown whether the change happened; read the record to find out.
watch(after)    Every record that changed after a revision, deletions included, in the order of
                revisions, then each further change as it happens, from any process, until closed.
                A record that changed several times may be reported once, with its last value. A
                batch is never empty and its revision only grows. Compacted: the store no longer
                knows every change after this revision (it knows CHANGES_MAX); load again.
history(after, limit), latest(before, limit)
                History values, oldest first and newest first. Positions grow and are not dense.
first_of_newest(commits)
                A position that has at least this many of the newest commits at or after it.
trim(before, limit)
                Delete at most `limit` of the oldest history values with a position below `before`,
                and return how many. The newest value always stays.
lease(name, ttl_seconds)
                Acquire the record `lease/{name}`; None while another holder has it. See `Lease`.
close()         Release all leases and end all watches. Calls in progress finish or raise
                StoreLost, later calls raise StoreLost. Closing twice is harmless.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from forewarn.errors import Compacted, Conflict, Invalid

WRITES_MAX = 120
"""Writes and checks together: etcd compares and changes at most 128 keys in a transaction."""
VALUE_BYTES_MAX = 1024 * 1024
COMMIT_BYTES_MAX = 1408 * 1024
"""All values. With their keys they are less than the 1.5 MiB that etcd accepts in a request."""
CHANGES_MAX = 10_000
"""A watch that is at most this many changes behind is not compacted."""
POSITION_MAX = 2**63 - 1
LEASE_KEY = "lease/{}"
HELD_SHARE = 2 / 3
"""The share of its ttl for which a lease that is not renewed is held."""


def steady_seconds() -> float:
    """A monotonic clock. On Linux it also counts while the machine is suspended."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Record(msgspec.Struct, frozen=True, gc=False):
    """What a key holds, or that it was deleted at this revision (value None).

    A load creates a million of these: a struct is created in C and not tracked by the garbage
    collector.
    """

    key: str
    value: bytes | None
    revision: int


class Snapshot(msgspec.Struct, frozen=True):
    """Records as of one revision. A watch after this revision misses nothing."""

    revision: int
    records: tuple[Record, ...]


class Write(msgspec.Struct, frozen=True):
    """Set the key to this value (None: delete it) if it still has the revision that was read."""

    key: str
    value: bytes | None
    revision: int


class RevisionCheck(msgspec.Struct, frozen=True):
    """Compare the key's revision (0: absent) without writing it."""

    key: str
    revision: int


class HistoryValue(msgspec.Struct, frozen=True):
    """The history entries of one commit; the position is the revision of that commit."""

    position: int
    value: bytes


HistoryValues = tuple[HistoryValue, ...]


@dataclass(eq=False)
class Lease:
    """The right to do something alone, held by this process while it lives.

    States:  HELD -> LOST, by release, by deletion of the record, or because no renewal succeeded
    for two thirds of the ttl. It is never held again: acquire a new one.

    The store renews it every third of the ttl, without a new revision; if that fails, it tries
    again after a second or less, while the lease is held. The holder begins to stop at two thirds,
    and another process can acquire the lease after the full ttl. What takes longer to stop than the
    last third needs a wait of its own: see `takeover_delay` of the engine. A commit that must not
    happen without the lease carries `RevisionCheck(lease.key, lease.revision)`.
    """

    name: str
    revision: int
    ttl_seconds: float
    monotonic: Callable[[], float]
    delete: Callable[["Lease"], Awaitable[None]]
    """Deletes the record; part of the store."""
    id: int = 0
    """The store's own id of it, if it has one."""

    def __post_init__(self) -> None:
        self.key = LEASE_KEY.format(self.name)
        self._ended = asyncio.Event()
        self.renew(self.monotonic())

    def is_held(self) -> bool:
        return not self._ended.is_set() and self.seconds_left() > 0

    def seconds_left(self) -> float:
        """For how long it is held if it is not renewed."""
        return self._held_until - self.monotonic()

    async def lost(self) -> None:
        """Wait until the lease is no longer held."""
        while self.is_held():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self.seconds_left(), 3600)):
                    await self._ended.wait()

    async def release(self) -> None:
        """Release the lease, so that another process can acquire it immediately."""
        if not self._ended.is_set():
            self.end()
            await self.delete(self)

    def renew(self, at: float) -> None:
        """Called by the store: a renewal that began at this monotonic time has succeeded."""
        self._held_until = at + self.ttl_seconds * HELD_SHARE

    def end(self) -> None:
        """Called by the store: the lease is lost."""
        self._ended.set()


class Upgrade(NamedTuple):
    """How the values of an older schema are rewritten. Both functions are pure and never raise.

    `record(key, value)` returns the new value, or None to drop the record. `entries(value)`
    returns the history value of what was one history entry.
    """

    record: Callable[[str, bytes], bytes | None]
    entries: Callable[[bytes], bytes]


class Store(Protocol):
    async def get(self, key: str) -> Record: ...

    async def load(self, prefix: str = "") -> Snapshot: ...

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int: ...

    def watch(self, after: int) -> AsyncGenerator[Snapshot, None]: ...

    async def history(self, after: int = 0, limit: int = 1000) -> HistoryValues: ...

    async def latest(self, before: int = POSITION_MAX, limit: int = 1000) -> HistoryValues: ...

    async def first_of_newest(self, commits: int) -> int: ...

    async def trim(self, before: int, limit: int = 1000) -> int: ...

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None: ...

    async def close(self) -> None: ...


def check_commit(
    writes: Sequence[Write], checks: Sequence[RevisionCheck], entries: bytes | None
) -> Sequence[Write | RevisionCheck]:
    """Reject a commit that some store could not take. Called before anything is written.

    Returns what is compared: `check_revision` takes each.
    """
    compared: tuple[Write | RevisionCheck, ...] = (*writes, *checks)
    for key, count in Counter(each.key for each in compared).items():
        if not key:
            raise Invalid("commit names an empty key; expected the name of a record")
        if count > 1:
            raise Invalid(f"commit names {key!r} twice; a key is accepted once", key=key)
    sizes = {repr(write.key): len(write.value or b"") for write in writes}
    sizes["the history entries"] = len(entries or b"")
    largest = max(sizes, key=lambda name: sizes[name])
    for what, count, unit, limit in (
        ("commit", len(compared), "writes and checks", WRITES_MAX),
        (f"value of {largest}", sizes[largest], "bytes", VALUE_BYTES_MAX),
        ("commit", sum(sizes.values()), "bytes", COMMIT_BYTES_MAX),
    ):
        if count > limit:
            raise Invalid(f"{what} has {count} {unit}; at most {limit} are accepted", limit=limit)
    return compared


def check_revision(compared: Write | RevisionCheck, found: int) -> None:
    """Raise Conflict unless the key still has the revision that was read (0: absent)."""
    if compared.revision != found:
        raise Conflict(
            f"{compared.key!r} is at revision {found}; expected revision {compared.revision}",
            key=compared.key,
            found=found,
            expected=compared.revision,
        )


def check_watch(after: int, compacted: int) -> None:
    """A watch must not miss a change."""
    if after < compacted:
        raise Compacted(
            f"changes up to revision {compacted} are compacted; a watch after {after} would miss"
            " some: load again"
        )
