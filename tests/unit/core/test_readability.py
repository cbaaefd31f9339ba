"""Notice is what could be read: gaps in which no VM could read an event are made up, once."""

from datetime import UTC, datetime, timedelta

from forewarn.core.command import (
    Degrade,
    Delete,
    Evict,
    Extend,
    Fail,
    Finish,
    NoteUnread,
    Tick,
    Unread,
)
from forewarn.core.event import EventType, Gap, Status
from forewarn.core.fleet import Scope
from forewarn.core.machine import next_deadline
from forewarn.core.readability import keep_recent
from forewarn.core.timing import Timing
from tests.builders import (
    MINUTE,
    NOON,
    SECOND,
    approve,
    claim,
    guid,
    maintain,
    outcome_of,
    restart,
    run,
    run_impact,
    scope_of,
    statuses,
)

PENDING = run(scope_of(), restart())


def gap(first: float, last: float) -> Gap:
    """From so many seconds after noon until so many."""
    return Gap(NOON + first * SECOND, NOON + last * SECOND)


def unread(*gaps: Gap, number: int = 1, since: datetime | None = None) -> NoteUnread:
    return NoteUnread((Unread(guid(number), gaps, since),))


def not_before_of(scope: Scope) -> timedelta:
    (event,) = scope.events
    return event.not_before - NOON


def test_gap_in_the_notice_is_made_up() -> None:
    """It was announced for 12:15 and could not be read for 46 s: 12:15:46, and guests see it."""
    outcome = outcome_of(PENDING, unread(gap(0, 46)))
    assert not_before_of(outcome.scope) == 15 * MINUTE + 46 * SECOND
    assert outcome.scope.incarnation == PENDING.incarnation + 1
    (change,) = outcome.changes
    assert change.what == "extended"
    assert change.detail == "to 2026-03-04T12:15:46Z: it could not be read for 46s"
    assert change.not_before == NOON + 15 * MINUTE + 46 * SECOND


def test_gap_that_is_noted_again_is_made_up_once() -> None:
    """Every server notes what it knows, and a reply may be lost."""
    once = run(PENDING, unread(gap(0, 46)))
    assert run(once, unread(gap(0, 46)), unread(gap(10, 40))) == once


def test_short_gap_does_not_count_because_a_later_time_is_not_over() -> None:
    """Noted again with the same facts, it changes nothing."""
    once = run(PENDING, unread(gap(10, 20), since=NOON + 15 * SECOND))
    assert run(once, unread(gap(10, 20), since=NOON + 15 * SECOND)) == once
    assert not_before_of(once) == 15 * MINUTE


def test_overlapping_gaps_count_once() -> None:
    """The servers and the daemon of a host may have been away at the same time."""
    scope = run(PENDING, unread(gap(100, 200)), unread(gap(50, 150)))
    assert not_before_of(scope) == 15 * MINUTE + 150 * SECOND


def test_gap_under_15_seconds_counts_as_notice() -> None:
    """A restart of the only server is not worth a new NotBefore."""
    assert run(PENDING, unread(gap(10, 24.999))) == PENDING
    assert not_before_of(run(PENDING, unread(gap(10, 25)))) == 15 * MINUTE + 15 * SECOND


def test_preempt_counts_gaps_of_3_seconds() -> None:
    """Its whole notice is 30 seconds."""
    scope = run(scope_of(), Evict(vm="web-0", event_id=guid(1)))
    assert run(scope, unread(gap(10, 12.9))) == scope
    assert not_before_of(run(scope, unread(gap(10, 13)))) == 33 * SECOND


def test_gap_before_the_announcement_does_not_count() -> None:
    """An idle fleet confirms nothing, so a gap may begin long before the event."""
    assert run(PENDING, unread(gap(-3600, 0.2))) == PENDING
    assert not_before_of(run(PENDING, unread(gap(-3600, 20)))) == 15 * MINUTE + 20 * SECOND


