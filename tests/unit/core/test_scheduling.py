"""What operations create: events with their notice, silent impacts, or errors."""

from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from forewarn import errors
from forewarn.core.command import (
    Approve,
    Cancel,
    Claim,
    Command,
    Degrade,
    Delete,
    Evict,
    Fail,
    Finish,
    Maintain,
    Redeploy,
    SetMembers,
    Tick,
)
from forewarn.core.event import Cause, EventType, Source, Status
from forewarn.core.fleet import AutoApprove, Power, Scope, ScopeKind
from forewarn.core.timing import Timing
from tests.builders import (
    MINUTE,
    NOON,
    OPERATION,
    SECOND,
    guid,
    maintain,
    outcome_of,
    restart,
    run,
    run_impact,
    scope_of,
    statuses,
    vm,
)


@pytest.mark.parametrize(
    ("command", "notice"),
    [
        (restart(), 15 * MINUTE),
        (Redeploy(vm="web-0", event_id=guid(1)), 10 * MINUTE),
        (Evict(vm="web-0", event_id=guid(1)), 30 * SECOND),
        (Delete(vm="web-0", event_id=guid(1)), 5 * MINUTE),
        (maintain(type_=EventType.FREEZE), 15 * MINUTE),
        (maintain(type_=EventType.REBOOT), 15 * MINUTE),
        (maintain(type_=EventType.REDEPLOY), 10 * MINUTE),
        (Degrade(host="host-a", operation_id=OPERATION), timedelta(days=7)),
    ],
)
def test_every_type_gives_its_notice(command: Command, notice: timedelta) -> None:
    """The notice is what a guest plans with (protocol 6.2)."""
    (event,) = run(scope_of(), command).events

    assert (event.status, event.not_before) == (Status.SCHEDULED, NOON + notice)


@pytest.mark.parametrize(
    ("command", "type_", "source", "seconds", "description"),
    [
        (
            restart(),
            "Reboot",
            "User",
            -1,
            "Virtual machine is going to be restarted as requested by authorized user.",
        ),
        (
            Redeploy(vm="web-0", event_id=guid(1)),
            "Redeploy",
            "User",
            -1,
            "Virtual machine is going to be redeployed as requested by authorized user.",
        ),
        (Evict(vm="web-0", event_id=guid(1)), "Preempt", "Platform", -1, ""),
        (
            Delete(vm="web-0", event_id=guid(1)),
            "Terminate",
            "User",
            -1,
            "Virtual machine is going to be deleted as requested by authorized user.",
        ),
        (maintain(), "Freeze", "Platform", 9, "Host server is undergoing maintenance."),
        (
            maintain(cause=Cause.LIVE_MIGRATION, duration_seconds=5),
            "Freeze",
            "Platform",
            5,
            (
                "Virtual machine is being paused because of a memory-preserving Live Migration"
                " operation."
            ),
        ),
        (
            maintain(type_=EventType.REBOOT, description="New kernel."),
            "Reboot",
            "Platform",
            -1,
            "New kernel.",
        ),
        (
            Degrade(host="host-a", operation_id=OPERATION),
            "Redeploy",
            "Platform",
            -1,
            "Host server is undergoing an emergency repair.",
        ),
        (
            Fail(host="host-a", operation_id=OPERATION),
            "Reboot",
            "Platform",
            -1,
            "Virtual machine has encountered a failure.",
        ),
    ],
)
def test_event_has_type_source_duration_and_text_of_its_cause(
    command: Command, type_: str, source: str, seconds: int, description: str
) -> None:
    """The texts are those of Azure (protocol 2.2 and 2.5)."""
    (event,) = run(scope_of(), command).events

    assert (event.type, event.source, event.duration_seconds, event.description) == (
        type_,
        source,
        seconds,
        description,
    )


def test_not_before_is_rounded_up_to_a_whole_second() -> None:
    """The wire has no fractions, and NotBefore must not be early."""
    at = NOON + timedelta(microseconds=1)

    (event,) = run(scope_of(), restart(), at=at).events

    assert event.not_before == NOON + 15 * MINUTE + SECOND


