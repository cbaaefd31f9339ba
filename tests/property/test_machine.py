"""The rules under any story: what must always hold, holds."""

from datetime import datetime

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.fleet import Scope
from forewarn.core.machine import Group, Outcome, decide, due_impacts, next_impact_at
from forewarn.core.timing import Timing
from forewarn.errors import Error
from tests.builders import NOON, guid, scope_of, vm
from tests.rules import (
    check_domains,
    check_state,
    check_step,
    keeps_members_events,
    pages,
    without_incarnation,
)
from tests.stories import MOVES, Move, claim_of, command_of, finish_of, scope_of_number, span_of

TIMINGS = {1: Timing(), 60: Timing.at_rate(60)}
moves = st.builds(
    Move, st.integers(0, len(MOVES) - 1), st.integers(0, 31), st.integers(0, 31), st.integers(0, 15)
)
stories = st.lists(moves, min_size=1, max_size=30)
scopes = st.integers(0, 500).map(scope_of_number)

REPEATABLE = (
    ask.Restart,
    ask.Redeploy,
    ask.Delete,
    ask.Evict,
    ask.Maintain,
    ask.Degrade,
    ask.Fail,
    ask.Approve,
    ask.Finish,
    ask.Seen,
    ask.Tick,
    ask.SetMembers,
    ask.Claim,
)
"""What the engine may ask again after a lost reply.

Cancel and Complete may refuse then, saying how the event ended.
"""


@settings(max_examples=300, deadline=None)
@given(scope=scopes, story=stories, rate=st.sampled_from([1, 60]))
def test_whatever_is_asked_the_rules_hold(scope: Scope, story: list[Move], rate: int) -> None:
    """Every rule of tests/rules.py after every step: starts, statuses, domains, incarnations,
    bytes, members, repeats.
    """
    now, timing = NOON, TIMINGS[rate]
    for move in story:
        now += span_of(move)
        scope = decide(
            scope, ask.Tick(), now, timing
        ).scope  # the tick loop: time never passes unnoticed
        command = command_of(move, scope)
        frozen = msgspec.json.encode(scope)
        outcome = attempt(scope, command, now, timing)
        assert msgspec.json.encode(scope) == frozen, "decide never touches what it was given"
        if not isinstance(outcome, Outcome):
            continue
        check_step(scope, outcome.scope, now)
        check_state(outcome.scope, now)
        check_domains(scope, outcome.scope)
        keeps_members_events(scope, command, outcome.scope)
        assert (outcome.scope == scope) == (not outcome.changes) or isinstance(
            command, ask.Seen | ask.SetMembers | ask.Claim
        )
        if outcome.is_gone:
            return
        if isinstance(command, REPEATABLE):
            assert decide(outcome.scope, command, now, timing).scope == outcome.scope, (
                "asked again it changes nothing"
            )
        scope = outcome.scope


ON_ONE_VM = (
    ask.Restart(vm="a", event_id=guid(1)),
    ask.Redeploy(vm="a", event_id=guid(2)),
    ask.Delete(vm="a", event_id=guid(3)),
)
CLAIMS = tuple(number for number, build in enumerate(MOVES) if build in (claim_of, finish_of))
claims = st.builds(
    Move, st.sampled_from(CLAIMS), st.integers(0, 31), st.integers(0, 31), st.integers(0, 15)
)


@settings(max_examples=100, deadline=None)
@given(story=st.lists(st.one_of(claims, claims, moves), min_size=1, max_size=30))
def test_a_vm_never_has_two_impacts_at_once(story: list[Move]) -> None:
    """Workers claim, lose and retry what they like: a reboot in the middle of a migration breaks
    the VM.
    """
    scope, now = scope_of(vm("a"), vm("b", domain=1), is_enabled=False, terminate_notice=None), NOON
    for command in ON_ONE_VM:
        scope = decide(scope, command, now, TIMINGS[1]).scope
    for move in story:
        now += span_of(move)
        outcome = attempt(scope, command_of(move, scope), now, TIMINGS[1])
        if isinstance(outcome, Outcome):
            if outcome.is_gone:
                return
            scope = outcome.scope
        claimed = [impact.vm for impact in scope.impacts if impact.claimed_by]
        assert len(set(claimed)) == len(claimed)
        due = [impact.vm for impact in due_impacts(scope, now)]
        assert len(set(due)) == len(due)
        assert (next_impact_at(scope) is None) == all(impact.is_over for impact in scope.impacts), (
            "nothing waits for ever"
        )


@settings(max_examples=100, deadline=None)
@given(scope=scopes, story=stories)
def test_the_same_input_gives_the_same_output(scope: Scope, story: list[Move]) -> None:
    """No clock, no chance, no order of sets: what is decided on one server is decided on any."""
    now = NOON
    for move in story:
        now += span_of(move)
        command = command_of(move, scope)
        first = attempt(scope, command, now, TIMINGS[1])
        assert attempt(scope, command, now, TIMINGS[1]) == first
        if isinstance(first, Outcome):
            if first.is_gone:
                return
            scope = first.scope


def attempt(
    scope: Scope, command: ask.Command, now: datetime, timing: Timing, group: Group | None = None
) -> Outcome | tuple[str, str]:
    """The outcome, or the problem's code and message.

    Anything else that is raised is a bug and fails the test.
    """
    try:
        return decide(scope, command, now, timing, group)
    except Error as problem:
        return problem.code, problem.message


@settings(max_examples=200, deadline=None)
@given(scope=scopes, story=stories, group=st.integers(2, 8))
def test_commands_that_are_committed_together_do_what_they_do_one_by_one(
    scope: Scope, story: list[Move], group: int
) -> None:
    """A group is one commit: the guests see its end alone, so the incarnation counts that and not
    the steps in between.
    """
    now, together, alone = NOON, Group(scope), scope
    for number, move in enumerate(story):
        if number % group == 0:
            together = Group(scope)
        now += span_of(move)
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
