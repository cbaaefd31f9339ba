"""More worlds, each of them without and with host daemons:

`python -m tests.sim --seeds 1000 --first 50`. Names the seed of what it finds, and then ends with
1.
"""

import argparse
import asyncio
import sys
import traceback
from collections.abc import Callable

from tests.sim.hostd_world import HostdWorld
from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=500)
    chosen = parser.parse_args()
    found = 0
    simulations: dict[str, Callable[[int], object]] = {
        "servers": lambda seed: asyncio.run(World(seed).run()),
        "host daemons": lambda seed: HostdWorld(seed).run(),
    }
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        for name, run in simulations.items():
            try:
                run(seed)
            except Exception:
                found += 1
                print(f"{name}, seed {seed}:", file=sys.stderr)
                traceback.print_exc(limit=-3)
    print(f"{len(simulations) * chosen.seeds - found} passed, {found} failed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
