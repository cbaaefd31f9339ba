"""How values are stored: JSON with a format number. A newer format is refused.

Codecs of scopes and of the fleet are here; a feature defines the codecs of its own records.
"""

from contextlib import suppress
from datetime import datetime
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from forewarn.core.event import Gap, Time
from forewarn.core.fleet import Scope
from forewarn.errors import StoreUnusable

FORMAT = 1

T = TypeVar("T")


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The digest of the fleet file applied last.

    `names` and `incarnation_floor` are what earlier versions wrote instead of the records of
    `DECLARED` and `FLOOR`.
    """

    names: tuple[str, ...] = ()
    digest: str = ""
    incarnation_floor: int = 0


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest DocumentIncarnation of any deleted scope. New scopes start above it."""

    incarnation: int = 0


class ClockReading(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a server's clock showed when the server wrote this. `asks`: the others are to write."""

    server: str
    at: Time
    asks: bool = False


class Shown(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """At this time a server showed all that was committed; see `readability.py`.

    `gaps` are recent times in which none did. `server` wrote it.
    """

    at: Time
    gaps: tuple[Gap, ...] = ()
    server: str = ""


class _Stamp(msgspec.Struct):
    format: int


class _Record(_Stamp, Generic[T], forbid_unknown_fields=True):
    value: T


class RecordCodec(Generic[T]):
    """Encodes and decodes one kind of record. `name` appears in error messages."""

    def __init__(self, name: str, type_: type[T]) -> None:
        self._name, self.type = name, type_
        self._decoder = msgspec.json.Decoder(_Record[type_])  # type: ignore[valid-type]

    def encode(self, value: T) -> bytes:
        return msgspec.json.encode(_Record(FORMAT, value))

    def decode(self, encoded: bytes) -> T:
        """The value; StoreUnusable if it is damaged or of a newer format.

        A newer format may have unknown fields, so on failure the format number is read alone.
        """
        try:
            record = self._decoder.decode(encoded)
            self._check_format(record.format)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._check_format(msgspec.json.decode(encoded, type=_Stamp).format)
            name, reason = self._name, str(error)
            raise StoreUnusable(
                f"The stored {name} record is damaged: {reason}", record=name, reason=reason
            ) from error
        value: T = record.value
        return value

    def _check_format(self, found: int) -> None:
        if found != FORMAT:
            name = self._name
            raise StoreUnusable(
                f"The stored {name} record has format {found}; this version reads format {FORMAT}",
                record=name,
                format=found,
                format_read=FORMAT,
            )


class ScopeCodec(RecordCodec[Scope]):
    """For scopes. `seen_at` is left out, because it is in the record of `SEEN`.

    Earlier versions stored it in the scope, so it may be there.
    """

    def encode(self, value: Scope) -> bytes:
        return super().encode(replace(value, seen_at=None))


class BytesCodec(RecordCodec[bytes]):
    """For records whose value is used as it is: leases."""

    def __init__(self) -> None:
        super().__init__("raw", bytes)

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, encoded: bytes) -> bytes:
        return encoded


SCOPE = ScopeCodec("scope", Scope)
SEEN: RecordCodec[datetime] = RecordCodec("seen", Time)
"""When a VM of the scope last polled. A large scope is not written once an hour for that."""
POLLED: RecordCodec[dict[str, int]] = RecordCodec("polled", dict[str, int])
"""When each VM of the scope last polled, in seconds since the epoch."""
HOSTS = RecordCodec("hosts", Hosts)
FLOOR = RecordCodec("floor", Floor)
CLOCK = RecordCodec("clock", ClockReading)
SHOWN = RecordCodec("shown", Shown)
DECLARED: RecordCodec[tuple[str, ...]] = RecordCodec("declared hosts", tuple[str, ...])
RAW = BytesCodec()
