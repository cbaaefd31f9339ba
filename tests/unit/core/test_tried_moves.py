"""Moves that were tried and have not succeeded: the VM may have been started on another host."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn.core.command import (
    Abandon,
    Approve,
    Command,
    Complete,
    Finish,
    Redeploy,
    Release,
    SetMembers,
)
from forewarn.core.event import EventType, ImpactState
from forewarn.core.fleet import Scope, TriedMove
from tests.builders import (
    NOON,
    approve,
    claim,
    finish,
    guid,
    maintain,
    restart,
    run,
    scope_of,
    vm,
)
from tests.work_count import Name, work_of

LATER = NOON + timedelta(minutes=5)
SCOPE = scope_of(vm("web-0"), vm("web-1"))
REDEPLOY = Redeploy(vm="web-0", event_id=guid(1))
CLAIMED = run(SCOPE, REDEPLOY, approve("web-0"), replace(claim(), stop_seconds=30.0))
FAILED = finish(problem="the target did not answer")


@pytest.mark.parametrize("ended", [FAILED, Complete(event_id=guid(1))])
def test_try_that_ends_without_success_is_remembered(ended: Command) -> None:
    """Also after its event, which an operator has completed while it ran."""
    assert run(CLAIMED, ended, at=LATER).tried_moves == (TriedMove("web-0", LATER),)


def test_try_lasts_until_its_platform_has_stopped() -> None:
    """It acts for a while after the event has ended."""
    dropped = run(CLAIMED, Complete(event_id=guid(1)))
    stopped = run(dropped, Release(worker="w1", event_id=guid(1), vm="web-0"), at=LATER)

    assert stopped.tried_moves == (TriedMove("web-0", LATER),)


def test_try_of_a_lost_host_or_server_lasts_until_the_next_one() -> None:
    """Nobody knows when it ended."""
    released = run(CLAIMED, Release(worker="w1"))
    assert released.tried_moves == ()

    assert run(released, claim(worker="w2"), at=LATER).tried_moves == (TriedMove("web-0", LATER),)


@pytest.mark.parametrize(
    "known",
    [
        finish(tries=2),
        SetMembers(kind=SCOPE.kind, policy=SCOPE.policy, vms=(vm("web-1"),)),
    ],
)
def test_nothing_is_remembered_of_a_vm_that_has_moved_or_left(known: Command) -> None:
    again: Scope = run(run(CLAIMED, FAILED), claim(), at=LATER)
    assert again.tried_moves == (TriedMove("web-0", NOON),)

    assert run(again, known, at=LATER).tried_moves == ()


def test_impact_that_moves_nothing_is_not_remembered() -> None:
    assert run(SCOPE, restart(), approve("web-0"), claim(), FAILED).tried_moves == ()


def held_moves(count: int) -> Scope:
    """A worker holds the moves of all these VMs, which one event began."""
    vms = tuple(vm(Name(f"web-{number}")) for number in range(count))
    begun = run(scope_of(*vms), maintain(type_=EventType.REDEPLOY))
    begun = run(begun, Approve(event_ids=(begun.events[0].id,)))
    held = {"state": ImpactState.CLAIMED, "claimed_by": "w1", "tries": 1, "stop_seconds": 30.0}
    return replace(begun, impacts=tuple(replace(each, **held) for each in begun.impacts))


def dropped_moves(count: int) -> Scope:
    """Its event has been completed meanwhile."""
    begun = held_moves(count)
    return run(begun, Complete(event_id=begun.events[0].id))


def finish_one(scope: Scope) -> Command:
    first, *_ = scope.dropped
    return Finish(event_id=first.event_id, vm=first.vm, worker="w1", tries=1)


@pytest.mark.parametrize(
    ("begin", "command_for"),
    [
        (held_moves, lambda scope: Complete(event_id=scope.events[0].id)),
        (held_moves, lambda scope: Abandon(host="host-a", problem="host-a was forgotten")),
        (dropped_moves, lambda scope: Release(worker="w1")),
        (dropped_moves, finish_one),
    ],
)
def test_work_grows_with_the_tries_and_not_with_their_square(
    begin: Callable[[int], Scope], command_for: Callable[[Scope], Command]
) -> None:
    """A scope may have thousands of VMs, and a server waits for the rules."""

    async def work(count: int) -> int:
        scope = begin(count)

        async def end() -> None:
            run(scope, command_for(scope))

        return await work_of(end())

    few, many = (asyncio.run(work(count)) for count in (250, 1000))
    assert many < 5 * few, "for four times as many VMs"
