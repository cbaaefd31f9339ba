"""What joining, leaving and moving does to events."""

import pytest
from msgspec.structs import replace

from forewarn import errors
from forewarn.core.command import Cancel, Retire, SetMembers, Tick
from forewarn.core.fleet import Power, Scope, ScopeKind, Vm
from tests.builders import (
    MINUTE,
    NOON,
    guid,
    maintain,
    outcome_of,
    restart,
    run,
    scope_of,
    statuses,
    vm,
)


def members(scope: Scope, *vms: Vm) -> SetMembers:
    return SetMembers(kind=scope.kind, policy=scope.policy, vms=vms)


def test_vm_that_stays_keeps_its_events() -> None:
    scope = run(scope_of(), restart("web-0", 1), restart("web-1", 2))

    after = run(scope, members(scope, scope.vms[0], vm("web-2", domain=2)))

    assert statuses(after) == ["Reboot Scheduled web-0"]
    assert [member.name for member in after.vms] == ["web-0", "web-2"]


def test_vm_that_leaves_is_removed_from_a_shared_event() -> None:
    scope = run(scope_of(vm("a"), vm("b")), maintain())
    event_id = scope.events[0].id

    after = run(scope, members(scope, vm("b")))

    assert [(event.id, event.resources) for event in after.events] == [(event_id, ("b",))]
    assert after.incarnation == scope.incarnation + 1


def test_last_vm_that_leaves_completes_a_started_event() -> None:
    scope = run(run(scope_of(), maintain()), Tick(), at=NOON + 15 * MINUTE)

    after = run(scope, members(scope, scope.vms[1]), at=NOON + 16 * MINUTE)

    assert (after.events, after.impacts, [ended.how for ended in after.ended]) == (
        (),
        (),
        ["completed"],
    )


def test_same_members_again_change_nothing() -> None:
    scope = run(scope_of(), restart())

    assert run(scope, members(scope, *scope.vms)) == scope


def test_new_member_is_not_visible_in_the_document() -> None:
    scope = scope_of()

    assert run(scope, members(scope, *scope.vms, vm("web-2"))).incarnation == 1


def test_update_domain_is_fixed_while_an_event_is_pending() -> None:
    """Otherwise an event would have VMs of two domains."""
    scope = run(scope_of(), restart())
    moved = replace(scope.vms[0], update_domain=3)

    with pytest.raises(errors.VmBusy, match="cancel or complete it first"):
        run(scope, members(scope, moved, scope.vms[1]))
    assert (
        run(run(scope, Cancel(event_id=guid(1))), members(scope, moved, scope.vms[1])).vms[0]
        == moved
    )


def test_kind_is_fixed_while_an_event_is_shown() -> None:
    """The kind shows in 2017-03-01's names, and the same incarnation must mean the same bytes."""
    scope = run(scope_of(), restart())
    other = replace(members(scope, *scope.vms), kind=ScopeKind.CLOUD_SERVICE)

    with pytest.raises(errors.ScopeBusy):
        run(scope, other)
    assert run(scope, Cancel(event_id=guid(1)), other).kind is ScopeKind.CLOUD_SERVICE


def test_vm_that_was_moved_leaves_the_events_of_its_old_host() -> None:
    scope = run(scope_of(), maintain())

    assert (
        run(scope, members(scope, replace(scope.vms[0], host="host-z"), scope.vms[1])).events == ()
    )


def test_new_fleet_file_does_not_start_an_evicted_vm() -> None:
    """The file says which VMs exist, not which of them run."""
    scope = scope_of(vm("web-0", power=Power.DEALLOCATED), vm("web-1", domain=1))

    after = run(scope, members(scope, vm("web-0", address="10.0.0.1"), vm("web-1", domain=1)))

    assert (after.vms[0].power, after.vms[0].address) == (Power.DEALLOCATED, "10.0.0.1")


def test_duplicate_vm_is_refused() -> None:
    with pytest.raises(errors.Invalid, match="duplicate VM in scope web"):
        run(scope_of(), members(scope_of(), vm("a"), vm("a")))


def test_retired_scope_ends_everything_in_it() -> None:
    outcome = outcome_of(run(scope_of(), restart()), Retire())

    assert outcome.is_gone
    assert (outcome.scope.vms, outcome.scope.events) == ((), ())
    assert [change.what for change in outcome.changes] == ["left", "canceled", "left", "retired"]
