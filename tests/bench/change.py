"""What one change costs, decided, committed to memory and published: in a fleet of 10 VMs and in
one of 100,000.

A process of its own, so that the large fleet does not weigh on anything else. It prints one JSON
line.
"""

import asyncio
import gc
import json
import statistics
import time
from datetime import timedelta

from forewarn.core.command import Cancel, Restart, Seen, SetMembers
from forewarn.core.fleet import Policy, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.engine.worker import Worker
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.store.memory import MemoryStore

SCOPE_VMS = 5
CHANGES = 40
ROUNDS = 15


async def fleet_of(vms: int) -> Engine:
    engine = Engine(MemoryStore(), RealClock(), Timing())
    for first in range(0, vms, SCOPE_VMS):
        members = tuple(
            Vm(name=f"vm-{number}", host=f"host-{number}")
            for number in range(first, first + SCOPE_VMS)
        )
        enrol = SetMembers(kind=ScopeKind.AVAILABILITY_SET, policy=Policy(), vms=members)
        await engine.submit(f"scope-{first}", enrol, by="bench")
    for name in ("scope-0", f"scope-{SCOPE_VMS}"):
        await engine.submit(name, Seen(), by="bench")
    platform = SimulatedPlatform(engine.clock, durations={}, hosts=lambda: engine.board.hosts)
    Worker(
        engine, platform, worker="bench", impact_limit=timedelta(hours=1)
    )  # whose part of a change is to note the deadline
    return engine


async def seconds_per_change(engine: Engine, salt: int) -> float:
    began = time.perf_counter()
    for number in range(CHANGES // 2):
        first = number % 2 * SCOPE_VMS
        event_id = f"{salt}-{number}"
        await engine.submit(
            f"scope-{first}", Restart(vm=f"vm-{first}", event_id=event_id), by="bench"
        )
        await engine.submit(f"scope-{first}", Cancel(event_id=event_id), by="bench")
    return (time.perf_counter() - began) / CHANGES


async def main() -> None:
    small, large = await fleet_of(10), await fleet_of(100_000)
    gc.collect()
    gc.freeze()
    pairs = [
        (await seconds_per_change(small, salt), await seconds_per_change(large, salt))
        for salt in range(ROUNDS)
    ]
    print(
        json.dumps(
            {
                "small": statistics.median(pair[0] for pair in pairs),
                "large": statistics.median(pair[1] for pair in pairs),
                "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