def test_gap_counts_if_the_event_waited_for_its_end_however_short_it_is() -> None:
    """It was found unreadable, because its host had been away since before the announcement."""
    waiting = run(PENDING, unread(since=NOON))
    ended = run(waiting, unread(gap(-20, 10)))
    assert not_before_of(ended) == 15 * MINUTE + 10 * SECOND
    assert not_before_of(run(ended, unread(gap(100, 120)))) == 15 * MINUTE + 30 * SECOND
    assert not_before_of(run(waiting, unread(gap(2, 12)))) == 15 * MINUTE


def test_event_that_was_announced_long_before_keeps_not_before() -> None:
    """Two days of notice with 20 minutes of trouble are still more than 15 minutes."""
    scope = run(scope_of(), restart(not_before=NOON + timedelta(days=2)))
    outcome = outcome_of(scope, unread(gap(0, 1200)))
    assert not_before_of(outcome.scope) == timedelta(days=2)
    assert outcome.scope.incarnation == scope.incarnation
    assert outcome.changes == ()


def test_gap_after_the_notice_was_complete_changes_nothing_visible() -> None:
    """The event waited for another update domain: its VMs had read it for 15 minutes."""
    scope = run(PENDING, unread(gap(900, 2000)))
    assert not_before_of(scope) == 15 * MINUTE


def test_deletion_is_made_up_too() -> None:
    """`Extend` refuses a Terminate; a guest that could not read it is given its notice anyway."""
    scope = run(scope_of(), Delete(vm="web-0", event_id=guid(1)), unread(gap(0, 60)))
    assert not_before_of(scope) == 6 * MINUTE


def test_made_up_event_starts_when_all_vms_are_down() -> None:
    """Only a NotBefore that a person chose waits for VMs that are down."""
    (event,) = run(PENDING, unread(gap(0, 60))).events
    assert not event.is_timed


def test_operator_postpones_from_the_corrected_not_before() -> None:
    scope = run(PENDING, unread(gap(0, 60)))
    extended = run(scope, Extend(event_id=guid(1), not_before=NOON + 20 * MINUTE))
    assert not_before_of(run(extended, unread(gap(0, 60)))) == 20 * MINUTE


def test_event_that_cannot_be_read_now_does_not_start_by_time() -> None:
    """The host of its VM is cut off; when it is back, the VM gets the notice that it missed."""
    cut_off = NOON + 5 * MINUTE
    scope = run(PENDING, unread(since=cut_off))
    assert statuses(run(scope, Tick(), at=NOON + 20 * MINUTE)) == ["Reboot Scheduled web-0"]
    assert next_deadline(scope) is None
    back = run(scope, unread(gap(300, 1500)))
    assert not_before_of(back) == 35 * MINUTE
    assert statuses(run(back, Tick(), at=NOON + 35 * MINUTE - SECOND)) == ["Reboot Scheduled web-0"]
    assert statuses(run(back, Tick(), at=NOON + 35 * MINUTE)) == ["Reboot Started web-0"]


def test_approval_starts_an_event_that_others_cannot_read() -> None:
    """An approval is as good as ever: some VM has read the event."""
    scope = run(PENDING, unread(gap(0, 60), since=NOON + MINUTE))
    assert statuses(run(scope, approve("web-1"))) == ["Reboot Started web-0"]


def test_event_that_cannot_be_read_holds_no_other_update_domain() -> None:
    """A host that is cut off must not stop the maintenance of all others."""
    scope = run(scope_of(), maintain("host-a"), maintain("host-b", operation_id=guid(5)))
    first, second = sorted(scope.events, key=lambda event: event.id)
    at = NOON + 15 * MINUTE
    scope = run(scope, NoteUnread((Unread(first.id, (), NOON),)), at=at)
    assert next_deadline(scope) == second.not_before
    scope = run(scope, Tick(), at=at)
    assert {event.id: event.status.value for event in scope.events} == {
        first.id: "Scheduled",
        second.id: "Started",
    }


