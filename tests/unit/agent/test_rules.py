"""Which rule is for which event."""

import pytest

from forewarn.agent.rules import (
    Bounds,
    Budget,
    Concerns,
    Rule,
    first_match,
    is_first,
    is_quiet,
    matches,
)
from forewarn.client import Document, Event
from tests.unit.agent.agent_world import reboot, started


def is_for(rule: Rule, event: Event, lead_seconds: float = 900) -> bool:
    return matches(rule, event, vm="web-0", lead_seconds=lead_seconds)


def test_the_first_rule_that_matches_wins() -> None:
    """A file is read from top to bottom: the special cases stand first."""
    rules = (Rule("freezes", types=("Freeze",)), Rule("reboots", types=("Reboot",)), Rule("all"))

    found = first_match(rules, reboot(), vm="web-0", lead_seconds=900)

    assert found is not None
    assert found.name == "reboots"


def test_an_event_that_no_rule_is_for_has_none() -> None:
    """Nothing is done by default: who writes no rule wants no action."""
    assert (
        first_match((Rule("freezes", types=("Freeze",)),), reboot(), vm="web-0", lead_seconds=900)
        is None
    )


def test_a_rule_that_says_nothing_is_for_every_event_of_this_vm() -> None:
    """What is left out matches all, also types that are new to us."""
    assert is_for(Rule("all"), reboot(type="Levitate", source="", duration_seconds=-1))


def test_types_and_sources_are_compared_in_any_case() -> None:
    """Endpoints and people differ in capitals, and nobody means something by it."""
    assert is_for(Rule("r", types=("reboot",), sources=("platform",)), reboot())
    assert not is_for(Rule("r", sources=("User",)), reboot())


@pytest.mark.parametrize(
    ("concerns", "own", "peer"), [("own", True, False), ("peer", False, True), ("any", True, True)]
)
def test_own_peer_and_any_tell_whom_the_event_hits(concerns: str, own: bool, peer: bool) -> None:
    """All VMs of a scope read one document: without this a VM would drain for its neighbour."""
    rule = Rule("r", concerns=Concerns(concerns))

    assert is_for(rule, reboot()) is own
    assert is_for(rule, reboot(resources=("web-1",))) is peer


def test_bounds_include_both_ends() -> None:
    """max = 30 means that 30 seconds is still short, and 31 is not."""
    rule = Rule("short", duration_seconds=Bounds(10, 30))

    assert [is_for(rule, reboot(duration_seconds=seconds)) for seconds in (9, 10, 30, 31)] == [
        False,
        True,
        True,
        False,
    ]


def test_an_unknown_duration_is_within_no_bounds() -> None:
    """-1 means that nobody knows; a rule for short pauses must not take it for a short one."""
    assert not is_for(Rule("short", duration_seconds=Bounds(None, 30)), reboot(duration_seconds=-1))
    assert not is_for(Rule("any", duration_seconds=Bounds(-1, None)), reboot(duration_seconds=-1))


def test_the_lead_time_decides() -> None:
    """With a minute to go another plan is right than with fifteen."""
    rule = Rule("early", lead_seconds=Bounds(60, None))

    assert is_for(rule, reboot(), lead_seconds=60)
    assert not is_for(rule, reboot(), lead_seconds=59.9)


def test_scope_patterns_match_any_name_in_resources() -> None:
    """A scope is known to a guest only by the names in it; old api-versions begin them with an
    underscore.
    """
    rule = Rule("web", scope=("web-*",))

    assert is_for(rule, reboot(resources=("_db-0", "_WEB-0")))
    assert not is_for(Rule("db", scope=("db-?", "mail")), reboot())


def test_the_first_of_resources_leads() -> None:
    """As Azure's documents propose: everyone sees the same list, so everyone agrees."""
    assert is_first(reboot(resources=("_web-0", "web-1")), "web-0")
    assert not is_first(reboot(resources=("web-1", "web-0")), "web-0")
    assert not is_first(reboot(resources=()), "web-0")


def test_quiet_is_when_no_other_vm_is_under_impact() -> None:
    """Our own Started event is no reason to wait; another VM's is, also if it shares the event with
    us.
    """
    own, shared, waiting = (
        started(reboot()),
        started(reboot(resources=("web-0", "web-1"))),
        reboot(resources=("web-1",)),
    )

    assert is_quiet(Document(1, (own, waiting)), "web-0")
    assert not is_quiet(Document(1, (shared,)), "web-0")


def test_time_is_split_by_weight_and_what_is_left_over_goes_on() -> None:
    """A step that was quick gives its time to those after it."""
    budget = Budget(100.0)

    assert budget.seconds_for([1, 3], None, 0.0) == 25.0
    assert budget.seconds_for([3], None, 5.0) == 95.0


def test_a_step_never_gets_more_than_its_own_limit() -> None:
    """The limit is what the operator knows about the step."""
    assert Budget(100.0).seconds_for([1], 60, 0.0) == 60
    assert Budget(100.0).seconds_for([1, 1], 60, 0.0) == 50.0


def test_when_time_is_short_the_last_steps_are_cut() -> None:
    """Of many steps in two seconds the first four get half a second each: the order of the file is
    the order of importance.
    """
    budget, now, given = Budget(2.0), 0.0, []
    weights = [1.0] * 10
    for index in range(10):
        seconds = budget.seconds_for(weights[index:], None, now)
        given.append(seconds)
        now += seconds

    assert given[:4] == [0.5, 0.5, 0.5, 0.5]
    assert given[4:] == [0.0] * 6


def test_a_preempt_of_thirty_seconds_keeps_three_for_the_approval() -> None:
    """The shortest notice there is: what is prepared must still be approved in time."""
    assert Budget.until(1030.0, 1000.0).deadline == 1027.0


def test_the_reserve_is_never_more_than_five_seconds() -> None:
    """An approval takes a moment, however long the notice."""
    assert Budget.until(1900.0, 1000.0).deadline == 1895.0


def test_after_the_deadline_every_step_is_cut() -> None:
    """A step begun then would be under way when the impact comes."""
    assert Budget(10.0).seconds_for([1], 60, 9.6) == 0.0
    assert Budget(10.0).seconds_for([1], 60, 11.0) == 0.0


@pytest.mark.parametrize(("limit_seconds", "expected"), [(None, 300.0), (1000.0, 1000.0)])
def test_without_a_deadline_a_step_has_its_limit_or_five_minutes(
    limit_seconds: float | None, expected: float
) -> None:
    """Start and recover have nothing to be in time for, but everything has a limit."""
    assert Budget().seconds_for([1, 1], limit_seconds, 0.0) == expected


def test_it_is_known_early_that_time_will_not_suffice() -> None:
    """Two steps that took 30 seconds each do not fit into 59: an operator told at the start can
    still act.
    """
    assert Budget(60.0).is_enough_for([30.0, 30.0], 0.0)
    assert not Budget(60.0).is_enough_for([30.0, 30.0], 1.0)
    assert Budget().is_enough_for([1e9], 0.0)
