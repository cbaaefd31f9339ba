"""How much of a scope may be down at a time: scope summaries, and a ledger of what is reserved.

Two rules: one update domain at a time, and at most as many VMs as the budget allows. VMs that are
already down count, whatever the reason: VMs that do not run, VMs under impact, VMs on hosts that
are unreachable, and VMs of other events that come before ours can be over.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from datetime import datetime
from itertools import chain
from typing import NamedTuple

from forewarn.core.event import Status
from forewarn.core.fleet import Budget, Power, Scope
from forewarn.core.machine import domains_under_impact


class ScopeSummary:
    """What the budget needs to know of a scope: which VMs are down, and which are on a host.

    `lost` are those of its hosts that are unreachable.
    """

    def __init__(self, scope: Scope, is_lost: Callable[[str], bool] = lambda host: False) -> None:
        self.scope = scope
        self._is_lost = is_lost
        self.lost = self._find_lost({vm.host for vm in scope.vms})
        self.domains = domains_under_impact(scope)
        down = {vm.name for vm in scope.vms if vm.power.is_off or vm.host in self.lost}
        started = (event.resources for event in scope.events if event.status is Status.STARTED)
        self.down: Set[str] = down.union(*started, (impact.vm for impact in scope.impacts))
        self._residents: dict[str, dict[int, set[str]]] = {}
        for vm in scope.vms:
            if vm.power is not Power.DEALLOCATED:  # a deallocated VM is on no host
                on_host = self._residents.setdefault(vm.host, {})
                on_host.setdefault(vm.update_domain, set()).add(vm.name)

    def is_of(self, scope: Scope) -> bool:
        """Whether this is still the summary of the scope."""
        return self.scope is scope and self.lost == self._find_lost(self._residents)

    def _find_lost(self, hosts: Iterable[str]) -> Set[str]:
        return {host for host in hosts if self._is_lost(host)}

    def on(self, host: str) -> Mapping[int, Set[str]]:
        """The VMs on a host, by update domain."""
        return self._residents.get(host, {})

    def limit(self, budget: Budget | None) -> int | None:
        """The smaller of the scope's own budget and another one; None if there is neither."""
        budgets = (self.scope.policy.max_unavailable, budget)
        return min((b.of(len(self.scope.vms)) for b in budgets if b is not None), default=None)


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
        for summary in scopes:
            self.reserve(summary.scope.name, summary.on(host))

    def find_blocker(self, host: str, scopes: Iterable[ScopeSummary]) -> Blocker | None:
        """The first scope that does not allow the host now.

        Scopes with reservations come first: they are the likely ones, and a plan asks often.
        """
        for summary in sorted(scopes, key=lambda summary: summary.scope.name not in self._vms):
            blocker = self._find_blocker(host, summary)
            if blocker is not None:
                return blocker
        return None

    def _find_blocker(self, host: str, summary: ScopeSummary) -> Blocker | None:
        name, residents = summary.scope.name, summary.on(host)
        if not residents:
            return None
        limit = summary.limit(self._budget)
        # The state machine of a scope never lets two update domains be under impact together.
        largest = max(map(len, residents.values()))
        if limit is not None and largest > limit:
            return Blocker(host, name, largest, limit, is_permanent=True)
        busy = self._domains.get(name, set()) | summary.domains
        if busy and len(busy | residents.keys()) > 1:
            return Blocker(host, name, 0, None)
        if limit is None:
            return None
        taken = self._unavailable(summary)
        most = max(len(taken | vms) for vms in residents.values())
        return Blocker(host, name, most, limit) if most > limit else None

    def _unavailable(self, summary: ScopeSummary) -> Set[str]:
        coming = (
            event.resources
            for event in summary.scope.events
            if event.is_approved or event.not_before <= self._horizon
        )
        return {*summary.down, *self._vms.get(summary.scope.name, ()), *chain(*coming)}
