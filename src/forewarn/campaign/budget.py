"""How much of a scope may be down at once: scope summaries, and a ledger of what is reserved.

Two rules: one update domain at a time, and at most as many VMs as the budget allows. VMs that are
already down count, whatever the reason: VMs that do not run, VMs under impact, and VMs of other
events that come before ours can be over.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from forewarn.core.event import EndReason, Event, Status
from forewarn.core.fleet import Budget, Power, Scope
from forewarn.core.machine import domains_under_impact

Residents = Mapping[int, frozenset[str]]
"""The VMs of one scope on one host, by update domain."""

NO_RESIDENTS: Residents = {}


class ScopeSummary(NamedTuple):
    """What the rules need to know of a scope, as of a revision of the store."""

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
        budgets = (self.budget, budget)
        return min((b.of(self.size) for b in budgets if b is not None), default=None)


def summarize(scope: Scope, revision: int = 0) -> ScopeSummary:
    down = {vm.name for vm in scope.vms if vm.power is not Power.RUNNING}
    for event in scope.events:
        if event.status is Status.STARTED:
            down.update(event.resources)
    down.update(impact.vm for impact in scope.impacts)
    residents: dict[str, dict[int, set[str]]] = {}
    for vm in scope.vms:
        if vm.power is not Power.DEALLOCATED:  # a deallocated VM is on no host
            residents.setdefault(vm.host, {}).setdefault(vm.update_domain, set()).add(vm.name)
    return ScopeSummary(
        name=scope.name,
        size=len(scope.vms),
        budget=scope.policy.max_unavailable,
        down=frozenset(down),
        domains=frozenset(domains_under_impact(scope)),
        residents={
            host: {domain: frozenset(vms) for domain, vms in domains.items()}
            for host, domains in residents.items()
        },
        events={event.id: event for event in scope.events},
        ended={ended.id: ended.how for ended in scope.ended},
        revision=revision,
    )


class Blocker(NamedTuple):
    """Why a host cannot start. `is_permanent`: not even if all other VMs were up."""

    host: str
    scope: str
    vms: int
    limit: int | None
    is_permanent: bool = False

    def __str__(self) -> str:
        if self.limit is None:
            return f"another update domain of {self.scope} is in progress"
        if self.is_permanent:
            what = f"{self.host} alone takes {self.vms} VMs of {self.scope} down at once"
        else:
            what = f"{self.vms} VMs of {self.scope} would be unavailable"
        return f"{what}; its max_unavailable is {self.limit}"


class BudgetLedger:
    """The VMs and update domains of each scope that hosts in progress have reserved.

    Other events count if they come before `horizon`.
    """

    def __init__(self, budget: Budget | None, horizon: datetime) -> None:
        self._budget = budget
        self._horizon = horizon
        self._vms: dict[str, set[str]] = {}
        self._domains: dict[str, set[int]] = {}

    def reserve(self, scope: str, domains: Mapping[int, Iterable[str]]) -> None:
        for domain, vms in domains.items():
            self._vms.setdefault(scope, set()).update(vms)
            self._domains.setdefault(scope, set()).add(domain)

    def reserve_host(self, host: str, scopes: Iterable[ScopeSummary]) -> None:
        for scope in scopes:
            self.reserve(scope.name, scope.residents.get(host, NO_RESIDENTS))

    def find_blocker(self, host: str, scopes: Iterable[ScopeSummary]) -> Blocker | None:
        """The first scope that does not allow the host now, those with reservations first."""
        for scope in sorted(scopes, key=lambda scope: scope.name not in self._vms):
            blocker = self._find_blocker(host, scope)
            if blocker is not None:
                return blocker
        return None

    def _find_blocker(self, host: str, scope: ScopeSummary) -> Blocker | None:
        residents = scope.residents.get(host, NO_RESIDENTS)
        if not residents:
            return None
        limit = scope.limit(self._budget)
        # The state machine of a scope never lets two update domains be under impact together.
        largest = max(map(len, residents.values()))
        if limit is not None and largest > limit:
            return Blocker(host, scope.name, largest, limit, is_permanent=True)
        busy = self._domains.get(scope.name, set()) | scope.domains
        if busy and len(busy | residents.keys()) > 1:
            return Blocker(host, scope.name, 0, None)
        if limit is None:
            return None
        taken = self._unavailable(scope)
        most = max(len(taken | vms) for vms in residents.values())
        return Blocker(host, scope.name, most, limit) if most > limit else None

    def _unavailable(self, scope: ScopeSummary) -> frozenset[str]:
        coming = (
            event.resources
            for event in scope.events.values()
            if event.is_approved or event.not_before <= self._horizon
        )
        return scope.down.union(self._vms.get(scope.name, ()), *coming)
