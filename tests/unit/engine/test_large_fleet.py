"""A large fleet is loaded and applied without keeping anybody waiting.

Turns of the event loop are counted, no time is taken.
"""

import asyncio
from collections.abc import Awaitable

import pytest

from forewarn.core.command import Claim, Fail, Finish
from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.core.machine import Group, decide
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Difference, Operations
from forewarn.engine.record import SCOPE
from forewarn.engine.replica import SCOPE_KEY
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import VALUE_BYTES_MAX, Write
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, OPERATION, run, vm


async def turns_during(doing: Awaitable[object]) -> int:
    """How many turns everybody else gets until it is done."""
    turns, is_over = 0, False

    async def poll() -> None:
        nonlocal turns
        while not is_over:  # until what is counted is done
            turns += 1
            await asyncio.sleep(0)

    polling = asyncio.create_task(poll())
    await doing
    is_over = True
    await polling
    return turns


def test_polls_pass_while_the_store_is_read() -> None:
    """A store that was lost is read again as a whole when it is back, and until then every VM can
    be answered.
    """

    async def read() -> None:
        store = MemoryStore()
        for first in range(0, 2000, 100):
            scopes = [
                Scope(name=f"s{number}", vms=(vm(f"vm-{number}"),))
                for number in range(first, first + 100)
            ]
            await store.commit(
                [Write(SCOPE_KEY.format(scope.name), SCOPE.encode(scope), 0) for scope in scopes]
            )
        engine = Engine(store, VirtualClock(NOON), Timing())
        assert await turns_during(engine.load()) >= 10
        assert len(engine.board.vms) == 2000
        assert await turns_during(engine.load()) >= 10

    asyncio.run(read())


def fleet_of(scopes: int, vms: int) -> Fleet:
    return Fleet(
        scopes=tuple(
            Scope(
                name=f"s{scope}",
                kind=ScopeKind.SCALE_SET,
                vms=tuple(vm(f"vm-{scope}-{number}") for number in range(vms)),
            )
            for scope in range(scopes)
        )
    )


def operations() -> Operations:
    return Operations(Engine(MemoryStore(), VirtualClock(NOON), Timing()), lambda: OPERATION)


@pytest.mark.parametrize(("scopes", "vms"), [(50, 100), (5000, 1), (5, 1000)])
def test_polls_pass_while_a_fleet_is_compared_and_applied(scopes: int, vms: int) -> None:
    """Five thousand VMs, in scopes of any size: all of them are looked at, and other VMs poll
    meanwhile.
    """

    async def apply() -> None:
        service, fleet = operations(), fleet_of(scopes, vms)
        least = min(10, scopes - 1)
        assert await turns_during(service.apply(fleet, by="test", dry_run=True)) >= least
        assert await turns_during(service.apply(fleet, by="test")) >= least
        assert (
            await turns_during(service.apply(fleet, by="test")) >= least
        )  # it is compared, though nothing has changed
        assert len(service.fleet().scopes) == scopes
        assert await turns_during(service.apply(Fleet(), by="test")) >= least
        assert service.fleet() == Fleet()

    asyncio.run(apply())


def test_vm_that_changes_scopes_neither_joins_nor_leaves() -> None:
    """Only scopes that change are compared; a VM that moves changes both of its scopes."""

    async def apply() -> None:
        service = operations()
        a, b, c, d = (vm(name) for name in "abcd")
        await service.apply(
            Fleet(scopes=(group("one", a, b), group("two", c), group("three", d))), by="test"
        )
        wanted = Fleet(scopes=(group("one", a), group("two", b, vm("e")), group("four", vm("f"))))
        expected = Difference(
            added=("four",),
            changed=("one", "two"),
            removed=("three",),
            vms_joined=("e", "f"),
            vms_left=("c", "d"),
            hosts_added=(),
            hosts_removed=(),
        )
        assert await service.apply(wanted, by="test", dry_run=True) == expected
        assert await service.apply(wanted, by="test") == expected
        assert {scope.name: [vm.name for vm in scope.vms] for scope in service.fleet().scopes} == {
            "one": ["a"],
            "two": ["b", "e"],
            "four": ["f"],
        }

    asyncio.run(apply())


def group(name: str, *vms: Vm) -> Scope:
    return Scope(name=name, kind=ScopeKind.SCALE_SET, vms=vms)


@pytest.mark.parametrize("problem", ["x" * 500, "\N{CJK UNIFIED IDEOGRAPH-96FB}" * 500, "\0" * 500])
def test_scope_whose_impacts_have_all_failed_can_be_stored(problem: str) -> None:
    """A result that cannot be stored would leave its impact claimed for ever."""
    count, worker = 1000, f"server-{OPERATION}"
    vms = tuple(vm(f"vm-{number:04}", address=f"10.100.100.{number}") for number in range(count))
    scope = run(
        Scope(name="big", kind=ScopeKind.SCALE_SET, vms=vms),
        Fail(host="host-a", operation_id=OPERATION),
    )
    (event,) = scope.events
    together = Group(scope)
    for each in vms:
        for command in (
            Claim(event_id=event.id, vm=each.name, worker=worker),
            Finish(event_id=event.id, vm=each.name, worker=worker, tries=1, problem=problem),
        ):
            outcome = decide(scope, command, NOON, Timing(), together)
            scope = outcome.scope
        assert outcome.changes[-1].detail == problem

    assert [impact.failures for impact in scope.impacts] == [1] * count
    assert len(SCOPE.encode(scope)) < VALUE_BYTES_MAX
