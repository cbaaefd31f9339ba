"""What a server does for the history besides writing it: keep it within its limits, and tell the
webhooks. Told by the config.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from forewarn.config import Config
from forewarn.core.change import ChangeKind
from forewarn.engine.engine import Engine
from forewarn.errors import Invalid
from forewarn.history.retention import RetentionWorker
from forewarn.history.webhook_http import Postbox
from forewarn.history.webhooks import Office, Receiver, identity_of


@asynccontextmanager
async def kept(
    config: Config,
    engine: Engine,
    *,
    worker: str,
    secrets: Sequence[bytes],
    make_id: Callable[[], str],
    chance: Callable[[], float],
) -> AsyncIterator[asyncio.Task[None]]:
    """Within this the work is done, in the task that is given.

    What happens from now on is told to every webhook.
    """
    tail = engine.tail
    keep = timedelta(days=config.history_days)
    retention = RetentionWorker(
        engine.store, engine.clock, tail, keep=keep, commits_max=config.history_notes_max
    )
    receivers = []
    if config.webhook:
        office = Office(
            store=engine.store,
            clock=engine.clock,
            tail=tail,
            worker=worker,
            identity=await identity_of(engine.store, make_id),
            changes=_changes(config.webhook_changes),
            secrets=secrets,
            limit=timedelta(seconds=config.webhook_seconds_max),
            chance=chance,
        )
        boxes = {
            url: Postbox(url, seconds_max=config.webhook_seconds_max) for url in config.webhook
        }
        receivers = [Receiver(url, box, office) for url, box in boxes.items()]
    for receiver in receivers:
        await receiver.enter()
    tail.webhooks = tuple(receivers)
    work = asyncio.create_task(_run(retention, receivers))
    try:
        yield work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _run(retention: RetentionWorker, receivers: Sequence[Receiver]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(retention.run())
        for receiver in receivers:
            group.create_task(receiver.run())


def _changes(names: Sequence[str]) -> frozenset[ChangeKind]:
    unknown = [name for name in names if name not in list(ChangeKind)]
    if unknown:
        raise Invalid(
            f"webhook_changes: expected some of {', '.join(ChangeKind)}, got {unknown[0]!r}",
            option="webhook_changes",
        )
    return frozenset(ChangeKind(name) for name in names)
