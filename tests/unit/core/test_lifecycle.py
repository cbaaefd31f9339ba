"""Approval, start, impact and end."""

from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from forewarn import errors
from forewarn.core.command import (
    Approve,
    Cancel,
    Claim,
    Command,
    Complete,
    Degrade,
    Delete,
    Evict,
    Extend,
    Fail,
    Finish,
    Redeploy,
    Release,
    Seen,
    SetMembers,
    Tick,
)
from forewarn.core.event import Ended, EndReason, EventType, ImpactState, Status
from forewarn.core.fleet import Approval, Power, Scope, ScopeKind
from forewarn.core.lifecycle import TRIES_MAX
from forewarn.core.machine import due_impacts, next_deadline, next_impact_at
from forewarn.core.timing import Timing
from tests.builders import (
    MINUTE,
    NOON,
    OPERATION,
    SECOND,
    STANDARD,
    approve,
    claim,
    finish,
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


def test_event_starts_at_not_before_and_not_a_second_earlier() -> None:
    """NotBefore is a promise to the guest: starting early breaks it."""
    scope = run(scope_of(), restart())

    assert statuses(run(scope, Tick(), at=NOON + 15 * MINUTE - SECOND)) == [
        "Reboot Scheduled web-0"
    ]
    assert statuses(run(scope, Tick(), at=NOON + 15 * MINUTE)) == ["Reboot Started web-0"]


def test_next_deadline_is_the_nearest_not_before() -> None:
    scope = run(scope_of(), restart(), Evict(vm="web-1", event_id=guid(2)))

    assert next_deadline(scope) == NOON + 30 * SECOND
    assert next_deadline(scope_of()) is None


def test_any_vm_of_the_scope_may_approve_for_all() -> None:
    """As on Azure: the approval of one VM covers every resource of the event."""
    scope = run(scope_of(), restart(), approve("web-1"))

    assert statuses(scope) == ["Reboot Started web-0"]
    assert scope.events[0].approvals == ("web-1",)


def test_approving_again_changes_nothing() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart(), approve("web-1"))

    assert outcome_of(scope, approve("web-1")).changes == ()
    assert run(scope, approve("web-1")) == scope


def test_late_approval_is_accepted_and_changes_nothing() -> None:
    """Guests race with completion and retry on errors."""
    started = run(scope_of(), restart(), approve("web-0"))
    over = run_impact(started)

    assert run(started, approve("web-1")) == started
    assert run(over, approve("web-1")) == over


def test_approval_is_all_or_nothing() -> None:
    scope = run(scope_of(), restart())

    with pytest.raises(errors.UnknownEvent, match="nothing was approved"):
        run(scope, approve("web-0", 1, 99))
    assert statuses(scope) == ["Reboot Scheduled web-0"]


def test_vm_of_another_scope_may_not_approve() -> None:
    with pytest.raises(errors.Forbidden):
        run(scope_of(), restart(), approve("db-0"))


def test_approval_by_all_needs_every_running_vm() -> None:
    members = (
        vm("a"),
        vm("b", domain=1),
        vm("c", domain=2),
        vm("d", domain=3, power=Power.STOPPED),
    )
    scope = run(scope_of(*members, approval=Approval.ALL), restart("a"), approve("a"), approve("b"))

    assert statuses(scope) == ["Reboot Scheduled a"]
    assert statuses(run(scope, approve("c"))) == ["Reboot Started a"]


def test_approval_by_quorum_needs_more_than_half() -> None:
    members = tuple(vm(name, domain=number) for number, name in enumerate("abcd"))
    scope = run(
        scope_of(*members, approval=Approval.QUORUM), restart("a"), approve("a"), approve("b")
    )

    assert statuses(scope) == ["Reboot Scheduled a"]
    assert statuses(run(scope, approve("c"))) == ["Reboot Started a"]


def test_vm_that_left_is_not_needed_for_approval_by_all() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart(), approve("web-0"))

    rest = run(scope, SetMembers(kind=scope.kind, policy=scope.policy, vms=scope.vms[:1]))

    assert statuses(rest) == ["Reboot Started web-0"]


def test_approval_of_an_operator_suffices_under_any_policy() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart(), Approve(event_ids=(guid(1),)))

    assert statuses(scope) == ["Reboot Started web-0"]


def test_approval_is_not_visible_to_guests() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart())

    assert run(scope, approve("web-0")).incarnation == scope.incarnation == 2


