"""Waiting has an end, whatever is waited for."""

import threading

import pytest

from forewarn.agent.step import StepFailed, StepTimedOut
from forewarn.agent.steps.wait import pause, until, within
from tests.unit.agent.steps.build import occasion


def test_waiting_ends_when_it_is_done() -> None:
    """What is true already is not waited for."""
    looks = iter((False, False, True))
    until(occasion(), lambda: next(looks), waiting_for=lambda: "x", every=0)

    assert list(looks) == []


def test_waiting_ends_at_the_limit_and_says_what_did_not_come() -> None:
    """That is what the operator wants to know."""
    with pytest.raises(StepTimedOut, match="time is up: x did not come"):
        until(occasion(seconds=0), lambda: False, waiting_for=lambda: "x did not come")


def test_waiting_ends_when_the_agent_has_to() -> None:
    """At once, and not as a time-out."""
    with pytest.raises(StepFailed, match="the agent has to end: x") as failure:
        pause(occasion(stop=True), 60, "x")

    assert not isinstance(failure.value, StepTimedOut)


def test_a_pause_that_reaches_the_limit_ends_the_step() -> None:
    """One more try at the last moment would fail for want of time, and hide the true reason."""
    with pytest.raises(StepTimedOut, match="the true reason"):
        pause(occasion(seconds=0.05), 60, "the true reason")


def test_a_call_gives_back_what_it_returns_and_raises_what_it_raises() -> None:
    """As if it were called here."""
    assert within(occasion(), 5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(occasion(), 5, lambda: 1 // 0)


def test_a_call_that_does_not_return_is_given_up() -> None:
    """Name resolution knows no limit of its own.

    Its own time first, then the step's, then the agent's.
    """
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 seconds"):
        within(occasion(), 0.1, never.wait)
    with pytest.raises(TimeoutError):
        within(occasion(seconds=0), 5, never.wait)
    with pytest.raises(StepFailed, match="the agent has to end"):
        within(occasion(stop=True), 5, never.wait)
    never.set()
