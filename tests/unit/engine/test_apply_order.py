"""A large fleet is applied in several commits, in an order that is safe to stop at any of them."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine import fleet_apply
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.errors import StoreLost
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import (
    COMMIT_BYTES_MAX,
    VALUE_BYTES_MAX,
    WRITES_MAX,
    RevisionCheck,
    Write,
)
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, OPERATION, vm


class Crashing(MemoryStore):
    """Accepts `accepts` commits, then none."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts = 10**9
        self.sizes: list[tuple[int, int, int]] = []

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        if self.accepts == 0:
            raise StoreLost("the machine has crashed")
        self.accepts -= 1
        values = [len(write.value or b"") for write in writes] + [len(entries or b"")]
        self.sizes.append((len(writes) + len(checks), max(values), sum(values)))
        return await super().commit(writes, checks, entries)


async def server(store: MemoryStore) -> Operations:
    """A process that has just started."""
    engine = Engine(store, VirtualClock(NOON), Timing())
    await engine.load()
    return Operations(engine, lambda: OPERATION)


def group(name: str, *vms: Vm) -> Scope:
    return Scope(name=name, kind=ScopeKind.SCALE_SET, vms=vms)


def single(member: Vm, name: str = "") -> Scope:
    return Scope(name=name or member.name, kind=ScopeKind.VM, vms=(member,))


def at(name: str, number: int) -> Vm:
    """A VM with an address and an id of that number; 0: with neither."""
    if not number:
        return vm(name)
    identity = f"00000000-0000-4000-8000-{number:012}"
    return replace(vm(name, address=f"10.0.0.{number}"), id=identity)


def fleet(*scopes: Scope) -> Fleet:
    return Fleet(scopes=tuple(sorted(scopes, key=lambda scope: scope.name)))


PLAIN = fleet(group("keep", at("k", 1)), single(at("old-1", 2)), single(at("old-2", 3)))
CHANGES = {
    "new and deleted": (
        PLAIN,
        fleet(group("keep", at("k", 1)), single(at("a-new", 4)), single(at("z-new", 5))),
    ),
    "a VM moves": (
        fleet(group("a", at("m", 1), at("n", 2)), group("b", at("o", 3))),
        fleet(group("a", at("n", 2)), group("b", at("m", 1), at("o", 3))),
    ),
    "two groups exchange VMs": (
        fleet(group("a", at("m", 1), at("n", 2)), group("b", at("o", 3))),
        fleet(group("a", at("n", 2), at("o", 3)), group("b", at("m", 1)), group("c", at("p", 4))),
    ),
    "two VMs exchange their scopes": (
        fleet(single(at("m", 1), "a"), single(at("n", 2), "b")),
        fleet(single(at("n", 2), "a"), single(at("m", 1), "b")),
    ),
    "two VMs exchange their addresses": (
        fleet(single(at("m", 1)), single(at("n", 2)), group("o")),
        fleet(single(at("m", 2)), single(at("n", 1)), group("o", at("p", 3))),
    ),
    "a new VM takes a deleted one's address": (
        PLAIN,
        fleet(group("keep", at("k", 1)), single(at("a-new", 2)), single(at("z-new", 9))),
    ),
    "a VM takes the address that another gives up": (
        fleet(single(at("m", 1)), single(at("n", 2)), single(at("x", 4))),
        fleet(single(at("m", 2)), single(at("n", 3)), single(at("y", 5))),
    ),
    "addresses rotate while VMs move": (
        fleet(group("a", at("m", 1), at("n", 2)), group("b", at("o", 3)), single(at("p", 4))),
        fleet(group("a", at("m", 2), at("o", 1)), group("b", at("n", 4)), single(at("q", 3))),
    ),
}


def members(scopes: Sequence[Scope]) -> list[Vm]:
    return [vm for scope in scopes for vm in scope.vms]


def identities(vms: Sequence[Vm]) -> list[str]:
    """Their names, addresses and ids."""
    return [value for vm in vms for value in (vm.name, vm.address, vm.id) if value]


