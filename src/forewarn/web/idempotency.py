"""A POST with an Idempotency-Key is done once: whoever asks again gets the first answer, also after a restart.

The answer is kept in the store for a day. The operation's id comes from the key too, so that the rules know it again even if
a server dies between doing it and keeping the answer, or two servers are asked at once.
"""

import asyncio
import hashlib
import re
import uuid
from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakValueDictionary

from litestar import MediaType, Request, Response

from forewarn.engine.engine import Engine
from forewarn.errors import Conflict, Invalid, Unavailable
from forewarn.store.base import WRITES_MAX, Record, Write
from forewarn.web.problems import KeyReused
from forewarn.wire.record import ANSWER, Answer

HEADER = "Idempotency-Key"
KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,198}[\x21-\x7e])?")
KEY_LENGTH_MAX = 200
ANSWER_KEY = "answer/{}/"
KEPT_FOR = timedelta(hours=24)
KEPT_MAX = 2000
BODY_BYTES_MAX = 16 * 1024
TRIM_EVERY = 100
OPERATION = uuid.UUID("3f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f10")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the answer of a request will be kept. Whoever holds its lock is the only one here who asks this."""

    lock: asyncio.Lock
    key: str
    revision: int
    asked: str

    @property
    def operation_id(self) -> str:
        return str(uuid.uuid5(OPERATION, self.key + self.asked)).upper()


class Answers:
    """The answers that are kept, in the engine's store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._kept_count = 0

    async def begin(self, request: Request[Any, Any, Any], caller: str, body: bytes) -> Slot | Response[bytes]:
        """The first answer if this was asked before; else a slot, whose lock is held until `end`."""
        said = request.headers[HEADER]
        if not KEY.fullmatch(said):
            raise Invalid(f"{HEADER}: expected 1 to {KEY_LENGTH_MAX} printable ASCII characters, got {said[:80]!r}", field=HEADER)
        key = ANSWER_KEY.format(_digest(caller.encode(), said.encode()))
        asked = _digest(request.scope["raw_path"], request.scope["query_string"], body)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        await lock.acquire()
        try:
            found = next((one for one in (await self._engine.store.load(key)).records if one.value is not None), None)
            answer = ANSWER.decode(found.value) if found is not None and found.value is not None else None
            if answer is None or answer.at + KEPT_FOR <= self._engine.clock.now():
                return Slot(lock, key, found.revision if found else 0, asked)
            if answer.asked != asked:
                raise KeyReused(f"{HEADER} {said[:80]!r} came with another request before; expected a new key", key=said)
        except BaseException:
            lock.release()
            raise
        lock.release()
        replayed = {"Idempotency-Replayed": "true"}
        return Response(answer.body.encode(), status_code=answer.status, media_type=MediaType.JSON, headers=replayed)

    async def keep(self, slot: Slot, status: int, body: bytes) -> None:
        """Keep the answer before it is given. A failure of ours is not kept, so that it can be tried again."""
        if status >= 500 or len(body) > BODY_BYTES_MAX:
            return
        answer = Answer(asked=slot.asked, status=status, body=body.decode(), at=self._engine.clock.now())
        try:
            await self._engine.store.commit([Write(slot.key, ANSWER.encode(answer), slot.revision)])
            self._kept_count += 1
            if self._kept_count % TRIM_EVERY == 1:
                await self._trim()
        except Conflict:
            return  # another server was asked the same, and keeps its answer
        except Unavailable as problem:
            self._engine.trouble.tell("answer not kept", problem=problem.message)

    async def _trim(self) -> None:
        """Let go of what is a day old, and of the oldest beyond the limit.

        Revisions grow as time does, so a few answers have to be read to know which are old: reading all would keep polls waiting.
        """
        kept = sorted((await self._engine.store.load("answer/")).records, key=lambda one: one.revision)
        old_count = bisect_right(kept, self._engine.clock.now() - KEPT_FOR, key=_kept_at)
        old = kept[: max(old_count, len(kept) - KEPT_MAX)]
        for first in range(0, len(old), WRITES_MAX):
            await self._engine.store.commit([Write(one.key, None, one.revision) for one in old[first : first + WRITES_MAX]])


def _kept_at(found: Record) -> datetime:
    assert found.value is not None
    return ANSWER.decode(found.value).at


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()
