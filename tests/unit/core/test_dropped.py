"""Impacts that end while a worker holds them: its platform may still act on their VM."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn.core.command import Abandon, Claim, Command, Complete, Release, SetMembers
from forewarn.core.event import ImpactState
from forewarn.core.fleet import Scope
from forewarn.core.machine import due_impacts, next_impact_at
from tests.builders import NOON, approve, claim, finish, guid, restart, run, scope_of, vm

SLOW: Claim = replace(claim(), stop_seconds=30.0)
SCOPE = scope_of(vm("web-0"), vm("web-1"))
BEGUN = run(SCOPE, restart(), approve("web-0"), SLOW)
"""The restart of web-0, by a platform that takes its time to stop."""


def restart_again(scope: Scope) -> Scope:
    """Another restart of web-0, which is due."""
    return run(scope, restart(number=2), approve("web-0", 2))


@pytest.mark.parametrize(
    "drop",
    [
        Complete(event_id=guid(1)),
        Abandon(host="host-a", problem="host-a was forgotten"),
        SetMembers(kind=SCOPE.kind, policy=SCOPE.policy, vms=(vm("web-1"),)),
    ],
)
def test_impact_that_ends_while_it_is_held_blocks_its_vm(drop: Command) -> None:
    """Any server may claim the next one, and the holder may not have seen that this one is over."""
    scope = run(BEGUN, drop)
    assert [(each.vm, each.claimed_by) for each in scope.dropped] == [("web-0", "w1")]
    assert (scope.events, scope.impacts) == ((), ())
    if scope.vm("web-0") is None:
        scope = run(scope, SetMembers(kind=SCOPE.kind, policy=SCOPE.policy, vms=SCOPE.vms))

    scope = restart_again(scope)
    assert (due_impacts(scope, NOON), next_impact_at(scope)) == ((), None)
    assert run(scope, claim(2, worker="w2")) == scope


@pytest.mark.parametrize(
    "ended",
    [
        Release(worker="w1", event_id=guid(1), vm="web-0"),
        Release(worker="w1"),
        finish(),
        finish(problem="no route to host"),
    ],
)
def test_vm_is_free_when_the_holder_has_stopped(ended: Command) -> None:
    """Or is lost: then another server releases its claims when its platform must have stopped."""
    scope = run(restart_again(run(BEGUN, Complete(event_id=guid(1)))), ended)
    assert scope.dropped == ()

    assert run(scope, claim(2, worker="w2")).impacts[0].state is ImpactState.CLAIMED


@pytest.mark.parametrize(
    "other",
    [
        Release(worker="w2"),
        Release(worker="w1", event_id=guid(2), vm="web-0"),
        Release(worker="w1", event_id=guid(1), vm="web-0", tries=2),
        finish(worker="w2"),
    ],
)
def test_others_do_not_free_the_vm(other: Command) -> None:
    dropped = run(BEGUN, Complete(event_id=guid(1)))

    assert run(dropped, other) == dropped


def test_result_of_the_holder_drops_nothing() -> None:
    assert run(BEGUN, finish()).dropped == ()
    assert run(BEGUN, finish(problem="no route to host", is_final=True)).dropped == ()


def test_platform_that_stops_at_once_blocks_nothing() -> None:
    scope = run(SCOPE, restart(), approve("web-0"), claim(), Complete(event_id=guid(1)))

    assert scope.dropped == ()


def test_other_vms_are_not_blocked() -> None:
    scope = run(BEGUN, Complete(event_id=guid(1)), restart("web-1", 2), approve("web-1", 2))

    assert [impact.vm for impact in due_impacts(scope, NOON)] == ["web-1"]


def test_late_result_of_an_earlier_try_does_not_free_a_vm() -> None:
    """It was committed, its reply was lost, and its worker sends it again."""
    late, later = finish(problem="no route to host"), NOON + timedelta(minutes=5)
    scope = run(run(BEGUN, late), SLOW, Complete(event_id=guid(1)), at=later)
    assert [each.tries for each in scope.dropped] == [2]

    assert run(scope, late, at=later) == scope
