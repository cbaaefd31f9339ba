"""How long each step may take. Pure.

The time to NotBefore, less a reserve for the approval itself, is split over the steps still to do,
by weight. What a step leaves over goes to those after it. Nobody gets less than MINIMUM_SECONDS: so
when time is short the first steps are run and the last, in the order of the file, are cut. Start
and recover have no deadline: there each step has its own limit, or LIMIT_SECONDS.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MINIMUM_SECONDS = 0.5
LIMIT_SECONDS = 300.0
RESERVE_PART = 0.1
RESERVE_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Budget:
    """The time for one phase.

    `deadline` is when the steps must be over, a moment of the monotonic clock; None is no deadline.
    """

    deadline: float | None = None

    @classmethod
    def until(cls, moment: float, now: float) -> "Budget":
        """The budget for what must be done, and approved, at `moment`."""
        reserve = min(RESERVE_PART * max(0.0, moment - now), RESERVE_SECONDS_MAX)
        return cls(moment - reserve)

    def seconds_for(
        self, weights_left: Sequence[float], limit_seconds: float | None, now: float
    ) -> float:
        """What the first of the steps still to do may take; 0 means that it is cut."""
        assert weights_left, "asked for no step"
        if self.deadline is None:
            return LIMIT_SECONDS if limit_seconds is None else limit_seconds
        left = self.deadline - now
        if left < MINIMUM_SECONDS:
            return 0.0
        share = max(MINIMUM_SECONDS, min(left, left * weights_left[0] / sum(weights_left)))
        return share if limit_seconds is None else min(share, limit_seconds)

    def will_make_it(self, expected_seconds: Iterable[float], now: float) -> bool:
        """Whether the steps still to do fit into what is left, each taking as long as is expected
        of it.
        """
        return self.deadline is None or sum(expected_seconds) <= self.deadline - now
