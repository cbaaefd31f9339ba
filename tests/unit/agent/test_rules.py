"""Which rule is for which event."""

import math

import pytest

from forewarn.agent.rules import (
    Bounds,
    Concerns,
    Rule,
    first_match,
    is_first,
    is_quiet,
    matches,
    prepare_deadline,
    seconds_for_step,
)
from forewarn.client import Document, Event
from tests.unit.agent.agent_world import reboot, started


def is_for(rule: Rule, event: Event, lead_seconds: float = 900) -> bool:
    return matches(rule, event, vm="web-0", lead_seconds=lead_seconds)


def test_first_matching_rule_applies() -> None:
    """A file is read from top to bottom: special cases come first."""
    rules = (Rule("freezes", types=("Freeze",)), Rule("reboots", types=("Reboot",)), Rule("all"))

    found = first_match(rules, reboot(), vm="web-0", lead_seconds=900)

    assert found is not None
    assert found.name == "reboots"


def test_event_without_a_matching_rule_has_none() -> None:
    """Without a rule, nothing is done."""
    assert (
        first_match((Rule("freezes", types=("Freeze",)),), reboot(), vm="web-0", lead_seconds=900)
        is None
    )


def test_rule_without_conditions_matches_all_events_of_this_vm() -> None:
    """Also types that are not known yet."""
    assert is_for(Rule("all"), reboot(type="Levitate", source="", duration_seconds=-1))


def test_types_and_sources_ignore_case() -> None:
    """Endpoints and people capitalise differently."""
    assert is_for(Rule("r", types=("reboot",), sources=("platform",)), reboot())
    assert not is_for(Rule("r", sources=("User",)), reboot())


@pytest.mark.parametrize(
    ("concerns", "own", "peer"), [("own", True, False), ("peer", False, True), ("any", True, True)]
)
def test_concerns_selects_events_by_affected_vm(concerns: str, own: bool, peer: bool) -> None:
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


def test_unknown_duration_is_within_no_bounds() -> None:
    """A rule for short freezes must not match -1."""
    assert not is_for(Rule("short", duration_seconds=Bounds(0, 30)), reboot(duration_seconds=-1))
    assert not is_for(Rule("any", duration_seconds=Bounds(0, 10**9)), reboot(duration_seconds=-1))


def test_lead_time_decides() -> None:
    """With one minute left, another plan is right than with fifteen."""
    rule = Rule("early", lead_seconds=Bounds(60))

    assert is_for(rule, reboot(), lead_seconds=60)
    assert not is_for(rule, reboot(), lead_seconds=59.9)


def test_scope_patterns_match_any_name_in_resources() -> None:
    """A guest knows its scope only by the names in it.

    Old api-versions prefix them with an underscore.
    """
    rule = Rule("web", scope=("web-*",))

    assert is_for(rule, reboot(resources=("_db-0", "_WEB-0")))
    assert not is_for(Rule("db", scope=("db-?", "mail")), reboot())


def test_first_of_resources_is_the_leader() -> None:
    """As Azure's documentation proposes: every VM sees the same list."""
    assert is_first(reboot(resources=("_web-0", "web-1")), "web-0")
    assert not is_first(reboot(resources=("web-1", "web-0")), "web-0")
    assert not is_first(reboot(resources=()), "web-0")


def test_scope_is_quiet_if_no_other_vm_is_started() -> None:
    """This VM's own Started event does not count, unless it shares the event with another VM."""
    own, shared, waiting = (
        started(reboot()),
        started(reboot(resources=("web-0", "web-1"))),
        reboot(resources=("web-1",)),
    )

    assert is_quiet(Document(1, (own, waiting)), "web-0")
    assert not is_quiet(Document(1, (shared,)), "web-0")


def test_time_is_shared_by_weight_and_unused_time_passes_on() -> None:
    """A fast step gives its time to the steps after it."""
    assert seconds_for_step(100.0, [1, 3], None, 0.0) == 25.0
    assert seconds_for_step(100.0, [3], None, 5.0) == 95.0


def test_step_never_gets_more_than_its_limit() -> None:
    assert seconds_for_step(100.0, [1], 60, 0.0) == 60
    assert seconds_for_step(100.0, [1, 1], 60, 0.0) == 50.0


def test_short_time_cuts_the_last_steps() -> None:
    """In two seconds, the first four steps get half a second each.

    The order of the file is the priority.
    """
    now, given = 0.0, []
    weights = [1.0] * 10
    for index in range(10):
        seconds = seconds_for_step(2.0, weights[index:], None, now)
        given.append(seconds)
        now += seconds

    assert given[:4] == [0.5, 0.5, 0.5, 0.5]
    assert given[4:] == [0.0] * 6


def test_preempt_keeps_three_seconds_for_the_approval() -> None:
    """The shortest notice there is: what is prepared must still be approved in time."""
    assert prepare_deadline(1030.0, 1000.0) == 1027.0


def test_reserve_is_at_most_five_seconds() -> None:
    """An approval is fast, however long the notice."""
    assert prepare_deadline(1900.0, 1000.0) == 1895.0


def test_every_step_is_cut_after_the_deadline() -> None:
    """It would still run when the impact comes."""
    assert seconds_for_step(10.0, [1], 60, 9.6) == 0.0
    assert seconds_for_step(10.0, [1], 60, 11.0) == 0.0


@pytest.mark.parametrize(("limit_seconds", "expected"), [(None, 300.0), (1000.0, 1000.0)])
def test_without_a_deadline_the_limit_is_five_minutes(
    limit_seconds: float | None, expected: float
) -> None:
    """Start and recover have no deadline, but everything has a limit."""
    assert seconds_for_step(math.inf, [1, 1], limit_seconds, 0.0) == expected
