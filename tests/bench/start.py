"""How long a server takes from an SQLite file to a board that can be polled, against reading and
decoding the same records.

A process of its own: `python -m tests.bench.start [VMS] [VMS_PER_SCOPE]`. It prints one JSON line.
"""

import asyncio
import gc
import json
import resource
import sqlite3
import sys
import tempfile
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.record import SCOPE, SEEN
from forewarn.engine.replica import SCOPE_KEY, SEEN_KEY
from forewarn.engine.worker import Worker
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.server import open_service, pause_collector, resume_collector
from forewarn.store.base import Write
from forewarn.store.sqlite import SqliteStore

SEEN_AT = datetime(2026, 3, 4, 12, tzinfo=UTC)
SCOPES_PER_COMMIT = 50
"""A commit is limited to 1 MiB."""


def scope(number: int, vms: int) -> Scope:
    """A scope whose VMs have all that a fleet file usually declares."""
    members = range(number * vms, (number + 1) * vms)
    kind = ScopeKind.VM if vms == 1 else ScopeKind.SCALE_SET
    return Scope(
        name=f"scope-{number:07}",
        kind=kind,
        vms=tuple(map(vm, members)),
        incarnation=5,
    )


def vm(number: int) -> Vm:
    return Vm(
        name=f"vm-{number:07}",
        address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
        update_domain=number % 5,
        host=f"host-{number // 50:05}",
        id=str(uuid.UUID(int=number)),
    )


async def fill(path: Path, vms: int, vms_per_scope: int) -> None:
    store = await SqliteStore.open(str(path))
    for first in range(0, vms // vms_per_scope, SCOPES_PER_COMMIT):
        scopes = [
            scope(number, vms_per_scope)
            for number in range(first, min(first + SCOPES_PER_COMMIT, vms // vms_per_scope))
        ]
        await store.commit(
            [Write(SCOPE_KEY.format(one.name), SCOPE.encode(one), 0) for one in scopes]
        )
        await store.commit(
            [Write(SEEN_KEY.format(one.name), SEEN.encode(SEEN_AT), 0) for one in scopes]
        )
    await store.close()


def read_alone(path: Path) -> float:
    """Seconds to read and decode every record, and do nothing with it."""
    gc.disable()
    began = time.perf_counter()
    with sqlite3.connect(path) as connection:
        values = connection.execute("SELECT key, value FROM record ORDER BY key")
        scopes = [
            SCOPE.decode(value) if key.startswith("scope/") else SEEN.decode(value)
            for key, value in values
        ]
    seconds = time.perf_counter() - began
    assert scopes
    gc.enable()
    return seconds


async def start(path: Path) -> float:
    """Seconds from opening the file until `serve` would open its listeners."""
    began = time.perf_counter()
    clock = RealClock()
    pause_collector()
    store = await SqliteStore.open(str(path))
    async with open_service(store, clock, Timing(), lambda: "") as service:
        resume_collector()
        engine = service.engine
        platform = SimulatedPlatform(clock, durations={}, hosts=lambda: engine.board.hosts)
        Worker(engine, platform, worker="bench", impact_limit=timedelta(hours=1))
        return time.perf_counter() - began


def main() -> None:
    vms, vms_per_scope = (int(argument) for argument in (*sys.argv[1:], "1000000", "100")[:2])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forewarn.db"
        asyncio.run(fill(path, vms, vms_per_scope))
        alone = read_alone(path)
        seconds = asyncio.run(start(path))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    numbers = {"seconds": seconds, "alone": alone, "ratio": seconds / alone, "peak_mib": memory}
    print(json.dumps({"vms": vms, "vms_per_scope": vms_per_scope, **numbers}))


if __name__ == "__main__":
    main()