def test_platform_event_waits_for_another_domain_under_impact() -> None:
    """A set with one replica per domain never loses two at once."""
    both = run(scope_of(), maintain("host-a"), maintain("host-b"))
    at = NOON + 15 * MINUTE

    first = run(both, Tick(), at=at)

    assert sorted(statuses(first)) == ["Freeze Scheduled web-1", "Freeze Started web-0"] or sorted(
        statuses(first)
    ) == [
        "Freeze Scheduled web-0",
        "Freeze Started web-1",
    ]
    assert next_deadline(first) is None
    assert [status.split()[1] for status in statuses(run_impact(first, at=at + MINUTE))] == [
        "Started"
    ]


def test_platform_event_of_the_same_domain_does_not_wait() -> None:
    members = (vm("a"), vm("b", host="host-b"))
    scope = run(scope_of(*members), maintain("host-a"), maintain("host-b", operation_id=guid(5)))

    assert [
        status.split()[1] for status in statuses(run(scope, Tick(), at=NOON + 15 * MINUTE))
    ] == ["Started"] * 2


def test_platform_event_waits_for_silent_restart_in_another_domain() -> None:
    scope = run(scope_of(is_enabled=False), maintain("host-a"), at=NOON)
    scope = run(scope, restart("web-1", 2), Tick(), at=NOON + 15 * MINUTE)

    assert statuses(scope) == ["Freeze Scheduled web-0"]


def test_user_operation_waits_for_no_domain() -> None:
    scope = run(scope_of(), restart("web-0", 1), restart("web-1", 2), approve("web-0", 1, 2))

    assert statuses(scope) == ["Reboot Started web-0", "Reboot Started web-1"]


def test_coupled_deletions_start_together() -> None:
    """In scale sets an approved deletion waits for the others (protocol 6.4)."""
    two = (Delete(vm="web-0", event_id=guid(1)), Delete(vm="web-1", event_id=guid(2)))
    scope = run(scope_of(couple_terminates=True), *two, approve("web-0", 1))

    assert [status.split()[1] for status in statuses(scope)] == ["Scheduled", "Scheduled"]
    assert [status.split()[1] for status in statuses(run(scope, approve("web-1", 2)))] == [
        "Started",
        "Started",
    ]
    assert [status.split()[1] for status in statuses(run(scope, Tick(), at=NOON + 5 * MINUTE))] == [
        "Started",
        "Started",
    ]
    alone = run(scope_of(), *two, approve("web-0", 1))
    assert [status.split()[1] for status in statuses(alone)] == ["Started", "Scheduled"]


def test_last_impact_completes_the_event() -> None:
    scope = run(scope_of(vm("a"), vm("b")), maintain(), Tick())
    event_id = scope.events[0].id
    scope = run(scope, Tick(), at=NOON + 15 * MINUTE)
    for name in "ab":
        assert statuses(scope) == ["Freeze Started a,b"]
        claimed = Claim(event_id=event_id, vm=name, worker="w1")
        done = Finish(event_id=event_id, vm=name, worker="w1", tries=1)
        scope = run(scope, claimed, done, at=NOON + 15 * MINUTE)

    assert scope.events == ()
    assert [(ended.id, ended.how) for ended in scope.ended] == [(event_id, EndReason.COMPLETED)]


def test_claim_belongs_to_one_worker_until_it_is_released() -> None:
    """Time alone takes nothing from a worker: its lease decides whether it is alive."""
    scope = run(scope_of(), restart(), approve("web-0"), claim(worker="w1"))

    assert run(scope, claim(worker="w2"), at=NOON + timedelta(days=30)) == scope
    assert run(scope, Release(worker="w2")) == scope
    scope = run(scope, Release(worker="w1"))
    assert run(scope, Release(worker="w1"), at=NOON + MINUTE) == scope
    assert run(scope, claim(worker="w2")).impacts[0].claimed_by == "w2"


def test_release_of_a_try_leaves_the_next_one_of_its_worker() -> None:
    """It may be recorded again after a bug, when the next try has begun."""
    waits = Release(worker="w1", event_id=guid(1), vm="web-0", tries=1)
    scope = run(scope_of(), restart(), approve("web-0"), claim(), waits)
    assert scope.impacts[0].claimed_by == ""
    scope = run(scope, claim())

    assert run(scope, waits) == scope


