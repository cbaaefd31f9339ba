"""Approval, start, impact and end."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn import errors
from forewarn.core import command as ask
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


def test_an_event_starts_at_not_before_and_not_a_second_earlier() -> None:
    """NotBefore is a promise to the guest: early is a broken promise."""
    scope = run(scope_of(), restart())

    assert statuses(run(scope, ask.Tick(), at=NOON + 15 * MINUTE - SECOND)) == [
        "Reboot Scheduled web-0"
    ]
    assert statuses(run(scope, ask.Tick(), at=NOON + 15 * MINUTE)) == ["Reboot Started web-0"]


def test_the_next_deadline_is_the_nearest_not_before() -> None:
    scope = run(scope_of(), restart(), ask.Evict(vm="web-1", event_id=guid(2)))

    assert next_deadline(scope) == NOON + 30 * SECOND
    assert next_deadline(scope_of()) is None


def test_any_vm_of_the_scope_may_approve_for_all() -> None:
    """As on Azure: a peer's word covers every resource of the event."""
    scope = run(scope_of(), restart(), approve("web-1"))

    assert statuses(scope) == ["Reboot Started web-0"]
    assert scope.events[0].approvals == ("web-1",)


def test_approving_twice_is_approving_once() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart(), approve("web-1"))

    assert outcome_of(scope, approve("web-1")).changes == ()
    assert run(scope, approve("web-1")) == scope


def test_approving_what_is_started_or_over_is_fine_and_changes_nothing() -> None:
    """Guests race with completion and retry on errors; a late word is no error."""
    started = run(scope_of(), restart(), approve("web-0"))
    over = run_impact(started)

    assert run(started, approve("web-1")) == started
    assert run(over, approve("web-1")) == over


def test_approval_is_all_or_nothing() -> None:
    scope = run(scope_of(), restart())

    with pytest.raises(errors.UnknownEvent, match="nothing was approved"):
        run(scope, approve("web-0", 1, 99))
    assert statuses(scope) == ["Reboot Scheduled web-0"]


def test_a_stranger_may_not_approve() -> None:
    with pytest.raises(errors.Forbidden):
        run(scope_of(), restart(), approve("db-0"))


def test_approval_by_all_waits_for_every_running_vm() -> None:
    members = (
        vm("a"),
        vm("b", domain=1),
        vm("c", domain=2),
        vm("d", domain=3, power=Power.STOPPED),
    )
    scope = run(scope_of(*members, approval=Approval.ALL), restart("a"), approve("a"), approve("b"))

    assert statuses(scope) == ["Reboot Scheduled a"]
    assert statuses(run(scope, approve("c"))) == ["Reboot Started a"]


def test_approval_by_quorum_waits_for_more_than_half() -> None:
    members = tuple(vm(name, domain=number) for number, name in enumerate("abcd"))
    scope = run(
        scope_of(*members, approval=Approval.QUORUM), restart("a"), approve("a"), approve("b")
    )

    assert statuses(scope) == ["Reboot Scheduled a"]
    assert statuses(run(scope, approve("c"))) == ["Reboot Started a"]


def test_a_vm_that_leaves_no_longer_holds_up_an_approval_by_all() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart(), approve("web-0"))

    rest = run(scope, ask.SetMembers(kind=scope.kind, policy=scope.policy, vms=scope.vms[:1]))

    assert statuses(rest) == ["Reboot Started web-0"]


def test_an_operators_word_suffices_under_any_policy() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart(), ask.Approve(event_ids=(guid(1),)))

    assert statuses(scope) == ["Reboot Started web-0"]


def test_an_approval_is_not_visible_to_the_guests() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart())

    assert run(scope, approve("web-0")).incarnation == scope.incarnation == 2


def test_a_platform_event_waits_while_another_update_domain_is_under_impact() -> None:
    """A set with one replica per domain never loses two at once."""
    both = run(scope_of(), maintain("host-a"), maintain("host-b"))
    at = NOON + 15 * MINUTE

    first = run(both, ask.Tick(), at=at)

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