def test_failed_hardware_is_immediate() -> None:
    """There is nothing to wait for."""
    scope = run(PENDING, unread(since=NOON))
    scope = run(scope, Fail(host="host-a", operation_id=guid(7)))
    assert [event.status for event in scope.events if event.type is EventType.REBOOT][-1] == (
        "Started"
    )


def test_only_a_tick_starts_what_is_due() -> None:
    """Whoever sends it knows until when events could be read; an approval of another does not."""
    scope = run(PENDING, restart("web-1", 2, not_before=NOON + 60 * MINUTE))
    at = NOON + 30 * MINUTE
    assert statuses(run(scope, approve("web-1", 2), at=at)) == [
        "Reboot Scheduled web-0",
        "Reboot Started web-1",
    ]


def test_tick_starts_nothing_after_the_time_that_it_confirms() -> None:
    """The sender was suspended between its check and its commit."""
    late, confirmed = NOON + 30 * MINUTE, NOON + 15 * MINUTE - SECOND
    assert run(PENDING, Tick(shown_at=confirmed), at=late) == PENDING
    started = run(PENDING, Tick(shown_at=confirmed + SECOND), at=late)
    assert statuses(started) == ["Reboot Started web-0"]


def test_tick_starts_only_events_that_its_sender_knows() -> None:
    """Another one may have been committed late, after the sender has looked for gaps."""
    scope = run(PENDING, restart("web-1", 2))
    ticked = run(scope, Tick(NOON + 15 * MINUTE, frozenset({guid(1)})), at=NOON + 15 * MINUTE)
    assert [event.has_had_notice for event in ticked.events] == [True, False]


def test_approved_deletion_waits_for_one_that_cannot_be_read() -> None:
    """Coupled deletions start together; the other VM has not had its notice."""
    scope = run(
        scope_of(couple_terminates=True),
        Delete(vm="web-0", event_id=guid(1)),
        Delete(vm="web-1", event_id=guid(2)),
        unread(number=2, since=NOON),
    )
    at = NOON + 4 * MINUTE
    assert "Terminate Scheduled web-0" in statuses(run(scope, approve("web-0", 1), at=at))


def test_started_event_is_not_postponed() -> None:
    """What was noted late concerns an event that is over, or started by an approval."""
    started = run(PENDING, approve("web-0"))
    assert run(started, unread(gap(0, 60))) == started
    ended = run(
        started, claim(), finish := Finish(event_id=guid(1), vm="web-0", worker="w1", tries=1)
    )
    assert run(ended, finish, unread(gap(0, 60))) == ended


def test_host_that_flaps_for_a_week_delays_a_degraded_event_by_its_gaps() -> None:
    """40 gaps of 20 seconds are 800 seconds, and the times between them were notice."""
    scope = run(scope_of(), Degrade(host="host-a", operation_id=guid(1)))
    event_id, gaps = scope.events[0].id, [gap(n * 14400, n * 14400 + 20) for n in range(40)]
    for number in range(40):
        recent = tuple(gaps[max(0, number - 31) : number + 1])
        scope = run(scope, NoteUnread((Unread(event_id, recent),)))
    assert not_before_of(scope) == timedelta(days=7, seconds=800)
    assert len(scope.events[0].gaps) <= 16
    assert run(scope, NoteUnread((Unread(event_id, tuple(gaps[:10])),))) == scope


def test_gap_that_has_not_ended_is_made_up_although_others_end_meanwhile() -> None:
    """Its host is away, and the servers restart again and again."""
    gaps = [gap(40 * n + 60, 40 * n + 80) for n in range(20)]
    scope = run(PENDING, unread(since=NOON + 50 * SECOND))
    for number in range(20):
        scope = run(scope, unread(*gaps[: number + 1], since=NOON + 50 * SECOND))
    assert len(scope.events[0].gaps) <= 16
    scope = run(scope, unread(gap(50, 3000)))
    assert not_before_of(scope) == 15 * MINUTE + 2950 * SECOND


