"""Who comes, who goes, and what that does to events."""

import pytest
from msgspec.structs import replace

from forewarn import errors
from forewarn.core import command as ask
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


def enrol(scope: Scope, *vms: Vm) -> ask.SetMembers:
    return ask.SetMembers(kind=scope.kind, policy=scope.policy, vms=vms)


def test_a_vm_that_stays_keeps_its_events() -> None:
    scope = run(scope_of(), restart("web-0", 1), restart("web-1", 2))

    after = run(scope, enrol(scope, scope.vms[0], vm("web-2", domain=2)))

    assert statuses(after) == ["Reboot Scheduled web-0"]
    assert [member.name for member in after.vms] == ["web-0", "web-2"]


def test_a_vm_that_leaves_is_taken_out_of_an_event_that_others_share() -> None:
    scope = run(scope_of(vm("a"), vm("b")), maintain())
    event_id = scope.events[0].id

    after = run(scope, enrol(scope, vm("b")))

    assert [(event.id, event.resources) for event in after.events] == [(event_id, ("b",))]
    assert after.incarnation == scope.incarnation + 1


def test_the_last_vm_that_leaves_a_started_event_completes_it() -> None:
    scope = run(run(scope_of(), maintain()), ask.Tick(), at=NOON + 15 * MINUTE)

    after = run(scope, enrol(scope, scope.vms[1]), at=NOON + 16 * MINUTE)

    assert (after.events, after.impacts, [ended.how for ended in after.ended]) == (
        (),
        (),
        ["completed"],
    )


def test_enrolling_what_is_enrolled_changes_nothing() -> None:
    scope = run(scope_of(), restart())

    assert run(scope, enrol(scope, *scope.vms)) == scope


def test_a_new_member_is_not_visible_in_the_document() -> None:
    scope = scope_of()

    assert run(scope, enrol(scope, *scope.vms, vm("web-2"))).incarnation == 1


def test_a_vm_keeps_its_update_domain_while_something_is_pending_for_it() -> None:
    """Else an event would hold VMs of two domains."""
    scope = run(scope_of(), restart())
    moved = replace(scope.vms[0], update_domain=3)

    with pytest.raises(errors.VmBusy, match="cancel or complete it first"):
        run(scope, enrol(scope, moved, scope.vms[1]))
    assert (
        run(run(scope, ask.Cancel(event_id=guid(1))), enrol(scope, moved, scope.vms[1])).vms[0]
        == moved
    )


def test_a_scope_keeps_its_kind_while_an_event_is_shown() -> None:
    """The kind shows in 2017-03-01's names, and the same incarnation must mean the same bytes."""
    scope = run(scope_of(), restart())
    other = replace(enrol(scope, *scope.vms), kind=ScopeKind.CLOUD_SERVICE)

    with pytest.raises(errors.ScopeBusy):
        run(scope, other)
    assert run(scope, ask.Cancel(event_id=guid(1)), other).kind is ScopeKind.CLOUD_SERVICE


def test_a_vm_that_the_operator_moved_is_excused_from_the_old_hosts_maintenance() -> None:
    scope = run(scope_of(), maintain())

    assert run(scope, enrol(scope, replace(scope.vms[0], host="host-z"), scope.vms[1])).events == ()


def test_a_new_fleet_file_does_not_bring_an_evicted_vm_back_to_life() -> None:
    """The file says who is in the fleet, not who runs: that is known from what was done."""
    scope = scope_of(vm("web-0", power=Power.DEALLOCATED), vm("web-1", domain=1))

    after = run(scope, enrol(scope, vm("web-0", address="10.0.0.1"), vm("web-1", domain=1)))

    assert (after.vms[0].power, after.vms[0].address) == (Power.DEALLOCATED, "10.0.0.1")


def test_a_vm_stands_in_a_scope_once() -> None:
    with pytest.raises(errors.Invalid, match="duplicate VM in scope web"):
        run(scope_of(), enrol(scope_of(), vm("a"), vm("a")))


def test_retiring_a_scope_ends_everything_in_it() -> None:
    outcome = outcome_of(run(scope_of(), restart()), ask.Retire())

    assert outcome.is_gone
    assert (outcome.scope.vms, outcome.scope.events) == ((), ())
    assert [change.what for change in outcome.changes] == ["left", "canceled", "left", "retired"]