def test_operator_may_give_more_notice() -> None:
    later = NOON + timedelta(hours=3, milliseconds=500)

    (event,) = run(scope_of(), restart(not_before=later)).events

    assert event.not_before == NOON + timedelta(hours=3, seconds=1)


def test_operator_may_not_give_a_second_less_notice() -> None:
    with pytest.raises(
        errors.NoticeTooShort,
        match=r"12:14:59Z; this Reboot needs .* 15m, so 2026-03-04T12:15:00Z at",
    ):
        run(scope_of(), restart(not_before=NOON + 15 * MINUTE - SECOND))


def test_not_before_more_than_a_year_ahead_is_refused() -> None:
    with pytest.raises(errors.Invalid, match="at most 366 days ahead"):
        run(scope_of(), restart(not_before=NOON + timedelta(days=367)))


@pytest.mark.parametrize(
    "value", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-03-05T00:00:00"]
)
def test_invalid_not_before_is_refused(value: str) -> None:
    """The ends of the calendar, and a time without a zone: `decide` raises only Errors."""
    with pytest.raises(errors.Invalid, match="not_before"):
        run(scope_of(), restart(not_before=datetime.fromisoformat(value)))


def test_rate_shortens_every_notice() -> None:
    """At 60, a quarter of an hour is a quarter of a minute."""
    timing = Timing.at_rate(60)

    scope = run(
        scope_of(terminate_notice=10 * MINUTE),
        restart(),
        Delete(vm="web-1", event_id=guid(2)),
        timing=timing,
    )

    assert [event.not_before for event in scope.events] == [NOON + 15 * SECOND, NOON + 10 * SECOND]


def test_repeated_command_changes_nothing() -> None:
    """After a lost reply a command is repeated; the VM must not be restarted twice."""
    once = run(scope_of(), restart())

    assert run(once, restart()) == once


def test_second_restart_is_refused_with_the_pending_id() -> None:
    with pytest.raises(errors.AlreadyPending) as caught:
        run(scope_of(), restart(number=1), restart(number=2))

    assert caught.value.facts == {"vm": "web-0", "event": guid(1)}


def test_other_vms_and_other_operations_are_independent() -> None:
    scope = run(scope_of(), restart(), restart("web-1", 2), Redeploy(vm="web-0", event_id=guid(3)))

    assert len(scope.events) == 3


def test_limit_of_user_operations_counts_scheduled_ones() -> None:
    scope = run(scope_of(user_operations_max=1), restart())

    with pytest.raises(errors.TooManyOperations, match="the maximum is 1"):
        run(scope, restart("web-1", 2))
    assert len(run(scope, Cancel(event_id=guid(1)), restart("web-1", 2)).events) == 1


def test_platform_events_do_not_count_as_user_operations() -> None:
    scope = run(scope_of(user_operations_max=1), maintain(), restart())

    assert len(scope.events) == 2


def test_operation_runs_at_once_if_no_vm_polls() -> None:
    """A restart must not depend on polls; they only give notice."""
    scope = run(scope_of(is_enabled=False), restart())

    assert scope.events == ()
    assert [(impact.vm, impact.type) for impact in scope.impacts] == [("web-0", "Reboot")]
    assert scope.incarnation == 1


def test_silent_operation_is_carried_out_once() -> None:
    scope = run_impact(run(scope_of(is_enabled=False), restart()))

    assert scope.impacts == ()
    assert run(scope, restart()) == scope


def test_requested_time_is_kept_even_if_no_vm_polls() -> None:
    scope = run(scope_of(is_enabled=False), restart(not_before=NOON + timedelta(hours=1)))

    assert statuses(scope) == ["Reboot Scheduled web-0"]


