"""The rules of a scope under random stories."""

from datetime import datetime, timedelta
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forewarn.core.command import (
    Approve,
    Back,
    Claim,
    Command,
    Degrade,
    Delete,
    Evict,
    Fail,
    Finish,
    Maintain,
    NoteUnread,
    Redeploy,
    Release,
    Restart,
    Seen,
    SetMembers,
    Tick,
    Unread,
)
from forewarn.core.event import EventType, Gap, ImpactState
from forewarn.core.fleet import Scope
from forewarn.core.machine import (
    Group,
    Outcome,
    decide,
    due_impacts,
    next_deadline,
    next_impact_at,
)
from forewarn.core.timing import Timing
from forewarn.errors import Error
from tests.builders import NOON, SECOND, guid, scope_of, vm
from tests.random_commands import (
    MOVES,
    Move,
    back_of,
    claim_of,
    command_of,
    finish_of,
    interval_of,
    scope_of_number,
)
from tests.rules import (
    check_back,
    check_domains,
    check_state,
    check_step,
    keeps_members_events,
    pages,
    readable_seconds,
    without_incarnation,
)

TIMINGS = {1: Timing(), 60: Timing.at_rate(60)}
moves = st.builds(
    Move, st.integers(0, len(MOVES) - 1), st.integers(0, 31), st.integers(0, 31), st.integers(0, 15)
)
stories = st.lists(moves, min_size=1, max_size=30)
scopes = st.integers(0, 500).map(scope_of_number)

REPEATABLE = (
    Back,
    Restart,
    Redeploy,
    Delete,
    Evict,
    Maintain,
    Degrade,
    Fail,
    Approve,
    Finish,
    Seen,
    Tick,
    SetMembers,
    Claim,
    NoteUnread,
)
"""What may be repeated after a lost reply without any effect.

Cancel and Complete are not listed: repeated, they may report how the event ended.
"""


@settings(max_examples=300, deadline=None)
@given(scope=scopes, main=stories, rate=st.sampled_from([1, 60]))
def test_invariants_hold_after_every_command(scope: Scope, main: list[Move], rate: int) -> None:
    """Starts, statuses, domains, incarnations, bytes, members, and repeated commands."""
    now, timing = NOON, TIMINGS[rate]
    for move in main:
        now += interval_of(move)
        ticked = decide(scope, Tick(), now, timing).scope  # as the worker does
        check_back(scope, Tick(), ticked, now, timing)
        scope = ticked
        command = command_of(move, scope)
        frozen = msgspec.json.encode(scope)
        outcome = attempt(scope, command, now, timing)
        assert msgspec.json.encode(scope) == frozen, "decide never modifies its input"
        if not isinstance(outcome, Outcome):
            continue
        check_step(scope, outcome.scope, now)
        check_state(outcome.scope, now, is_ticked=isinstance(command, Tick))
        check_domains(scope, outcome.scope)
        check_back(scope, command, outcome.scope, now, timing)
        keeps_members_events(scope, command, outcome.scope)
        assert (outcome.scope == scope) == (not outcome.changes) or isinstance(
            command, Seen | SetMembers | Release | NoteUnread
        )
        if outcome.is_gone:
            return
        if isinstance(command, REPEATABLE):
            assert decide(outcome.scope, command, now, timing).scope == outcome.scope, (
                "repeated, it changes nothing"
            )
        scope = outcome.scope


skews = st.integers(-7200, 7200).map(lambda seconds: timedelta(seconds=seconds))


@settings(max_examples=300, deadline=None)
@given(scope=scopes, main=st.lists(st.tuples(moves, skews), min_size=1, max_size=30))
def test_promise_is_kept_whatever_the_clocks_of_servers_show(
    scope: Scope, main: list[tuple[Move, timedelta]]
) -> None:
    """Each command is decided by a server with another clock: NotBefore never moves earlier, and
    nothing starts before it by the clock that finds it due.
    """
    now = NOON
    for move, skew in main:
        now += interval_of(move)
        outcome = attempt(scope, command_of(move, scope), now + skew, TIMINGS[1])
        if isinstance(outcome, Outcome):
            check_step(scope, outcome.scope, now + skew)
            if outcome.is_gone:
                return
            scope = outcome.scope


