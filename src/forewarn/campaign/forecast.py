"""The forecast of a campaign: its hosts in waves that keep every scope within its budget. Pure.

It is only a forecast: a running campaign starts a host as soon as the budgets allow it, and does
not wait for a whole wave.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import islice

import msgspec

from forewarn.campaign.budget import Blocker, BudgetLedger, ScopeSummary
from forewarn.core.fleet import Budget

WINDOW_MIN, WINDOW_MAX = 64, 1000


class Forecast(msgspec.Struct, frozen=True):
    """Hosts in waves, hosts that can never start, and hosts that cannot start at present."""

    waves: tuple[tuple[str, ...], ...]
    too_large: tuple[Blocker, ...]
    waiting: tuple[Blocker, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """In the order in which they will start."""
        in_waves = tuple(host for wave in self.waves for host in wave)
        return in_waves + tuple(blocker.host for blocker in self.waiting)


def window_size(max_hosts: int) -> int:
    """How many waiting hosts one step considers, however large the fleet is."""
    return min(max(4 * max_hosts, WINDOW_MIN), WINDOW_MAX)


def forecast(
    scopes: Mapping[str, Sequence[ScopeSummary]],
    *,
    max_hosts: int,
    budget: Budget | None,
    horizon: datetime,
) -> Forecast:
    """Fill each wave with the first hosts of the window that fit together.

    `scopes` has the scopes with VMs on each host.
    """
    alone = BudgetLedger(budget, horizon)
    found = ((host, alone.find_blocker(host, scopes[host])) for host in scopes)
    blockers = {host: blocker for host, blocker in found if blocker is not None}
    rest = (host for host in scopes if host not in blockers)
    window: list[str] = []
    waves: list[tuple[str, ...]] = []
    while window := [*window, *islice(rest, window_size(max_hosts) - len(window))]:
        ledger, wave = BudgetLedger(budget, horizon), dict[str, None]()
        for host in window:  # each fits alone, so each wave takes at least one
            if len(wave) == max_hosts:
                break
            if ledger.find_blocker(host, scopes[host]) is None:
                ledger.reserve_host(host, scopes[host])
                wave[host] = None
        window = [host for host in window if host not in wave]
        waves.append(tuple(wave))
    return Forecast(
        waves=tuple(waves),
        too_large=tuple(blocker for blocker in blockers.values() if blocker.is_permanent),
        waiting=tuple(blocker for blocker in blockers.values() if not blocker.is_permanent),
    )
