"""A store in an etcd cluster, for servers on any number of machines."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self
from uuid import uuid4

import grpc
from aetcd import rpc

from forewarn.errors import Conflict, Unavailable
from forewarn.log import log
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
    check_watch,
    steady_seconds,
)
from forewarn.store.etcd_client import EtcdClient
from forewarn.store.etcd_layout import (
    FIRST_SEGMENT,
    Layout,
    begin,
    is_absent,
    parse_count,
    span,
    transaction,
)
from forewarn.store.etcd_options import EtcdOptions
from forewarn.store.lease_keeper import LeaseKeeper

PAGE_FIRST, PAGE_MAX = 100, 5000
PAGE_BYTES = 4 * 1024 * 1024
HISTORY_PAGE = 100
"""A history value may have 256 KiB, and each call has a time limit."""
SEGMENT_VALUES = 500
"""How many history values a segment has at least, before the next one begins."""
SEGMENT_TRIES_MAX = 10
TRIM_OPERATIONS = 100
CONFIRM_SECONDS = 1.0
"""How often a watch without changes is compared with the store."""
RESUME_SECONDS = 0.1


class _Cut(Exception):
    """The stream of a watch has ended, but the store may still answer."""


class EtcdStore(LeaseKeeper):
    """The contract of `base.py` on etcd. Each commit is one transaction."""

    def __init__(self, client: EtcdClient, prefix: str, retention_seconds: float) -> None:
        super().__init__(steady_seconds)
        self._client = client
        self._layout = Layout(prefix)
        self._segment = FIRST_SEGMENT
        self._values_in_segment = 0
        self._quiet = (0, 0)
        self._compacting = asyncio.create_task(self._compact_forever(retention_seconds))

    @classmethod
    async def open(
        cls,
        addresses: Sequence[str],
        prefix: str,
        options: EtcdOptions,
        before_create: Callable[[], None],
        *,
        may_create: bool = True,
    ) -> Self:
        """Use the prefix, or begin a new store there. Reject a prefix with other keys."""
        client = EtcdClient(addresses, options)
        try:
            await client.connect()
            await begin(client, prefix, before_create, may_create=may_create)
        except BaseException:
            await client.close()
            raise
        return cls(client, prefix, options.retention_minutes * 60)

    async def get(self, key: str) -> Record:
        if not key:  # else a key that Forewarn did not write would hide the revision
            _, segments = await self._read(self._newest())
            return Record(key, None, self._revision(segments))
        record = rpc.RangeRequest(key=self._key("record", key))
        _, found, segments = await self._read(record, self._newest())
        if not found.kvs:
            return Record(key, None, self._revision(segments))
        return Record(key, found.kvs[0].value, found.kvs[0].mod_revision)

    async def load(self, prefix: str = "") -> Snapshot:
        first, end = span(self._key("record", prefix))
        page = rpc.RangeRequest(key=first, range_end=end, limit=PAGE_FIRST)
        page.revision, found, segments = await self._read(page, self._newest())
        records = self._records(found.kvs)
        while found.more:  # ends: each page starts after the last key of the one before
            size = sum(len(each.value) for each in found.kvs) // len(found.kvs) + 1
            page.limit = max(1, min(PAGE_BYTES // size, PAGE_MAX))
            page.key = found.kvs[-1].key + b"\0"
            found = await self._client.read(page)
            records += self._records(found.kvs)
        self._revision(segments)
        return Snapshot(page.revision, tuple(records))

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
        *,
        etcd_lease: int = 0,
    ) -> int:
        compared, has_value = check_commit(writes, checks, entries), entries is not None
        for _ in range(SEGMENT_TRIES_MAX):
            segment = self._segment
            request = self._transaction(writes, compared, entries, etcd_lease)
            response = await self._client.write(request)
            if response.succeeded:
                if segment == self._segment:
                    before = parse_count(response.responses[0].response_put.prev_kv.value)
                    self._values_in_segment = max(self._values_in_segment, before) + has_value
                    if self._values_in_segment >= SEGMENT_VALUES:
                        self._enter(segment + 1)  # the next commit begins it
                return int(response.header.revision)
            segments, *found = (each.response_range for each in response.responses)
            for each, range_ in zip(compared, found, strict=True):
                check_revision(each, range_.kvs[0].mod_revision if range_.kvs else 0)
            self._revision(segments)  # another server began a segment: try again in that one
        raise Unavailable("other servers write too much history at once; try again")

    async def watch(self, after: int) -> AsyncGenerator[Snapshot, None]:
        """Continues at another endpoint after a cut; StoreLost if none answers."""
        while not self._client.is_closed:
            try:
                async with aclosing(self._stream(after)) as batches:
                    async for batch in batches:
                        after = batch.revision
                        yield batch
            except _Cut:
                await self.get("")  # of another endpoint, if this one fails
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
        await self._delete(keys)
        if keys:  # the segments before the last deleted value are empty now
            first, end = self._layout.segments_before(keys[-1])
            older = rpc.RangeRequest(key=first, range_end=end, keys_only=True)
            found = (await self._client.read(older)).kvs
            await self._delete([each.key for each in found if self._layout.has_number(each.key)])
        return len(keys)

    async def _delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), TRIM_OPERATIONS):
            batch = keys[start : start + TRIM_OPERATIONS]
            await self._client.write(transaction(rpc.DeleteRangeRequest(key=key) for key in batch))

    async def first_of_newest(self, commits: int) -> int:
        _, found = await self._read(self._newest(FIRST_SEGMENT))
        for segment in reversed(self._layout.chain(found.kvs, self._segment).values()):
            commits -= segment.version
            if commits <= 0:
                return int(segment.create_revision)
        return 0

    async def lease(self, name: str, ttl_seconds: float) -> Lease | None:
        now, key = self._monotonic(), LEASE_KEY.format(name)
        if (await self.get(key)).value is not None:
            return None
        granted = await self._client.write(rpc.LeaseGrantRequest(TTL=math.ceil(ttl_seconds)))
        try:
            write = Write(key, uuid4().hex.encode(), 0)
            revision = await self.commit([write], etcd_lease=granted.ID)
        except Conflict:
            return None  # what was granted ends by itself
        return self._keep(name, revision, ttl_seconds, since=now, id_=granted.ID)

    async def close(self) -> None:
        self._compacting.cancel()
        await self._release_all()
        await self._client.close()

    def _key(self, kind: str, name: str) -> bytes:
        return self._layout.key(kind, name)

    def _records(self, found: Iterable[Any]) -> list[Record]:
        named = ((self._layout.record_name(each.key), each) for each in found)
        return [Record(n, each.value, each.mod_revision) for n, each in named if n is not None]

    async def _read(self, *ranges: Any) -> tuple[Any, ...]:
        """The revision of etcd, and the results of several ranges as of that revision."""
        response = await self._client.read(transaction(ranges))
        return response.header.revision, *(each.response_range for each in response.responses)

    def _newest(self, first: int | None = None) -> Any:
        """A range of the newest segments, or of all from another one.

        The one that this server writes to may not have begun yet.
        """
        start = max(self._segment - 1, FIRST_SEGMENT) if first is None else first
        key, end = self._layout.segments(start)
        return rpc.RangeRequest(key=key, range_end=end, keys_only=True)

    def _revision(self, segments: Any) -> int:
        """The revision of the store: that of its last commit, and not of other uses of etcd."""
        known = self._layout.chain(segments.kvs, self._segment)
        self._enter(max(known, default=0))
        return max((int(each.mod_revision) for each in known.values()), default=0)

    def _enter(self, segment: int) -> None:
        if segment > self._segment:
            self._segment, self._values_in_segment = segment, 0

    def _transaction(
        self,
        writes: Sequence[Write],
        compared: Sequence[Write | RevisionCheck],
        entries: bytes | None,
        etcd_lease: int,
    ) -> Any:
        newest = f"{self._segment:010}"
        count = str(self._values_in_segment + (entries is not None)).encode()
        changes = [rpc.PutRequest(key=self._key("segment", newest), value=count, prev_kv=True)]
        for write in writes:
            key = self._key("record", write.key)
            if write.value is not None:
                changes.append(rpc.PutRequest(key=key, value=write.value, lease=etcd_lease))
            elif write.revision:
                changes.append(rpc.DeleteRangeRequest(key=key))
        if entries is not None:
            key = self._key("history", f"{newest}/{uuid4().hex}")
            changes.append(rpc.PutRequest(key=key, value=entries))
        keys = [self._key("record", each.key) for each in compared]
        are_unchanged = [
            rpc.Compare(target=rpc.Compare.MOD, key=key, mod_revision=each.revision)
            for key, each in zip(keys, compared, strict=True)
        ]
        reads = (rpc.RangeRequest(key=key, keys_only=True) for key in keys)
        is_last = is_absent(*self._layout.segments(self._segment + 1))
        otherwise = [self._newest(), *reads]
        return transaction(changes, compares=[is_last, *are_unchanged], otherwise=otherwise)

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
        order = rpc.RangeRequest.DESCEND if newest_first else rpc.RangeRequest.ASCEND
        segments = await self._segments_between(after, before)
        for segment in reversed(segments) if newest_first else segments:
            key, end = span(self._key("history", f"{segment:010}/"))
            page = rpc.RangeRequest(
                key=key,
                range_end=end,
                min_mod_revision=after + 1,
                max_mod_revision=before - 1,
                sort_target=rpc.RangeRequest.MOD,
                sort_order=order,
                keys_only=keys_only,
            )
            found = None
            while len(values) < limit and (found is None or found.more):  # ends: pages move on
                page.limit = min(limit - len(values), HISTORY_PAGE)
                found = await self._client.read(page)
                values += found.kvs
                if found.kvs and newest_first:
                    page.max_mod_revision = found.kvs[-1].mod_revision - 1
                elif found.kvs:
                    page.min_mod_revision = found.kvs[-1].mod_revision + 1
        return values

    async def _segments_between(self, after: int, before: int) -> list[int]:
        """The segments that may have such positions. Most readers need only the newest.

        Positions of a segment are from its creation on, and before the creation of the next one.
        """
        for first in (None, 0):
            _, found = await self._read(self._newest(first))
            self._revision(found)
            known = self._layout.chain(found.kvs, self._segment)
            created = [int(each.create_revision) for each in known.values()]
            if created and created[0] <= after:
                break
        spans = zip(known, created, [*created[1:], POSITION_MAX], strict=True)
        return [number for number, start, end in spans if end > after and start < before]

    async def _stream(self, after: int) -> AsyncGenerator[Snapshot, None]:
        """The batches of one stream, until it is cut or the store is closed."""
        key, end = span(self._key("record", ""))
        quiet_from, quiet_to = self._quiet
        start = max(after, quiet_to) if quiet_from <= after else after
        # Starts at a revision that is known: etcd drops a deletion at the very revision that was
        # compacted, and would not say so.
        create = rpc.WatchCreateRequest(
            key=key,
            range_end=end,
            start_revision=max(start, 1),
            progress_notify=True,
            fragment=True,
        )
        call, events = None, list[Any]()
        try:
            call = await self._client.open_watch(rpc.WatchRequest(create_request=create))
            while (response := await self._next(call, after)) is not grpc.aio.EOF:
                if response.compact_revision:
                    check_watch(after, response.compact_revision)
                if response.canceled:
                    raise _Cut(response.cancel_reason)
                events += (each for each in response.events if each.kv.mod_revision > after)
                if not (response.events or response.created):
                    self._quiet = (after, response.header.revision)
                if events and not response.fragment:
                    revision, records = events[-1].kv.mod_revision, self._changed(events)
                    events = []
                    if not records:  # Forewarn did not write these keys
                        self._quiet = (after, revision)
                        continue
                    after = revision
                    yield Snapshot(after, records)
            if not self._client.is_closed:
                raise _Cut("etcd has ended the stream")
        except grpc.RpcError as error:
            raise _Cut(error.details()) from error
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
                    raise _Cut("the watch is behind the store")
            return reading.result()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return grpc.aio.EOF  # the store was closed
        finally:
            reading.cancel()

    def _changed(self, events: Iterable[Any]) -> tuple[Record, ...]:
        """The last change of each record, in the order of revisions."""
        changed: dict[str, Record] = {}
        for event in events:
            for record in self._records([event.kv]):
                is_deleted = event.type == rpc.Event.DELETE
                value = None if is_deleted else record.value
                changed.pop(record.key, None)
                changed[record.key] = Record(record.key, value, record.revision)
        return tuple(changed.values())

    async def _renew(self, leases: Sequence[Lease], now: float) -> Collection[Lease]:
        renewed = []
        for lease in leases:
            response = await self._client.read(rpc.LeaseKeepAliveRequest(ID=lease.id))
            if response.TTL > 0 and (await self.get(lease.key)).revision == lease.revision:
                renewed.append(lease)
        return renewed

    async def _compact_forever(self, retention_seconds: float) -> None:
        """Drop old revisions, which only a watch that was cut needs. Other servers do so, too."""
        revision = 0
        while retention_seconds:  # ends when cancelled
            try:
                revision = await self._compact(revision)
            except Unavailable:
                revision = 0
            except Exception:  # else etcd would fill up, silently
                revision = 0
                log.exception("bug while compacting etcd")
            await asyncio.sleep(retention_seconds)

    async def _compact(self, before: int) -> int:
        """Drop what is older than this revision; returns the present one."""
        present, _ = await self._read(self._newest())
        if before:
            with suppress(Unavailable):  # another server may have compacted more
                await self._client.write(rpc.CompactionRequest(revision=before))
        return int(present)