def test_requested_time_is_kept_despite_automatic_approval() -> None:
    """Restart it tomorrow does not mean now."""
    tomorrow = NOON + timedelta(days=1)
    automatic = scope_of(auto_approve=(AutoApprove.USER_RESTART,))
    down = scope_of(vm("web-0", power=Power.STOPPED))

    assert statuses(run(automatic, restart(not_before=tomorrow))) == ["Reboot Scheduled web-0"]
    assert statuses(run(down, restart(not_before=tomorrow))) == ["Reboot Scheduled web-0"]
    assert statuses(run(down, maintain(not_before=tomorrow))) == ["Freeze Scheduled web-0"]


def test_host_operation_can_be_repeated_for_the_missing_vms() -> None:
    """A VM may arrive later, or the store may fail halfway. No VM gets a second event."""
    scope = run(scope_of(vm("a")), Degrade(host="host-a", operation_id=OPERATION))
    scope = run(scope, SetMembers(kind=scope.kind, policy=scope.policy, vms=(vm("a"), vm("b"))))

    again = run(scope, Degrade(host="host-a", operation_id=guid(77)))

    assert statuses(again) == ["Redeploy Scheduled a", "Redeploy Scheduled b"]
    with pytest.raises(errors.AlreadyPending):
        run(again, Degrade(host="host-a", operation_id=guid(78)))


def test_maintenance_is_announced_even_if_no_vm_polls() -> None:
    assert statuses(run(scope_of(is_enabled=False), maintain())) == ["Freeze Scheduled web-0"]


def test_delete_runs_at_once_without_terminate_notice() -> None:
    scope = run(scope_of(terminate_notice=None), Delete(vm="web-0", event_id=guid(1)))

    assert scope.events == ()
    assert [vm.name for vm in run_impact(scope).vms] == ["web-1"]


def test_restart_of_a_stopped_vm_starts_it_silently() -> None:
    stopped = scope_of(vm("web-0", power=Power.STOPPED), vm("web-1", domain=1))

    scope = run(stopped, restart())

    assert scope.events == ()
    assert run_impact(scope).vms[0].power is Power.RUNNING


def test_deallocated_vm_cannot_be_evicted() -> None:
    with pytest.raises(errors.VmDown):
        run(scope_of(vm("web-0", power=Power.DEALLOCATED)), Evict(vm="web-0", event_id=guid(1)))


@pytest.mark.parametrize(
    ("scope", "command", "code", "message"),
    [
        (
            scope_of(is_enabled=False),
            restart(),
            "not-polled",
            "no VM of web has polled in the last 24h",
        ),
        (
            scope_of(vm("web-0", power=Power.STOPPED)),
            restart(),
            "vm-down",
            "web-0 is stopped",
        ),
        (
            scope_of(vm("web-0", power=Power.DEALLOCATED), is_enabled=False),
            restart(),
            "vm-down",
            "web-0 is deallocated",
        ),
        (
            scope_of(terminate_notice=None),
            Delete(vm="web-0", event_id=guid(1)),
            "no-notice",
            "the policy of web has no terminate_notice",
        ),
    ],
)
def test_operation_without_an_event_gives_the_true_reason(
    scope: Scope, command: Command, code: str, message: str
) -> None:
    """An operator who expected a notice looks for exactly this."""
    reason = outcome_of(scope, command).no_event

    assert reason is not None
    assert (reason.code, reason.message) == (code, message)
    assert outcome_of(scope_of(), restart()).no_event is None


def test_unknown_vm_is_named() -> None:
    with pytest.raises(errors.UnknownVm, match="'web-9'"):
        run(scope_of(), restart("web-9"))


def test_host_operation_makes_one_event_per_update_domain() -> None:
    """So a guest sees which VMs go down together."""
    scope = scope_of(vm("a"), vm("b", domain=1), vm("c"), vm("elsewhere", host="host-b"))

    assert statuses(run(scope, maintain())) == ["Freeze Scheduled a,c", "Freeze Scheduled b"]


def test_maintenance_ignores_deallocated_vms() -> None:
    scope = scope_of(vm("a"), vm("b", power=Power.DEALLOCATED))

    assert statuses(run(scope, maintain())) == ["Freeze Scheduled a"]


