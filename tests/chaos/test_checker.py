"""The checker itself: good histories are accepted, and each broken promise is found by its name."""

from msgspec.structs import replace

from tests.chaos.checker import Promise, Violation, check
from tests.chaos.history import (
    AGE_UNKNOWN,
    Call,
    Fault,
    HistoryEntry,
    ImpactRun,
    Kind,
    Members,
    Recording,
    Run,
    Shown,
    Stage,
)

NOON = 1_800_000_000.0
NOT_BEFORE = NOON + 10
RUN = Run(
    seed=1,
    began_at=NOON,
    ended_at=NOON + 60,
    servers=("s0", "s1"),
    notice_seconds={Kind.RESTART: 8.0},
    fleet={"web": Members("any", ("web-0", "web-1", "web-2"))},
    faults=(),
)
SCHEDULED = Shown("E", "Scheduled", NOT_BEFORE)
STARTED = Shown("E", "Started")
VIEWS = {"bytes-none": (), "bytes-scheduled": (SCHEDULED,), "bytes-started": (STARTED,)}


def call(kind: Kind, after: float, status: int = 200, **more: object) -> Call:
    """A call that was asked this many seconds after noon, and answered 0.1 s later."""
    fields = {
        "client": "c0",
        "server": "s0",
        "asked_at": NOON + after,
        "answered_at": NOON + after + 0.1,
    }
    return Call(kind=kind, status=status, **fields | more)  # type: ignore[arg-type]


def poll(after: float, incarnation: int, view: str, server: str = "s0") -> Call:
    return call(
        Kind.POLL,
        after,
        scope="web",
        incarnation=incarnation,
        view=f"bytes-{view}",
        server=server,
        client=f"c-{server}",
    )


def final(server: str, incarnation: int = 4, view: str = "none") -> Call:
    return replace(poll(50, incarnation, view, server), kind=Kind.FINAL, client=f"f-{server}")


def entry(number: int, what: str, after: float, **more: object) -> HistoryEntry:
    fields = {
        "event": "E",
        "scope": "web",
        "resources": ("web-0",),
        "type": "Reboot",
        "cause": "user-restart",
    }
    return HistoryEntry(number=number, what=what, at=NOON + after, **fields | more)  # type: ignore[arg-type]


RESTART = call(Kind.RESTART, 0, 202, vm="web-0", events=(SCHEDULED,))
SCHEDULED_ENTRY = entry(1, "scheduled", 0.05, not_before=NOT_BEFORE)
IMPACTED_ENTRY = entry(4, "impacted", 12, vm="web-0")
GOOD = Recording(
    run=RUN,
    calls=(
        RESTART,
        poll(0.5, 2, "scheduled"),
        poll(0.6, 2, "scheduled", "s1"),
        *(poll(each, 2, "scheduled") for each in range(2, 10, 2)),
        poll(10.5, 3, "started"),
        poll(13, 4, "none"),
        final("s0"),
        final("s1"),
    ),
    views=VIEWS,
    impacts=(
        ImpactRun(Stage.BEGUN, "E", "web-0", "s1", NOON + 10.5),
        ImpactRun(Stage.DONE, "E", "web-0", "s1", NOON + 11.5),
    ),
    entries=(
        SCHEDULED_ENTRY,
        entry(2, "started", 10.01),
        entry(3, "claimed", 10.02, vm="web-0"),
        IMPACTED_ENTRY,
        entry(5, "completed", 12),
    ),
)


def with_calls(*calls: Call, before: Recording = GOOD) -> Recording:
    return replace(before, calls=(*before.calls, *calls))


def without(what: str) -> Recording:
    return replace(GOOD, entries=tuple(each for each in GOOD.entries if each.what != what))


def broken(recording: Recording) -> list[Promise]:
    return sorted({violation.promise for violation in check(recording)})


def test_a_good_history_breaks_no_promise() -> None:
    assert check(GOOD) == []


# --- acknowledged commands


def test_an_acknowledged_operation_without_event_is_lost() -> None:
    lost = call(Kind.RESTART, 1, 202, vm="web-1", events=(Shown("F", "Scheduled", NOON + 11),))
    assert broken(with_calls(lost)) == [Promise.KEPT]


