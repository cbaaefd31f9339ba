"""The keys of a store in etcd, below its prefix:

    forewarn                    the version of this layout
    record/{key}                a record, or a lease's record, which is attached to an etcd lease
    segment/{number}            every commit puts the newest one: its revision is the store's,
                                and its value about how many history values it has
    history/{number}/{id}       a history value; its revision is its position

etcd chooses the revision of a commit, so the key of a history value cannot contain its position.
Values are therefore collected in segments of some hundred. A commit is refused if a later segment
exists, so all positions of a segment are below those of the next, and reading a page sorts no more
than a segment.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from aetcd import rpc

from forewarn.errors import StoreUnusable
from forewarn.store.etcd_client import EtcdClient

LAYOUT = b"1"
FIRST_SEGMENT = 1


async def begin(client: EtcdClient, prefix: str, *, may_create: bool) -> None:
    """Begin a new store below the prefix, unless there is one."""
    identity, (first, end) = f"{prefix}/forewarn".encode(), span(f"{prefix}/".encode())
    one_key = rpc.RangeRequest(key=first, range_end=end, limit=1, keys_only=True)
    response = await client.read(transaction([rpc.RangeRequest(key=identity), one_key]))
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
    if not found and not may_create:
        raise StoreUnusable(f"etcd has no store {prefix}; expected the prefix of a service")
    if not found:
        puts = [
            rpc.PutRequest(key=identity, value=LAYOUT),
            rpc.PutRequest(key=f"{prefix}/segment/{FIRST_SEGMENT:010}".encode()),
        ]
        await client.write(transaction(puts, compares=[is_absent(identity)]))


def span(prefix: bytes) -> tuple[bytes, bytes]:
    """The first key with this prefix, and the first one after all of them."""
    return prefix, prefix[:-1] + bytes([prefix[-1] + 1])


def segment_number(key: bytes) -> int:
    """The number of a segment, from its key."""
    return int(key.rpartition(b"/")[2])


def is_absent(key: bytes, range_end: bytes = b"") -> Any:
    """A comparison: the key, or each key of a range, does not exist."""
    return rpc.Compare(target=rpc.Compare.CREATE, key=key, range_end=range_end)


def transaction(
    requests: Iterable[Any], *, compares: Sequence[Any] = (), otherwise: Iterable[Any] = ()
) -> Any:
    """All requests at once if all comparisons are true, else the other ones."""
    return rpc.TxnRequest(
        compare=compares,
        success=[_operation(request) for request in requests],
        failure=[_operation(request) for request in otherwise],
    )


def _operation(request: Any) -> Any:
    names = {
        rpc.PutRequest: "request_put",
        rpc.DeleteRangeRequest: "request_delete_range",
        rpc.RangeRequest: "request_range",
    }
    return rpc.RequestOp(**{names[type(request)]: request})