def test_claim_that_was_decided_before_another_attempt_is_not_granted() -> None:
    """That attempt may be at the daemon of another host, and its worker knows which."""
    begun = replace(claim(worker="w1"), host="host-a", tries=0)
    scope = run(scope_of(), restart(), approve("web-0"), begun, Release(worker="w1"))

    assert run(scope, replace(claim(worker="w2"), host="host-b", tries=0)) == scope
    (impact,) = run(scope, replace(claim(worker="w2"), host="host-a", tries=1)).impacts
    assert (impact.claimed_by, impact.host, impact.tries) == ("w2", "host-a", 2)


def test_worker_that_claims_a_released_impact_begins_a_new_attempt() -> None:
    """The result of the old attempt must not be taken for that of the new one."""
    scope = run(scope_of(), restart(), approve("web-0"), claim(), Release(worker="w1"), claim())

    assert scope.impacts[0].tries == 2
    assert run(scope, finish(tries=1)) == scope


def test_attempt_dated_far_ahead_is_due_at_once() -> None:
    """A server whose clock was a day ahead set it; waiting for it would take a day."""
    scope = run(scope_of(), restart(), approve("web-0"))
    (impact,) = scope.impacts

    def dated(due_at: datetime) -> Scope:
        return replace(scope, impacts=(replace(impact, due_at=due_at),))

    assert due_impacts(dated(NOON + 65 * SECOND), NOON) == ()
    assert len(due_impacts(dated(NOON + 66 * SECOND), NOON)) == 1


def test_result_of_a_lost_claim_is_ignored() -> None:
    scope = run(scope_of(), restart(), approve("web-0"), claim(worker="w1"))
    scope = run(scope, Release(worker="w1"), claim(worker="w2"))

    assert run(scope, finish(worker="w1", tries=1)) == scope
    assert run(scope, finish(worker="w2", tries=1)) == scope
    assert run(scope, finish(worker="w2", tries=2)).events == ()


def test_impact_that_no_worker_finishes_fails_in_the_end() -> None:
    scope = run(scope_of(), restart(), approve("web-0"))
    for number in range(TRIES_MAX):
        scope = run(scope, claim(worker=f"w{number}"), Release(worker=f"w{number}"))
    assert scope.impacts[0].tries == TRIES_MAX

    scope = run(scope, claim(worker="last"))

    assert (scope.events, scope.ended[-1].how) == ((), EndReason.FAILED)


def test_impact_waits_for_an_unreachable_host_without_a_limit() -> None:
    """Only a server that is lost counts: the impact may be the cause of that."""
    scope = run(scope_of(), restart(), approve("web-0"))
    waits = Release(worker="w1", event_id=guid(1), vm="web-0")
    for _ in range(TRIES_MAX + 1):
        scope = run(scope, claim(), waits)

    assert run_impact(run(scope, Release(worker="w1"))).ended[-1].how is EndReason.COMPLETED


def test_redeploy_changes_the_host() -> None:
    scope = run(scope_of(), Redeploy(vm="web-0", event_id=guid(1)), approve("web-0"))

    assert run_impact(scope, host="host-z").vms[0].host == "host-z"


def test_vm_that_moved_leaves_the_events_of_its_old_host() -> None:
    """A guest reacts to degraded hardware by redeploying early."""
    scope = run(scope_of(vm("a"), vm("b")), Degrade(host="host-a", operation_id=OPERATION))
    scope = run(scope, Redeploy(vm="a", event_id=guid(1)), approve("a"))

    assert statuses(run_impact(scope, host="host-z")) == ["Redeploy Scheduled b"]


def test_preempt_deallocates_and_ends_all_but_a_deletion() -> None:
    scope = run(
        scope_of(),
        restart(),
        Delete(vm="web-0", event_id=guid(2)),
        Evict(vm="web-0", event_id=guid(3)),
    )
    at = NOON + 30 * SECOND

    scope = run_impact(run(scope, Tick(), at=at), at=at)

    assert scope.vms[0].power is Power.DEALLOCATED
    assert statuses(scope) == ["Terminate Scheduled web-0"]


def test_evicted_vm_does_not_run_again_when_its_reboot_ends() -> None:
    """Everything in progress ends with the eviction, also if an operator completes that."""
    scope = run(scope_of(), restart(), Evict(vm="web-0", event_id=guid(3)), approve("web-0", 1, 3))
    assert statuses(scope) == ["Reboot Started web-0", "Preempt Started web-0"]

    scope = run(scope, claim(1), Complete(event_id=guid(3)), finish(1))

    assert (scope.vms[0].power, scope.events, scope.impacts) == (Power.DEALLOCATED, (), ())


