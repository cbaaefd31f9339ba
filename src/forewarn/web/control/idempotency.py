"""A POST with an Idempotency-Key is done once: a retry within a day gets the first answer, also
after a restart.

Before the operation a record of the key is written, with the id that the operation will have;
afterwards it gets the answer. If a server dies in between, or two servers are asked at once, the
retry repeats the operation under the same id, and the rules recognise it. When the record has
expired or was trimmed, the key is new, and so is the operation.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from litestar import MediaType, Request, Response
from msgspec.structs import replace

from forewarn.engine.engine import TRIES_MAX, Engine
from forewarn.engine.record import RecordCodec
from forewarn.errors import Conflict, Invalid, StoreUnusable, Unavailable
from forewarn.store.base import WRITES_MAX, Record, Write
from forewarn.web.control.auth import Principal
from forewarn.web.http_status import KeyReused

HEADER = "Idempotency-Key"
KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,198}[\x21-\x7e])?")
KEY_LENGTH_MAX = 200
ANSWER_KEY = "answer/{}/"
KEPT_FOR = timedelta(hours=24)
KEPT_MAX = 2000
BODY_BYTES_MAX = 16 * 1024
TRIM_EVERY = 100


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


ANSWER = RecordCodec("answer", Answer)


@dataclass(frozen=True, slots=True)
class Slot:
    """The record of a key whose request is being handled.

    Its lock keeps others with this key waiting, on this server.
    """

    lock: asyncio.Lock
    key: str
    revision: int
    reserved: Answer

    @property
    def operation_id(self) -> str:
        return self.reserved.operation_id


class Answers:
    """The records of the keys, in the engine's store. `make_id` makes the id of a new operation."""

    def __init__(self, engine: Engine, make_id: Callable[[], str]) -> None:
        self._engine = engine
        engine.register("answer", ANSWER, cached=False)
        self._make_id = make_id
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reserved_count = 0

    async def begin(
        self, request: Request[Any, Any, Any], caller: Principal, body: bytes
    ) -> Slot | Response[bytes]:
        """The first answer if this was asked before; else a slot, whose lock is held until the
        request has been answered.
        """
        said = request.headers[HEADER]
        if not KEY.fullmatch(said):
            raise Invalid(
                f"{HEADER}: expected 1 to {KEY_LENGTH_MAX} printable ASCII characters, got {said[:80]!r}",
                field=HEADER,
            )
        key = ANSWER_KEY.format(_digest(caller.identity.encode(), said.encode()))
        asked = _digest(request.scope["raw_path"], request.scope["query_string"], body)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        await lock.acquire()
        try:
            answer, revision = await self._reserve(key, asked)
            if answer.asked != asked:
                raise KeyReused(
                    f"{HEADER} {said[:80]!r} came with another request before; expected a new key",
                    key=said,
                )
            if not answer.status:
                return Slot(lock, key, revision, answer)
        except BaseException:
            lock.release()
            raise
        lock.release()
        replayed = {"Idempotency-Replayed": "true"}
        return Response(
            answer.body.encode(),
            status_code=answer.status,
            media_type=MediaType.JSON,
            headers=replayed,
        )

    async def keep(self, slot: Slot, status: int, body: bytes) -> None:
        """Store the answer before it is sent.

        A failure of ours is not stored, so that it can be tried again.
        """
        if status >= 500 or len(body) > BODY_BYTES_MAX:
            return
        answer = replace(slot.reserved, status=status, body=body.decode())
        try:
            await self._engine.store.commit([Write(slot.key, ANSWER.encode(answer), slot.revision)])
        except Conflict:
            return  # another server was asked the same, and has stored its answer
        except Unavailable as problem:
            self._engine.throttled_log.warn("answer not kept", problem=problem.message)

    async def _reserve(self, key: str, asked: str) -> tuple[Answer, int]:
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
            answer = Answer(asked=asked, at=now, operation_id=self._make_id())
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
        except Unavailable as problem:
            self._engine.throttled_log.warn("answers not trimmed", problem=problem.message)


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