lengths = st.one_of(st.integers(1, 40), st.integers(41, 7200))
gaps_of_a_day = st.lists(st.tuples(st.integers(-600, 7200), lengths), max_size=24)


@settings(max_examples=300, deadline=None)
@given(pieces=gaps_of_a_day, order=st.randoms(), more_notice=st.integers(0, 7200))
def test_notice_is_what_could_be_read_in_whichever_order_gaps_are_noted(
    pieces: list[tuple[int, int]], order: Random, more_notice: int
) -> None:
    """Each gap is made up once, and only as far as the minimum notice needs it."""
    gaps = [Gap(NOON + a * SECOND, NOON + (a + b) * SECOND) for a, b in pieces]
    not_before = NOON + (900 + more_notice) * SECOND
    scope = scope_of(vm("a"), vm("b", domain=1))
    restart = Restart(vm="a", event_id=guid(1), not_before=not_before)
    scope = decide(scope, restart, NOON, TIMINGS[1]).scope
    at_once = decide(scope, NoteUnread((Unread(guid(1), tuple(gaps)),)), NOON, TIMINGS[1]).scope
    (event,) = at_once.events
    assert event.not_before >= not_before
    assert readable_seconds(event, event.not_before) >= 900
    if event.not_before > not_before:
        assert readable_seconds(event, event.not_before - SECOND) < 900, "not a second too much"
    assert len(event.gaps) <= 16
    apart = all(b >= 15 for _, b in pieces) and len(pieces) <= 16
    if apart:  # shorter gaps count only with a neighbor that is known at the same time
        for gap in order.sample([*gaps, *gaps], 2 * len(gaps)):
            scope = decide(scope, NoteUnread((Unread(guid(1), (gap,)),)), NOON, TIMINGS[1]).scope
        assert [each.not_before for each in scope.events] == [event.not_before]


ON_ONE_VM = (
    Restart(vm="a", event_id=guid(1)),
    Redeploy(vm="a", event_id=guid(2)),
    Delete(vm="a", event_id=guid(3)),
)
CLAIMS = tuple(
    number for number, build in enumerate(MOVES) if build in (claim_of, finish_of, back_of)
)
claims = st.builds(
    Move, st.sampled_from(CLAIMS), st.integers(0, 31), st.integers(0, 31), st.integers(0, 15)
)


@settings(max_examples=100, deadline=None)
@given(
    main=st.lists(st.one_of(claims, claims, moves), min_size=1, max_size=30), is_seen=st.booleans()
)
def test_vm_never_has_two_impacts_at_once(main: list[Move], is_seen: bool) -> None:
    """A reboot in the middle of a migration breaks the VM, and so does one while it boots."""
    scope, now = scope_of(vm("a"), vm("b", domain=1), is_enabled=False, terminate_notice=None), NOON
    for command in ON_ONE_VM:
        scope = decide(scope, command, now, TIMINGS[1]).scope
    if is_seen:
        scope = decide(scope, Seen(), now, TIMINGS[1]).scope
    for move in main:
        now += interval_of(move)
        outcome = attempt(scope, command_of(move, scope), now, TIMINGS[1])
        if isinstance(outcome, Outcome):
            if outcome.is_gone:
                return
            scope = outcome.scope
        claimed = [impact.vm for impact in scope.impacts if impact.claimed_by]
        assert len(set(claimed)) == len(claimed)
        due = [impact.vm for impact in due_impacts(scope, now)]
        assert len(set(due)) == len(due)
        booting = [impact for impact in scope.impacts if impact.state is ImpactState.BOOTING]
        blocked = {impact.vm for impact in booting}
        waiting = {impact.vm for impact in scope.impacts if not impact.is_over}
        waiting -= {impact.vm for impact in scope.impacts if impact.is_held}
        is_open = next_impact_at(scope) is not None
        assert is_open >= bool(waiting - blocked), "no impact is forgotten"
        assert is_open <= bool(waiting), "no impact is invented"
        limit = min((impact.due_at for impact in booting), default=None)
        assert limit is None or (next_deadline(scope) or limit + SECOND) <= limit, (
            "no wait is endless"
        )


