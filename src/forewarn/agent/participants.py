"""Which local programs take part, which of them the agent waits for before an event, and how long.

A program that is notified of prepare has ANSWER_SECONDS to answer. It may ask for more,
EXTENSIONS_MAX times and each time for at most EXTENSION_SECONDS_MAX from then on, but never past
the deadline of the phase, which leaves the reserve for the approval.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from forewarn.agent.progress import event_to_json, truncate
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event
from forewarn.errors import Invalid, NotFound, Refused, Unavailable
from forewarn.log import log

ANSWER_SECONDS = 30.0
EXTENSION_SECONDS_MAX = 300.0
EXTENSIONS_MAX = 10
NOTICES_MAX = 256
PROGRAMS_MAX = 64
RESOURCES_BYTES_MAX = 64 * 1024

Message = Mapping[str, object]


class Program(Protocol):
    """A local program. `send` never blocks."""

    def send(self, message: Message) -> None: ...


@dataclass(slots=True)
class PhaseNotice:
    """An event in its phase. `awaited` is until when the agent waits for each program that has not
    answered. Before `complete_at`, programs may still be missing.
    """

    event: Event
    phase: WorkflowPhase
    deadline: float
    complete_at: float = -math.inf
    awaited: dict[Program, float] = field(default_factory=dict)
    extensions: dict[Program, int] = field(default_factory=dict)

    def to_json(self, now: float) -> Message:
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
    """The registered programs and their names, the current notices by the event's key, and who has
    answered them. Its methods may be called from any thread. They send under the lock, so responses
    and notices keep their order.

    `resumed` are the events that an earlier process was preparing for. Its connections are gone, so
    programs have ANSWER_SECONDS to come back. Deadlines are on the `monotonic` clock.
    """

    def __init__(
        self, *, resumed: Iterable[str] = (), monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.programs: dict[Program, str] = {}
        self.notices: dict[str, PhaseNotice] = {}
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._resumed = frozenset(resumed)
        self._complete_at = monotonic() + ANSWER_SECONDS

    def begin(self, event: Event, phase: WorkflowPhase, deadline: float) -> None:
        """Notify all programs that are registered, and those that register before it is over. Only
        prepare waits for their answers. Recover is the last phase: its notice is dropped when the
        next one begins.
        """
        with self._lock:
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
            for program in self.programs:
                self._notify(program, notice)

    def _notify(self, program: Program, notice: PhaseNotice) -> None:
        now = self._monotonic()
        if notice.phase is WorkflowPhase.PREPARE:
            notice.awaited[program] = min(now + ANSWER_SECONDS, notice.deadline)
        program.send(notice.to_json(now))

    def all_ready(self, event_id: str) -> bool:
        """Whether no program needs more time for this event."""
        with self._lock:
            now = self._monotonic()
            notice = self.notices.get(event_id.upper())
            if notice is None or now >= notice.deadline:
                return True
            return now >= notice.complete_at and all(end <= now for end in notice.awaited.values())

    def names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self.programs.values()))

    def leave(self, program: Program) -> None:
        with self._lock:
            for notice in self.notices.values():
                notice.awaited.pop(program, None)
                notice.extensions.pop(program, None)
            name = self.programs.pop(program, None)
        if name is not None:
            log.info("a program disconnected", application=name)

    def handle(self, program: Program, request: Message) -> None:
        """Respond to `register`, `ready` or `more`."""
        with self._lock:
            if "register" in request:
                self._register(program, request["register"])
            elif "ready" in request:
                notice = self._find(request["ready"])
                notice.awaited.pop(program, None)
                program.send({"ready": notice.event.id})
            elif "more" in request:
                notice = self._find(request["more"])
                seconds = _extend(notice, program, request.get("seconds"), self._monotonic())
                program.send({"more": notice.event.id, "seconds": round(seconds, 1)})
            else:
                got = ", ".join(request)[:60] or "nothing"
                raise Invalid(f"the line has {got}; expected register, ready, more or status")

    def _register(self, program: Program, name: object) -> None:
        """A program that registers late is notified of all events that are not over."""
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 100:
            expected = "the program's name, 1 to 100 printable characters"
            raise Invalid(f"register is {name!r:.60}; expected {expected}")
        is_new = program not in self.programs
        if is_new and len(self.programs) >= PROGRAMS_MAX:
            raise Unavailable(f"{PROGRAMS_MAX} programs have registered, which is the limit")
        self.programs[program] = name
        program.send({"registered": name})
        if not is_new:
            return
        log.info("a program registered", application=name)
        for notice in self.notices.values():
            if notice.phase is not WorkflowPhase.RECOVER:
                self._notify(program, notice)

    def _find(self, event_id: object) -> PhaseNotice:
        notice = self.notices.get(event_id.upper()) if isinstance(event_id, str) else None
        if notice is None:
            raise NotFound(f"unknown event {event_id!r:.60}")
        return notice


def _extend(notice: PhaseNotice, program: Program, seconds: object, now: float) -> float:
    """How long the agent waits from now. An extension never makes it shorter."""
    if program not in notice.awaited:
        reason = "it is ready, has not registered, or prepare is over"
        event_id = notice.event.id
        raise Refused(f"the agent does not wait for this program before {event_id}: {reason}")
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
