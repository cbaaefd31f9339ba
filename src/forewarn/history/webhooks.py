"""Deliver chosen changes to webhooks, signed. The history is the outbox.

At least once and in order. Each webhook has a cursor record and a task of its own, so one that
fails delays no other. One server delivers at a time: the holder of the lease `webhooks`.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from forewarn.config import Config, WebhookFormat
from forewarn.core.change import ChangeKind
from forewarn.core.event import Time
from forewarn.engine.clock import within
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Entry, decode_all, last_number
from forewarn.engine.isolation import isolated
from forewarn.engine.lease import run_under_lease
from forewarn.engine.log_throttle import ThrottledLog
from forewarn.engine.record import RAW, RecordCodec
from forewarn.engine.transaction import Transaction
from forewarn.errors import Error, Invalid, RecordUnreadable
from forewarn.history import event_grid
from forewarn.history.cloudevents import encode, event_id, headers
from forewarn.history.feed import HistoryFeed
from forewarn.log import log
from forewarn.store.base import HistoryValues, Lease

if TYPE_CHECKING:
    from forewarn.history.webhook_sender import WebhookSender

KEY = "webhook/{}/"
IDENTITY_KEY = "identity"
BY = "webhooks"
UNSAVED_MAX = 50
"""How many deliveries may be repeated after a crash."""
SAVE_INTERVAL = timedelta(minutes=1)
FIRST_PAUSE, PAUSE_MAX = timedelta(seconds=1), timedelta(minutes=5)
CHECK_INTERVAL = timedelta(seconds=15)
REJECTED = (400, 413, 422)
"""Statuses that reject this very message."""
REJECTIONS_MAX = 10
NEVER = datetime.fromtimestamp(0, UTC)


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything up to `number` is delivered; the next attempt is not before `retry_at`.

    `failures` counts failed attempts since the last success, `rejections` those of them at the end
    that rejected the next message.
    """

    number: int
    retry_at: Time = NEVER
    failures: int = 0
    rejections: int = 0


CURSOR = RecordCodec("webhook", Cursor)


@dataclass(frozen=True, kw_only=True)
class WebhookContext:
    """What all webhooks of a server share."""

    engine: Engine
    feed: HistoryFeed
    identity: str
    changes: Collection[str]
    secrets: Sequence[bytes] = field(repr=False)
    is_event_grid: bool
    random: Callable[[], float]


