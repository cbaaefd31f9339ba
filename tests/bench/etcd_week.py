"""How much disk a week of commits needs in etcd, with compaction and without.

`python -m tests.bench.etcd_week` prints a row for each. 1,000 VMs in scopes of five: every scope is
polled, which is recorded once an hour, and every VM is rebooted once with notice and approval. Time
is simulated; etcd is real, one member, with its data in memory.
"""

import asyncio
import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from aetcd import rpc

from forewarn.core.command import Approve, Claim, Finish, Restart, SetMembers
from forewarn.core.fleet import Policy, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.lab.clock import VirtualClock
from forewarn.store.etcd import EtcdStore
from forewarn.store.open import open_store
from tests.builders import NOON, guid
from tests.etcd_cluster import EtcdCluster

VMS, SCOPE_VMS, HOURS = 1000, 5, 7 * 24
MIB = 1024 * 1024


def name_of_scope(vm: int) -> str:
    return f"scope-{vm // SCOPE_VMS}"


async def apply_fleet(engine: Engine) -> None:
    for first in range(0, VMS, SCOPE_VMS):
        members = tuple(
            Vm(
                name=f"vm-{number}",
                address=f"10.{number >> 8}.{number & 255}.1",
                update_domain=number % SCOPE_VMS,
                host=f"host-{number // 20}",
            )
            for number in range(first, first + SCOPE_VMS)
        )
        enrol = SetMembers(kind=ScopeKind.AVAILABILITY_SET, policy=Policy(), vms=members)
        await engine.submit(name_of_scope(first), enrol, by="bench")


async def reboot(engine: Engine, number: int) -> None:
    """As a VM and a worker do it: announce, approve, claim, finish."""
    scope, vm, event_id = name_of_scope(number), f"vm-{number}", guid(number + 1)
    await engine.submit(scope, Restart(vm=vm, event_id=event_id), by="bench")
    await engine.submit(scope, Approve(event_ids=(event_id,), vm=vm), by=vm)
    await engine.submit(scope, Claim(event_id=event_id, vm=vm, worker="bench"), by="bench")
    finish = Finish(event_id=event_id, vm=vm, worker="bench", tries=1)
    await engine.submit(scope, finish, by="bench")


async def simulate(store: EtcdStore, *, compact: bool) -> dict[str, Any]:
    clock = VirtualClock(NOON)
    engine = Engine(store, clock, Timing())
    await engine.load()
    await apply_fleet(engine)
    before, done = 0, 0
    for hour in range(HOURS):
        for published in list(engine.board.scopes.values()):
            await engine.seen(published)
            if engine._background:
                await asyncio.gather(*engine._background.values())
        while done < VMS * (hour + 1) // HOURS:
            await reboot(engine, done)
            done += 1
        # what a server does every `etcd_retention_minutes`, which are 60
        if compact and before:
            await store._client.write(rpc.CompactionRequest(revision=before))
        before = (await store.get("")).revision
        await clock.advance(timedelta(hours=1))
        if sys.stderr.isatty():
            print(f"\rhour {hour + 1} of {HOURS}", end="", file=sys.stderr)
    status = await store._client.read(rpc.StatusRequest())
    return {
        "revisions": before,
        "history values": len(await store.history(limit=1_000_000)),
        "db_bytes": status.dbSize,
        "in_use_bytes": status.dbSizeInUse,
    }


def files_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


async def measure(*, compact: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="week-") as folder:
        cluster = EtcdCluster(Path(folder))
        cluster.start()
        try:
            store = await open_store(cluster.url())
            assert isinstance(store, EtcdStore)
            try:
                found = await simulate(store, compact=compact)
                return found | {"files_bytes": files_bytes(cluster.members[0].folder / "data")}
            finally:
                await store.close()
        finally:
            cluster.stop()


def main() -> None:
    for compact in (True, False):
        found = asyncio.run(measure(compact=compact))
        sizes = {
            name.removesuffix("_bytes"): f"{value / MIB:.1f} MiB"
            for name, value in found.items()
            if name.endswith("_bytes")
        }
        print(json.dumps({"compacted": compact, **found, **sizes}))


if __name__ == "__main__":
    main()