RESTARTS = (
    Restart(vm="a", event_id=guid(1)),
    Redeploy(vm="a", event_id=guid(2)),
    Restart(vm="b", event_id=guid(3)),
    Maintain(host="host-a", operation_id=guid(10), type=EventType.REBOOT),
    Approve(event_ids=(guid(1), guid(2), guid(3)), vm="a"),
)


@settings(max_examples=200, deadline=None)
@given(main=st.lists(st.one_of(claims, claims, claims, moves), min_size=5, max_size=40))
def test_restart_is_over_when_the_vm_is_back_or_late(main: list[Move]) -> None:
    """Otherwise peers send traffic to a VM that boots, and the next one goes down beside it."""
    scope, now = scope_of(vm("a"), vm("b", domain=1), vm("c")), NOON
    for command in RESTARTS:
        scope = decide(scope, command, now, TIMINGS[1]).scope
    for move in main:
        now += interval_of(move)
        ticked = decide(scope, Tick(), now, TIMINGS[1]).scope
        check_back(scope, Tick(), ticked, now, TIMINGS[1])
        scope, step = ticked, command_of(move, ticked)
        outcome = attempt(scope, step, now, TIMINGS[1])
        if isinstance(outcome, Outcome):
            check_back(scope, step, outcome.scope, now, TIMINGS[1])
            if outcome.is_gone:
                return
            scope = outcome.scope


@settings(max_examples=100, deadline=None)
@given(scope=scopes, main=stories)
def test_same_input_gives_same_output(scope: Scope, main: list[Move]) -> None:
    """Every server decides the same: no clock, no randomness, no order of sets."""
    now = NOON
    for move in main:
        now += interval_of(move)
        command = command_of(move, scope)
        first = attempt(scope, command, now, TIMINGS[1])
        assert attempt(scope, command, now, TIMINGS[1]) == first
        if isinstance(first, Outcome):
            if first.is_gone:
                return
            scope = first.scope


def attempt(
    scope: Scope, command: Command, now: datetime, timing: Timing, group: Group | None = None
) -> Outcome | tuple[str, str]:
    """The outcome, or the code and message of the error. Other exceptions are bugs."""
    try:
        return decide(scope, command, now, timing, group)
    except Error as error:
        return error.code, error.message


@settings(max_examples=200, deadline=None)
@given(scope=scopes, main=stories, group=st.integers(2, 8))
def test_grouped_commands_do_the_same_as_single_ones(
    scope: Scope, main: list[Move], group: int
) -> None:
    """A group is one commit, so the incarnation counts once for all its commands."""
    now, together, alone = NOON, Group(scope), scope
    for number, move in enumerate(main):
        if number % group == 0:
            together = Group(scope)
        now += interval_of(move)
        command = command_of(move, scope)
        grouped = attempt(scope, command, now, TIMINGS[1], together)
        outcome = attempt(alone, command, now, TIMINGS[1])
        if not isinstance(grouped, Outcome) or not isinstance(outcome, Outcome):
            assert grouped == outcome
            continue
        assert replace(grouped.scope, incarnation=1) == replace(outcome.scope, incarnation=1)
        assert grouped.changes == outcome.changes
        scope, alone, shown = grouped.scope, outcome.scope, together.shown
        has_changed = [without_incarnation(page) for page in pages(shown)] != [
            without_incarnation(page) for page in pages(scope)
        ]
        assert scope.incarnation == shown.incarnation + has_changed
        if outcome.is_gone:
            return
