"""A POST with an Idempotency-Key is executed once; a retry within 24 hours gets the first response.

    no record  -> RESERVED   before the operation; the record holds the operation's id
    RESERVED   -> STORED     after it; the record holds the response
    RESERVED or STORED       expire after 24 hours, or when there are too many; the key is new again

If a server dies while RESERVED, or two servers get the request at once, the retry repeats the
operation under the same id, and the rules recognise it.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakValueDictionary

from litestar import MediaType, Request, Response
from msgspec.structs import replace

from forewarn.engine.engine import TRIES_MAX, Engine
from forewarn.engine.record import ANSWER, Answer
from forewarn.errors import Conflict, Invalid, StoreUnusable, Unavailable
from forewarn.store.base import WRITES_MAX, Record, Write
from forewarn.web.control.auth import Principal
from forewarn.web.http_status import KeyReused

HEADER = "Idempotency-Key"
KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,198}[\x21-\x7e])?")
KEY_LENGTH_MAX = 200
RECORD_KEY = "answer/{}/"
KEPT_FOR = timedelta(hours=24)
KEPT_MAX = 2000
BODY_BYTES_MAX = 16 * 1024
TRIM_EVERY = 100


@dataclass(frozen=True, slots=True)
class Reservation:
    """The record of a key whose request is being handled.

    Its lock makes other requests with the same key wait, on this server.
    """

    lock: asyncio.Lock
    key: str
    revision: int
    reserved: Answer

    @property
    def operation_id(self) -> str:
        return self.reserved.operation_id


class Idempotency:
    """The records of the keys. `make_id` makes the id of a new operation."""

    def __init__(self, engine: Engine, make_id: Callable[[], str]) -> None:
        self._engine = engine
        self._make_id = make_id
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reserved_count = 0

    async def begin(
        self, request: Request[Any, Any, Any], principal: Principal, body: bytes
    ) -> Reservation | Response[bytes]:
        """The stored response, or a reservation whose lock is held until the response is sent."""
        value = request.headers[HEADER]
        if not KEY.fullmatch(value):
            raise Invalid(
                f"{HEADER}: expected 1 to {KEY_LENGTH_MAX} printable ASCII characters,"
                f" got {value[:80]!r}",
                field=HEADER,
            )
        key = RECORD_KEY.format(_digest(principal.identity.encode(), value.encode()))
        digest = _digest(request.scope["raw_path"], request.scope["query_string"], body)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        await lock.acquire()
        try:
            stored, revision = await self._reserve(key, digest)
            if stored.asked != digest:
                raise KeyReused(
                    f"{HEADER} {value[:80]!r} was used for another request; expected a new key",
                    key=value,
                )
            if not stored.status:
                return Reservation(lock, key, revision, stored)
        except BaseException:
            lock.release()
            raise
        lock.release()
        return Response(
            stored.body.encode(),
            status_code=stored.status,
            media_type=MediaType.JSON,
            headers={"Idempotency-Replayed": "true"},
        )

    async def finish(self, reservation: Reservation, status: int, body: bytes) -> None:
        """Store the response before it is sent.

        A server error is not stored, so that a retry can succeed.
        """
        if status >= 500 or len(body) > BODY_BYTES_MAX:
            return
        answer = replace(reservation.reserved, status=status, body=body.decode())
        try:
            await self._engine.store.commit(
                [Write(reservation.key, ANSWER.encode(answer), reservation.revision)]
            )
        except Conflict:
            return  # another server got the same request, and has stored its response
        except Unavailable as error:
            self._engine.throttled_log.warn("response not stored", problem=error.message)

    async def _reserve(self, key: str, digest: str) -> tuple[Answer, int]:
        """The record of a key and its revision.

        If there is none, or it has expired, a new one is written.
        """
        store, now = self._engine.store, self._engine.clock.now()
        for _ in range(TRIES_MAX):
            found = next(
                (one for one in (await store.load(key)).records if one.value is not None), None
            )
            if found is not None and (answer := _answer_in(found)).at + KEPT_FOR > now:
                return answer, found.revision
            answer = Answer(asked=digest, at=now, operation_id=self._make_id())
            try:
                revision = await store.commit(
                    [Write(key, ANSWER.encode(answer), found.revision if found else 0)]
                )
            except Conflict:
                continue  # another server was asked the same: its record counts
            self._reserved_count += 1
            if self._reserved_count % TRIM_EVERY == 1:
                await self._trim()
            return answer, revision
        raise Unavailable(f"too many servers use this {HEADER} at once; try again")

    async def _trim(self) -> None:
        """Delete the records that have expired, and the oldest beyond the limit."""
        try:
            records = (await self._engine.store.load("answer/")).records
            old = await asyncio.to_thread(_old, records, self._engine.clock.now() - KEPT_FOR)
            for first in range(0, len(old), WRITES_MAX):
                await self._engine.store.commit(
                    [Write(one.key, None, one.revision) for one in old[first : first + WRITES_MAX]]
                )
        except Conflict:
            return  # another server is trimming
        except Unavailable as error:
            self._engine.throttled_log.warn("responses not trimmed", problem=error.message)


def _old(records: Sequence[Record], until: datetime) -> list[Record]:
    """The records that were made up to a time, and the oldest beyond the limit.

    It reads all of them, so not in the loop.
    """
    excess = len(records) - KEPT_MAX
    by_age = enumerate(sorted(records, key=lambda one: one.revision))
    return [one for number, one in by_age if number < excess or _is_expired(one, until)]


def _is_expired(found: Record, until: datetime) -> bool:
    try:
        return _answer_in(found).at <= until
    except StoreUnusable:  # a newer server's, or damaged: it goes when it is one of the oldest
        return False


def _answer_in(found: Record) -> Answer:
    assert found.value is not None
    return ANSWER.decode(found.value)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()
