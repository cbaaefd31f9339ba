"""Scopes and the fleet's hosts as stored bytes: JSON with a format number. A newer format is refused, not guessed at."""

from typing import Generic, TypeVar

import msgspec

from forewarn.core.fleet import Scope
from forewarn.errors import StoreUnusable

FORMAT = 1

T = TypeVar("T")


class Hosts(msgspec.Struct, frozen=True):
    """The hosts that the fleet declares, the digest of the fleet file applied last, the number that new scopes start above."""

    names: tuple[str, ...] = ()
    digest: str = ""
    incarnation_floor: int = 0


class _Stamp(msgspec.Struct):
    format: int


class _Record(_Stamp, Generic[T]):
    value: T


_scope = msgspec.json.Decoder(_Record[Scope])
_hosts = msgspec.json.Decoder(_Record[Hosts])


def encode_scope(scope: Scope) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, scope))


def decode_scope(record: bytes) -> Scope:
    return _decoded(_scope, record, what="scope")


def encode_hosts(hosts: Hosts) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, hosts))


def decode_hosts(record: bytes) -> Hosts:
    return _decoded(_hosts, record, what="hosts")


def _decoded(decoder: msgspec.json.Decoder[_Record[T]], record: bytes, *, what: str) -> T:
    """The format is looked at before the rest: a newer record may not even have our members."""
    try:
        stamp = msgspec.json.decode(record, type=_Stamp)
        if stamp.format != FORMAT:
            raise StoreUnusable(
                f"The stored {what} record has format {stamp.format}; this version reads format {FORMAT}",
                record=what,
                format=stamp.format,
                format_read=FORMAT,
            )
        return decoder.decode(record).value
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreUnusable(f"The stored {what} record is damaged: {error}", record=what, reason=str(error)) from error
