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


class Hosts(msgspec.Struct, frozen=True):
    """The hosts that the fleet declares, the digest of the fleet file applied last, the number that new scopes start above."""

    names: tuple[str, ...] = ()
    digest: str = ""
    incarnation_floor: int = 0


class Answer(msgspec.Struct, frozen=True):
    """What a request with an Idempotency-Key was answered; `asked` is the digest of the request."""

    asked: str
    status: int
    body: str
    at: datetime


class _Stamp(msgspec.Struct):
    format: int


class _Record(_Stamp, Generic[T]):
    value: T


_scope = msgspec.json.Decoder(_Record[Scope])
_hosts = msgspec.json.Decoder(_Record[Hosts])
_campaign = msgspec.json.Decoder(_Record[Campaign])
_roll = msgspec.json.Decoder(_Record[Roll])
_names = msgspec.json.Decoder(_Record[tuple[str, ...]])
_token = msgspec.json.Decoder(_Record[Token])
_answer = msgspec.json.Decoder(_Record[Answer])


def encode_scope(scope: Scope) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, scope))


def decode_scope(record: bytes) -> Scope:
    return _decoded(_scope, record, what="scope")


def encode_hosts(hosts: Hosts) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, hosts))


def decode_hosts(record: bytes) -> Hosts:
    return _decoded(_hosts, record, what="hosts")


def encode_campaign(campaign: Campaign) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, campaign))


def decode_campaign(record: bytes) -> Campaign:
    return _decoded(_campaign, record, what="campaign")


def encode_roll(roll: Roll) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, roll))


def decode_roll(record: bytes) -> Roll:
    return _decoded(_roll, record, what="roll of campaigns")


def encode_names(names: tuple[str, ...]) -> bytes:
    """Hosts of a campaign, in their order."""
    return msgspec.json.encode(_Record(FORMAT, names))


def decode_names(record: bytes) -> tuple[str, ...]:
    return _decoded(_names, record, what="campaign's hosts")


def encode_token(token: Token) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, token))


def decode_token(record: bytes) -> Token:
    return _decoded(_token, record, what="token")


def encode_answer(answer: Answer) -> bytes:
    return msgspec.json.encode(_Record(FORMAT, answer))


def decode_answer(record: bytes) -> Answer:
    return _decoded(_answer, record, what="answer")


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