def test_a_platform_event_of_the_same_domain_does_not_wait() -> None:
    members = (vm("a"), vm("b", host="host-b"))
    scope = run(scope_of(*members), maintain("host-a"), maintain("host-b", operation_id=guid(5)))

    assert [
        status.split()[1] for status in statuses(run(scope, ask.Tick(), at=NOON + 15 * MINUTE))
    ] == ["Started"] * 2


def test_a_platform_event_waits_for_a_silent_restart_in_another_domain_too() -> None:
    scope = run(scope_of(is_enabled=False), maintain("host-a"), at=NOON)
    scope = run(scope, restart("web-1", 2), ask.Tick(), at=NOON + 15 * MINUTE)

    assert statuses(scope) == ["Freeze Scheduled web-0"]


def test_a_users_operation_waits_for_no_domain() -> None:
    scope = run(scope_of(), restart("web-0", 1), restart("web-1", 2), approve("web-0", 1, 2))

    assert statuses(scope) == ["Reboot Started web-0", "Reboot Started web-1"]


def test_coupled_deletions_go_together_or_not_at_all() -> None:
    """As Azure documents for scale sets: one approved deletion waits for the others (protocol 6.4)."""
    two = (ask.Delete(vm="web-0", event_id=guid(1)), ask.Delete(vm="web-1", event_id=guid(2)))
    scope = run(scope_of(couple_terminates=True), *two, approve("web-0", 1))

    assert [status.split()[1] for status in statuses(scope)] == ["Scheduled", "Scheduled"]
    assert [status.split()[1] for status in statuses(run(scope, approve("web-1", 2)))] == [
        "Started",
        "Started",
    ]
    assert [
        status.split()[1] for status in statuses(run(scope, ask.Tick(), at=NOON + 5 * MINUTE))
    ] == ["Started", "Started"]
    alone = run(scope_of(), *two, approve("web-0", 1))
    assert [status.split()[1] for status in statuses(alone)] == ["Started", "Scheduled"]


def test_the_last_impact_completes_the_event() -> None:
    scope = run(scope_of(vm("a"), vm("b")), maintain(), ask.Tick())
    event_id = scope.events[0].id
    scope = run(scope, ask.Tick(), at=NOON + 15 * MINUTE)
    for name in "ab":
        assert statuses(scope) == ["Freeze Started a,b"]
        told = ask.Claim(event_id=event_id, vm=name, worker="w1")
        done = ask.Finish(event_id=event_id, vm=name, worker="w1", tries=1)
        scope = run(scope, told, done, at=NOON + 15 * MINUTE)

    assert scope.events == ()
    assert [(ended.id, ended.how) for ended in scope.ended] == [(event_id, EndReason.COMPLETED)]


def test_a_claim_belongs_to_one_worker_until_it_lapses() -> None:
    scope = run(scope_of(), restart(), approve("web-0"), claim(worker="w1"))

    assert run(scope, claim(worker="w2")) == scope
    later = NOON + STANDARD.claim
    assert run(scope, claim(worker="w2"), at=later - SECOND) == scope
    assert run(scope, claim(worker="w2"), at=later).impacts[0].claimed_by == "w2"


def test_a_renewed_claim_does_not_lapse() -> None:
    scope = run(scope_of(), restart(), approve("web-0"), claim())
    scope = run(scope, claim(tries=1), at=NOON + 10 * SECOND)

    assert next_impact_at(scope) == NOON + 10 * SECOND + STANDARD.claim
    assert run(scope, claim(worker="w2"), at=NOON + STANDARD.claim) == scope


def test_a_worker_that_comes_back_to_its_own_lapsed_claim_begins_a_new_try() -> None:
    """Else a driver that never ends would be called for ever, and never given up."""
    scope = run(scope_of(), restart(), approve("web-0"), claim())
    scope = run(scope, claim(), at=NOON + STANDARD.claim)

    assert scope.impacts[0].tries == 2
    assert run(scope, claim(tries=1), at=NOON + STANDARD.claim) == scope