def test_gaps_of_an_event_are_bounded() -> None:
    """Of more than 16, the oldest are only in the total."""
    gaps = [gap(50 * number, 50 * number + 20) for number in range(18)]
    (event,) = run(PENDING, unread(*gaps)).events
    assert event.gaps == tuple(gaps[2:])
    assert (event.unread_total, event.unread_until) == (40 * SECOND, NOON + 70 * SECOND)
    assert event.not_before == NOON + 15 * MINUTE + 18 * 20 * SECOND


def test_gaps_after_the_notice_are_forgotten_first() -> None:
    """They postpone nothing, and those before stay as they are."""
    gaps = [gap(40 * number, 40 * number + 20) for number in range(16)]
    (event,) = run(PENDING, unread(*gaps, gap(5000, 5020), gap(5025, 5045))).events
    assert event.gaps == tuple(gaps)


def test_latest_gaps_are_kept_and_short_ones_for_two_minutes() -> None:
    """Each event stores what concerns it within seconds; short gaps concern only a Preempt."""
    long = [gap(100 * number, 100 * number + 50) for number in range(40)]
    at = NOON + 4000 * SECOND
    assert keep_recent(long, at, Timing()) == tuple(long[8:])
    short = [gap(3700, 3779), gap(3870, 3876), gap(3900, 3904)]
    assert keep_recent(short, at, Timing()) == (short[0], short[2])


def test_short_gap_is_kept_through_a_long_one() -> None:
    """Nothing was running in that time that could have stored it with its event."""
    short, long = gap(0, 10), gap(11, 611)
    assert keep_recent([short, long], long.until, Timing()) == (short, long)
    assert keep_recent([short, long], NOON + 729 * SECOND, Timing()) == (short, long)
    assert keep_recent([short, long], NOON + 730 * SECOND, Timing()) == (long,)


def test_short_gap_is_kept_through_one_that_began_at_an_unknown_time() -> None:
    """After a confirmation of a wrong clock, nothing is known since the beginning of time."""
    long = Gap(datetime.min.replace(tzinfo=UTC), NOON + 600 * SECOND)
    assert keep_recent([gap(0, 10), long], long.until, Timing()) == (gap(0, 10), long)


def test_held_event_starts_in_the_commit_that_ends_the_other() -> None:
    """Between two commits the scope would look as if no VM were under impact, and a campaign would
    begin another host.
    """
    scope = run(scope_of(), maintain("host-a"), maintain("host-b"))
    scope = run(scope, Tick(), at=NOON + 15 * MINUTE)
    assert sorted(event.status for event in scope.events) == ["Scheduled", "Started"]

    scope = run_impact(scope, at=NOON + 20 * MINUTE)

    assert [event.status for event in scope.events] == ["Started"]


def test_gap_after_the_notice_was_complete_postpones_nothing() -> None:
    scope = run(scope_of(), maintain("host-a"), maintain("host-b"))
    scope = run(scope, Tick(), at=NOON + 15 * MINUTE)
    (held,) = (event for event in scope.events if event.status is Status.SCHEDULED)

    note = NoteUnread((Unread(held.id, (gap(960, 1080),)),))
    scope = run(scope, note, at=NOON + 18 * MINUTE)

    assert held in scope.events


def test_postponed_event_needs_its_notice_again() -> None:
    scope = run(scope_of(), maintain("host-a"), maintain("host-b"))
    scope = run(scope, Tick(), at=NOON + 15 * MINUTE)
    (held,) = (event for event in scope.events if event.status is Status.SCHEDULED)
    extend = Extend(event_id=held.id, not_before=NOON + 60 * MINUTE)
    scope = run(scope, extend, at=NOON + 16 * MINUTE)

    scope = run_impact(scope, at=NOON + 20 * MINUTE)

    assert [event.status for event in scope.events] == ["Scheduled"]
