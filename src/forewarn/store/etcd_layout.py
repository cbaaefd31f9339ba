"""The keys of a store in etcd, below its prefix:

    forewarn                    the version of this layout
    record/{key}                a record, or a lease's record, which is attached to an etcd lease
    segment/{number}            every commit puts the newest one: its revision is the store's
    history/{number}/{id}       a history value; its revision is its position

etcd chooses the revision of a commit, so the key of a history value cannot contain its position.
Values are therefore collected in segments of some hundred commits. A commit is refused if a later
segment exists, so all positions of a segment are below those of the next, and reading a page sorts
no more than a segment.
"""

from collections.abc import Iterable
from typing import Any

from aetcd import rpc

from forewarn.errors import StoreUnusable
from forewarn.store.etcd_client import EtcdClient

LAYOUT = b"1"
FIRST_SEGMENT = 1
Compare, Delete, Put, Range = (
    rpc.Compare,
    rpc.DeleteRangeRequest,
    rpc.PutRequest,
    rpc.RangeRequest,
)


async def begin(client: EtcdClient, prefix: str) -> None:
    """Begin a new store below the prefix, unless there is one."""
    identity, (first, end) = f"{prefix}/forewarn".encode(), span(f"{prefix}/".encode())
    reads = [Range(key=identity), Range(key=first, range_end=end, limit=1, keys_only=True)]
    response = await client.read(rpc.TxnRequest(success=operations(reads)))
    found, any_key = (each.response_range.kvs for each in response.responses)
    if found and found[0].value != LAYOUT:
        raise StoreUnusable(
            f"the store {prefix} has layout {found[0].value!r}, from a newer Forewarn; expected"
            f" {LAYOUT!r}"
        )
    if any_key and not found:
        raise StoreUnusable(
            f"the prefix {prefix} is used by something else, which has the key"
            f" {any_key[0].key!r}; expected a Forewarn store, or no keys"
        )
    if not found:
        puts = [
            Put(key=identity, value=LAYOUT),
            Put(key=f"{prefix}/segment/{FIRST_SEGMENT:010}".encode()),
        ]
        is_absent = Compare(target=Compare.CREATE, key=identity)
        await client.write(rpc.TxnRequest(compare=[is_absent], success=operations(puts)))


def span(prefix: bytes) -> tuple[bytes, bytes]:
    """The first key with this prefix, and the first one after all of them."""
    return prefix, prefix[:-1] + bytes([prefix[-1] + 1])


def segment_number(key: bytes) -> int:
    """The number of a segment, from its key."""
    return int(key.rpartition(b"/")[2])


def operations(requests: Iterable[Any]) -> list[Any]:
    names = {
        Put: "request_put",
        Delete: "request_delete_range",
        Range: "request_range",
    }
    return [rpc.RequestOp(**{names[type(request)]: request}) for request in requests]