def test_a_worker_that_lost_its_claim_tells_us_nothing() -> None:
    scope = run(scope_of(), restart(), approve("web-0"), claim(worker="w1"))
    scope = run(scope, claim(worker="w2"), at=NOON + STANDARD.claim)

    assert run(scope, finish(worker="w1", tries=1)) == scope
    assert run(scope, finish(worker="w2", tries=1)) == scope
    assert run(scope, finish(worker="w2", tries=2)).events == ()


def test_an_impact_that_nobody_ever_finishes_is_given_up() -> None:
    scope, at = run(scope_of(), restart(), approve("web-0")), NOON
    for number in range(TRIES_MAX):
        scope, at = run(scope, claim(worker=f"w{number}"), at=at), at + STANDARD.claim
    assert scope.impacts[0].tries == TRIES_MAX

    scope = run(scope, claim(worker="last"), at=at)

    assert (scope.events, scope.ended[-1].how) == ((), EndReason.FAILED)


def test_redeploy_changes_the_vms_host() -> None:
    scope = run(scope_of(), ask.Redeploy(vm="web-0", event_id=guid(1)), approve("web-0"))

    assert run_impact(scope, host="host-z").vms[0].host == "host-z"


def test_a_vm_that_moved_away_is_excused_from_its_old_hosts_maintenance() -> None:
    """Redeploying early is what a guest does about degraded hardware; then there is nothing left to
    warn of.
    """
    scope = run(scope_of(vm("a"), vm("b")), ask.Degrade(host="host-a", operation_id=OPERATION))
    scope = run(scope, ask.Redeploy(vm="a", event_id=guid(1)), approve("a"))

    assert statuses(run_impact(scope, host="host-z")) == ["Redeploy Scheduled b"]


def test_preempt_deallocates_and_excuses_from_everything_but_deletion() -> None:
    scope = run(
        scope_of(),
        restart(),
        ask.Delete(vm="web-0", event_id=guid(2)),
        ask.Evict(vm="web-0", event_id=guid(3)),
    )
    at = NOON + 30 * SECOND

    scope = run_impact(run(scope, ask.Tick(), at=at), at=at)

    assert scope.vms[0].power is Power.DEALLOCATED
    assert statuses(scope) == ["Terminate Scheduled web-0"]


def test_an_evicted_vm_does_not_come_back_when_its_reboot_ends() -> None:
    """Whatever was under way for it ends with the eviction, also if an operator says that the
    eviction is done.
    """
    scope = run(
        scope_of(), restart(), ask.Evict(vm="web-0", event_id=guid(3)), approve("web-0", 1, 3)
    )
    assert statuses(scope) == ["Reboot Started web-0", "Preempt Started web-0"]

    scope = run(scope, claim(1), ask.Complete(event_id=guid(3)), finish(1))

    assert (scope.vms[0].power, scope.events, scope.impacts) == (Power.DEALLOCATED, (), ())


def test_maintenance_does_not_start_a_vm_that_was_stopped() -> None:
    stopped = scope_of(vm("web-0", power=Power.STOPPED), vm("web-1", domain=1, host="host-b"))
    scope = run(stopped, maintain(type_=EventType.REBOOT))

    scope = run_impact(run(scope, ask.Tick(), at=NOON + 15 * MINUTE), at=NOON + 15 * MINUTE)

    assert scope.vms[0].power is Power.STOPPED


def test_what_ended_is_remembered_for_an_hour_even_if_it_is_much() -> None:
    """A guest's word about any of them may still be on its way."""
    names = [f"v{number}" for number in range(150)]
    scope = scope_of(*(vm(name) for name in names), user_operations_max=1000)
    for number, name in enumerate(names):
        scope = run(scope, restart(name, number + 1), ask.Cancel(event_id=guid(number + 1)))

    assert run(scope, approve("v0", 1, 150)) == scope
    later = NOON + timedelta(hours=2)
    scope = run(scope, restart("v0", 500), ask.Cancel(event_id=guid(500)), at=later)
    assert len(scope.ended) == 100


