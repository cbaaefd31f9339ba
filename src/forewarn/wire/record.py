"""Scopes, the fleet's hosts, tokens and kept answers as stored bytes: JSON with a format number. A newer format is refused."""

from datetime import datetime
from typing import Generic, TypeVar

import msgspec

from forewarn.core.campaign import Campaign, Roll
from forewarn.core.fleet import Scope
from forewarn.core.token import Token
from forewarn.errors import StoreUnusable

FORMAT = 1

T = TypeVar("T")


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hosts that the fleet declares, the digest of the fleet file applied last, the number that new scopes start above."""

    names: tuple[str, ...] = ()
    digest: str = ""
    incarnation_floor: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an Idempotency-Key stands for since `at`: the request (its digest), the operation that it became, and its answer.

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


class Form(Generic[T]):
    """How one kind of value is stored. `what` names it in the words of a problem."""

    def __init__(self, what: str, type_: type[T]) -> None:
        self._what = what
        self._decoder = msgspec.json.Decoder(_Record[type_])  # type: ignore[valid-type]

    def encode(self, value: T) -> bytes:
        return msgspec.json.encode(_Record(FORMAT, value))

    def decode(self, record: bytes) -> T:
        """The format is looked at before the rest: a newer record may not even have our members."""
        what = self._what
        try:
            stamp = msgspec.json.decode(record, type=_Stamp)
            if stamp.format != FORMAT:
                raise StoreUnusable(
                    f"The stored {what} record has format {stamp.format}; this version reads format {FORMAT}",
                    record=what,
                    format=stamp.format,
                    format_read=FORMAT,
                )
            value: T = self._decoder.decode(record).value
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StoreUnusable(f"The stored {what} record is damaged: {error}", record=what, reason=str(error)) from error
        return value


SCOPE = Form("scope", Scope)
HOSTS = Form("hosts", Hosts)
CAMPAIGN = Form("campaign", Campaign)
ROLL = Form("roll of campaigns", Roll)
NAMES: Form[tuple[str, ...]] = Form("campaign's hosts", tuple[str, ...])
TOKEN = Form("token", Token)
ANSWER = Form("answer", Answer)
