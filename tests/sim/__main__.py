"""More worlds: servers alone, with outages, with host daemons, and with disks without a lock.

`python -m tests.sim --seeds 1000 --first 50`. Without libvirt's lock manager, a VM may be started
twice if an operator starts it by hand between the check and the act of a daemon, or if the clone of
a machine reports for its host while the original is away; such worlds are counted. Names the seed
of what it finds otherwise, and then ends with 1.
"""

import argparse
import asyncio
import sys
import traceback
from collections import Counter
from collections.abc import Callable

from tests.sim.hostd_world import HostdWorld
from tests.sim.hypervisors import OnlyTheLock
from tests.sim.outage_world import OutageWorld
from tests.sim.world import World

WITHOUT_LOCK = "host daemons without a disk lock"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=500)
    chosen = parser.parse_args()
    found, expected = 0, Counter[str]()
    simulations: dict[str, Callable[[int], object]] = {
        "servers": lambda seed: asyncio.run(World(seed).run()),
        "outages": lambda seed: asyncio.run(OutageWorld(seed).run()),
        "host daemons": lambda seed: HostdWorld(seed, has_lock=True).run(),
        WITHOUT_LOCK: lambda seed: HostdWorld(seed).run(),
    }
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        for name, run in simulations.items():
            try:
                run(seed)
            except Exception as problem:
                if name == WITHOUT_LOCK and isinstance(problem, OnlyTheLock):
                    expected[type(problem).__name__] += 1
                    continue
                found += 1
                print(f"{name}, seed {seed}:", file=sys.stderr)
                traceback.print_exc(limit=-3)
    passed = len(simulations) * chosen.seeds - found - expected.total()
    print(
        f"{passed} passed, {found} failed; {WITHOUT_LOCK}: {dict(expected) or 'none'} ended early"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