def test_an_operation_that_was_not_acknowledged_may_be_missing() -> None:
    assert check(with_calls(call(Kind.RESTART, 1, 503, vm="web-1"))) == []
    assert check(with_calls(call(Kind.RESTART, 1, 0, vm="web-1"))) == []


def test_an_event_without_an_end_is_lost() -> None:
    assert broken(without("completed")) == [Promise.KEPT]


def test_an_acknowledged_approval_is_recorded_unless_it_came_too_late() -> None:
    early = call(Kind.APPROVE, 2, vm="web-1", scope="web", events=(STARTED,))
    late = call(Kind.APPROVE, 11, vm="web-1", scope="web", events=(STARTED,))
    assert broken(with_calls(replace(early, events=(Shown("E", ""),)))) == [Promise.KEPT]
    assert check(with_calls(replace(late, events=(Shown("E", ""),)))) == []


def test_an_approval_that_started_the_event_is_good() -> None:
    approval = call(Kind.APPROVE, 2, vm="web-1", scope="web", events=(Shown("E", ""),))
    recording = with_calls(approval, poll(14, 4, "none"))
    approved = entry(6, "approved", 2.05, vm="web-1")
    assert check(replace(recording, entries=(*GOOD.entries, approved))) == []


def test_an_acknowledged_cancellation_must_have_canceled() -> None:
    cancel = call(Kind.CANCEL, 1, events=(Shown("E", ""),))
    assert broken(with_calls(cancel)) == [Promise.KEPT]


def test_an_event_is_canceled_only_on_request() -> None:
    entries = (SCHEDULED_ENTRY, entry(2, "canceled", 3))
    recording = replace(GOOD, entries=entries, impacts=(), calls=(RESTART, *GOOD.calls[-2:]))
    assert broken(recording) == [Promise.KEPT]
    asked = call(Kind.CANCEL, 2, 0, events=(Shown("E", ""),))
    assert check(with_calls(asked, before=recording)) == []


def test_an_acknowledged_extension_is_recorded() -> None:
    extend = call(Kind.EXTEND, 1, events=(Shown("E", ""),), not_before=NOON + 20)
    assert broken(with_calls(extend)) == [Promise.KEPT]


# --- notice


def test_an_event_that_is_seen_started_before_not_before_is_early() -> None:
    (violation,) = check(with_calls(poll(9.8, 3, "started", "s1")))
    assert violation == Violation(
        Promise.NOTICE,
        "event E was Started on s1 0.100 s before NotBefore at 1800000009.900",
    )


def test_an_impact_before_not_before_is_early() -> None:
    begun = ImpactRun(Stage.BEGUN, "E", "web-0", "s0", NOON + 9)
    assert broken(replace(GOOD, impacts=(begun, *GOOD.impacts))) == [Promise.NOTICE]


def test_an_approval_sent_before_excuses_an_early_start_and_a_refused_one_does_not() -> None:
    started = poll(5, 3, "started", "s1")
    sent = call(Kind.APPROVE, 4, 0, vm="web-1", scope="web", events=(Shown("E", ""),))
    assert check(with_calls(sent, started)) == []
    assert broken(with_calls(replace(sent, status=400), started)) == [Promise.NOTICE]
    late = replace(sent, asked_at=NOON + 6, answered_at=NOON + 6.1)
    assert broken(with_calls(started, late)) == [Promise.NOTICE]


def test_a_policy_that_asks_for_all_is_not_satisfied_by_some() -> None:
    policy = replace(RUN, fleet={"web": Members("all", ("web-0", "web-1", "web-2"))})
    started = poll(5, 3, "started", "s1")
    votes = [
        call(Kind.APPROVE, 3, 0, vm=f"web-{number}", scope="web", events=(Shown("E", ""),))
        for number in range(3)
    ]
    some = replace(with_calls(*votes[:2], started), run=policy)
    assert broken(some) == [Promise.NOTICE]
    assert check(replace(with_calls(*votes, started), run=policy)) == []


