"""How the time to NotBefore is split."""

import pytest

from forewarn.agent.budget import Budget


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
    assert Budget(60.0).will_make_it([30.0, 30.0], 0.0)
    assert not Budget(60.0).will_make_it([30.0, 30.0], 1.0)
    assert Budget().will_make_it([1e9], 0.0)
