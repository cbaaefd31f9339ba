"""Every change is complete: type, cause and VMs of its event, the host, and the reason."""

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Cancel, Claim, Command, Fail, Redeploy, SetMembers, Tick
from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Scope
from tests.builders import (
    NOON,
    OPERATION,
    STANDARD,
    approve,
    claim,
    finish,
    guid,
    maintain,
    outcome_of,
    restart,
    run,
    scope_of,
    vm,
)


def changes_of(scope: Scope, command: Command) -> list[Change]:
    return list(outcome_of(scope, command).changes)


def test_scheduled_has_type_cause_host_time_and_description() -> None:
    """The event may be gone when the history is read."""
    (change,) = changes_of(scope_of(), maintain(description="New firmware."))

    assert (change.type, change.cause, change.resources) == (
        EventType.FREEZE,
        Cause.MAINTENANCE,
        ("web-0",),
    )
    assert (change.host, change.description) == ("host-a", "New firmware.")
    assert change.not_before is not None
    assert change.not_before > NOON


def test_operation_on_a_vm_has_its_host() -> None:
    """So a search by host finds what users did there."""
    (change,) = changes_of(scope_of(), restart("web-1"))

    assert (change.host, change.resources, change.cause) == ("host-b", ("web-1",), Cause.RESTART)


def test_started_has_the_reason_of_the_start() -> None:
    """Starting early needs an approval."""
    scheduled = run(scope_of(), restart())

    approved, started = changes_of(scheduled, approve("web-1"))
    assert (approved.what, approved.detail) == (ChangeKind.APPROVED, "web-1")
    assert (started.detail, started.resources, started.host) == (
        "approved by web-1",
        ("web-0",),
        "host-a",
    )
    event = scheduled.events[0]
    (due,) = outcome_of(scheduled, Tick(), at=event.not_before).changes
    assert due.detail == "NotBefore has been reached"
    assert (
        changes_of(scope_of(), Fail(host="host-a", operation_id=OPERATION))[1].detail
        == "host-a has failed"
    )


def test_approved_has_the_approving_vm_and_the_host_of_the_event() -> None:
    """A VM may be named `operator`, and it need not be a resource of the event."""
    members = (vm("web-0"), vm("operator", domain=1, host="host-b"))
    scheduled = run(scope_of(*members), restart())

    by_vm, by_operator = (
        changes_of(scheduled, approve("operator"))[0],
        changes_of(scheduled, approve(""))[0],
    )

    assert (by_vm.what, by_vm.detail, by_vm.vm, by_vm.host) == (
        ChangeKind.APPROVED,
        "operator",
        "operator",
        "host-a",
    )
    assert (by_operator.what, by_operator.detail, by_operator.vm) == (
        ChangeKind.APPROVED,
        "operator",
        "",
    )


def test_end_has_the_facts_of_its_event() -> None:
    """The history is all that is left of the event."""
    (change,) = changes_of(run(scope_of(), restart()), Cancel(event_id=guid(1)))

    assert (change.what, change.type, change.resources, change.host) == (
        ChangeKind.CANCELED,
        EventType.REBOOT,
        ("web-0",),
        "host-a",
    )
    assert (change.description, change.duration_seconds) == (
        "Virtual machine is going to be restarted as requested by authorized user.",
        -1,
    )


def test_automatic_cancellation_has_its_reason() -> None:
    """No operator canceled it, so the history must explain it."""
    scope = run(scope_of(), restart("web-1"))
    rest = SetMembers(kind=scope.kind, policy=scope.policy, vms=scope.vms[:1])

    left, canceled = changes_of(scope, rest)
    assert (left.what, left.vm, left.host) == (ChangeKind.LEFT, "web-1", "host-b")
    assert (canceled.what, canceled.detail) == (ChangeKind.CANCELED, "web-1 has left")


def test_failed_has_the_message_of_the_platform() -> None:
    scope = run(scope_of(), restart(), approve("web-0"))
    scope = run(scope, claim(), finish(problem="no such domain"))
    later = NOON + STANDARD.retry_window
    changes = outcome_of(
        run(scope, claim(), at=later), finish(tries=2, problem="no such domain"), at=later
    ).changes

    assert (changes[-1].what, changes[-1].detail) == (ChangeKind.FAILED, "web-0: no such domain")


def test_moved_has_both_hosts() -> None:
    """So the history of either host shows the move."""
    scope = scope_of()
    moved = (vm("web-0", host="host-c"), scope.vms[1])
    (change,) = changes_of(scope, SetMembers(kind=scope.kind, policy=scope.policy, vms=moved))

    assert (change.what, change.host_before, change.host) == (ChangeKind.MOVED, "host-a", "host-c")


def test_silent_operation_has_type_cause_and_vm() -> None:
    """Without an event the history is the only trace."""
    scope = scope_of(is_enabled=False)
    (executed,) = changes_of(scope, restart())
    done = outcome_of(run(scope, restart(), claim()), finish()).changes

    assert (executed.type, executed.cause, executed.resources, executed.host) == (
        EventType.REBOOT,
        Cause.RESTART,
        ("web-0",),
        "host-a",
    )
    assert [(change.what, change.resources) for change in done] == [
        (ChangeKind.IMPACTED, ("web-0",)),
        (ChangeKind.COMPLETED, ("web-0",)),
    ]


def test_change_of_one_vm_of_an_event_names_that_vm_alone() -> None:
    """Otherwise an event of 1,000 VMs would write 1,000 names into thousands of entries."""
    scope = run(scope_of(vm("a"), vm("b")), Fail(host="host-a", operation_id=OPERATION))
    event_id = scope.events[0].id

    (claimed,) = changes_of(scope, Claim(event_id=event_id, vm="b", worker="w1"))

    assert (claimed.what, claimed.vm, claimed.resources, claimed.host) == (
        ChangeKind.CLAIMED,
        "b",
        ("b",),
        "host-a",
    )
    assert (claimed.description, claimed.duration_seconds) == ("", None)


def test_end_has_the_host_where_the_vm_was_before() -> None:
    """A redeploy happens on the old host; the new one is in the change `moved`."""
    scope = run(scope_of(), Redeploy(vm="web-0", event_id=guid(1)), approve("web-0"), claim())

    changes = outcome_of(scope, finish(host="host-z")).changes

    assert [(change.what, change.host) for change in changes] == [
        (ChangeKind.IMPACTED, "host-a"),
        (ChangeKind.MOVED, "host-z"),
        (ChangeKind.COMPLETED, "host-a"),
    ]


def test_end_names_all_vms_that_left_together() -> None:
    """The VMs leave one by one, and the event ends with the last one."""
    scope = run(scope_of(vm("a"), vm("b"), vm("c", host="host-b")), maintain())
    rest = SetMembers(kind=scope.kind, policy=scope.policy, vms=scope.vms[2:])

    canceled = changes_of(scope, rest)[-1]

    assert (canceled.what, canceled.resources) == (ChangeKind.CANCELED, ("a", "b"))
