"""The forecast of a campaign: its hosts in waves, none of which takes more of a scope than its
budget allows. Pure.

Only a forecast: at work a host has its turn as soon as there is room for it, not when a whole wave
is over.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice

import msgspec

from forewarn.campaign.budget import NOBODY, Hindrance, Ledger, Standing
from forewarn.core.fleet import Budget

WINDOW_MIN, WINDOW_MAX = 64, 1000


class Forecast(msgspec.Struct, frozen=True):
    """Hosts in waves; those that can never have their turn; those that cannot as things stand now,
    and will wait.
    """

    waves: tuple[tuple[str, ...], ...]
    too_large: tuple[Hindrance, ...]
    waiting: tuple[Hindrance, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """In the order in which they will have their turn."""
        return tuple(host for wave in self.waves for host in wave) + tuple(
            one.host for one in self.waiting
        )


def window_of(max_hosts: int) -> int:
    """How many hosts are looked at to find those that have their turn next: the work of a step,
    whatever the fleet's size.
    """
    return min(max(4 * max_hosts, WINDOW_MIN), WINDOW_MAX)


def forecast(
    hosts: Sequence[str],
    on_host: Callable[[str], Sequence[Standing]],
    *,
    max_hosts: int,
    budget: Budget | None,
    horizon: datetime,
) -> Forecast:
    """Each wave is filled with the first hosts, of the next few, that fit together.

    `on_host` tells the scopes of a host.
    """
    standings = {host: on_host(host) for host in hosts}
    nothing_taken = Ledger(budget, horizon)
    hindrances = [
        found for host in hosts if (found := nothing_taken.hindrance(host, standings[host]))
    ]
    stuck = {found.host for found in hindrances}
    rest = (host for host in hosts if host not in stuck)
    scopes = {host: frozenset(one.name for one in standings[host]) for host in hosts}
    domains = {
        host: frozenset(
            (one.name, domain)
            for one in standings[host]
            for domain in one.residents.get(host, NOBODY)
        )
        for host in hosts
    }
    window: list[str] = []
    waves = []
    while True:  # ends: each wave takes a host at least, for alone each of them fits
        window += islice(rest, window_of(max_hosts) - len(window))
        if not window:
            break
        ledger, taken, taken_domains = Ledger(budget, horizon), set[str](), set[tuple[str, int]]()
        wave: dict[str, None] = {}
        for host in window:
            if len(wave) == max_hosts:
                break
            shared = taken & scopes[host]  # of the other scopes nothing is taken, and so it fits
            if len(shared) > len(taken_domains & domains[host]):
                # another domain of one of them: told at once, for most that do not fit do not for
                # this
                continue
            if shared and ledger.hindrance(
                host, [one for one in standings[host] if one.name in shared]
            ):
                continue
            ledger.take_host(host, standings[host])
            taken |= scopes[host]
            taken_domains |= domains[host]
            wave[host] = None
        window = [host for host in window if host not in wave]
        waves.append(tuple(wave))
    return Forecast(
        waves=tuple(waves),
        too_large=tuple(found for found in hindrances if found.is_for_good),
        waiting=tuple(found for found in hindrances if not found.is_for_good),
    )
