"""`forewarn serve` for a run, or with a fault in the code, to show that the checker finds it.

`python -m tests.chaos.planted FAULT serve ...`, or `none`. Each fault is what a plausible mistake
would do. A notice takes seconds here, so the times without a readable document that do not count
are shorter, too. A Preempt has its real notice.
"""

import random
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from forewarn import server
from forewarn.cli.main import main
from forewarn.core import command as commands
from forewarn.core import lifecycle, machine
from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Unread
from forewarn.core.draft import Draft
from forewarn.core.event import Event, EventType, Impact, ImpactState
from forewarn.core.fleet import Scope
from forewarn.core.timing import NOTICE, Timing
from forewarn.engine import impact_job, worker
from forewarn.engine.engine import Engine
from forewarn.engine.readability import Readability

EARLY = timedelta(seconds=5)
GAP_MIN = timedelta(seconds=2)
SHOWN_EVERY = timedelta(seconds=0.5)
FORGOTTEN = 0.2


def acknowledge_without_commit() -> None:
    """Some restarts are answered as if they had been committed."""
    submit = Engine.submit

    async def forget(self: Engine, scope: str, command: Any, by: str, **more: Any) -> Any:
        if isinstance(command, commands.Restart) and random.random() < FORGOTTEN:
            found = self.board.find_scope(scope).scope
            return machine.decide(found, command, self.clock.now(), self.timing)
        return await submit(self, scope, command, by, **more)

    Engine.submit = forget  # type: ignore[method-assign]


def start_early() -> None:
    """Events are due five seconds before NotBefore."""
    newly_due, next_deadline = machine.newly_due, machine.next_deadline

    def due_early(scope: Scope, due_until: datetime | None) -> list[Event]:
        return newly_due(scope, due_until and due_until + EARLY)

    def wake_early(scope: Scope) -> datetime | None:
        deadline = next_deadline(scope)
        return deadline and deadline - EARLY

    machine.newly_due = due_early
    vars(worker)["next_deadline"] = wake_early


def shorten_gaps() -> None:
    """Scale what a rate leaves alone, because it is between servers.

    A Preempt, with half a second of notice, would be over before any outage is noticed.
    """
    at_rate = Timing.at_rate

    def at_rate_with_short_gaps(rate: float, **more: timedelta) -> Timing:
        timing = at_rate(rate, **more)
        return replace(
            timing,
            notice={**timing.notice, EventType.PREEMPT: NOTICE[EventType.PREEMPT]},
            gap_min=GAP_MIN,
            gap_min_preempt=GAP_MIN,
            shown_every=SHOWN_EVERY,
            shown_every_preempt=SHOWN_EVERY,
        )

    vars(server)["Timing"] = type("ShortTiming", (), {"at_rate": at_rate_with_short_gaps})


def ignore_claims() -> None:
    """Every server carries out every impact, and records it, whoever has claimed it.

    None stops when another one has finished.
    """
    finish = lifecycle.finish

    def take(draft: Draft, command: commands.Claim) -> None:
        impact = draft.impacts.get((command.event_id, command.vm))
        if impact is not None and not impact.is_over:
            claimed = replace(impact, state=ImpactState.CLAIMED, claimed_by=command.worker)
            draft.put_impact(replace(claimed, tries=impact.tries + 1))

    def record(draft: Draft, command: commands.Finish) -> None:
        impact = draft.impacts.get((command.event_id, command.vm))
        if impact is not None and impact.is_held:
            held = replace(impact, claimed_by=command.worker, tries=command.tries)
            draft.put_impact(held)
            finish(draft, command)
            return
        draft.changes.append(Change(ChangeKind.IMPACTED, event=command.event_id, vm=command.vm))
        draft.scope = replace(draft.scope, seen_at=draft.now)  # so that it is committed

    def is_due(impact: Impact, now: datetime) -> bool:
        return impact.due_at <= now

    machine.RULES[commands.Claim], machine.RULES[commands.Finish] = take, record
    lifecycle.is_due = is_due
    impact_job.ImpactJob._is_ours = lambda *arguments: True  # type: ignore[method-assign]
    impact_job.ImpactJob.check = lambda self: None  # type: ignore[method-assign]


def ignore_gaps() -> None:
    """The time in which no server showed anything counts as notice."""
    Readability._add_gap = lambda self, known, now: known.gaps  # type: ignore[method-assign]


def count_old_documents() -> None:
    """The time in which servers show an event from memory, without the store, counts as notice."""
    unread = Readability._unread

    def forget(self: Readability, scope: Scope, event: Event, hosts: Any) -> Unread:
        found = unread(self, scope, event, hosts)
        before = tuple(gap for gap in found.gaps if gap.since < event.created_at)
        return Unread(event.id, before, found.since)

    Readability._unread = forget  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    "acknowledge-without-commit": acknowledge_without_commit,
    "start-early": start_early,
    "ignore-claims": ignore_claims,
    "ignore-gaps": ignore_gaps,
    "count-old-documents": count_old_documents,
    "none": lambda: None,
}


if __name__ == "__main__":
    shorten_gaps()
    PLANTED[sys.argv.pop(1)]()
    main()
