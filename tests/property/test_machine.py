"""The rules under any story: what must always hold, holds."""

from datetime import datetime

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.core import command as ask
from forewarn.core.fleet import Scope
from forewarn.core.machine import Outcome, decide
from forewarn.core.timing import Timing
from forewarn.errors import Problem
from tests.builders import NOON
from tests.rules import check_domains, check_state, check_step, keeps_members_events
from tests.stories import MOVES, Move, command_of, scope_of_number, span_of

TIMINGS = {1: Timing(), 60: Timing.at_rate(60)}
moves = st.builds(Move, st.integers(0, len(MOVES) - 1), st.integers(0, 31), st.integers(0, 31), st.integers(0, 15))
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
    ask.Enrol,
    ask.Claim,
)
"""What the engine may ask again after a lost reply. Cancel and Complete may refuse then, saying how the event ended."""


@settings(max_examples=300, deadline=None)
@given(scope=scopes, story=stories, rate=st.sampled_from([1, 60]))
def test_whatever_is_asked_the_rules_hold(scope: Scope, story: list[Move], rate: int) -> None:
    """Every rule of tests/rules.py after every step: starts, statuses, domains, incarnations, bytes, members, repeats."""
    now, timing = NOON, TIMINGS[rate]
    for move in story:
        now += span_of(move)
        scope = decide(scope, ask.Tick(), now, timing).scope  # the tick loop: time never passes unnoticed
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
        assert (outcome.scope == scope) == (not outcome.changes) or isinstance(command, ask.Seen | ask.Enrol | ask.Claim)
        if outcome.is_gone:
            return
        if isinstance(command, REPEATABLE):
            assert decide(outcome.scope, command, now, timing).scope == outcome.scope, "asked again it changes nothing"
        scope = outcome.scope


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


def attempt(scope: Scope, command: ask.Command, now: datetime, timing: Timing) -> Outcome | tuple[str, str]:
    """The outcome, or the problem's code and message. Anything else that is raised is a bug and fails the test."""
    try:
        return decide(scope, command, now, timing)
    except Problem as problem:
        return problem.code, problem.message
