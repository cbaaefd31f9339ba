"""Stories: random commands for a scope, chosen by small numbers so that hypothesis shrinks well."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

from forewarn.core.command import (
    Approve,
    Back,
    Cancel,
    Claim,
    Command,
    Complete,
    Degrade,
    Delete,
    Evict,
    Extend,
    Fail,
    Finish,
    HostOperation,
    Maintain,
    NoteUnread,
    Operation,
    Redeploy,
    Release,
    Restart,
    Retire,
    Seen,
    SetMembers,
    Tick,
    Unread,
)
from forewarn.core.event import Cause, EventType, Gap, ImpactState, Status
from forewarn.core.fleet import Approval, AutoApprove, Policy, Power, Scope, ScopeKind, Vm
from tests.builders import NOON, guid

T = TypeVar("T")

NAMES = ("a", "b", "c", "d")
HOSTS = ("h1", "h2")
WORKERS = ("w1", "w2")
INTERVALS = tuple(timedelta(seconds=seconds) for seconds in (0, 1, 7, 30, 300, 960))


class Move(NamedTuple):
    """A command (`kind`) and the choices in it. Any numbers are valid."""

    kind: int
    first: int
    second: int
    third: int


def pick(choices: Sequence[T], number: int) -> T:
    return choices[number % len(choices)]


def interval_of(move: Move) -> timedelta:
    return pick(INTERVALS, move.third)


def policy_of(number: int) -> Policy:
    return Policy(
        approval=pick(tuple(Approval), number),
        auto_approve=tuple(choice for bit, choice in enumerate(AutoApprove) if number >> bit & 1),
        terminate_notice=pick((timedelta(minutes=5), None, timedelta(minutes=15)), number),
        couple_terminates=bool(number & 2),
        user_operations_max=1 + number % 3,
    )


def members_of(number: int) -> tuple[Vm, ...]:
    """Some of the four VMs on different hosts; the same number, the same members."""
    chosen = [name for bit, name in enumerate(NAMES) if number >> bit & 1] or ["a"]
    powers = (Power.RUNNING, Power.RUNNING, Power.STOPPED, Power.RUNNING, Power.DEALLOCATED)
    return tuple(
        Vm(
            name=name,
            update_domain=(number + 2 * place) % 3,
            host=pick(HOSTS, number // 3 + place),
            power=pick(powers, number // 7 + (place if number % 2 else 0)),
        )
        for place, name in enumerate(chosen)
    )


def scope_of_number(number: int) -> Scope:
    return Scope(
        name="web",
        kind=pick(tuple(ScopeKind), number),
        policy=policy_of(number // 3),
        vms=members_of(15 if number % 2 else number),
        seen_at=NOON if number % 3 else None,
    )


def command_of(move: Move, scope: Scope) -> Command:
    return pick(MOVES, move.kind)(move, scope)


def _operation(kind: type[Operation]) -> Callable[[Move, Scope], Command]:
    def build(move: Move, scope: Scope) -> Command:
        later = pick(
            (None, None, None, NOON + timedelta(hours=1), NOON + timedelta(minutes=1)), move.third
        )
        return kind(
            vm=pick(NAMES, move.first), event_id=guid(1 + move.second % 6), not_before=later
        )

    return build


def _id(move: Move, scope: Scope) -> str:
    """Usually a known id, sometimes an unknown one."""
    known = [event.id for event in scope.events] + [impact.event_id for impact in scope.impacts]
    return pick([*known, *known, guid(99)], move.first)


def _host_operation(kind: type[HostOperation]) -> Callable[[Move, Scope], Command]:
    def build(move: Move, scope: Scope) -> Command:
        host, operation_id = pick(HOSTS, move.first), guid(10 + move.second % 4)
        if kind is Maintain:
            return Maintain(
                host=host,
                operation_id=operation_id,
                type=pick(tuple(EventType)[:4], move.third),
                cause=pick(
                    (Cause.MAINTENANCE, Cause.MAINTENANCE, Cause.LIVE_MIGRATION), move.third
                ),
                duration_seconds=pick((None, 0, 30, -1), move.first // 2),
                description=pick((None, "Kernel.", ""), move.second),
                not_before=pick((None, None, NOON + timedelta(hours=2)), move.first // 3),
            )
        return kind(host=host, operation_id=operation_id)  # type: ignore[call-arg]

    return build


def claim_of(move: Move, scope: Scope) -> Command:
    impacts = [(impact.event_id, impact.vm) for impact in scope.impacts] or [(guid(1), "a")]
    event_id, vm = pick(impacts, move.first)
    return Claim(event_id=event_id, vm=vm, worker=pick(WORKERS, move.second))


def release_of(move: Move, scope: Scope) -> Command:
    return Release(worker=pick(WORKERS, move.first))


def finish_of(move: Move, scope: Scope) -> Command:
    claimed = [impact for impact in scope.impacts if impact.claimed_by]
    if not claimed:
        return Tick()
    impact = pick(claimed, move.first)
    return Finish(
        event_id=impact.event_id,
        vm=impact.vm,
        worker=impact.claimed_by,
        tries=impact.tries - (move.third == 5),
        problem=pick(("", "", "broken"), move.second),
        host=pick(("", "", "h1", "h3"), move.third),
        is_back=pick((True, False), move.second // 3),
    )


def back_of(move: Move, scope: Scope) -> Command:
    """Usually of a VM that boots, sometimes of one that does not."""
    booting = [impact for impact in scope.impacts if impact.state is ImpactState.BOOTING]
    impacts = [*booting, *booting, *scope.impacts]
    if not impacts:
        return Tick()
    impact = pick(impacts, move.first)
    return Back(event_id=impact.event_id, vm=pick((impact.vm, impact.vm, "a"), move.second))


def unread_of(move: Move, scope: Scope) -> Command:
    """Some Scheduled event could not be read for a while after it was created, or cannot now."""
    scheduled = [event for event in scope.events if event.status is Status.SCHEDULED]
    if not scheduled:
        return Tick()
    event = pick(scheduled, move.first)
    since = event.created_at + timedelta(seconds=29 * move.second - 60)
    gap = Gap(since, since + pick((*INTERVALS, timedelta(seconds=20)), move.third))
    is_open = move.third % 5 == 4
    return NoteUnread((Unread(event.id, (gap,), since if is_open else None),))


MOVES: tuple[Callable[[Move, Scope], Command], ...] = (
    lambda move, scope: Tick(),
    _operation(Restart),
    _operation(Redeploy),
    _operation(Delete),
    _operation(Evict),
    _host_operation(Maintain),
    _host_operation(Maintain),
    _host_operation(Degrade),
    _host_operation(Fail),
    lambda move, scope: Approve(event_ids=(_id(move, scope),), vm=pick((*NAMES, ""), move.second)),
    lambda move, scope: Approve(
        event_ids=(_id(move, scope), *(event.id for event in scope.events[:2])),
        vm=pick(NAMES, move.second),
    ),
    lambda move, scope: Cancel(event_id=_id(move, scope)),
    lambda move, scope: Extend(
        event_id=_id(move, scope),
        not_before=NOON + timedelta(minutes=7 * move.second, seconds=move.third),
    ),
    lambda move, scope: Complete(event_id=_id(move, scope)),
    claim_of,
    claim_of,
    release_of,
    finish_of,
    finish_of,
    back_of,
    unread_of,
    unread_of,
    lambda move, scope: Seen(),
    lambda move, scope: SetMembers(
        kind=pick(tuple(ScopeKind), move.first),
        policy=policy_of(move.second),
        vms=members_of(move.third * 8 + move.first),
    ),
    lambda move, scope: Retire() if move.first == 31 else Tick(),
)
