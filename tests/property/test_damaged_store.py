"""A store file with single flipped bits: a disk or a cable does that, and no checksum in SQLite
notices it.
"""

import asyncio
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.auth.tokens import Role, Tokens
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.errors import StoreUnusable
from forewarn.fleetfile.parser import Fleet
from forewarn.history.query import EntryFilter, read
from forewarn.lab.clock import VirtualClock
from forewarn.store.sqlite import SqliteStore
from tests.builders import NOON, guid, vm

FLIPS = 300
FLEET = Fleet(
    scopes=(
        Scope(
            name="web",
            kind=ScopeKind.AVAILABILITY_SET,
            vms=(vm("web-0"), vm("web-1", domain=1, host="host-b")),
        ),
        *(
            Scope(name=f"db-{number}", kind=ScopeKind.VM, vms=(vm(f"db-{number}"),))
            for number in range(20)
        ),
    ),
    hosts=("host-a", "host-b", "host-c"),
)


async def fill(path: Path) -> None:
    """A store with every kind of record: scopes with events, the fleet, tokens, history."""
    engine = Engine(await SqliteStore.open(str(path)), VirtualClock(NOON), Timing())
    tokens = Tokens(engine)
    try:
        await engine.load()
        ids = (guid(number) for number in range(1, 1000))
        operations = Operations(engine, lambda: next(ids))
        await operations.apply(FLEET, by="test")
        await engine.seen(engine.board.scopes["web"])
        await operations.restart("web-0", by="test")
        await tokens.create(
            "boss", Role.ADMIN, secret="a" * 64, by="test", expires_in=timedelta(days=1)
        )
    finally:
        await engine.close()


async def use(path: Path) -> None:
    """All that a starting server reads."""
    engine = Engine(await SqliteStore.open(str(path)), VirtualClock(NOON), Timing())
    try:
        await engine.load()
        await anext(engine.store.watch(0))
        await read(engine.store, EntryFilter(), limit=1000)
    finally:
        await engine.close()


def test_flipped_bits_are_survived_or_reported_as_a_damaged_store(tmp_path: Path) -> None:
    """An operator restores a backup for a damaged store, and reports a bug to us; the message
    decides which.
    """
    whole, path = tmp_path / "whole.db", tmp_path / "store.db"
    asyncio.run(fill(whole))
    content = whole.read_bytes()
    written = [place for place, byte in enumerate(content) if byte]
    dice, outcomes = random.Random(16), Counter[str]()
    for _ in range(FLIPS):
        place, bit = dice.choice(written), dice.randrange(8)
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
        )
        try:
            asyncio.run(use(path))
            outcomes["used"] += 1
        except StoreUnusable:
            outcomes["refused"] += 1
        except Exception as error:
            pytest.fail(f"bit {bit} of byte {place}: {error!r}")
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)

    assert min(outcomes["used"], outcomes["refused"]) > FLIPS // 10, outcomes
