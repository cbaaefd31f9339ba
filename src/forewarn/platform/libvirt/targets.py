"""Where VMs can move: asks the other hosts for their memory, and limits the moves of each host."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import libvirt

from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest
from forewarn.platform.libvirt.connection import Domain, LibvirtHosts, ignoring
from forewarn.platform.placement import Candidate, rank_targets


class Arrival(NamedTuple):
    """A VM on its way to a host."""

    host: str
    scope: str
    need_bytes: int


@dataclass
class Targets:
    """The hosts that VMs can move to.

    At most `migrations_max` VMs leave a host at a time, and as many arrive. A VM that waits to
    arrive holds a place on its old host; one that arrives waits for nobody, so none waits forever.
    """

    libvirts: LibvirtHosts
    hosts: Callable[[], Iterable[str]]
    avoid: Callable[[], Mapping[str, int]]
    scope_hosts: Callable[[str], Iterable[str]]
    migrations_max: int

    def __post_init__(self) -> None:
        self._places = defaultdict[str, asyncio.Semaphore](
            lambda: asyncio.Semaphore(self.migrations_max)
        )
        self._arrivals: dict[str, Arrival] = {}

    def others(self, request: ImpactRequest) -> list[str]:
        """Return the hosts but the VM's own that have a URI, one for each libvirt."""
        own, uri = self.libvirts.uri(request.vm.host), self.libvirts.uri
        names = sorted({*self.hosts(), *request.targets}, reverse=True)
        by_uri = {uri(name): name for name in names if uri(name) not in ("", own)}
        return sorted(by_uri.values())

    async def _rank(self, request: ImpactRequest, need_bytes: int) -> list[str]:
        """Return the targets, the best first; none if there is no other host.

        A host that does not answer is left out. What is on its way to a host counts as there.
        """
        if request.targets:
            usable = {self.libvirts.uri(host) for host in self.others(request)}
            return [host for host in request.targets if self.libvirts.uri(host) in usable]
        others = self.others(request)
        answers = await self.libvirts.for_each(others, self._ask_memory)
        avoid, arrivals = self.avoid(), self._arrivals
        scope_vms = Counter(self.scope_hosts(request.scope))
        scope_vms.update(each.host for each in arrivals.values() if each.scope == request.scope)
        candidates = []
        for host, answer in zip(others, answers, strict=True):
            if answer is not None:
                total, used = answer
                coming = {
                    key: each.need_bytes for key, each in arrivals.items() if each.host == host
                }
                free = total - sum((coming | used).values())
                candidates.append(Candidate(host, free, avoid.get(host, 0), scope_vms[host]))
        ranked = rank_targets(candidates, need_bytes)
        if others and not ranked:
            raise ImpactFailed(
                f"{len(candidates)} of {len(others)} other hosts answer, and none has"
                f" {need_bytes >> 20} MiB of free memory for {request.vm.name}",
                vm=request.vm.name,
            )
        return ranked

    @asynccontextmanager
    async def leave(self, request: ImpactRequest, domain: Domain) -> AsyncIterator[list[str]]:
        """Within this, the VM may leave its host. Gives the targets, the best first.

        Others see it as on its way at once, so that two VMs do not choose the same free memory.
        """
        uuid = domain.handle.UUIDString()
        async with self._places[f"from {self.libvirts.uri(domain.host)}"]:
            need_bytes = await domain.do(lambda handle: int(handle.info()[1]) << 10)
            targets = await self._rank(request, need_bytes)
            self._arrivals[uuid] = Arrival("".join(targets[:1]), request.scope, need_bytes)
            try:
                yield targets
            finally:
                del self._arrivals[uuid]

    @asynccontextmanager
    async def arrive(self, domain: Domain, host: str) -> AsyncIterator[None]:
        """Within this, the VM that leaves its host may arrive on this one."""
        uuid = domain.handle.UUIDString()
        self._arrivals[uuid] = self._arrivals[uuid]._replace(host=host)
        async with self._places[f"to {self.libvirts.uri(host)}"]:
            yield

    async def _ask_memory(self, host: str) -> tuple[int, dict[str, int]] | None:
        try:
            return await self.libvirts.ask(host, read_memory)
        except ImpactFailed:
            return None


def read_memory(connection: Any) -> tuple[int, dict[str, int]]:
    """Return a host's memory, and that of each running domain by its UUID, in bytes."""
    used = {}
    for handle in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
        with ignoring(libvirt.VIR_ERR_NO_DOMAIN):  # it ended meanwhile
            used[handle.UUIDString()] = handle.info()[1] << 10
    return connection.getInfo()[1] << 20, used
