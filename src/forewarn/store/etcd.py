"""A store in an etcd cluster, for servers on any number of machines.

Keys below the prefix:

    forewarn                    the version of this layout
    record/{key}                a record, or a lease's record, which is attached to an etcd lease
    segment/{number}            every commit puts the newest one: its revision is the store's
    history/{number}/{id}       a history value; its revision is its position

etcd chooses the revision of a commit, so the key of a history value cannot contain its position.
Values are therefore collected in segments of some hundred commits. A commit is refused if a later
segment exists, so all positions of a segment are below those of the next, and reading a page sorts
no more than a segment.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, Self
from uuid import uuid4

import grpc
from aetcd import rpc

from forewarn.errors import Compacted, Conflict, StoreLost, StoreUnusable, Unavailable
from forewarn.store.base import (
    LEASE_KEY,
    POSITION_MAX,
    HistoryValue,
    HistoryValues,
    Lease,
    Record,
    RevisionCheck,
    Snapshot,
    Write,
    check_commit,
    check_revision,
)
from forewarn.store.etcd_client import EtcdClient
from forewarn.store.etcd_options import EtcdOptions

LAYOUT = b"1"
PAGE_FIRST, PAGE_MAX = 100, 5000
PAGE_BYTES = 4 * 1024 * 1024
SEGMENT_COMMITS = 500
SEGMENT_TRIES_MAX = 10
TRIM_OPERATIONS = 100
CONFIRM_SECONDS = 1.0
"""How often a watch without changes is compared with the store."""
RESUME_SECONDS = 0.1

Compare, Delete, Put, Range = (
    rpc.Compare,
    rpc.DeleteRangeRequest,
    rpc.PutRequest,
    rpc.RangeRequest,
)


class Segment(NamedTuple):
    """A part of the history: positions after its start, up to the start of the next one."""

    number: int
    start: int


class EtcdStore:
    """The contract of `base.py` on etcd. Each commit is one transaction."""

    def __init__(self, client: EtcdClient, prefix: str, retention_seconds: float) -> None:
        self._client = client
        self._prefix = prefix
        self._segment = 1
        self._leases: dict[Lease, int] = {}
        self._quiet = (0, 0)
        self._tasks = [asyncio.create_task(self._renew_forever())]
        if retention_seconds:
            self._tasks.append(asyncio.create_task(self._compact_forever(retention_seconds)))

    @classmethod
    async def open(cls, addresses: Sequence[str], prefix: str, options: EtcdOptions) -> Self:
        """Use the prefix, or begin a new store there. Reject a prefix with other keys."""
        client = EtcdClient(addresses, options)
        try:
            await client.connect()
            await _begin(client, prefix)
        except BaseException:
            await client.close()
            raise
        return cls(client, prefix, options.retention_minutes * 60)

    async def get(self, key: str) -> Record:
        _, found, segments = await self._read(Range(key=self._key("record", key)), self._newest())
        if not found.kvs:
            return Record(key, None, self._revision(segments))
        return Record(key, found.kvs[0].value, found.kvs[0].mod_revision)

    async def load(self, prefix: str = "") -> Snapshot:
        first, end = _span(self._key("record", prefix))
        page = Range(key=first, range_end=end, limit=PAGE_FIRST)
        page.revision, found, segments = await self._read(page, self._newest())
        records = [self._record(each) for each in found.kvs]
        while found.more:  # ends: each page starts after the last key of the one before
            size = sum(len(each.value) for each in found.kvs) // len(found.kvs) + 1
            page.limit = max(1, min(PAGE_BYTES // size, PAGE_MAX))
            page.key = found.kvs[-1].key + b"\0"
            found = await self._client.read(page)
            records += map(self._record, found.kvs)
        return Snapshot(self._revision(segments), tuple(records))

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        check_commit(writes, checks, entries)
        return await self._commit(writes, checks, entries)

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        """Continues at another endpoint after a cut; StoreLost if none answers."""
        while not self._client.is_closed:
            try:
                async with aclosing(self._stream(after)) as batches:
                    async for batch in batches:
                        after = batch.revision
                        yield batch
            except StoreLost as error:
                if isinstance(error, Compacted):
                    raise
            if not self._client.is_closed:
                await self.get("")
                await asyncio.sleep(RESUME_SECONDS)

    async def history(self, after: int = 0, limit: int = 1000) -> HistoryValues:
        values = await self._values(after, POSITION_MAX, limit)
        return tuple(HistoryValue(each.mod_revision, each.value) for each in values)

    async def latest(self, before: int = POSITION_MAX, limit: int = 1000) -> HistoryValues:
        values = await self._values(0, before, limit, newest_first=True)
        return tuple(HistoryValue(each.mod_revision, each.value) for each in values)

    async def trim(self, before: int, limit: int = 1000) -> int:
        newest = await self._values(0, POSITION_MAX, 1, newest_first=True, keys_only=True)
        before = min([before, *(each.mod_revision for each in newest)])
        keys = [each.key for each in await self._values(0, before, limit, keys_only=True)]
        for start in range(0, len(keys), TRIM_OPERATIONS):
            deletions = [Delete(key=key) for key in keys[start : start + TRIM_OPERATIONS]]
            await self._client.write(rpc.TxnRequest(success=_operations(deletions)))
        if keys:  # the segments before the last deleted value are empty now
            first, last = self._key("segment", ""), keys[-1].split(b"/")[-2].decode()
            empty = Delete(key=first, range_end=self._key("segment", last))
            await self._client.write(rpc.TxnRequest(success=_operations([empty])))
        return len(keys)

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        now, key = time.monotonic(), LEASE_KEY.format(name)
        granted = await self._client.write(rpc.LeaseGrantRequest(TTL=math.ceil(ttl_seconds)))
        try:
            write = Write(key, uuid4().hex.encode(), 0)
            revision = await self._commit([write], etcd_lease=granted.ID)
        except Conflict:
            await self._client.write(rpc.LeaseRevokeRequest(ID=granted.ID))
            return None
        lease = Lease(name, revision, ttl_seconds, time.monotonic, delete=self._release)
        lease.renew(now)
        self._leases[lease] = granted.ID
        return lease

    async def renew_leases(self) -> None:
        """Renew the leases of this process; end those that are lost."""
        for lease, etcd_lease in list(self._leases.items()):
            now = time.monotonic()
            with suppress(Unavailable):  # the next renewal may succeed, until the lease is lost
                renewed = await self._client.write(rpc.LeaseKeepAliveRequest(ID=etcd_lease))
                if renewed.TTL > 0 and (await self.get(lease.key)).revision == lease.revision:
                    lease.renew(now)
                else:
                    lease.end()
            if not lease.is_held():
                self._leases.pop(lease, None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for lease in list(self._leases):
            with suppress(Unavailable):
                await lease.release()
        await self._client.close()

    def _key(self, kind: str, name: str) -> bytes:
        return f"{self._prefix}/{kind}/{name}".encode()

    def _record(self, found: Any) -> Record:
        key = found.key[len(self._key("record", "")) :].decode()
        return Record(key, found.value, found.mod_revision)

    async def _read(self, *ranges: Any) -> tuple[Any, ...]:
        """The revision of etcd, and the results of several ranges as of that revision."""
        response = await self._client.read(rpc.TxnRequest(success=_operations(ranges)))
        return response.header.revision, *(each.response_range for each in response.responses)

    def _newest(self, first: int | None = None) -> Any:
        """A range of the segments from the newest known one, or from another one."""
        start = self._segment if first is None else first
        key, end = self._key("segment", f"{start:010}"), _span(self._key("segment", ""))[1]
        return Range(key=key, range_end=end, keys_only=True)

    def _revision(self, segments: Any) -> int:
        """The revision of the store: that of its last commit, and not of other uses of etcd."""
        self._segment = max([self._segment, *(_number(each.key) for each in segments.kvs)])
        return max((int(each.mod_revision) for each in segments.kvs), default=0)

    async def _commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
        etcd_lease: int = 0,
    ) -> int:
        compared: tuple[Write | RevisionCheck, ...] = (*writes, *checks)
        for _ in range(SEGMENT_TRIES_MAX):
            request = self._transaction(writes, compared, entries, etcd_lease)
            response = await self._client.write(request)
            if response.succeeded:
                before = response.responses[0].response_put.prev_kv
                if before.version and before.version % SEGMENT_COMMITS == 0:
                    await self._begin_segment()
                return int(response.header.revision)
            segments, *found = (each.response_range for each in response.responses)
            for each, range_ in zip(compared, found, strict=True):
                check_revision(each, range_.kvs[0].mod_revision if range_.kvs else 0)
            self._revision(segments)  # another server began a segment: try again in that one
        raise Unavailable("other servers write too much history at once; try again")

    def _transaction(
        self,
        writes: Sequence[Write],
        compared: Sequence[Write | RevisionCheck],
        entries: bytes | None,
        etcd_lease: int,
    ) -> Any:
        newest = f"{self._segment:010}"
        changes = [Put(key=self._key("segment", newest), prev_kv=True)]
        for write in writes:
            key = self._key("record", write.key)
            if write.value is not None:
                changes.append(Put(key=key, value=write.value, lease=etcd_lease))
            elif write.revision:
                changes.append(Delete(key=key))
        if entries is not None:
            key = self._key("history", f"{newest}/{uuid4().hex}")
            changes.append(Put(key=key, value=entries))
        later = self._newest(self._segment + 1)
        keys = [self._key("record", each.key) for each in compared]
        return rpc.TxnRequest(
            compare=[
                Compare(
                    target=Compare.CREATE,
                    key=later.key,
                    range_end=later.range_end,
                    create_revision=0,
                ),
                *(
                    Compare(target=Compare.MOD, key=key, mod_revision=each.revision)
                    for key, each in zip(keys, compared, strict=True)
                ),
            ],
            success=_operations(changes),
            failure=_operations([later, *(Range(key=key, keys_only=True) for key in keys)]),
        )

    async def _begin_segment(self) -> None:
        """If this fails or another server was faster, the present segment grows a bit more."""
        key = self._key("segment", f"{self._segment + 1:010}")
        with suppress(Unavailable):
            await self._client.write(
                rpc.TxnRequest(
                    compare=[Compare(target=Compare.CREATE, key=key, create_revision=0)],
                    success=_operations([Put(key=key)]),
                )
            )

    async def _values(
        self,
        after: int,
        before: int,
        limit: int,
        *,
        newest_first: bool = False,
        keys_only: bool = False,
    ) -> list[Any]:
        """History values with positions between two others, as etcd holds them."""
        values: list[Any] = []
        segments = await self._segments_between(after, before)
        for segment in reversed(segments) if newest_first else segments:
            if len(values) >= limit:
                break
            key, end = _span(self._key("history", f"{segment.number:010}/"))
            page = await self._client.read(
                Range(
                    key=key,
                    range_end=end,
                    limit=limit - len(values),
                    min_mod_revision=after + 1,
                    max_mod_revision=before - 1,
                    sort_target=Range.MOD,
                    sort_order=Range.DESCEND if newest_first else Range.ASCEND,
                    keys_only=keys_only,
                )
            )
            values += page.kvs
        return values

    async def _segments_between(self, after: int, before: int) -> list[Segment]:
        """The segments that may have such positions. Most readers need only the newest."""
        for first in (self._segment, 0):
            _, found = await self._read(self._newest(first))
            self._revision(found)
            segments = [Segment(_number(each.key), each.create_revision) for each in found.kvs]
            if segments and segments[0].start <= after:
                break
        ends = [*(each.start for each in segments[1:]), POSITION_MAX]
        return [
            segment
            for segment, end in zip(segments, ends, strict=True)
            if end > after and segment.start < before
        ]

    async def _stream(self, after: int) -> AsyncGenerator[Snapshot, None]:
        """The batches of one stream, until it is cut (StoreLost) or the store is closed."""
        key, end = _span(self._key("record", ""))
        quiet_from, quiet_to = self._quiet
        start = max(after, quiet_to) if quiet_from <= after else after
        create = rpc.WatchCreateRequest(
            key=key, range_end=end, start_revision=start + 1, progress_notify=True, fragment=True
        )
        call, events = None, []
        try:
            call = await self._client.open_watch(rpc.WatchRequest(create_request=create))
            while (response := await self._next(call, after)) is not grpc.aio.EOF:
                if response.canceled:
                    self._raise_canceled(response, after)
                events += response.events
                if response.fragment or response.created:
                    continue
                if not events:
                    self._quiet = (after, response.header.revision)
                    continue
                records, events = self._changed(events), []
                after = records[-1].revision
                yield Snapshot(after, records)
        except grpc.RpcError as error:
            raise self._client.translate(error) from error
        finally:
            if call is not None:
                call.cancel()
                await call.code()  # gRPC must not report to an event loop that has ended

    async def _next(self, call: Any, after: int) -> Any:
        """The next message. A stream that is silent though the store has changed is cut.

        A member that is stopped, or that lags behind the others, is noticed only in this way.
        """
        reading = asyncio.ensure_future(call.read())
        try:
            is_behind = False
            while not (await asyncio.wait({reading}, timeout=CONFIRM_SECONDS))[0]:
                was_behind, is_behind = is_behind, (await self.get("")).revision > after
                if was_behind and is_behind:
                    raise StoreLost("the watch is behind the store")
            return reading.result()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return grpc.aio.EOF  # the store was closed
        finally:
            reading.cancel()

    def _raise_canceled(self, response: Any, after: int) -> None:
        if response.compact_revision:
            raise Compacted(
                f"changes up to revision {response.compact_revision} are compacted; a watch after"
                f" {after} would miss some: load again"
            )
        raise StoreLost(f"etcd ended the watch: {response.cancel_reason}")

    def _changed(self, events: Iterable[Any]) -> tuple[Record, ...]:
        """The last change of each record, in the order of revisions."""
        changed: dict[str, Record] = {}
        for event in events:
            record = self._record(event.kv)
            if event.type == rpc.Event.DELETE:
                record = Record(record.key, None, record.revision)
            changed.pop(record.key, None)
            changed[record.key] = record
        return tuple(changed.values())

    async def _release(self, lease: Lease) -> None:
        etcd_lease = self._leases.pop(lease, 0)
        with suppress(Conflict):  # another holder has it already
            await self.commit([Write(lease.key, None, lease.revision)])
        if etcd_lease:
            await self._client.write(rpc.LeaseRevokeRequest(ID=etcd_lease))

    async def _renew_forever(self) -> None:
        while True:  # ends when cancelled
            ttls = (lease.ttl_seconds for lease in self._leases)
            await asyncio.sleep(min(ttls, default=3) / 3)
            await self.renew_leases()

    async def _compact_forever(self, retention_seconds: float) -> None:
        """Drop old revisions, which only a watch that was cut needs. Other servers do so, too."""
        revision = 0
        while True:  # ends when cancelled
            with suppress(Unavailable):
                if revision:
                    await self._client.write(rpc.CompactionRequest(revision=revision))
            with suppress(Unavailable):
                revision, *_ = await self._read(self._newest())
            await asyncio.sleep(retention_seconds)


async def _begin(client: EtcdClient, prefix: str) -> None:
    """Begin a new store below the prefix, unless there is one."""
    identity, segment = f"{prefix}/forewarn".encode(), f"{prefix}/segment/{1:010}".encode()
    first, end = _span(f"{prefix}/".encode())
    response = await client.read(
        rpc.TxnRequest(
            success=_operations(
                [Range(key=identity), Range(key=first, range_end=end, limit=1, keys_only=True)]
            )
        )
    )
    found, any_key = (each.response_range.kvs for each in response.responses)
    if found and found[0].value != LAYOUT:
        raise StoreUnusable(
            f"{prefix}: the store has layout {found[0].value.decode(errors='replace')!r}, from a"
            f" newer Forewarn; expected layout {LAYOUT.decode()!r}"
        )
    if any_key and not found:
        key = any_key[0].key.decode(errors="replace")
        raise StoreUnusable(
            f"{prefix}: the prefix is used by something else, which has the key {key!r}; expected"
            " a Forewarn store, or no keys"
        )
    if not found:
        await client.write(
            rpc.TxnRequest(
                compare=[Compare(target=Compare.CREATE, key=identity, create_revision=0)],
                success=_operations([Put(key=identity, value=LAYOUT), Put(key=segment)]),
            )
        )


def _span(prefix: bytes) -> tuple[bytes, bytes]:
    """The first key with this prefix, and the first one after all of them."""
    return prefix, prefix[:-1] + bytes([prefix[-1] + 1])


def _number(key: bytes) -> int:
    """The number of a segment, from its key."""
    return int(key.rpartition(b"/")[2])


def _operations(requests: Iterable[Any]) -> list[Any]:
    names = {Put: "request_put", Delete: "request_delete_range", Range: "request_range"}
    return [rpc.RequestOp(**{names[type(request)]: request}) for request in requests]
