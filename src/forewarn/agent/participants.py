"""Which local programs the agent waits for before an event, and how long. Pure.

A program that is notified of prepare has ANSWER_SECONDS to answer. It may ask for more,
EXTENSIONS_MAX times and each time for at most EXTENSION_SECONDS_MAX from then on, but never past
the deadline of the phase, which leaves the reserve for the approval.
"""

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from forewarn.agent.progress import event_to_json, truncate
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event
from forewarn.errors import Invalid, NotFound, Refused

ANSWER_SECONDS = 30.0
EXTENSION_SECONDS_MAX = 300.0
EXTENSIONS_MAX = 10
NOTICES_MAX = 256
RESOURCES_BYTES_MAX = 64 * 1024


@dataclass(slots=True)
class PhaseNotice:
    """An event in its phase. `awaited` is until when the agent waits for each program that has not
    answered. Before `complete_at`, programs may still be missing.
    """

    event: Event
    phase: WorkflowPhase
    deadline: float
    complete_at: float = -math.inf
    awaited: dict[Hashable, float] = field(default_factory=dict)
    extensions: dict[Hashable, int] = field(default_factory=dict)

    def await_answer(self, program: Hashable, now: float) -> None:
        if self.phase is WorkflowPhase.PREPARE:
            self.awaited[program] = min(now + ANSWER_SECONDS, self.deadline)

    def to_json(self, now: float) -> dict[str, object]:
        """The line that notifies a program. Long texts are cut, so its size is bounded."""
        event = replace(self.event, resources=_truncate_list(self.event.resources), extra={})
        members = event_to_json(event)
        del members["resource_type"], members["extra"]
        return {
            "event": {
                name: truncate(value) if isinstance(value, str) else value
                for name, value in members.items()
            },
            "phase": self.phase,
            "seconds_left": round(max(0.0, self.deadline - now), 1),
        }


class Participants:
    """The current notices by the event's key, and who has answered them.

    `resumed` are the events that an earlier process was preparing for. Its connections are gone, so
    programs have ANSWER_SECONDS from `since` to come back.
    """

    def __init__(self, *, resumed: Iterable[str] = (), since: float = -math.inf) -> None:
        self.notices: dict[str, PhaseNotice] = {}
        self._resumed = frozenset(resumed)
        self._complete_at = since + ANSWER_SECONDS

    def begin(
        self,
        event: Event,
        phase: WorkflowPhase,
        *,
        deadline: float,
        programs: Iterable[Hashable],
        now: float,
    ) -> PhaseNotice:
        """Recover is the last phase: its notice is dropped when the next one begins."""
        self.notices = {
            key: notice
            for key, notice in self.notices.items()
            if notice.phase is not WorkflowPhase.RECOVER and key != event.key
        }
        while len(self.notices) >= NOTICES_MAX:
            del self.notices[next(iter(self.notices))]
        notice = self.notices[event.key] = PhaseNotice(event, phase, deadline)
        if phase is WorkflowPhase.PREPARE and event.key in self._resumed:
            notice.complete_at = self._complete_at
        for program in programs:
            notice.await_answer(program, now)
        return notice

    def join(self, program: Hashable, now: float) -> Iterator[PhaseNotice]:
        """The notices for a program that registers late: all events that are not over."""
        for notice in self.notices.values():
            if notice.phase is not WorkflowPhase.RECOVER:
                notice.await_answer(program, now)
                yield notice

    def leave(self, program: Hashable) -> None:
        for notice in self.notices.values():
            notice.awaited.pop(program, None)
            notice.extensions.pop(program, None)

    def all_ready(self, event_id: str, now: float) -> bool:
        notice = self.notices.get(event_id.upper())
        if notice is None or now >= notice.deadline:
            return True
        return now >= notice.complete_at and all(end <= now for end in notice.awaited.values())

    def answer(
        self, program: Hashable, request: Mapping[str, object], now: float
    ) -> dict[str, object]:
        """Handle `ready` or `more`, and return the response."""
        verb = next((verb for verb in ("ready", "more") if verb in request), None)
        if verb is None:
            got = ", ".join(request)[:60] or "nothing"
            raise Invalid(f"the line has {got}; expected register, ready, more or status")
        notice = self._find(request[verb])
        event_id = notice.event.id
        if verb == "ready":
            notice.awaited.pop(program, None)
            return {"ready": event_id}
        if program not in notice.awaited:
            reason = "it is ready, has not registered, or prepare is over"
            raise Refused(f"the agent does not wait for this program before {event_id}: {reason}")
        seconds = self._extend(notice, program, request.get("seconds"), now)
        return {"more": event_id, "seconds": round(seconds, 1)}

    def _extend(self, notice: PhaseNotice, program: Hashable, seconds: object, now: float) -> float:
        """How long the agent waits from now. An extension never makes it shorter."""
        if not isinstance(seconds, int | float) or seconds is True or not 0 < seconds < math.inf:
            raise Invalid(f"seconds is {seconds!r:.60}; expected a number above 0")
        if notice.awaited[program] <= now:
            raise Refused(f"the time to answer for {notice.event.id} is up")
        count = notice.extensions.get(program, 0) + 1
        if count > EXTENSIONS_MAX:
            raise Refused(f"this is extension {count}; expected at most {EXTENSIONS_MAX}")
        notice.extensions[program] = count
        end = min(now + min(seconds, EXTENSION_SECONDS_MAX), notice.deadline)
        notice.awaited[program] = max(notice.awaited[program], end)
        return notice.awaited[program] - now

    def _find(self, event_id: object) -> PhaseNotice:
        notice = self.notices.get(event_id.upper()) if isinstance(event_id, str) else None
        if notice is None:
            raise NotFound(f"unknown event {event_id!r:.60}")
        return notice


def _truncate_list(names: Iterable[str]) -> tuple[str, ...]:
    """As many names as fit."""
    fitting: list[str] = []
    left = RESOURCES_BYTES_MAX
    for name in map(truncate, names):
        left -= len(json.dumps(name))
        if left < 0:
            break
        fitting.append(name)
    return tuple(fitting)
