"""A large fleet is loaded and applied without keeping anybody waiting.

Turns of the event loop are counted, no time is taken.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable
from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn.core.command import (
    Approve,
    Claim,
    Command,
    Fail,
    Finish,
    Maintain,
    Restart,
    SetMembers,
)
from forewarn.core.event import Ended, EndReason, EventType
from forewarn.core.fleet import Approval, Policy, Scope, ScopeKind, Vm
from forewarn.core.machine import Group, decide
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.fleet_apply import ChangedItem
from forewarn.engine.operations import Difference, Operations
from forewarn.engine.record import SCOPE
from forewarn.engine.replica import SCOPE_KEY
from forewarn.errors import Invalid
from forewarn.fleetfile.parser import FieldChange, Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import VALUE_BYTES_MAX, Write
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, OPERATION, guid, run, vm


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
            details=(ChangedItem("two", "b", (FieldChange("scope", "one", "two"),)),),
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


def long_name(prefix: str, length: int) -> str:
    return prefix.ljust(length, "x")


def longest(number: int, name_length: int) -> Vm:
    """A VM with everything but instance metadata, all as long as accepted."""
    return Vm(
        name=long_name(f"vm-{number:04}-", name_length),
        address=f"2001:0db8:85a3:0000:0000:8a2e:0370:{number:04x}",
        update_domain=10,
        host=long_name("host-", name_length),
        id=f"00000000-0000-4000-8000-{number:012}",
        fault_domain=10,
    )


def scope_of_longest(vms: int, name_length: int) -> Scope:
    members = tuple(longest(number, name_length) for number in range(vms))
    return Scope(name=long_name("big-", name_length), kind=ScopeKind.SCALE_SET, vms=members)


def is_accepted(scope: Scope) -> bool:
    async def apply() -> bool:
        try:
            await operations().apply(Fleet(scopes=(scope,)), by="test", dry_run=True, digest="d")
        except Invalid:
            return False
        return True

    return asyncio.run(apply())


@pytest.mark.parametrize("type_", [EventType.REBOOT, EventType.REDEPLOY])
@pytest.mark.parametrize("name_length", [36, 64, 128])
def test_largest_scope_whose_vms_all_fail_fits_into_its_record(
    name_length: int, type_: EventType
) -> None:
    """Every VM approves, the host fails and so does every attempt, while a hundred restarts are
    announced and a thousand events have ended. What was accepted must stay possible to store:
    a result that is not would leave its impact claimed.
    """
    most = bisect_left(
        range(1001), True, key=lambda vms: not is_accepted(scope_of_longest(vms, name_length))
    )
    count = most - 1
    assert count > {36: 999, 64: 800, 128: 580}[name_length]
    scope = scope_of_longest(count, name_length)
    host, worker = scope.vms[0].host, f"server-{OPERATION}"
    members = SetMembers(kind=scope.kind, policy=Policy(approval=Approval.ALL), vms=scope.vms)
    scope = run(Scope(name=scope.name), replace(members, is_file=True))
    scope = replace(
        scope,
        seen_at=NOON,
        incarnation=2**31,
        ended=tuple(
            Ended(guid(number), EndReason.COMPLETED, NOON + timedelta(microseconds=number))
            for number in range(1, 1001)
        ),
    )
    now, together = NOON + timedelta(microseconds=1), Group(scope)

    def submit(command: Command) -> None:
        nonlocal scope
        scope = decide(scope, command, now, Timing(), together).scope

    for number, each in enumerate(scope.vms[:100]):
        submit(Restart(vm=each.name, event_id=guid(5000 + number)))
    submit(Maintain(host=host, operation_id=OPERATION, type=type_, description="x" * 500))
    event = scope.events[-1]
    for each in scope.vms[:-1]:
        submit(Approve(event_ids=(event.id,), vm=each.name))
    submit(Approve(event_ids=(event.id,), vm=scope.vms[-1].name))

    def claim(vm: Vm) -> None:
        stop_seconds = 1234.5
        claim = Claim(event_id=event.id, vm=vm.name, worker=worker, host=vm.host)
        submit(replace(claim, stop_seconds=stop_seconds))

    for each in scope.vms:
        claim(each)
        submit(Finish(event_id=event.id, vm=each.name, worker=worker, tries=1, problem='"' * 500))
    now += timedelta(hours=1)
    for each in scope.vms:
        claim(each)

    impacts = [impact for impact in scope.impacts if impact.event_id == event.id]
    assert [impact.claimed_by for impact in impacts] == [worker] * count
    assert len(scope.ended) == 1000
    size = len(SCOPE.encode(scope))
    assert VALUE_BYTES_MAX * 3 // 4 < size < VALUE_BYTES_MAX, count


def test_scope_that_may_outgrow_its_record_is_refused() -> None:
    """Before anything is applied, with what to do."""

    async def apply() -> None:
        service = operations()
        fleet = Fleet(scopes=(group("one", vm("a")), scope_of_longest(1000, 128)))
        for dry_run in (True, False):
            with pytest.raises(
                Invalid,
                match=r"scope big-x+ with 1000 VMs and their events may need \d+ bytes; at most"
                r" 1048576 fit into its record: use fewer VMs, shorter names or less user data",
            ):
                await service.apply(fleet, by="test", dry_run=dry_run)
        assert service.fleet() == Fleet()

    asyncio.run(apply())


def test_scope_accepted_by_an_earlier_version_may_change_but_not_grow() -> None:
    """An operator must be able to remove a VM from it, or to correct one."""

    async def apply() -> None:
        service, large = operations(), scope_of_longest(800, 128)
        await service._engine.store.commit(
            [Write(SCOPE_KEY.format(large.name), SCOPE.encode(large), 0)]
        )
        await service._engine.load()
        corrected = replace(large, vms=(replace(large.vms[0], update_domain=11), *large.vms[1:]))
        await service.apply(Fleet(scopes=(corrected,)), by="test")
        assert service.fleet().scopes[0].vms == corrected.vms
        with pytest.raises(Invalid, match="fit into its record"):
            await service.apply(
                Fleet(scopes=(replace(large, vms=(*large.vms, longest(800, 128))),)), by="test"
            )

    asyncio.run(apply())


def test_apply_leaves_room_for_what_has_happened_to_its_scopes() -> None:
    """A scope remembers up to a thousand ended events, however small its definition is."""

    async def apply() -> None:
        service = operations()
        ended = tuple(Ended(guid(number), EndReason.COMPLETED, NOON) for number in range(400))
        scopes = [replace(scope, ended=ended) for scope in fleet_of(50, 1).scopes]
        for scope in scopes:
            await service._engine.store.commit(
                [Write(SCOPE_KEY.format(scope.name), SCOPE.encode(scope), 0)]
            )
        await service._engine.load()
        vms = [replace(scope.vms[0], update_domain=7) for scope in scopes]
        wanted = Fleet(scopes=tuple(group(f"s{number}", vm) for number, vm in enumerate(vms)))
        await service.apply(wanted, by="test")
        assert {vm.update_domain for one in service.fleet().scopes for vm in one.vms} == {7}

    asyncio.run(apply())
