"""Where VMs are and can move: asks the hosts for their domains and memory, and limits the moves."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import libvirt

from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest
from forewarn.platform.libvirt import marker
from forewarn.platform.libvirt.connection import Domain, LibvirtHosts, ignoring
from forewarn.platform.placement import Move, rank_targets


@dataclass
class Targets:
    """The hosts that VMs are on and can move to.

    `hosts` are all of them; `avoid` says which are bad ones, and how bad; `scope_hosts` are the
    hosts of a scope's VMs. A daemon knows none of that: its requests have targets.

    At most `migrations_max` VMs leave a host at a time, and as many arrive. A VM that waits to
    arrive holds a place on its old host; one that arrives waits for none, so no VM waits forever.
    """

    libvirts: LibvirtHosts
    hosts: Callable[[], Iterable[str]] = tuple
    avoid: Callable[[], Mapping[str, int]] = dict
    scope_hosts: Callable[[str], Iterable[str]] = lambda scope: ()
    migrations_max: int = 2

    def __post_init__(self) -> None:
        self._places = defaultdict[str, asyncio.Semaphore](
            lambda: asyncio.Semaphore(self.migrations_max)
        )
        self._moves: dict[str, Move] = {}

    def others(self, request: ImpactRequest) -> list[str]:
        """Return all other hosts that may have the VM."""
        return self._with_uri(request, (*self.hosts(), *request.targets, *request.may_run_on))

    def _with_uri(self, request: ImpactRequest, hosts: Iterable[str]) -> list[str]:
        """Those of these hosts that have a URI, one for each libvirt but that of the VM's host."""
        own, uri = self.libvirts.uri(request.vm.host), self.libvirts.uri
        by_uri = {uri(host): host for host in sorted({*hosts}, reverse=True)}
        return sorted(host for key, host in by_uri.items() if key not in ("", own))

    async def find(self, request: ImpactRequest) -> list[Domain]:
        """Find the domains of the VM: the one that runs first.

        If it does not run on its own host, those that may run it are asked; all hosts if it is not
        even defined there, or if it is to move, which may be half done.
        """
        vm, uri = request.vm, self.libvirts.uri
        here = await self.libvirts.find(vm.host, vm)
        if here is not None and not await here.is_off():
            return [here]
        begun = await here.ask(marker.read) if here is not None else marker.Marker()
        hosts = {begun.target, *request.may_run_on} - {""}
        if here is None or request.moves:
            hosts |= {*self.others(request)}
        by_uri = {uri(host): host for host in sorted(hosts) if uri(host) != uri(vm.host)}

        async def look(host: str) -> Domain | None:
            try:
                return await self.libvirts.find(host, vm, is_needed=True)
            except ImpactFailed as error:
                raise ImpactFailed(
                    f"{vm.name} may run on {host}, which does not answer: {error}", host=host
                ) from error

        copies = (here, *await self.libvirts.for_each(by_uri.values(), look))
        found = [domain for domain in copies if domain is not None]
        off = [domain for domain in found if await domain.is_off()]
        running = [domain for domain in found if domain not in off]
        return running + [
            domain for domain in off if domain is here or not await self.discard(domain, begun)
        ]

    async def discard(self, copy: Domain, begun: marker.Marker) -> bool:
        """Undefine what a move, as the marker on its host says, has defined on a target and not
        started. A start that is still on its way there fails then. False if it is something else,
        such as the VM on the host that it leaves, seen from the target.
        """
        uri = self.libvirts.uri
        is_source = begun.host and uri(begun.host) == uri(copy.host)
        is_ours = begun.event and (await copy.ask(marker.read)).event == begun.event
        if is_source or not is_ours or not await copy.is_off():
            return False
        await copy.undefine(libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
        if not await copy.is_off():
            raise ImpactFailed(f"the VM was started on {copy.host} meanwhile", host=copy.host)
        return True

    async def _rank(self, request: ImpactRequest, move: Move) -> list[str]:
        """Return the targets, the best first; none if there is no other host.

        A host that does not answer is left out. What is on its way to a host counts as there.
        That a host may run the VM does not make it a target.
        """
        if request.targets:
            usable = {self.libvirts.uri(host) for host in self._with_uri(request, request.targets)}
            return [host for host in request.targets if self.libvirts.uri(host) in usable]
        others = self._with_uri(request, self.hosts())
        answers = await self.libvirts.for_each(others, self._ask_memory)
        free = {
            host: answer[0] - sum(self._without_moves(host, answer[1]))
            for host, answer in zip(others, answers, strict=True)
            if answer is not None
        }
        return rank_targets(
            move,
            free,
            hosts=len(others),
            moves=self._moves.values(),
            moves_max=self.migrations_max,
            avoid=self.avoid(),
            scope_hosts=self.scope_hosts(request.scope),
        )

    def _without_moves(self, host: str, used: Mapping[str, int]) -> list[int]:
        """Of the domains of a host, those that are not on their way to it."""
        coming = {uuid for uuid, move in self._moves.items() if move.host == host}
        return [used[uuid] for uuid in used.keys() - coming]

    @asynccontextmanager
    async def leave(self, request: ImpactRequest, domain: Domain) -> AsyncIterator[list[str]]:
        """Within this, the VM may leave its host. Gives the targets, the best first.

        Others see it as on its way at once, so that two VMs do not choose the same free memory.
        """
        uuid = domain.uuid
        async with self._places[f"from {self.libvirts.uri(domain.host)}"]:
            need_bytes = await domain.ask(lambda handle: int(handle.info()[1]) << 10)
            move = Move(request.vm.name, request.scope, need_bytes)
            targets = await self._rank(request, move)
            self._moves[uuid] = move._replace(host="".join(targets[:1]))
            try:
                yield targets
            finally:
                del self._moves[uuid]

    @asynccontextmanager
    async def arrive(self, domain: Domain, host: str) -> AsyncIterator[None]:
        """Within this, the VM that leaves its host may arrive on this one."""
        uuid = domain.uuid
        self._moves[uuid] = self._moves[uuid]._replace(host=host)
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
