"""More worlds, each of them without and with host daemons:

`python -m tests.sim --seeds 1000 --first 50`. The hosts have libvirt's lock manager, unless
`--no-lock`: then an operator who starts a VM by hand, between the check and the act of a daemon,
can still start it twice; such worlds are counted. Names the seed of what it finds otherwise, and
then ends with 1.
"""

import argparse
import asyncio
import sys
import traceback
from collections.abc import Callable

from tests.sim.hostd_world import HostdWorld
from tests.sim.hypervisors import StartedByHand
from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--no-lock", action="store_true")
    chosen = parser.parse_args()
    found = by_hand = 0
    simulations: dict[str, Callable[[int], object]] = {
        "servers": lambda seed: asyncio.run(World(seed).run()),
        "host daemons": lambda seed: HostdWorld(seed, has_lock=not chosen.no_lock).run(),
    }
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        for name, run in simulations.items():
            try:
                run(seed)
            except StartedByHand:
                by_hand += 1
            except Exception:
                found += 1
                print(f"{name}, seed {seed}:", file=sys.stderr)
                traceback.print_exc(limit=-3)
    passed = len(simulations) * chosen.seeds - found - by_hand
    print(f"{passed} passed, {found} failed, {by_hand} ended with a VM that was started by hand")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