def test_second_maintenance_is_refused_but_a_failure_is_not() -> None:
    scope = run(scope_of(), maintain(type_=EventType.REBOOT))

    with pytest.raises(errors.AlreadyPending):
        run(scope, maintain(type_=EventType.REBOOT, operation_id=guid(7)))
    assert statuses(run(scope, Fail(host="host-a", operation_id=guid(8)))) == [
        "Reboot Scheduled web-0",
        "Reboot Started web-0",
    ]


@pytest.mark.parametrize(
    "bad",
    [
        maintain(type_=EventType.PREEMPT),
        maintain(type_=EventType.TERMINATE),
        maintain(cause=Cause.RESTART),
        maintain(duration_seconds=-2),
        maintain(duration_seconds=86_401),
        maintain(description="x" * 501),
        maintain(description="a\x1b[2Jb"),
    ],
)
def test_invalid_maintenance_is_refused(bad: Maintain) -> None:
    with pytest.raises(errors.Invalid):
        run(scope_of(), bad)


def test_failed_hardware_does_not_wait_for_other_domains() -> None:
    """The VMs are down already."""
    busy = run(scope_of(), maintain(), at=NOON)
    busy = run(busy, Tick(), at=NOON + 15 * MINUTE)

    scope = run(busy, Fail(host="host-b", operation_id=guid(8)), at=NOON + 16 * MINUTE)

    assert statuses(scope) == ["Freeze Started web-0", "Reboot Started web-1"]


@pytest.mark.parametrize(
    ("choice", "command"),
    [
        (AutoApprove.USER_RESTART, restart()),
        (AutoApprove.USER_REDEPLOY, Redeploy(vm="web-0", event_id=guid(1))),
    ],
)
def test_automatic_approval_starts_the_operation_at_once(
    choice: AutoApprove, command: Command
) -> None:
    scope = run(scope_of(auto_approve=(choice,)), command)

    assert scope.events[0].status is Status.STARTED
    assert scope.events[0].approvals == ("policy",)
    assert scope.incarnation == 2


def test_automatic_approval_does_not_apply_to_maintenance() -> None:
    scope = run(
        scope_of(auto_approve=(AutoApprove.USER_RESTART,)), maintain(type_=EventType.REBOOT)
    )

    assert statuses(scope) == ["Reboot Scheduled web-0"]


def test_maintenance_starts_at_once_if_all_instances_are_down() -> None:
    down = (
        vm("web-0", power=Power.STOPPED),
        vm("web-1", domain=1, power=Power.STOPPED, host="host-b"),
    )

    assert statuses(run(scope_of(*down), maintain())) == ["Freeze Started web-0"]
    assert statuses(run(scope_of(*down, auto_approve=()), maintain())) == ["Freeze Scheduled web-0"]
    assert statuses(run(scope_of(vm("web-0"), down[1]), maintain())) == ["Freeze Scheduled web-0"]


@pytest.mark.parametrize("kind", list(ScopeKind))
def test_all_kinds_of_scope_have_the_same_rules(kind: ScopeKind) -> None:
    outcome = outcome_of(scope_of(vm("web-0"), kind=kind), restart())

    assert outcome.scope.events[0].source is Source.USER
    assert [change.what for change in outcome.changes] == ["scheduled"]


def fail_again(scope: Scope, type_: EventType) -> Scope:
    policy = replace(scope.policy, failed_hardware=type_)
    return run(replace(scope, policy=policy), Fail(host="host-a", operation_id=guid(9)))


@pytest.mark.parametrize("type_", [EventType.REBOOT, EventType.REDEPLOY])
def test_failed_hardware_has_the_event_type_of_the_policy(type_: EventType) -> None:
    """Microsoft's articles have both; clients handle them differently."""
    scope = scope_of(failed_hardware=type_)

    scope = run(scope, Fail(host="host-a", operation_id=guid(8)))

    assert statuses(scope) == [f"{type_} Started web-0"]
    assert scope.events[0].description == "Virtual machine has encountered a failure."


