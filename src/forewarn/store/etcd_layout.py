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

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aetcd import rpc

from forewarn.errors import StoreUnusable
from forewarn.log import log
from forewarn.store.etcd_client import EtcdClient

LAYOUT = b"1"
FIRST_SEGMENT = 1
SEGMENT_MAX = 9_999_999_998
"""The key of the next but one would sort before all others."""
SEGMENT = re.compile(rb"[0-9]{10}")
FOREIGN_LOGGED_MAX = 20
"""How many keys that Forewarn did not write are named in the log."""


class Layout:
    """The keys below a prefix. Keys there that Forewarn did not write are ignored and logged."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._foreign = set[bytes]()

    def key(self, kind: str, name: str) -> bytes:
        return f"{self._prefix}/{kind}/{name}".encode()

    def record_name(self, key: bytes) -> str | None:
        """What a record is called; None if no record of Forewarn has such a key."""
        try:
            return key[len(self.key("record", "")) :].decode()
        except UnicodeDecodeError:
            self._ignore(key)
            return None

    def segments(self, first: int) -> tuple[bytes, bytes]:
        """The span of the segments from this one on. A name without a digit is not among them."""
        return self.key("segment", f"{first:010}"), self.key("segment", ":")

    def segment_number(self, key: bytes) -> int | None:
        """The number of a segment; None if no segment of Forewarn has such a key."""
        name = key[len(self.key("segment", "")) :]
        if SEGMENT.fullmatch(name) and int(name) <= SEGMENT_MAX:
            return int(name)
        self._ignore(key)
        return None

    def check_last(self, keys: Iterable[bytes], newest: int) -> None:
        """StoreUnusable if a key sorts after the newest segment that is none.

        Every commit compares that there is no later segment, so none would succeed.
        """
        for key in keys:
            if key >= self.segments(newest + 1)[0]:
                raise StoreUnusable(
                    f"etcd has the key {key!r}, which Forewarn did not write, and nothing can be"
                    " committed while it exists: delete it"
                )

    def segment_of_value(self, key: bytes) -> str:
        """The name of the segment that a history value is in."""
        return key[len(self.key("history", "")) :].partition(b"/")[0].decode()

    def _ignore(self, key: bytes) -> None:
        if key not in self._foreign and len(self._foreign) < FOREIGN_LOGGED_MAX:
            self._foreign.add(key)
            log.warning("a key of etcd that Forewarn did not write is ignored", key=repr(key))


def parse_count(value: bytes) -> int:
    """How many history values a segment has, by its value; 0 if Forewarn did not write that."""
    try:
        return int(value or 0)
    except ValueError:
        return 0


async def begin(
    client: EtcdClient, prefix: str, before_create: Callable[[], None], *, may_create: bool
) -> None:
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
        before_create()
        puts = [
            rpc.PutRequest(key=identity, value=LAYOUT),
            rpc.PutRequest(key=f"{prefix}/segment/{FIRST_SEGMENT:010}".encode()),
        ]
        await client.write(transaction(puts, compares=[is_absent(identity)]))


def span(prefix: bytes) -> tuple[bytes, bytes]:
    """The first key with this prefix, and the first one after all of them."""
    return prefix, prefix[:-1] + bytes([prefix[-1] + 1])


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
