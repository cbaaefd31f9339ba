"""Whom we wait for before an event, and for how long. Pure: the time is told.

A program that is told of prepare has PATIENCE_SECONDS to answer. It may ask for more,
EXTENSIONS_MAX times and each time for at most EXTENSION_SECONDS_MAX from then on, but never past
the call's deadline, which leaves the reserve for the approval.
"""

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from forewarn.agent.step import Phase
from forewarn.client import Event
from forewarn.errors import Invalid, NotFound, Refused

PATIENCE_SECONDS = 30.0
EXTENSION_SECONDS_MAX = 300.0
EXTENSIONS_MAX = 10
CALLS_MAX = 256
TEXT_BYTES_MAX = 4096
RESOURCES_BYTES_MAX = 64 * 1024


@dataclass(slots=True)
class Call:
    """An event in its phase. `awaited` is until when each program that has not answered is waited
    for.

    Before `not_before` it is not known who is there.
    """

    event: Event
    phase: Phase
    deadline: float
    not_before: float = -math.inf
    awaited: dict[Hashable, float] = field(default_factory=dict)
    extensions: dict[Hashable, int] = field(default_factory=dict)

    def await_answer(self, program: Hashable, now: float) -> None:
        if self.phase is Phase.PREPARE:
            self.awaited[program] = min(now + PATIENCE_SECONDS, self.deadline)


class Gathering:
    """The calls that are not over, by the event's key, and who has answered them.

    `resumed` are the events that programs heard of in an earlier life, which ended with their
    connections. They have PATIENCE_SECONDS from `since` to come back.
    """

    def __init__(self, *, resumed: Iterable[str] = (), since: float = -math.inf) -> None:
        self.calls: dict[str, Call] = {}
        self._resumed = frozenset(resumed)
        self._complete_at = since + PATIENCE_SECONDS

    def begin(
        self,
        event: Event,
        phase: Phase,
        *,
        deadline: float,
        programs: Iterable[Hashable],
        now: float,
    ) -> None:
        """The last phase, recover, is told and forgotten by the next time."""
        self.calls = {
            key: call
            for key, call in self.calls.items()
            if call.phase is not Phase.RECOVER and key != event.key
        }
        while len(self.calls) >= CALLS_MAX:  # ends at the limit
            del self.calls[next(iter(self.calls))]
        call = self.calls[event.key] = Call(event, phase, deadline)
        if phase is Phase.PREPARE and event.key in self._resumed:
            call.not_before = self._complete_at
        for program in programs:
            call.await_answer(program, now)

    def join(self, program: Hashable, now: float) -> Iterator[Call]:
        """What a program that comes late must be told: all but what is over."""
        for call in self.calls.values():
            if call.phase is not Phase.RECOVER:
                call.await_answer(program, now)
                yield call

    def leave(self, program: Hashable) -> None:
        for call in self.calls.values():
            call.awaited.pop(program, None)
            call.extensions.pop(program, None)

    def all_ready(self, event_id: str, now: float) -> bool:
        call = self.calls.get(event_id.upper())
        if call is None or now >= call.deadline:
            return True
        return now >= call.not_before and all(until <= now for until in call.awaited.values())

    def answer(
        self, program: Hashable, said: Mapping[str, object], now: float
    ) -> dict[str, object]:
        """What a program's answer changes, and what it is told."""
        verb = next((verb for verb in ("ready", "more") if verb in said), None)
        if verb is None:
            raise Invalid(
                f"the line says {', '.join(said)[:60] or 'nothing'}; expected register, ready, more or status"
            )
        call = self._call(said[verb])
        if verb == "ready":
            call.awaited.pop(program, None)
            return {"ready": call.event.id}
        if program not in call.awaited:
            raise Refused(
                f"nobody waits for this program before {call.event.id}: it is ready, has not registered, or it has begun"
            )
        return {
            "more": call.event.id,
            "seconds": round(self._extend(call, program, said.get("seconds"), now), 1),
        }

    def _extend(self, call: Call, program: Hashable, asked: object, now: float) -> float:
        """How long it is waited for from now. Asking never makes it shorter."""
        if (
            isinstance(asked, bool)
            or not isinstance(asked, int | float)
            or not 0 < asked < math.inf
        ):
            raise Invalid(f"seconds is {asked!r:.60}; expected a number above 0")
        if call.awaited[program] <= now:
            raise Refused(f"the time to answer for {call.event.id} is up")
        count = call.extensions.get(program, 0) + 1
        if count > EXTENSIONS_MAX:
            raise Refused(f"asked {count} times for more time; expected at most {EXTENSIONS_MAX}")
        call.extensions[program] = count
        until = min(now + min(asked, EXTENSION_SECONDS_MAX), call.deadline)
        call.awaited[program] = max(call.awaited[program], until)
        return call.awaited[program] - now

    def _call(self, event_id: object) -> Call:
        call = self.calls.get(event_id.upper()) if isinstance(event_id, str) else None
        if call is None:
            raise NotFound(f"there is no event {event_id!r:.60} that anybody was told of")
        return call


def told(call: Call, now: float) -> dict[str, object]:
    """The line that tells a program of an event. Long texts are cut, so that it always fits."""
    event = call.event
    return {
        "event": {
            "id": cut(event.id),
            "type": cut(event.type),
            "status": cut(event.status),
            "source": cut(event.source),
            "resources": _first(event.resources),
            "not_before": event.not_before.isoformat() if event.not_before else None,
            "duration_seconds": event.duration_seconds,
            "description": cut(event.description),
        },
        "phase": call.phase,
        "seconds_left": round(max(0.0, call.deadline - now), 1),
    }


def cut(text: str) -> str:
    """Its beginning, if it is long."""
    return text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")


def _first(names: Iterable[str]) -> list[str]:
    """As many as there is place for."""
    shown: list[str] = []
    left = RESOURCES_BYTES_MAX
    for name in map(cut, names):
        left -= len(json.dumps(name))
        if left < 0:
            break
        shown.append(name)
    return shown