class Webhook:
    """Delivers to one URL. The counters are for metrics.

    States:  LOADING the cursor, until the store answers -> DELIVERING
             WAITING for a change -> DELIVERING -> WAITING
             DELIVERING -> PAUSED after a failure, until `retry_at` -> DELIVERING
    """

    def __init__(self, url: str, sender: "WebhookSender", context: WebhookContext) -> None:
        self.name = sender.name
        self.delivered = self.failed = self.refused = self.lost = 0
        self.is_failing = False
        self._key = KEY.format(hashlib.sha256(url.encode()).hexdigest()[:32])
        self._sender, self._context = sender, context
        self._engine, self._feed, self._clock = context.engine, context.feed, context.engine.clock
        self._throttled_log = ThrottledLog(self._clock)
        self._is_loaded = False
        self._cursor = self._saved = Cursor(0)
        self._saved_at = self._clock.now()
        self._unsaved = 0

    async def register(self) -> None:
        """Save where a new webhook begins: after everything that has happened so far."""
        number = await self._feed.last()

        def decide(transaction: Transaction) -> None:
            if transaction.get(self._key) is None:
                transaction.put(self._key, Cursor(number))

        with suppress(RecordUnreadable):
            await self._engine.update([self._key], decide, by=BY)

    async def run(self, lease: Lease) -> None:
        """Deliver until cancelled, then save the cursor: the next server repeats nothing."""
        self._is_loaded = False  # another server may have delivered meanwhile
        try:
            while True:
                changed = self._feed.changed
                until = await self._attempt(lease)
                await asyncio.sleep(0)  # let polls pass
                if until is not None:
                    await self._clock.sleep_until(until)
                    continue
                with suppress(TimeoutError):
                    await within(self._clock, CHECK_INTERVAL, changed.wait())
        finally:
            if self._is_loaded:
                with suppress(Error, TimeoutError):
                    await asyncio.wait_for(self._save(lease), 1)

    async def close(self) -> None:
        await self._sender.close()

    async def _attempt(self, lease: Lease) -> datetime | None:
        with isolated(self._throttled_log, "bug in a webhook worker", receiver=self.name):
            try:
                if not self._is_loaded:
                    await self._load()
                if self._is_loaded:
                    return await self.deliver_next(lease)
            except Error as error:  # of the store; those of the receiver are handled
                self._throttled_log.warn(
                    "webhook waits for the store", receiver=self.name, problem=error.message
                )
        return self._clock.now() + CHECK_INTERVAL

    async def _load(self) -> None:
        """Continue where the last server stopped, unless this version cannot read where."""
        await self._engine.refresh(self._key)
        if self._key in self._engine.unreadable:
            return
        saved: Cursor = self._engine.records.get(self._key).value or Cursor(0)
        # a server with a wrong clock may have saved any time
        latest = self._clock.now() + PAUSE_MAX
        self._saved = self._cursor = replace(saved, retry_at=min(saved.retry_at, latest))
        self._is_loaded = True

    async def deliver_next(self, lease: Lease) -> datetime | None:
        """Deliver the next values of the history.

        Returns when to continue; None: when something changes.
        """
        now = self._clock.now()
        if self._cursor.retry_at > now:
            return self._cursor.retry_at
        values = await self._feed.after(self._cursor.number)
        if not values:
            return None
        await self._report_gap(values)
        for value in values:
            for entry in decode_all(value):
                is_wanted = entry.what in self._context.changes and (
                    event_grid.is_event(entry) or not self._context.is_event_grid
                )
                if is_wanted and entry.number > self._cursor.number:
                    if not await self._deliver(entry, lease):
                        return self._cursor.retry_at
                    await self._pass(entry.number, lease)
            await self._pass(last_number(value.position), lease)
        if self._unsaved:
            await self._save(lease)
        return now

    async def _pass(self, number: int, lease: Lease) -> None:
        self._cursor = replace(self._cursor, number=number)
        is_old = self._clock.now() >= self._saved_at + SAVE_INTERVAL
        if is_old or self._unsaved >= UNSAVED_MAX:
            await self._save(lease)

    async def _deliver(self, entry: Entry, lease: Lease) -> bool:
        """Send one entry. False if it has to be sent again, after a pause that is saved."""
        identity, secrets = self._context.identity, self._context.secrets
        message_id, body, more = event_id(identity, entry), encode(identity, entry), {}
        if self._context.is_event_grid:
            place = self._engine.board.scopes.get(entry.scope)
            body = event_grid.encode(message_id, entry, place.scope if place else None)
            more = event_grid.HEADERS
        status, problem = 0, ""
        try:
            signed = headers(message_id, body, self._clock.now(), secrets)
            status = await self._sender.post(body, signed | more)
            if not 200 <= status < 300:
                problem = f"the response has status {status}"
        except Error as error:
            problem = error.message
        self._unsaved += 1
        if not problem:
            self.delivered += 1
            self.is_failing = False
            self._cursor = replace(self._cursor, failures=0, rejections=0)
            return True
        self.failed += 1
        rejections = self._cursor.rejections + 1 if status in REJECTED else 0
        if rejections >= REJECTIONS_MAX:
            self.refused += 1
            log.error("webhook refused", receiver=self.name, number=entry.number, problem=problem)
            self._cursor = replace(self._cursor, failures=0, rejections=0)
            return True
        await self._pause(problem, rejections, lease)
        return False

    async def _pause(self, problem: str, rejections: int, lease: Lease) -> None:
        """Try again later: longer each time, and not all webhooks at the same time."""
        failures = self._cursor.failures + 1
        pause = min(FIRST_PAUSE * 2 ** min(failures - 1, 20), PAUSE_MAX)
        pause *= 0.5 + self._context.random() / 2
        self.is_failing = True
        self._throttled_log.warn(
            "webhook failed", receiver=self.name, problem=problem, tries=failures
        )
        retry_at = self._clock.now() + pause
        self._cursor = Cursor(self._cursor.number, retry_at, failures, rejections)
        await self._save(lease)

    async def _report_gap(self, values: HistoryValues) -> None:
        """Entries that were trimmed before they could be delivered are lost."""
        after = self._cursor.number
        if oldest := await self._feed.gap_after(after, values):
            self.lost += 1
            log.error("webhook lost entries", receiver=self.name, after=after, before=oldest)
            self._cursor = replace(self._cursor, number=oldest - 1)

    async def _save(self, lease: Lease) -> None:
        cursor = self._cursor

        def put(transaction: Transaction) -> None:
            transaction.put(self._key, cursor)

        if cursor != self._saved:
            await self._engine.update([self._key], put, by=BY, lease=lease)
        self._saved, self._saved_at, self._unsaved = cursor, self._clock.now(), 0


def register_records(engine: Engine) -> None:
    """Call it before `engine.load`."""
    engine.register("webhook", CURSOR)
    engine.register(IDENTITY_KEY, RAW)


async def open_webhooks(
    config: Config,
    engine: Engine,
    feed: HistoryFeed,
    secrets: Sequence[bytes],
    make_id: Callable[[], str],
) -> tuple[Webhook, ...]:
    """The configured webhooks, registered: they get everything that happens from now on."""
    from forewarn.history.webhook_sender import WebhookSender  # httpx is slow to import

    unknown = [name for name in config.webhook_changes if name not in list(ChangeKind)]
    if unknown:
        raise Invalid(
            f"webhook_changes: expected some of {', '.join(ChangeKind)}, got {unknown[0]!r}",
            option="webhook_changes",
        )
    context = WebhookContext(
        engine=engine,
        feed=feed,
        identity=await get_identity(engine, make_id),
        changes=config.webhook_changes,
        secrets=secrets,
        is_event_grid=config.webhook_format is WebhookFormat.EVENT_GRID,
        random=random.random,
    )
    seconds = config.webhook_seconds_max
    webhooks = tuple(
        Webhook(url, WebhookSender(url, timeout_seconds=seconds), context) for url in config.webhook
    )
    for webhook in webhooks:
        await webhook.register()
    return webhooks


async def run_webhooks(webhooks: Sequence[Webhook], engine: Engine) -> None:
    """Deliver while this server holds the lease, until cancelled; then close them."""

    async def deliver_all(lease: Lease) -> None:
        async with asyncio.TaskGroup() as group:
            for webhook in webhooks:
                group.create_task(webhook.run(lease))

    try:
        await run_under_lease(engine, "webhooks", deliver_all)
    finally:
        for webhook in webhooks:
            await webhook.close()


async def get_identity(engine: Engine, make_id: Callable[[], str]) -> str:
    """The id that distinguishes this store from all others. Created on first use."""
    new = make_id().lower().encode()

    def decide(transaction: Transaction) -> bytes:
        identity: bytes | None = transaction.get(IDENTITY_KEY)
        if identity is None:
            transaction.put(IDENTITY_KEY, new)
        return identity or new

    return (await engine.update([IDENTITY_KEY], decide, by=BY)).decode()