def test_maintenance_does_not_start_a_stopped_vm() -> None:
    stopped = scope_of(vm("web-0", power=Power.STOPPED), vm("web-1", domain=1, host="host-b"))
    scope = run(stopped, maintain(type_=EventType.REBOOT))

    scope = run_impact(run(scope, Tick(), at=NOON + 15 * MINUTE), at=NOON + 15 * MINUTE)

    assert scope.vms[0].power is Power.STOPPED


def test_ended_events_are_remembered_for_an_hour() -> None:
    """The approval of any of them may still be on its way."""
    names = [f"v{number}" for number in range(150)]
    scope = scope_of(*(vm(name) for name in names), user_operations_max=1000)
    for number, name in enumerate(names):
        scope = run(scope, restart(name, number + 1), Cancel(event_id=guid(number + 1)))

    assert run(scope, approve("v0", 1, 150)) == scope
    later = NOON + timedelta(hours=2)
    scope = run(scope, restart("v0", 500), Cancel(event_id=guid(500)), at=later)
    assert len(scope.ended) == 100


def test_busy_domain_does_not_starve_another() -> None:
    """Behind a held platform event all later ones wait, also those of the busy domain."""
    members = (vm("a"), vm("b", domain=1, host="host-b"), vm("c", host="host-c"))
    scope = run(scope_of(*members), maintain("host-a"))
    scope = run(scope, maintain("host-b", operation_id=guid(5)), at=NOON + MINUTE)
    scope = run(scope, maintain("host-c", operation_id=guid(6)), at=NOON + 2 * MINUTE)
    at = NOON + 20 * MINUTE

    scope = run(run(scope, Tick(), at=NOON + 15 * MINUTE), Tick(), at=at)
    assert statuses(scope) == ["Freeze Started a", "Freeze Scheduled b", "Freeze Scheduled c"]
    assert next_deadline(scope) is None
    scope = run_impact(scope, at=at)
    assert statuses(scope) == ["Freeze Started b", "Freeze Scheduled c"]


def test_terminate_removes_the_vm() -> None:
    scope = run(scope_of(), Delete(vm="web-0", event_id=guid(1)), approve("web-0"))

    scope = run_impact(scope)

    assert [member.name for member in scope.vms] == ["web-1"]
    assert [(ended.id, ended.how) for ended in scope.ended] == [(guid(1), EndReason.COMPLETED)]


def test_scope_of_a_standalone_vm_goes_with_it() -> None:
    alone = scope_of(vm("web-0"), kind=ScopeKind.VM, terminate_notice=None)
    scope = run(alone, Delete(vm="web-0", event_id=guid(1)), claim())

    assert outcome_of(scope, finish()).is_gone


def test_cancel_removes_a_scheduled_event() -> None:
    scope = run(scope_of(), restart(), Cancel(event_id=guid(1)))

    assert (scope.events, scope.incarnation) == ((), 3)
    assert run(scope, Cancel(event_id=guid(1))) == scope


def test_only_scheduled_events_are_canceled_and_started_completed() -> None:
    with pytest.raises(errors.WrongStatus):
        run(scope_of(), restart(), approve("web-0"), Cancel(event_id=guid(1)))
    with pytest.raises(errors.WrongStatus):
        run(scope_of(), restart(), Complete(event_id=guid(1)))


def test_operator_can_complete_a_started_event() -> None:
    scope = run(scope_of(), Delete(vm="web-0", event_id=guid(1)), approve("web-0"), claim())

    scope = run(scope, Complete(event_id=guid(1)))

    assert (scope.events, scope.impacts, [member.name for member in scope.vms]) == (
        (),
        (),
        ["web-1"],
    )
    assert run(scope, finish()) == scope


def extend(hours: float, number: int = 1) -> Extend:
    return Extend(event_id=guid(number), not_before=NOON + timedelta(hours=hours))


def test_extended_event_starts_later_and_the_document_shows_it() -> None:
    before = run(scope_of(), restart())
    outcome = outcome_of(before, extend(2))
    scope = outcome.scope

    assert [change.what for change in outcome.changes] == ["extended"]
    assert (scope.incarnation, scope.events[0].not_before) == (
        before.incarnation + 1,
        NOON + 120 * MINUTE,
    )
    assert statuses(run(scope, Tick(), at=NOON + 120 * MINUTE - SECOND)) == [
        "Reboot Scheduled web-0"
    ]
    assert statuses(run(scope, Tick(), at=NOON + 120 * MINUTE)) == ["Reboot Started web-0"]


