"""A restart is over when the VM is back: it polled, its guest agent answers, or time is up."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from forewarn.campaign.budget import ScopeSummary
from forewarn.core.change import ChangeKind
from forewarn.core.command import (
    Back,
    Claim,
    Command,
    Complete,
    Delete,
    Evict,
    Fail,
    Finish,
    Redeploy,
    Release,
    Retire,
    Tick,
)
from forewarn.core.event import EventType, ImpactState
from forewarn.core.fleet import Power, Scope
from forewarn.core.machine import due_impacts, next_deadline, next_impact_at
from forewarn.core.timing import Timing
from forewarn.engine.record import SCOPE
from forewarn.errors import AlreadyPending
from tests.builders import (
    MINUTE,
    NOON,
    OPERATION,
    SECOND,
    approve,
    claim,
    finish,
    guid,
    maintain,
    outcome_of,
    restart,
    run,
    scope_of,
    statuses,
    vm,
)

LIMIT = Timing().back_limit


def back(number: int = 1, vm: str = "web-0") -> Back:
    return Back(event_id=guid(number), vm=vm, detail="polled again")


def booting(*before: Command, scope: Scope | None = None, host: str = "") -> Scope:
    """`web-0` was restarted, at noon, and has not been seen since."""
    scope = run(scope or scope_of(), *(before or (restart(), approve("web-0"))), claim())
    return run(scope, finish(is_back=False, host=host))


def states(scope: Scope) -> list[tuple[str, ImpactState]]:
    return [(impact.vm, impact.state) for impact in scope.impacts]


def test_event_of_a_restart_stays_until_the_vm_is_back() -> None:
    """Peers that see the event end send traffic to the VM, so it must be up by then."""
    scope = booting()

    assert states(scope) == [("web-0", ImpactState.BOOTING)]
    assert statuses(scope) == ["Reboot Started web-0"]
    assert scope.incarnation == run(scope_of(), restart(), approve("web-0")).incarnation
    scope = run(scope, back(), at=NOON + MINUTE)
    assert (scope.events, scope.impacts) == ((), ())


def test_vm_that_is_back_already_is_not_waited_for() -> None:
    """A live migration restarts nothing."""
    assert run(scope_of(), restart(), approve("web-0"), claim(), finish()).events == ()


def test_restart_ends_at_the_limit_and_not_a_second_earlier() -> None:
    scope = booting()

    assert next_deadline(scope) == NOON + LIMIT
    assert run(scope, Tick(), at=NOON + LIMIT - SECOND) == scope
    outcome = outcome_of(scope, Tick(), at=NOON + LIMIT)
    assert outcome.scope.events == ()
    assert [(change.what, change.detail) for change in outcome.changes] == [
        (ChangeKind.IMPACTED, "not back after 300 seconds"),
        (ChangeKind.COMPLETED, ""),
    ]


def test_limit_is_divided_by_the_rate() -> None:
    assert Timing.at_rate(60).back_limit == timedelta(seconds=5)
    assert Timing.at_rate(2, back_limit=MINUTE).back_limit == timedelta(seconds=30)


def test_history_has_the_restart_and_how_the_vm_came_back() -> None:
    scope = run(scope_of(), restart(), approve("web-0"), claim())

    restarted = outcome_of(scope, finish(is_back=False, detail="reset"))
    returned = outcome_of(restarted.scope, back())

    assert [(change.what, change.vm, change.detail) for change in restarted.changes] == [
        (ChangeKind.RESTARTED, "web-0", "reset")
    ]
    assert [(change.what, change.vm, change.detail) for change in returned.changes] == [
        (ChangeKind.IMPACTED, "web-0", "polled again"),
        (ChangeKind.COMPLETED, "", ""),
    ]


def test_moved_vm_is_on_its_new_host_while_it_boots() -> None:
    scope = booting(Redeploy(vm="web-0", event_id=guid(1)), approve("web-0"), host="host-z")

    assert states(scope) == [("web-0", ImpactState.BOOTING)]
    assert scope.vms[0].host == "host-z"
    outcome = outcome_of(scope, back())
    assert outcome.scope.vms[0].host == "host-z"
    assert [change.what for change in outcome.changes] == ["impacted", "completed"]


def test_effect_of_a_restart_is_applied_once() -> None:
    """A VM that was stopped from outside while it booted is not running when the wait ends."""
    stopped = vm("web-0", power=Power.STOPPED)
    scope = booting(restart(), scope=scope_of(stopped, vm("web-1", domain=1)))
    assert scope.vms[0].power is Power.RUNNING

    scope = replace(scope, vms=(stopped, *scope.vms[1:]))

    assert run(scope, Tick(), at=NOON + LIMIT).vms[0].power is Power.STOPPED


def test_silent_start_lasts_until_the_vm_is_back() -> None:
    """A stopped VM is started without an event, and its domain is under impact until it is up."""
    stopped = scope_of(vm("web-0", power=Power.STOPPED), vm("web-1", domain=1))
    scope = booting(restart(), scope=stopped)

    assert (scope.events, states(scope)) == ((), [("web-0", ImpactState.BOOTING)])
    assert run(scope, back()).impacts == ()


@pytest.mark.parametrize("type_", [EventType.REBOOT, EventType.REDEPLOY])
def test_other_update_domain_waits_until_the_vm_is_back(type_: EventType) -> None:
    """The next domain goes down only when this one is up."""
    scope = run(scope_of(), maintain("host-a", type_))
    scope = run(scope, maintain("host-b", type_, operation_id=guid(9)), at=NOON + SECOND)
    first, second = (event.id for event in scope.events)
    at = NOON + 16 * MINUTE
    restarted = Finish(event_id=first, vm="web-0", worker="w1", tries=1, is_back=False)
    scope = run(scope, Tick(), Claim(event_id=first, vm="web-0", worker="w1"), restarted, at=at)

    assert [event.status for event in scope.events] == ["Started", "Scheduled"]
    assert ScopeSummary(scope).down == {"web-0"}
    scope = run(scope, Back(event_id=first, vm="web-0"), at=at + MINUTE)
    assert [(event.id, event.status) for event in scope.events] == [(second, "Started")]


def test_event_of_several_vms_ends_when_the_last_is_back() -> None:
    scope = run(scope_of(vm("web-0"), vm("web-1")), maintain(type_=EventType.REBOOT))
    event_id, at = scope.events[0].id, NOON + 15 * MINUTE
    scope = run(scope, Tick(), at=at)
    for name in ("web-0", "web-1"):
        begin = Claim(event_id=event_id, vm=name, worker="w1")
        end = Finish(event_id=event_id, vm=name, worker="w1", tries=1, is_back=False)
        scope = run(scope, begin, end, at=at)

    scope = run(scope, Back(event_id=event_id, vm="web-1"), at=at)

    assert states(scope) == [("web-0", ImpactState.BOOTING), ("web-1", ImpactState.DONE)]
    assert run(scope, Back(event_id=event_id, vm="web-0"), at=at).events == ()


# --- what is not waited for


def test_scope_whose_guests_never_poll_is_not_held_up() -> None:
    """Nobody reads the document, and nobody could tell that the VM is back."""
    scope = booting(restart(), scope=scope_of(is_enabled=False))

    assert scope.impacts == ()


def test_limit_of_zero_means_not_to_wait() -> None:
    timing = Timing.at_rate(1, back_limit=timedelta(0))
    scope = run(scope_of(), restart(), approve("web-0"), claim(), timing=timing)

    assert run(scope, finish(is_back=False), timing=timing).events == ()


def test_vm_that_was_started_outside_and_then_restarted_is_waited_for() -> None:
    """The platform knows that it runs before the fleet does."""
    members = (vm("web-0", power=Power.STOPPED), vm("web-1", domain=1, host="host-b"))
    scope = run(scope_of(*members), maintain(type_=EventType.REBOOT))
    event_id, at = scope.events[0].id, NOON + 15 * MINUTE
    ended = Finish(event_id=event_id, vm="web-0", worker="w1", tries=1, is_back=False)

    scope = run(scope, Tick(), Claim(event_id=event_id, vm="web-0", worker="w1"), ended, at=at)

    assert states(scope) == [("web-0", ImpactState.BOOTING)]


@pytest.mark.parametrize(
    "command",
    [
        Evict(vm="web-0", event_id=guid(1)),
        Delete(vm="web-0", event_id=guid(1)),
    ],
)
def test_vm_that_goes_for_good_is_not_waited_for(command: Command) -> None:
    assert booting(command, approve("web-1")).impacts == ()


def test_freeze_is_over_when_the_platform_says_so() -> None:
    """A frozen VM was not restarted."""
    scope = run(scope_of(), maintain())
    event_id, at = scope.events[0].id, NOON + 15 * MINUTE
    ended = Finish(event_id=event_id, vm="web-0", worker="w1", tries=1, is_back=False)

    scope = run(scope, Tick(), Claim(event_id=event_id, vm="web-0", worker="w1"), ended, at=at)

    assert scope.events == ()


# --- commands while a VM boots


def test_booting_vm_is_claimed_by_nobody() -> None:
    scope = booting()

    assert (next_impact_at(scope), due_impacts(scope, NOON + 10 * LIMIT)) == (None, ())
    for command in (claim(worker="w2"), Release(worker="w1"), finish(), finish(problem="late")):
        assert run(scope, command, at=NOON + MINUTE) == scope


@pytest.mark.parametrize("command", [back(2), back(1, "web-1"), back(7, "nobody")])
def test_other_vm_that_is_back_ends_nothing(command: Back) -> None:
    scope = booting()

    assert run(scope, command) == scope


def test_being_back_again_changes_nothing() -> None:
    scope = run(booting(), back())

    assert run(scope, back()) == scope


def test_being_back_means_nothing_before_the_restart() -> None:
    """A guest polls until it goes down."""
    scope = run(scope_of(), restart(), approve("web-0"), claim())

    assert run(scope, back()) == scope


def test_operator_completes_the_event_of_a_booting_vm() -> None:
    assert run(booting(), Complete(event_id=guid(1))).events == ()


def test_second_restart_of_a_booting_vm_is_refused() -> None:
    with pytest.raises(AlreadyPending):
        run(booting(), restart(number=2))


def test_next_impact_of_a_vm_waits_until_it_is_back() -> None:
    """A VM has one impact at a time, and it is still booting."""
    scope = run(booting(), Redeploy(vm="web-0", event_id=guid(2)), approve("web-0", 2))
    assert states(scope) == [("web-0", ImpactState.BOOTING), ("web-0", ImpactState.WAITING)]

    assert due_impacts(scope, NOON) == ()
    assert run(scope, claim(2)) == scope
    scope = run(scope, back())
    assert [impact.event_id for impact in due_impacts(scope, NOON)] == [guid(2)]


def test_failed_hardware_does_not_wait_for_a_booting_vm() -> None:
    """Its host is gone, so it will not come back from there."""
    scope = run(booting(), Fail(host="host-a", operation_id=OPERATION))

    due = due_impacts(scope, NOON)
    assert [(impact.vm, impact.cause) for impact in due] == [("web-0", "failed-hardware")]


def test_earlier_impact_does_not_overtake_a_booting_one() -> None:
    """The failed hardware overtook the reboot that waits for its retry; now the VM boots."""
    scope = run(scope_of(), restart(), approve("web-0"), claim(), finish(problem="broken"))
    scope = run(scope, Fail(host="host-a", operation_id=OPERATION))
    failed = scope.impacts[1].event_id
    result = Finish(event_id=failed, vm="web-0", worker="w1", tries=1, is_back=False)
    scope = run(scope, Claim(event_id=failed, vm="web-0", worker="w1"), result)
    assert states(scope) == [("web-0", ImpactState.WAITING), ("web-0", ImpactState.BOOTING)]

    assert due_impacts(scope, NOON + MINUTE) == ()
    scope = run(scope, Back(event_id=failed, vm="web-0"))
    assert [impact.event_id for impact in due_impacts(scope, NOON + MINUTE)] == [guid(1)]


def test_evicted_vm_is_no_longer_waited_for() -> None:
    evict = Evict(vm="web-0", event_id=guid(2))
    scope = run(booting(), evict, approve("web-1", 2), claim(2), finish(2))

    assert (scope.events, scope.impacts) == ((), ())


def test_retired_scope_waits_for_no_vm() -> None:
    assert outcome_of(booting(), Retire()).is_gone


def test_booting_impact_survives_the_store() -> None:
    scope = booting()

    assert replace(SCOPE.decode(SCOPE.encode(scope)), seen_at=scope.seen_at) == scope