@pytest.mark.parametrize("first", [EventType.REBOOT, EventType.REDEPLOY])
def test_failure_after_a_change_of_policy_makes_no_second_event(first: EventType) -> None:
    """The VM is moved once; a second event would restart it on its new host."""
    (second,) = {EventType.REBOOT, EventType.REDEPLOY} - {first}
    scope = run(scope_of(failed_hardware=first), Fail(host="host-a", operation_id=guid(8)))

    with pytest.raises(errors.AlreadyPending, match=scope.events[0].id):
        fail_again(scope, second)


def test_failure_after_a_change_of_policy_reaches_a_vm_that_came_later() -> None:
    """As for any repeated host operation, only the VMs without such an event get one."""
    scope = run(scope_of(vm("a")), Fail(host="host-a", operation_id=guid(8)))
    late = replace(scope, vms=(*scope.vms, vm("b")))

    scope = fail_again(late, EventType.REDEPLOY)

    assert statuses(scope) == ["Reboot Started a", "Redeploy Started b"]


def test_failed_hardware_as_redeploy_leaves_degraded_hardware_no_event() -> None:
    """Both are Redeploys of the platform, but not the same operation."""
    scope = run(
        scope_of(vm("a"), failed_hardware=EventType.REDEPLOY),
        Degrade(host="host-a", operation_id=OPERATION),
        Fail(host="host-a", operation_id=guid(8)),
    )

    assert statuses(scope) == ["Redeploy Started a"]
    assert [event.cause for event in scope.events] == [Cause.FAILED]


def test_failed_hardware_supersedes_degraded_hardware() -> None:
    """The redeploy within days is pointless once the host is dead."""
    scope = run(
        scope_of(vm("a"), vm("b", domain=1)), Degrade(host="host-a", operation_id=OPERATION)
    )

    outcome = outcome_of(scope, Fail(host="host-a", operation_id=guid(8)))

    assert statuses(outcome.scope) == ["Reboot Started a", "Reboot Started b"]
    canceled = [change for change in outcome.changes if change.what == "canceled"]
    assert [change.event for change in canceled] == [event.id for event in scope.events]
    assert {change.detail for change in canceled} == {"host-a has failed"}


def test_failed_hardware_ends_a_waiting_redeploy_not_a_running_one() -> None:
    """A running platform call may still succeed; a retry would move the VM once more."""
    scope = run(scope_of(vm("a"), vm("b")), Degrade(host="host-a", operation_id=OPERATION))
    event_id = scope.events[0].id
    scope = run(scope, Approve(event_ids=(event_id,)))
    scope = run(scope, *(Claim(event_id=event_id, vm=name, worker="w1") for name in "ab"))
    scope = run(scope, Finish(event_id=event_id, vm="a", worker="w1", tries=1, problem="no answer"))

    scope = run(scope, Fail(host="host-a", operation_id=guid(8)))

    assert statuses(scope) == ["Redeploy Started b", "Reboot Started a,b"]


def test_failed_host_does_not_affect_other_hosts() -> None:
    scope = run(
        scope_of(),
        Degrade(host="host-a", operation_id=OPERATION),
        Degrade(host="host-b", operation_id=guid(7)),
        Fail(host="host-a", operation_id=guid(8)),
    )

    assert statuses(scope) == ["Redeploy Scheduled web-1", "Reboot Started web-0"]


def test_maintenance_of_a_large_host_reads_each_vm_once() -> None:
    """Polls wait while a command is decided, and a host may carry a whole scope."""
    names = [CountedName(f"v{number}") for number in range(300)]
    scope = run(scope_of(*(vm(name) for name in names)), maintain(type_=EventType.REBOOT))
    CountedName.comparisons = 0

    run(scope, maintain(operation_id=guid(7)))

    assert CountedName.comparisons < 10 * len(names)


class CountedName(str):
    """A VM's name that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__