def test_a_busy_domain_does_not_keep_another_waiting_for_ever() -> None:
    """Behind a platform event that is held, later ones wait their turn, also those of the busy
    domain.
    """
    members = (vm("a"), vm("b", domain=1, host="host-b"), vm("c", host="host-c"))
    scope = run(scope_of(*members), maintain("host-a"))
    scope = run(scope, maintain("host-b", operation_id=guid(5)), at=NOON + MINUTE)
    scope = run(scope, maintain("host-c", operation_id=guid(6)), at=NOON + 2 * MINUTE)
    at = NOON + 20 * MINUTE

    scope = run(run(scope, ask.Tick(), at=NOON + 15 * MINUTE), ask.Tick(), at=at)
    assert statuses(scope) == ["Freeze Started a", "Freeze Scheduled b", "Freeze Scheduled c"]
    assert next_deadline(scope) is None
    scope = run_impact(scope, at=at)
    assert statuses(scope) == ["Freeze Started b", "Freeze Scheduled c"]


def test_terminate_removes_the_vm_from_the_fleet() -> None:
    scope = run(scope_of(), ask.Delete(vm="web-0", event_id=guid(1)), approve("web-0"))

    scope = run_impact(scope)

    assert [member.name for member in scope.vms] == ["web-1"]
    assert [(ended.id, ended.how) for ended in scope.ended] == [(guid(1), EndReason.COMPLETED)]


def test_a_standalone_vm_takes_its_scope_with_it() -> None:
    alone = scope_of(vm("web-0"), kind=ScopeKind.VM, terminate_notice=None)
    scope = run(alone, ask.Delete(vm="web-0", event_id=guid(1)), claim())

    assert outcome_of(scope, finish()).is_gone


def test_cancel_takes_a_scheduled_event_back() -> None:
    scope = run(scope_of(), restart(), ask.Cancel(event_id=guid(1)))

    assert (scope.events, scope.incarnation) == ((), 3)
    assert run(scope, ask.Cancel(event_id=guid(1))) == scope


def test_a_started_event_cannot_be_canceled_and_a_scheduled_one_not_completed() -> None:
    with pytest.raises(errors.WrongStatus):
        run(scope_of(), restart(), approve("web-0"), ask.Cancel(event_id=guid(1)))
    with pytest.raises(errors.WrongStatus):
        run(scope_of(), restart(), ask.Complete(event_id=guid(1)))


def test_an_operator_can_complete_a_started_event_whatever_the_driver_does() -> None:
    scope = run(scope_of(), ask.Delete(vm="web-0", event_id=guid(1)), approve("web-0"), claim())

    scope = run(scope, ask.Complete(event_id=guid(1)))

    assert (scope.events, scope.impacts, [member.name for member in scope.vms]) == (
        (),
        (),
        ["web-1"],
    )
    assert run(scope, finish()) == scope


def extend(hours: float, number: int = 1) -> ask.Extend:
    return ask.Extend(event_id=guid(number), not_before=NOON + timedelta(hours=hours))


def test_an_event_that_is_extended_starts_later_and_the_document_says_so() -> None:
    before = run(scope_of(), restart())
    outcome = outcome_of(before, extend(2))
    scope = outcome.scope

    assert [change.what for change in outcome.changes] == ["extended"]
    assert (scope.incarnation, scope.events[0].not_before) == (
        before.incarnation + 1,
        NOON + 120 * MINUTE,
    )
    assert statuses(run(scope, ask.Tick(), at=NOON + 120 * MINUTE - SECOND)) == [
        "Reboot Scheduled web-0"
    ]
    assert statuses(run(scope, ask.Tick(), at=NOON + 120 * MINUTE)) == ["Reboot Started web-0"]


def test_an_event_is_given_more_notice_never_less() -> None:
    scope = run(scope_of(), restart())

    assert run(scope, extend(0.25)) == scope
    with pytest.raises(errors.NoticeTooShort, match="at the earliest"):
        run(scope, extend(0.24))


