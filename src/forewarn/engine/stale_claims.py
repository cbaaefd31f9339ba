"""Claims that say they last longer than any claim can: a server made them while its clock was
wrong, and died.

Waiting for `due_at` could take a day. So such a claim lapses by what this server observes, as in
the leader election of Kubernetes: if it is not renewed for as long as a claim lasts, by our own
clock, nobody holds it. A live server whose clock is ahead renews its claims every few seconds, and
each renewal is a new observation. The same goes for an impact that waits for its next try.
"""

import asyncio
from datetime import datetime, timedelta
from typing import NamedTuple

from forewarn.core.command import Lapse
from forewarn.core.event import Impact, ImpactState
from forewarn.core.timing import Timing
from forewarn.engine.board import PublishedScope
from forewarn.engine.engine import Engine
from forewarn.errors import Error

SLACK = timedelta(seconds=5)
"""How far the clocks of two servers may differ before a claim looks strange."""


class Observation(NamedTuple):
    """What an impact said, and since when it says so here."""

    due_at: datetime
    since: datetime


class StaleClaims:
    """Watches the impacts of all scopes for claims that no clock of ours could have made, and lets
    them lapse.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._observed: dict[str, dict[tuple[str, str], Observation]] = {}
        self._changed = asyncio.Event()
        engine.board.subscribe(self._notice)
        for place in engine.board.scopes.values():
            self._notice(place)

    async def run(self) -> None:
        """Work until cancelled. While there is nothing strange, it sleeps."""
        clock = self._engine.clock
        while True:  # ends when cancelled
            self._changed.clear()
            if not self._observed:
                await self._changed.wait()
            first = min(
                (one.since for scope in self._observed.values() for one in scope.values()),
                default=clock.now(),
            )
            await clock.sleep_until(first + self._engine.timing.claim)
            await asyncio.gather(
                *(self._let_lapse(scope, command) for scope, command in self._unchanged())
            )

    def _notice(self, place: PublishedScope) -> None:
        scope, now = place.scope, self._engine.clock.now()
        before = self._observed.pop(scope.name, {})
        strange = {}
        for impact in scope.impacts:
            if is_strange(impact, now, self._engine.timing):
                key = (impact.event_id, impact.vm)
                known = before.get(key)
                strange[key] = (
                    known
                    if known is not None and known.due_at == impact.due_at
                    else Observation(impact.due_at, now)
                )
        if strange:
            self._observed[scope.name] = strange
            self._changed.set()

    def _unchanged(self) -> list[tuple[str, Lapse]]:
        """What to let lapse. If that fails, it is tried again after another claim's length."""
        now, found = self._engine.clock.now(), []
        for scope, observed in self._observed.items():
            for (event_id, vm), one in observed.items():
                if one.since + self._engine.timing.claim <= now:
                    found.append((scope, Lapse(event_id=event_id, vm=vm, due_at=one.due_at)))
                    observed[event_id, vm] = Observation(one.due_at, now)
        return found

    async def _let_lapse(self, scope: str, command: Lapse) -> None:
        try:
            await self._engine.submit(scope, command, by="clock")
        except Error as problem:
            self._engine.throttled_log.warn(
                "stale claim not released", scope=scope, vm=command.vm, problem=problem.message
            )


def is_strange(impact: Impact, now: datetime, timing: Timing) -> bool:
    """Whether the impact is to stay as it is for longer than it can by a clock that agrees with
    ours.
    """
    longest = timing.claim if impact.state is ImpactState.CLAIMED else timing.retry_max
    return not impact.is_over and impact.due_at > now + longest + SLACK