def check_between(before: Fleet, found: Sequence[Scope], after: Fleet) -> None:
    """What is stored is consistent, and has every new VM if an old one is gone."""
    counts = Counter(identities(members(found)))
    assert set(counts.values()) <= {1}, counts
    names = {vm.name for vm in members(found)}
    old, new = ({vm.name: vm for vm in members(one.scopes)} for one in (before, after))
    assert names <= old.keys() | new.keys()
    gone = old.keys() - new.keys() - names
    taken = set(identities(list(old.values())))
    untouched = {name for name, vm in new.items() if taken.isdisjoint(identities([vm]))}
    assert not gone or untouched <= names, "an old VM was deleted before a new one was added"
    stays = places(before) & places(after)
    assert stays <= places(Fleet(scopes=tuple(found))), "a VM that stays was gone"


def places(fleet: Fleet) -> set[tuple[str, str]]:
    return {(scope.name, vm.name) for scope in fleet.scopes for vm in scope.vms}


@pytest.mark.parametrize("per_commit", [1, 2, 100])
@pytest.mark.parametrize("change", CHANGES)
def test_apply_can_be_stopped_after_any_commit_and_repeated(
    change: str, per_commit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No VM is ever in two scopes, no two VMs have one address, and no VM is deleted before the
    new ones exist. Applying again does the rest.
    """
    monkeypatch.setattr(fleet_apply, "VMS_PER_COMMIT_MAX", per_commit)
    before, after = CHANGES[change]

    async def main() -> None:
        for commits in range(20):
            store = Crashing()
            await (await server(store)).apply(before, by="ann")
            store.accepts = commits
            try:
                await (await server(store)).apply(after, by="ann")
            except StoreLost:
                check_between(before, (await server(store)).fleet().scopes, after)
            else:
                assert commits == 1 or per_commit < 100
                break
            store.accepts = 10**9
            again = await server(store)
            await again.apply(after, by="ann")
            for each in (again, await server(store)):
                assert each.fleet() == after
        else:
            pytest.fail("the apply never ended")
        assert (await server(store)).fleet() == after

    asyncio.run(main())


def test_vms_with_one_address_on_two_hosts_keep_it_during_an_apply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither takes it from the other, so neither has to give it up for a commit."""
    monkeypatch.setattr(fleet_apply, "VMS_PER_COMMIT_MAX", 1)

    def twins(domain: int) -> Fleet:
        each = {name: vm(name, domain=domain, address="10.0.0.1", host=name) for name in "ab"}
        return fleet(*map(single, each.values()))

    async def main() -> None:
        store = Crashing()
        await (await server(store)).apply(twins(0), by="ann")
        store.accepts = 1
        with pytest.raises(StoreLost):
            await (await server(store)).apply(twins(1), by="ann")
        found = members((await server(store)).fleet().scopes)
        assert [vm.update_domain for vm in found] == [1, 0]
        assert [vm.address for vm in found] == ["10.0.0.1"] * 2

    asyncio.run(main())


def test_hundred_thousand_vms_are_applied_within_the_limits() -> None:
    """And some replaced by others: standalone VMs and large scopes, no commit over a limit."""

    def large(prefix: str) -> Fleet:
        sizes = [1000] * 95 + [1] * 5000
        names = [
            f"keep-{number}" if number < 90 else f"{prefix}-{number}" for number in range(5095)
        ]
        return Fleet(
            scopes=tuple(
                group(name, *(vm(f"{name}-{each}") for each in range(size)))
                for name, size in zip(names, sizes, strict=True)
            )
        )

    async def main() -> None:
        store = Crashing()
        operations = await server(store)
        for prefix in ("one", "two"):
            await operations.apply(large(prefix), by="ann")
            assert len(operations._engine.board.vms) == 100_000
        most = [max(sizes) for sizes in zip(*store.sizes, strict=True)]
        for found, limit in zip(most, (WRITES_MAX, VALUE_BYTES_MAX, COMMIT_BYTES_MAX), strict=True):
            assert found <= limit
        assert len(store.sizes) < 500

    asyncio.run(main())