def test_what_has_started_is_unknown_or_is_a_deletion_cannot_be_extended() -> None:
    with pytest.raises(errors.WrongStatus, match="only a Scheduled event can be extended"):
        run(scope_of(), restart(), approve("web-0"), extend(2))
    with pytest.raises(errors.UnknownEvent, match="there is no event"):
        run(scope_of(), restart(), extend(2, number=9))
    with pytest.raises(errors.Refused, match="a deletion cannot be postponed"):
        run(scope_of(), ask.Delete(vm="web-0", event_id=guid(1)), extend(2))


def test_a_completed_event_cannot_be_canceled_any_more() -> None:
    over = run_impact(run(scope_of(), restart(), approve("web-0")))

    with pytest.raises(errors.EventEnded, match="is over: completed at"):
        run(over, ask.Cancel(event_id=guid(1)))


def test_polling_enables_and_is_stored_once_an_hour() -> None:
    scope = scope_of(is_enabled=False)
    outcome = outcome_of(scope, ask.Seen())

    assert [change.what for change in outcome.changes] == ["enabled"]
    assert run(outcome.scope, ask.Seen(), at=NOON + timedelta(minutes=59)) == outcome.scope
    refreshed = outcome_of(outcome.scope, ask.Seen(), at=NOON + timedelta(hours=1))
    assert (refreshed.scope.seen_at, refreshed.changes) == (NOON + timedelta(hours=1), ())


def test_a_scope_lapses_when_nobody_polled_for_a_day() -> None:
    """A poll up to an hour after the stored one may not be known, so the lapse is counted
    generously, never short.
    """
    scope = run(scope_of(is_enabled=False), ask.Seen())

    assert run(scope, restart(), at=NOON + timedelta(hours=24, minutes=59)).events != ()
    assert run(scope, restart(), at=NOON + timedelta(hours=25)).events == ()


@pytest.mark.parametrize(
    "command", [ask.Cancel(event_id=guid(9)), ask.Complete(event_id=guid(9)), approve("web-0", 9)]
)
def test_an_unknown_event_is_named(command: ask.Command) -> None:
    with pytest.raises(errors.UnknownEvent, match=guid(9)):
        run(scope_of(), command)


def test_claiming_or_finishing_what_is_not_there_changes_nothing() -> None:
    scope = scope_of()

    assert run(scope, claim(9), finish(9)) == scope


def test_freeze_and_reboot_leave_the_vm_where_it_is() -> None:
    for type_ in (EventType.FREEZE, EventType.REBOOT):
        scope = run(scope_of(), maintain(type_=type_))
        after = run_impact(run(scope, ask.Tick(), at=NOON + 15 * MINUTE), at=NOON + 15 * MINUTE)
        assert after.vms == scope.vms


def two_started() -> Scope:
    """A restart and then a redeploy of web-0, both Started."""
    scope = run(scope_of(), restart(), ask.Redeploy(vm="web-0", event_id=guid(2)))
    return run(scope, approve("web-0", 1), approve("web-0", 2))


def test_a_vm_has_at_most_one_impact_at_a_time() -> None:
    """A reboot in the middle of a migration breaks the VM, and the platform cannot tell which of
    the two did what.
    """
    scope = run(two_started(), claim(1))
    assert statuses(scope) == ["Reboot Started web-0", "Redeploy Started web-0"]

    assert run(scope, claim(2)) == scope
    assert due_impacts(scope, NOON) == ()
    assert next_impact_at(scope) == NOON + STANDARD.claim


def test_the_next_impact_of_a_vm_can_be_claimed_as_soon_as_the_first_has_ended() -> None:
    """Nobody waits for a timer: the scope itself says that the second is due now."""
    scope = run(two_started(), claim(1))

    scope = run(scope, finish(1))

    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [guid(2)]
    assert next_impact_at(scope) == NOON
    assert run(scope, claim(2)).impacts[0].claimed_by == "w1"


def test_impacts_of_one_vm_run_in_the_order_in_which_they_started() -> None:
    """The order must be the same on every server, or two servers would each begin with another one."""
    scope = two_started()

    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [guid(1)]
    assert run(scope, claim(2)) == scope


