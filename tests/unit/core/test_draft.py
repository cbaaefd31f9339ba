"""Every change tells what it concerns: the event's type, cause and VMs, the host, and why."""

from forewarn.core import command as ask
from forewarn.core.change import Change, ChangeKind
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


def told(scope: Scope, command: ask.Command) -> list[Change]:
    return list(outcome_of(scope, command).changes)


def test_what_is_scheduled_tells_what_why_where_and_when() -> None:
    """Whoever reads the history next week has no event to look at any more."""
    (change,) = told(scope_of(), maintain(description="New firmware."))

    assert (change.type, change.cause, change.resources) == (
        EventType.FREEZE,
        Cause.MAINTENANCE,
        ("web-0",),
    )
    assert (change.host, change.description) == ("host-a", "New firmware.")
    assert change.not_before is not None
    assert change.not_before > NOON


def test_what_befalls_a_vm_alone_names_its_host() -> None:
    """A search by host finds what users did there too."""
    (change,) = told(scope_of(), restart("web-1"))

    assert (change.host, change.resources, change.cause) == ("host-b", ("web-1",), Cause.RESTART)


def test_a_start_tells_who_or_what_brought_it() -> None:
    """Early is only right when somebody said go ahead."""
    scheduled = run(scope_of(), restart())

    approved, started = told(scheduled, approve("web-1"))
    assert (approved.what, approved.detail) == (ChangeKind.APPROVED, "web-1")
    assert (started.detail, started.resources, started.host) == (
        "approved by web-1",
        ("web-0",),
        "host-a",
    )
    event = scheduled.events[0]
    (due,) = outcome_of(scheduled, ask.Tick(), at=event.not_before).changes
    assert due.detail == "NotBefore has come"
    assert (
        told(scope_of(), ask.Fail(host="host-a", operation_id=OPERATION))[1].detail
        == "host-a has failed"
    )


def test_an_approval_records_the_vm_that_gave_it_and_the_host_of_the_event() -> None:
    """A VM may be named like another approver, so its name alone does not say who it was; and it
    need not be in the event.
    """
    members = (vm("web-0"), vm("operator", domain=1, host="host-b"))
    scheduled = run(scope_of(*members), restart())

    by_vm, by_operator = told(scheduled, approve("operator"))[0], told(scheduled, approve(""))[0]

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


def test_an_end_still_tells_what_ended() -> None:
    """The event is gone from the scope; its note is what is left of it."""
    (change,) = told(run(scope_of(), restart()), ask.Cancel(event_id=guid(1)))

    assert (change.what, change.type, change.resources, change.host) == (
        ChangeKind.CANCELED,
        EventType.REBOOT,
        ("web-0",),
        "host-a",
    )


def test_what_is_canceled_by_itself_tells_why() -> None:
    """Nobody asked for it, so nobody is there to be asked."""
    scope = run(scope_of(), restart("web-1"))
    rest = ask.SetMembers(kind=scope.kind, policy=scope.policy, vms=scope.vms[:1])

    left, canceled = told(scope, rest)
    assert (left.what, left.vm, left.host) == (ChangeKind.LEFT, "web-1", "host-b")
    assert (canceled.what, canceled.detail) == (ChangeKind.CANCELED, "web-1 has left")


def test_what_failed_tells_what_the_platform_said() -> None:
    scope = run(scope_of(), restart(), approve("web-0"))
    scope = run(scope, claim(), finish(problem="no such domain"))
    later = NOON + STANDARD.retry_window
    changes = outcome_of(
        run(scope, claim(), at=later), finish(tries=2, problem="no such domain"), at=later
    ).changes

    assert (changes[-1].what, changes[-1].detail) == (ChangeKind.FAILED, "web-0: no such domain")


def test_a_vm_that_moved_is_told_of_both_its_hosts() -> None:
    """Who looks at either host wants to see it go or come."""
    scope = scope_of()
    moved = (vm("web-0", host="host-c"), scope.vms[1])
    (change,) = told(scope, ask.SetMembers(kind=scope.kind, policy=scope.policy, vms=moved))

    assert (change.what, change.host_before, change.host) == (ChangeKind.MOVED, "host-a", "host-c")


def test_an_operation_without_an_event_tells_what_it_is() -> None:
    """Where nobody polls there is no event, and the history is the only trace."""
    scope = scope_of(is_enabled=False)
    (ordered,) = told(scope, restart())
    done = outcome_of(run(scope, restart(), claim()), finish()).changes

    assert (ordered.type, ordered.cause, ordered.resources, ordered.host) == (
        EventType.REBOOT,
        Cause.RESTART,
        ("web-0",),
        "host-a",
    )
    assert [(change.what, change.resources) for change in done] == [
        (ChangeKind.IMPACTED, ("web-0",)),
        (ChangeKind.COMPLETED, ("web-0",)),
    ]


def test_what_happens_to_one_vm_of_an_event_concerns_that_vm_alone() -> None:
    """Else an event of a thousand VMs would write a thousand names into each of its thousands of
    notes.
    """
    scope = run(scope_of(vm("a"), vm("b")), ask.Fail(host="host-a", operation_id=OPERATION))
    event_id = scope.events[0].id

    (claimed,) = told(scope, ask.Claim(event_id=event_id, vm="b", worker="w1"))

    assert (claimed.what, claimed.vm, claimed.resources, claimed.host) == (
        ChangeKind.CLAIMED,
        "b",
        ("b",),
        "host-a",
    )
