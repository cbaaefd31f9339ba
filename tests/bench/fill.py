"""A fleet that is applied to a store, and the commits per second that the store then takes.

A process of its own: `python -m tests.bench.fill STORE VMS`. It prints one JSON line.
"""

import asyncio
import itertools
import json
import sys
import time
import uuid

import uvloop

from forewarn.core.command import Cancel, Maintain
from forewarn.core.event import EventType
from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.fleetfile.parser import Fleet
from forewarn.server import make_id, open_service, pause_collector, resume_collector
from forewarn.store.open import open_store

VMS_PER_SCOPE = 10
VMS_PER_HOST = 50
COMMITS = 2000
COMMITTERS = 64
"""How many commits are in progress at a time, each for another scope."""


def scope_name(number: int) -> str:
    return f"scope-{number:06}"


def vm_name(number: int) -> str:
    return f"vm-{number:07}"


def fleet_of(vms: int) -> Fleet:
    """Scopes whose VMs have what a fleet file usually declares, each on another host."""
    hosts = max(vms // VMS_PER_HOST, VMS_PER_SCOPE)

    def vm(number: int) -> Vm:
        return Vm(
            name=vm_name(number),
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            update_domain=number % 5,
            host=f"host-{number % hosts:05}",
            id=str(uuid.UUID(int=number)),
        )

    return Fleet(
        scopes=tuple(
            Scope(
                name=scope_name(first // VMS_PER_SCOPE),
                kind=ScopeKind.SCALE_SET,
                vms=tuple(map(vm, range(first, first + VMS_PER_SCOPE))),
            )
            for first in range(0, vms, VMS_PER_SCOPE)
        )
    )


async def commits_per_second(engine: Engine) -> float:
    """Announce maintenance to one scope after the other, and cancel it: two commits each."""
    scopes = list(itertools.islice(engine.board.scopes.values(), COMMITS // 2))
    waiting = iter(scopes)

    async def commit() -> None:
        for published in waiting:  # all committers share it
            scope = published.scope
            maintain = Maintain(
                host=scope.vms[0].host, operation_id=make_id(), type=EventType.FREEZE
            )
            outcome = await engine.submit(scope.name, maintain, by="bench")
            (event,) = outcome.scope.events
            await engine.submit(scope.name, Cancel(event_id=event.id), by="bench")

    before = count_commits(engine)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(COMMITTERS):
            group.create_task(commit())
    seconds = time.perf_counter() - began
    if count_commits(engine) - before != 2 * len(scopes):
        raise RuntimeError("commits were repeated, or shared")
    return 2 * len(scopes) / seconds


def count_commits(engine: Engine) -> int:
    return sum(engine.metrics.store.counts)


async def fill(url: str, vms: int) -> dict[str, float]:
    pause_collector()
    wanted = fleet_of(vms)
    store = await open_store(url)
    async with open_service(store, RealClock(), Timing(), make_id) as service:
        began = time.perf_counter()
        await service.operations.apply(wanted, by="bench")
        seconds = time.perf_counter() - began
        resume_collector()
        commits = count_commits(service.engine)
        rate = await commits_per_second(service.engine)
    return {"apply_seconds": seconds, "apply_commits": commits, "commits_per_second": rate}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(fill(sys.argv[1], int(sys.argv[2])))))