def test_an_operation_without_an_event_also_waits_for_the_vms_current_impact() -> None:
    """An impact that no guest was told of does the same thing to the VM as any other."""
    scope = run(
        scope_of(is_enabled=False), restart(), ask.Redeploy(vm="web-0", event_id=guid(2)), claim(1)
    )

    assert run(scope, claim(2)) == scope
    assert run(scope, finish(1), claim(2)).impacts[0].claimed_by == "w1"


def test_a_lapsed_claim_is_taken_over_before_the_vms_next_impact() -> None:
    """Nobody knows how far the first one came, so the next one must not begin on top of it."""
    scope = run(two_started(), claim(1))
    later = NOON + STANDARD.claim

    assert [impact.event_id for impact in due_impacts(scope, later)] == [guid(1)]
    assert run(scope, claim(2, worker="w2"), at=later) == scope
    assert run(scope, claim(1, worker="w2"), at=later).impacts[0].claimed_by == "w2"


def test_an_impact_that_is_retried_keeps_its_vm_until_it_is_over() -> None:
    """A failed freeze may have left the VM suspended; a reboot in between would take that for the
    owner's wish.
    """
    scope = two_started()
    scope = run(scope, claim(1), finish(1, problem="no answer"))

    assert due_impacts(scope, NOON) == ()
    assert run(scope, claim(2)) == scope
    assert next_impact_at(scope) == NOON + STANDARD.retry


@pytest.mark.parametrize(
    "final",
    [
        ask.Evict(vm="web-0", event_id=guid(2)),
        ask.Delete(vm="web-0", event_id=guid(2)),
        ask.Fail(host="host-a", operation_id=OPERATION),
    ],
)
def test_what_makes_a_retry_pointless_does_not_wait_for_it(final: ask.Command) -> None:
    """The place of an evicted VM is needed now, and a VM on failed hardware is down until it is
    started elsewhere.
    """
    scope = run(
        scope_of(), restart(), approve("web-0"), claim(1), finish(1, problem="no answer"), final
    )
    last = scope.events[-1].id
    if scope.events[-1].status is Status.SCHEDULED:
        scope = run(scope, ask.Approve(event_ids=(last,), vm="web-0"))

    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [last]
    assert (
        run(scope, ask.Claim(event_id=last, vm="web-0", worker="w1")).impacts[-1].claimed_by == "w1"
    )


def test_a_failed_impact_is_tried_again_until_the_retry_window_is_over() -> None:
    """A hypervisor that restarts is back within minutes; the pauses grow to a minute, and the last
    try is at the very end.
    """
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


def test_without_a_retry_window_the_first_failure_is_the_last() -> None:
    timing = Timing(retry_window=timedelta(0))
    scope = run(
        scope_of(), restart(), approve("web-0"), claim(), finish(problem="no power"), timing=timing
    )

    assert (scope.events, scope.ended[-1].how) == ((), EndReason.FAILED)


def test_failed_tries_do_not_count_as_lapsed_claims() -> None:
    """A day of retries is many claims; only claims that nobody finished say that a worker is lost."""
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


def test_an_approval_of_many_ids_looks_each_of_them_up_once() -> None:
    """Any guest can name a thousand ids in one POST, and all other polls wait while they are looked
    up.
    """
    ids = tuple(CountedId(guid(number)) for number in range(400))
    scope = replace(
        scope_of(), ended=tuple(Ended(id=one, how=EndReason.COMPLETED, at=NOON) for one in ids)
    )
    CountedId.comparisons = 0

    with pytest.raises(errors.UnknownEvent):
        run(scope, ask.Approve(event_ids=(*(CountedId(one) for one in ids), guid(999)), vm="web-0"))

    assert CountedId.comparisons < 4 * len(ids)


def test_approving_an_event_twice_in_one_request_records_it_once() -> None:
    scope = run(scope_of(approval=Approval.ALL), restart())

    outcome = outcome_of(scope, approve("web-0", 1, 1))

    assert [change.what for change in outcome.changes] == ["approved"]
    assert outcome.scope.events[0].approvals == ("web-0",)