def test_event_gets_more_notice_never_less() -> None:
    scope = run(scope_of(), restart())

    assert run(scope, extend(0.25)) == scope
    with pytest.raises(
        errors.NoticeTooShort, match=r"this Reboot can only be postponed, so .*Z at the earliest"
    ):
        run(scope, extend(0.24))


def test_started_unknown_and_terminate_events_cannot_be_extended() -> None:
    with pytest.raises(errors.WrongStatus, match="only a Scheduled event can be extended"):
        run(scope_of(), restart(), approve("web-0"), extend(2))
    with pytest.raises(errors.UnknownEvent, match="there is no event"):
        run(scope_of(), restart(), extend(2, number=9))
    with pytest.raises(errors.Refused, match="a deletion cannot be postponed"):
        run(scope_of(), Delete(vm="web-0", event_id=guid(1)), extend(2))


def test_completed_event_cannot_be_canceled() -> None:
    over = run_impact(run(scope_of(), restart(), approve("web-0")))

    with pytest.raises(errors.EventEnded, match="is over: completed at"):
        run(over, Cancel(event_id=guid(1)))


def test_poll_enables_a_scope_and_is_stored_once_an_hour() -> None:
    scope = scope_of(is_enabled=False)
    outcome = outcome_of(scope, Seen())

    assert [change.what for change in outcome.changes] == ["enabled"]
    assert run(outcome.scope, Seen(), at=NOON + timedelta(minutes=59)) == outcome.scope
    refreshed = outcome_of(outcome.scope, Seen(), at=NOON + timedelta(hours=1))
    assert (refreshed.scope.seen_at, refreshed.changes) == (NOON + timedelta(hours=1), ())


def test_scope_is_disabled_after_a_day_without_polls() -> None:
    """A poll up to an hour after the stored one is not stored, so an hour is added."""
    scope = run(scope_of(is_enabled=False), Seen())

    assert run(scope, restart(), at=NOON + timedelta(hours=24, minutes=59)).events != ()
    assert run(scope, restart(), at=NOON + timedelta(hours=25)).events == ()


@pytest.mark.parametrize(
    "command", [Cancel(event_id=guid(9)), Complete(event_id=guid(9)), approve("web-0", 9)]
)
def test_unknown_event_is_named(command: Command) -> None:
    with pytest.raises(errors.UnknownEvent, match=guid(9)):
        run(scope_of(), command)


def test_claim_and_finish_of_an_unknown_impact_change_nothing() -> None:
    scope = scope_of()

    assert run(scope, claim(9), finish(9)) == scope


def test_freeze_and_reboot_do_not_move_the_vm() -> None:
    for type_ in (EventType.FREEZE, EventType.REBOOT):
        scope = run(scope_of(), maintain(type_=type_))
        after = run_impact(run(scope, Tick(), at=NOON + 15 * MINUTE), at=NOON + 15 * MINUTE)
        assert after.vms == scope.vms


def two_started() -> Scope:
    """A restart and then a redeploy of web-0, both Started."""
    scope = run(scope_of(), restart(), Redeploy(vm="web-0", event_id=guid(2)))
    return run(scope, approve("web-0", 1), approve("web-0", 2))


def test_vm_has_at_most_one_impact_at_a_time() -> None:
    """A reboot in the middle of a migration breaks the VM."""
    scope = run(two_started(), claim(1))
    assert statuses(scope) == ["Reboot Started web-0", "Redeploy Started web-0"]

    assert run(scope, claim(2)) == scope
    assert due_impacts(scope, NOON) == ()
    assert next_impact_at(scope) is None


def test_next_impact_of_a_vm_is_due_when_the_first_has_ended() -> None:
    """No timer is involved: the scope says that the second is due now."""
    scope = run(two_started(), claim(1))

    scope = run(scope, finish(1))

    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [guid(2)]
    assert next_impact_at(scope) == NOON
    assert run(scope, claim(2)).impacts[0].claimed_by == "w1"


def test_impacts_of_a_vm_run_in_the_order_of_their_start() -> None:
    """The order must be the same on every server."""
    scope = two_started()

    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [guid(1)]
    assert run(scope, claim(2)) == scope


def test_silent_operation_waits_for_the_current_impact_of_its_vm() -> None:
    scope = run(
        scope_of(is_enabled=False), restart(), Redeploy(vm="web-0", event_id=guid(2)), claim(1)
    )

    assert run(scope, claim(2)) == scope
    assert run(scope, finish(1), claim(2)).impacts[0].claimed_by == "w1"


