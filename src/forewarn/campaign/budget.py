"""How much of a scope may be down at once: a scope at a glance, and a ledger of what is taken of
each scope.

Two rules: one update domain at a time, and at most the budget's number of VMs. Whoever is down
already counts, whatever the reason: VMs that do not run, VMs under impact, and those of others'
events that will come before ours can be over.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from forewarn.core.event import EndReason, Event, Status
from forewarn.core.fleet import Budget, Power, Scope
from forewarn.core.machine import domains_under_impact

Residents = Mapping[int, frozenset[str]]
"""The VMs of one scope on one host, by update domain."""

NOBODY: Residents = {}


class Standing(NamedTuple):
    """A scope at a glance. `revision` is that of the store at which it stood so."""

    name: str
    size: int
    budget: Budget | None
    down: frozenset[str]
    domains: frozenset[int]
    residents: Mapping[str, Residents]
    events: Mapping[str, Event]
    ended: Mapping[str, EndReason]
    revision: int = 0

    def limit(self, budget: Budget | None) -> int | None:
        """The smaller of the scope's own budget and another one; None if there is neither."""
        return min(
            (one.of(self.size) for one in (self.budget, budget) if one is not None), default=None
        )


def standing(scope: Scope, revision: int = 0) -> Standing:
    down = {vm.name for vm in scope.vms if vm.power is not Power.RUNNING}
    down.update(
        vm for event in scope.events if event.status is Status.STARTED for vm in event.resources
    )
    down.update(impact.vm for impact in scope.impacts)
    residents: dict[str, dict[int, set[str]]] = {}
    for vm in scope.vms:
        if vm.power is not Power.DEALLOCATED:  # it has given up its place
            residents.setdefault(vm.host, {}).setdefault(vm.update_domain, set()).add(vm.name)
    return Standing(
        name=scope.name,
        size=len(scope.vms),
        budget=scope.policy.max_unavailable,
        down=frozenset(down),
        domains=frozenset(domains_under_impact(scope)),
        residents={
            host: {one: frozenset(vms) for one, vms in domains.items()}
            for host, domains in residents.items()
        },
        events={event.id: event for event in scope.events},
        ended={ended.id: ended.how for ended in scope.ended},
        revision=revision,
    )


class Hindrance(NamedTuple):
    """Why a host cannot have its turn. `is_for_good`: not even if everybody else were up."""

    host: str
    scope: str
    vms: int
    limit: int | None
    is_for_good: bool = False

    def __str__(self) -> str:
        if self.limit is None:
            return f"another update domain of {self.scope} is under way"
        if self.is_for_good:
            return f"{self.host} alone takes {self.vms} VMs of {self.scope} down at once; max_unavailable there is {self.limit}"
        return f"{self.vms} VMs of {self.scope} would be unavailable; max_unavailable there is {self.limit}"


class Ledger:
    """What is taken of each scope by hosts that have their turn.

    `horizon`: what others plan until then counts as well.
    """

    def __init__(self, budget: Budget | None, horizon: datetime) -> None:
        self._budget = budget
        self._horizon = horizon
        self._vms: dict[str, set[str]] = {}
        self._domains: dict[str, set[int]] = {}

    def take(self, scope: str, domains: Mapping[int, Iterable[str]]) -> None:
        for domain, vms in domains.items():
            self._vms.setdefault(scope, set()).update(vms)
            self._domains.setdefault(scope, set()).add(domain)

    def take_host(self, host: str, standings: Iterable[Standing]) -> None:
        for one in standings:
            self.take(one.name, one.residents.get(host, NOBODY))

    def hindrance(self, host: str, standings: Iterable[Standing]) -> Hindrance | None:
        """The first scope that forbids the host's turn now.

        Scopes of which something is taken are looked at first.
        """
        fresh = []
        for one in standings:
            if one.name not in self._vms:
                fresh.append(one)
            elif found := self._hindrance(host, one):
                return found
        return next(
            (found for found in (self._hindrance(host, one) for one in fresh) if found), None
        )

    def _hindrance(self, host: str, scope: Standing) -> Hindrance | None:
        residents = scope.residents.get(host, NOBODY)
        if not residents:
            return None
        busy = self._domains.get(scope.name, set()) | scope.domains
        limit = scope.limit(self._budget)
        if limit is not None:
            alone = max(
                map(len, residents.values())
            )  # the machine never lets two update domains be under impact together
            if alone > limit:
                return Hindrance(host, scope.name, alone, limit, is_for_good=True)
        if busy and len(busy | residents.keys()) > 1:
            return Hindrance(host, scope.name, 0, None)
        if limit is not None:
            taken = self._taken(scope)
            most = max(len(taken | vms) for vms in residents.values())
            if most > limit:
                return Hindrance(host, scope.name, most, limit)
        return None

    def _taken(self, scope: Standing) -> frozenset[str]:
        taken = scope.down.union(self._vms.get(scope.name, ()))
        coming = (
            event
            for event in scope.events.values()
            if event.is_approved or event.not_before <= self._horizon
        )
        return taken.union(vm for event in coming for vm in event.resources)