def test_a_start_between_the_first_and_the_extended_not_before_is_early() -> None:
    extended = entry(6, "extended", 3, not_before=NOON + 20)
    assert broken(replace(GOOD, entries=(*GOOD.entries, extended))) == [Promise.NOTICE]


def test_less_notice_than_the_type_promises_is_early() -> None:
    short = replace(RESTART, events=(replace(SCHEDULED, not_before=NOON + 7),))
    assert broken(replace(GOOD, calls=(short, *GOOD.calls[1:]))) == [Promise.NOTICE]


# --- impacts


LATE = entry(1, "scheduled", -60, not_before=NOON - 50)
"""Decided a minute before noon, and committed after an outage."""


def read_at(*after: float, seen: float) -> Recording:
    """Guests poll at these times, and see the event from then on, until it starts at 10.5."""
    polls = [
        poll(each, 1 if each < seen else 2, "none" if each < seen else "late") for each in after
    ]
    views = VIEWS | {"bytes-late": (Shown("E", "Scheduled", NOON - 50),)}
    rest = [each for each in GOOD.calls if each.kind is not Kind.POLL or each.asked_at > NOON + 10]
    lost = call(Kind.RESTART, -60, 0, vm="web-0")
    calls = (lost, *polls, *(each for each in rest if each.kind is not Kind.RESTART))
    return replace(GOOD, calls=calls, views=views, entries=(LATE, *GOOD.entries[1:]))


def test_an_event_that_guests_could_read_for_its_notice_is_good() -> None:
    assert broken(read_at(*range(11), seen=1)) == []


def test_an_event_that_appears_late_has_less_notice_than_promised() -> None:
    """Its NotBefore has passed before any guest could read it."""
    assert broken(read_at(*range(11), seen=9)) == [Promise.READ]


def test_time_without_any_response_is_no_notice() -> None:
    """Guests saw the event, then all servers were down, then it started."""
    assert broken(read_at(0, 1, 2, 10, seen=1)) == [Promise.READ]


def test_time_with_responses_to_other_guests_is_notice() -> None:
    """Clients of a busy machine may not get to one scope for a while. An outage concerns all."""
    others = [replace(poll(each, 1, "none"), scope="db", client="c-db") for each in range(11)]
    recording = read_at(0, 1, 2, 10, seen=1)
    assert broken(replace(recording, calls=(*recording.calls, *others))) == []


def test_time_with_only_old_documents_is_no_notice() -> None:
    """Guests saw the event, then all servers lost the store and answered from memory."""

    def with_age(call: Call, age: int) -> Call:
        is_in_outage = NOON + 2 <= call.asked_at < NOON + 10
        return replace(call, age=age) if call.kind is Kind.POLL and is_in_outage else call

    good = read_at(*range(11), seen=1)
    for age in (12, AGE_UNKNOWN):
        recording = replace(good, calls=tuple(with_age(call, age) for call in good.calls))
        assert broken(recording) == [Promise.READ]

    others = [replace(poll(each, 1, "none", "s1"), scope="db") for each in range(11)]
    assert broken(replace(recording, calls=(*recording.calls, *others))) == []


def test_a_completed_event_whose_command_never_finished_is_not_done() -> None:
    assert broken(replace(GOOD, impacts=GOOD.impacts[:1])) == [Promise.DONE]


def test_an_impact_that_was_carried_out_twice_and_recorded_once_is_good() -> None:
    assert check(replace(GOOD, impacts=GOOD.impacts * 2)) == []


def test_an_impact_that_is_recorded_twice_or_never_is_found() -> None:
    again = replace(IMPACTED_ENTRY, number=9)
    assert broken(replace(GOOD, entries=(*GOOD.entries, again))) == [Promise.RECORDED_ONCE]
    assert broken(without("impacted")) == [Promise.RECORDED_ONCE]


def test_a_failed_event_is_not_done() -> None:
    entries = tuple(
        replace(each, what="failed") if each.what == "completed" else each for each in GOOD.entries
    )
    assert broken(replace(GOOD, entries=entries)) == [Promise.DONE]


# --- documents


def test_an_incarnation_that_falls_for_one_client_is_found() -> None:
    assert broken(with_calls(poll(14, 2, "scheduled"))) == [Promise.NEVER_FALLS]