def test_released_impact_is_taken_over_before_the_next_one() -> None:
    """The first impact may be half done, so the next one must not begin on top of it."""
    scope = run(two_started(), claim(1), Release(worker="w1"))

    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [guid(1)]
    assert run(scope, claim(2, worker="w2")) == scope
    assert run(scope, claim(1, worker="w2")).impacts[0].claimed_by == "w2"


def test_impact_that_waits_for_a_retry_blocks_the_next_one() -> None:
    """A failed freeze may have left the VM suspended."""
    scope = two_started()
    scope = run(scope, claim(1), finish(1, problem="no answer"))

    assert due_impacts(scope, NOON) == ()
    assert run(scope, claim(2)) == scope
    assert next_impact_at(scope) == NOON + STANDARD.retry


@pytest.mark.parametrize(
    "final",
    [
        Evict(vm="web-0", event_id=guid(2)),
        Delete(vm="web-0", event_id=guid(2)),
        Fail(host="host-a", operation_id=OPERATION),
    ],
)
def test_impact_that_makes_a_retry_pointless_overtakes_it(final: Command) -> None:
    """An evicted VM's capacity is needed now, and a VM on failed hardware is down anyway."""
    scope = run(
        scope_of(), restart(), approve("web-0"), claim(1), finish(1, problem="no answer"), final
    )
    last = scope.events[-1].id
    if scope.events[-1].status is Status.SCHEDULED:
        scope = run(scope, Approve(event_ids=(last,), vm="web-0"))

    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [last]
    assert run(scope, Claim(event_id=last, vm="web-0", worker="w1")).impacts[-1].claimed_by == "w1"


def test_failed_impact_is_retried_until_the_window_ends() -> None:
    """A hypervisor that restarts is back within minutes. The last try is at the very end."""
    scope = run(scope_of(), restart(), approve("web-0"))
    at, tries = NOON, 0
    waits = []
    while scope.events:
        tries += 1
        scope = run(scope, claim(), finish(tries=tries, problem="no power"), at=at)
        due = next_impact_at(scope)
        if due is not None:
            assert scope.impacts[0].state is ImpactState.WAITING
            assert run(scope, claim(), at=due - SECOND) == scope
            waits.append((due - at).total_seconds())
            at = due

    assert waits == [5, 10, 20, 40, 60, 60, 60, 45]
    assert at - NOON == STANDARD.retry_window
    assert scope.ended[-1].how is EndReason.FAILED


def test_failure_that_is_final_is_not_retried() -> None:
    """The VM cannot move, say: nothing changes that within the window."""
    failure = finish(problem="web-0 cannot leave host-a", is_final=True)
    scope = run(scope_of(), restart(), approve("web-0"), claim(), failure)

    assert (scope.events, scope.ended[-1].how) == ((), EndReason.FAILED)


def test_first_failure_is_final_without_a_retry_window() -> None:
    timing = Timing(retry_window=timedelta(0))
    scope = run(
        scope_of(), restart(), approve("web-0"), claim(), finish(problem="no power"), timing=timing
    )

    assert (scope.events, scope.ended[-1].how) == ((), EndReason.FAILED)


def test_failures_do_not_count_as_lapsed_claims() -> None:
    """A day of retries is many claims; only unfinished claims mean that a worker is lost."""
    timing = Timing(retry_window=timedelta(days=1))
    scope, at = run(scope_of(), restart(), approve("web-0")), NOON
    for tries in range(1, 2 * TRIES_MAX):
        scope = run(scope, claim(), finish(tries=tries, problem="no power"), at=at, timing=timing)
        assert scope.impacts[0].failures == tries
        at = scope.impacts[0].due_at


class CountedId(str):
    """An event id that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedId.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_approval_of_many_ids_looks_up_each_once() -> None:
    """Any guest can send a thousand ids in one POST, and all polls wait meanwhile."""
    ids = tuple(CountedId(guid(number)) for number in range(400))
    scope = replace(
        scope_of(), ended=tuple(Ended(id=id_, how=EndReason.COMPLETED, at=NOON) for id_ in ids)
    )
    CountedId.comparisons = 0

    with pytest.raises(errors.UnknownEvent):
        run(scope, Approve(event_ids=(*(CountedId(id_) for id_ in ids), guid(999)), vm="web-0"))

    assert CountedId.comparisons < 4 * len(ids)


def test_id_repeated_in_one_approval_is_recorded_once() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart())

    outcome = outcome_of(scope, approve("web-0", 1, 1))

    assert [change.what for change in outcome.changes] == ["approved"]
    assert outcome.scope.events[0].approvals == ("web-0",)
