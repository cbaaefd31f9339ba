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
from contextlib import suppress
from typing import Any

from aetcd import rpc

from forewarn.errors import StoreUnusable
from forewarn.log import log
from forewarn.store.etcd_client import EtcdClient

LAYOUT = b"1"
FIRST_SEGMENT = 1
SEGMENTS_SKIPPED_MAX = 10
"""Numbers between a segment and the next: none, unless a person has deleted some."""
SEGMENT = re.compile(rb"[0-9]{10}")
FOREIGN_LOGGED_MAX = 20
"""How many keys that Forewarn did not write are named in the log."""


class Layout:
    """The keys below a prefix. Keys there that Forewarn did not write are ignored and logged.

    A key that is named as one of Forewarn's is trimmed with the history.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._foreign = set[bytes]()

    def key(self, kind: str, name: str) -> bytes:
        return f"{self._prefix}/{kind}/{name}".encode()

    def record_name(self, key: bytes) -> str | None:
        """What a record is called; None if no record of Forewarn has such a key."""
        name = key[len(self.key("record", "")) :]
        with suppress(UnicodeDecodeError):
            if name:
                return name.decode()
        self._ignore(key)
        return None

    def segments(self, first: int) -> tuple[bytes, bytes]:
        """The span of the segments from this one on. A name without a digit is not among them."""
        return self.key("segment", f"{first:010}"), self.key("segment", ":")

    def chain(self, found: Sequence[Any], present: int) -> dict[int, Any]:
        """The segments among these keys, by their numbers, in order.

        They were created one after the other, each with about the next number. Nothing else is a
        segment, even if its name is a number: not one below an older segment, nor one far ahead.
        StoreUnusable if such a key sorts after the newest segment, or after the present one, which
        may not have begun: every commit compares that there is no later one, so none would succeed.
        """
        chain, newest = dict[int, Any](), 0
        for each in sorted(found, key=lambda each: int(each.create_revision)):
            number = int(self._segment_name(each.key)) if self.has_number(each.key) else 0
            if number and (not chain or newest < number <= newest + SEGMENTS_SKIPPED_MAX):
                chain[number], newest = each, number
        later, _ = self.segments(max(newest, present) + 1)
        members = {each.key for each in chain.values()}
        for key in (each.key for each in found if each.key not in members):
            if key >= later:
                raise StoreUnusable(
                    f"etcd has the key {key!r}, which Forewarn did not write, and nothing can be"
                    " committed while it exists: delete it"
                )
            self._ignore(key)
        return chain

    def has_number(self, key: bytes) -> bool:
        """Whether a key is named as segments are."""
        return SEGMENT.fullmatch(self._segment_name(key)) is not None

    def _segment_name(self, key: bytes) -> bytes:
        return key[len(self.key("segment", "")) :]

    def segments_before(self, value_key: bytes) -> tuple[bytes, bytes]:
        """The span of the segments before the one that a history value is in."""
        name = value_key[len(self.key("history", "")) :].partition(b"/")[0].decode()
        return self.segments(0)[0], self.key("segment", name)

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