def test_an_incarnation_that_is_older_on_another_server_is_good() -> None:
    assert check(with_calls(poll(14, 2, "scheduled", "s1"))) == []


def test_other_bytes_under_one_incarnation_are_found() -> None:
    assert broken(with_calls(poll(0.7, 2, "none", "s1"))) == [Promise.SAME_BYTES]


def test_servers_that_end_with_different_documents_are_found() -> None:
    behind = replace(final("s1", 3), client="f-late")
    assert Promise.CONVERGED in broken(with_calls(behind))


def test_a_server_without_final_documents_is_found() -> None:
    assert broken(replace(GOOD, calls=GOOD.calls[:-1])) == [Promise.CONVERGED]


def test_an_event_that_stays_in_the_documents_is_found() -> None:
    stuck = with_calls(final("s0", 5, "started"), final("s1", 5, "started"))
    assert broken(stuck) == [Promise.CONVERGED]


# --- operations


def extra_event(event: str, after: float) -> Recording:
    """A second restart of the VM that came to a good end."""
    entries = tuple(
        replace(each, number=each.number + 10, event=event, at=each.at + after)
        for each in GOOD.entries
        if each.what != "claimed"
    )
    impacts = tuple(replace(impact, event=event, at=impact.at + after) for impact in GOOD.impacts)
    views = GOOD.views | {"bytes-scheduled": (SCHEDULED, replace(SCHEDULED, id=event))}
    return replace(
        GOOD,
        views=views,
        entries=(*GOOD.entries, *entries),
        impacts=(*GOOD.impacts, *impacts),
    )


def test_a_second_event_of_an_acknowledged_operation_is_found() -> None:
    assert broken(extra_event("F", 1)) == [Promise.AT_MOST_ONCE]


def test_an_operation_without_response_explains_one_event_and_not_two() -> None:
    sent = call(Kind.RESTART, 0.5, 0, vm="web-0")
    assert check(with_calls(sent, before=extra_event("F", 1))) == []
    refused = replace(sent, status=409)
    assert broken(with_calls(refused, before=extra_event("F", 1))) == [Promise.AT_MOST_ONCE]
    later = replace(sent, asked_at=NOON + 30)
    assert broken(with_calls(later, before=extra_event("F", 1))) == [Promise.AT_MOST_ONCE]


def test_repeats_under_one_key_explain_one_event() -> None:
    first = replace(RESTART, key="k", status=0, events=())
    recording = with_calls(first, before=extra_event("F", 1))
    again = replace(RESTART, key="k")
    assert broken(replace(recording, calls=(first, again, *GOOD.calls[1:]))) == [
        Promise.AT_MOST_ONCE
    ]
    assert check(replace(GOOD, calls=(first, again, *GOOD.calls[1:]))) == []


def test_two_events_of_one_maintenance_for_a_vm_are_found() -> None:
    asked = call(Kind.MAINTAIN, 0, 202, text="disk 7", events=(SCHEDULED,))
    entries = tuple(
        replace(each, cause="maintenance", description="disk 7")
        for each in extra_event("F", 1).entries
    )
    recording = replace(extra_event("F", 1), entries=entries, calls=(asked, *GOOD.calls[1:]))
    assert broken(recording) == [Promise.AT_MOST_ONCE]


def test_a_wrong_clock_excuses_no_early_start() -> None:
    skewed = replace(RUN, faults=(Fault("clock", "s1", NOON, NOON + 60, NOON + 60, 30.0),))
    early = with_calls(poll(5, 3, "started", "s1"))
    assert broken(replace(early, run=skewed)) == [Promise.NOTICE]


def test_a_server_with_a_wrong_clock_may_be_a_second_wrong_about_the_notice() -> None:
    short = replace(RESTART, events=(replace(SCHEDULED, not_before=NOON + 7.5),))
    recording = replace(GOOD, calls=(short, *GOOD.calls[1:]))
    for target, expected in (("s0", []), ("s1", [Promise.NOTICE])):
        fault = Fault("clock", target, NOON, NOON + 60, NOON + 60, 30.0)
        assert broken(replace(recording, run=replace(RUN, faults=(fault,)))) == expected
