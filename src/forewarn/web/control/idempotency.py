"""A POST with an Idempotency-Key is executed once; a retry within 24 hours gets the first response.

    no record  -> RESERVED   before the operation; the record holds the operation's id
    RESERVED   -> STORED     after it; the record holds the response
    RESERVED or STORED       expire after 24 hours; when there are too many, the oldest of the
                             tokens that have most are deleted

If a server dies while RESERVED, or two servers get the request at the same time, the operation is
repeated under the same id, and the rules recognize it.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from litestar import Request
from litestar.middleware import ASGIMiddleware
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from msgspec.structs import replace

from forewarn.core.event import Time
from forewarn.engine.engine import Engine
from forewarn.engine.record import RAW, RecordCodec
from forewarn.engine.transaction import Transaction
from forewarn.errors import Invalid, Unavailable
from forewarn.store.base import WRITES_MAX, Record
from forewarn.web.http_status import KeyReused

HEADER = "Idempotency-Key"
KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,198}[\x21-\x7e])?")
KEY_LENGTH_MAX = 200
KIND = "answer"
KEPT_FOR = timedelta(hours=24)
KEPT_MAX = 2000
BODY_BYTES_MAX = 16 * 1024
TRIM_EVERY = 100
BY = "idempotency"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a key: the digest of its request, its operation, and the response.

    RESERVED while `status` is 0.
    """

    request: str = msgspec.field(name="asked")
    at: Time
    operation_id: str = ""
    status: int = 0
    body: str = ""


CODEC = RecordCodec(KIND, StoredResponse)


class Idempotency(ASGIMiddleware):
    """The middleware, and the records of the keys. `make_id` makes the id of a new operation."""

    def __init__(self, engine: Engine, make_id: Callable[[], str]) -> None:
        # Records are decoded here, so that unreadable ones can be deleted when there are too many.
        engine.register(KIND, RAW, cached=False)
        self._engine = engine
        self._make_id = make_id
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reserved_count = 0

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        request: Request[Any, Any, Any] = Request(scope, receive, send)
        is_stored = request.method == "POST" and not request.route_handler.opt.get("ignores_key")
        if not is_stored or HEADER not in request.headers:
            await next_app(scope, receive, send)
            return
        value = request.headers[HEADER]
        if not KEY.fullmatch(value):
            raise Invalid(
                f"{HEADER}: expected 1 to {KEY_LENGTH_MAX} printable ASCII characters,"
                f" got {value[:80]!r}",
                field=HEADER,
            )
        token = _digest(scope["state"]["principal"].identity.encode())
        key = f"{KIND}/{token}/{_digest(value.encode())}/"
        digest = _digest(scope["raw_path"], scope["query_string"], await request.body())
        async with self._locks.setdefault(key, asyncio.Lock()):  # retries wait, on this server
            stored = await self._reserve(key, digest)
            if stored.request != digest:
                raise KeyReused(
                    f"{HEADER} {value[:80]!r} was used for another request; expected a new key",
                    key=value,
                )
            if stored.status:
                replayed = {"Idempotency-Replayed": "true"}
                response = ASGIResponse(
                    body=stored.body, status_code=stored.status, headers=replayed
                )
                await response(scope, receive, send)
            else:
                scope["state"]["operation_id"] = stored.operation_id
                storing = self._storing(send, key, stored.operation_id)
                await next_app(scope, receive, storing)

    def _storing(self, send: Send, key: str, operation_id: str) -> Send:
        """A `send` that stores the response before it sends the end of it."""
        status, body = 0, b""

        async def store_and_send(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                body += message["body"]
                # A server error is not stored, so that a retry can succeed.
                is_stored = status < 500 and len(body) <= BODY_BYTES_MAX
                if is_stored and not message["more_body"]:
                    await self._store(key, operation_id, status, body)
            await send(message)

        return store_and_send

    async def _store(self, key: str, operation_id: str, status: int, body: bytes) -> None:
        def decide(transaction: Transaction) -> None:
            stored = _decode(transaction.get(key))
            # Unless another server got the same request and has stored its response.
            if stored and not stored.status and stored.operation_id == operation_id:
                response = replace(stored, status=status, body=body.decode())
                transaction.put(key, CODEC.encode(response))

        try:
            await self._engine.update([key], decide, by=BY)
        except Unavailable as error:
            self._engine.throttled_log.warn("response not stored", problem=error.message)

    async def _reserve(self, key: str, digest: str) -> StoredResponse:
        """The record of a key; a new one if there is none, or if it has expired."""
        operation_id = self._make_id()

        def decide(transaction: Transaction) -> StoredResponse:
            stored = _decode(transaction.get(key))
            if stored is None or stored.at + KEPT_FOR <= transaction.now:
                stored = StoredResponse(
                    request=digest, at=transaction.now, operation_id=operation_id
                )
                transaction.put(key, CODEC.encode(stored))
            return stored

        stored = await self._engine.update([key], decide, by=BY)
        if stored.operation_id == operation_id:
            self._reserved_count += 1
            if self._reserved_count % TRIM_EVERY == 1:
                await self._trim()
        return stored

    async def _trim(self) -> None:
        """Delete records beyond the limit, expired or not."""
        try:
            old = _select_old((await self._engine.store.load(f"{KIND}/")).records)
            for first in range(0, len(old), WRITES_MAX):
                await self._delete(old[first : first + WRITES_MAX])
        except Unavailable as error:
            self._engine.throttled_log.warn("responses not trimmed", problem=error.message)

    async def _delete(self, records: Sequence[Record]) -> None:
        def decide(transaction: Transaction) -> None:
            for record in records:
                if transaction.revision(record.key) == record.revision:
                    transaction.put(record.key, None)

        await self._engine.update([record.key for record in records], decide, by=BY)


def _select_old(records: Iterable[Record]) -> list[Record]:
    """The records beyond the limit.

    Kept are the newest of each token, then the second newest of each, and so on. So a token that
    makes up keys without end pushes out its own, and those of no other token.
    """
    oldest_first = sorted(records, key=lambda record: record.revision)
    counts = Counter[str]()
    by_rank = list[tuple[int, Record]]()
    for record in reversed(oldest_first):
        token = record.key.split("/")[1]
        by_rank.append((counts[token], record))
        counts[token] += 1
    by_rank.sort(key=lambda each: each[0])  # stable: within a rank, the newest first
    return [record for _, record in by_rank[KEPT_MAX:]]


def _decode(value: bytes | None) -> StoredResponse | None:
    return None if value is None else CODEC.decode(value)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()
