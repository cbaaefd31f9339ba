"""How the work of a function grows with its input, as a ratio: nothing here depends on how fast the
machine is.
"""

import time
from collections.abc import Callable

ROUNDS = 5
LINEAR_MAX = 9.0
"""Four times the input costs about 4 times as much if the work is linear, 16 times if it is
quadratic.
"""


def growth(work: Callable[[int], object], size: int) -> float:
    """CPU time for four times the size, divided by the CPU time for the size; the best of several
    rounds of each.
    """
    return _cpu_seconds(work, 4 * size) / _cpu_seconds(work, size)


def _cpu_seconds(work: Callable[[int], object], size: int) -> float:
    def once() -> float:
        before = time.process_time()
        work(size)
        return time.process_time() - before

    return min(once() for _ in range(ROUNDS))
