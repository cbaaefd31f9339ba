"""Scopes, the fleet's hosts, tokens and kept answers as stored bytes:

JSON with a format number. A newer format is refused.
"""

from contextlib import suppress
from datetime import datetime
from typing import Generic, TypeVar

import msgspec

from forewarn.auth.token import Token
from forewarn.campaign.model import Campaign, Roll
from forewarn.core.fleet import Scope
from forewarn.errors import StoreUnusable

FORMAT = 1

T = TypeVar("T")


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hosts that the fleet declares, and the digest of the fleet file applied last.

    `incarnation_floor` is what the first version wrote instead of a record of its own (`Floor`).
    """

    names: tuple[str, ...] = ()
    digest: str = ""
    incarnation_floor: int = 0


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest DocumentIncarnation that any scope that is gone has shown: new scopes start above
    it.
    """

    incarnation: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an Idempotency-Key stands for since `at`: the request (its digest), the operation that
    it became, and its answer.

    It is written before the operation, with status 0, and again with the answer.
    """

    asked: str
    at: datetime
    operation_id: str = ""
    status: int = 0
    body: str = ""


class _Stamp(msgspec.Struct):
    format: int


class _Record(_Stamp, Generic[T], forbid_unknown_fields=True):
    value: T


class RecordCodec(Generic[T]):
    """How one kind of value is stored. `what` names it in the words of a problem."""

    def __init__(self, what: str, type_: type[T]) -> None:
        self._what = what
        self._decoder = msgspec.json.Decoder(_Record[type_])  # type: ignore[valid-type]

    def encode(self, value: T) -> bytes:
        return msgspec.json.encode(_Record(FORMAT, value))

    def decode(self, record: bytes) -> T:
        """What cannot be decoded may be of a newer format, with members that we do not know: its
        format is looked at alone.
        """
        try:
            found = self._decoder.decode(record)
            self._check_format(found.format)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._check_format(msgspec.json.decode(record, type=_Stamp).format)
            what, reason = self._what, str(error)
            raise StoreUnusable(
                f"The stored {what} record is damaged: {reason}", record=what, reason=reason
            ) from error
        value: T = found.value
        return value

    def _check_format(self, found: int) -> None:
        if found != FORMAT:
            what = self._what
            raise StoreUnusable(
                f"The stored {what} record has format {found}; this version reads format {FORMAT}",
                record=what,
                format=found,
                format_read=FORMAT,
            )


SCOPE = RecordCodec("scope", Scope)
HOSTS = RecordCodec("hosts", Hosts)
FLOOR = RecordCodec("floor", Floor)
CAMPAIGN = RecordCodec("campaign", Campaign)
ROLL = RecordCodec("roll of campaigns", Roll)
NAMES: RecordCodec[tuple[str, ...]] = RecordCodec("campaign's hosts", tuple[str, ...])
TOKEN = RecordCodec("token", Token)
ANSWER = RecordCodec("answer", Answer)
