"""What is recorded during a run: every request of every client, and what others know about it.

All times are seconds of the machine's clock, which every process of the harness reads. Recording is
append-only, one JSON line each, so that a harness that is killed leaves what it saw.
"""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from forewarn.client import Document

CALLS_FILE = "calls-{}.jsonl"
IMPACTS_FILE = "impacts.log"
ENTRIES_FILE = "entries.json"
RUN_FILE = "run.json"


class Kind(StrEnum):
    """What a client requested."""

    POLL = "poll"
    WAIT = "wait"
    APPROVE = "approve"
    RESTART = "restart"
    REDEPLOY = "redeploy"
    EVICT = "evict"
    DELETE = "delete"
    MAINTAIN = "maintain"
    CANCEL = "cancel"
    EXTEND = "extend"
    READY = "ready"
    FINAL = "final"
    """A poll after the load, to compare the servers."""


POLLS = (Kind.POLL, Kind.WAIT, Kind.FINAL)
VM_OPERATIONS = {
    "user-restart": Kind.RESTART,
    "user-redeploy": Kind.REDEPLOY,
    "eviction": Kind.EVICT,
    "user-delete": Kind.DELETE,
}
"""The operations on one VM, by the cause that their events have in the history."""
OPERATIONS = (*VM_OPERATIONS.values(), Kind.MAINTAIN)
"""What creates events."""
AGE_UNKNOWN = -1
"""Of a response to our own client, which does not return its headers."""


class Shown(msgspec.Struct, frozen=True):
    """An event in a document or in a response; `not_before` is 0 if it is not shown."""

    id: str
    status: str
    not_before: float = 0.0


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a client, and its response.

    A client is sequential and stays with one server. Status 0: there was no response, so what was
    requested may have happened, or may still happen. `view` names what a document contained (see
    `Recording.views`); it is empty for a 304. `events` are those that an operation created, or that
    an approval, a cancellation or an extension named. Operations of one `key` are one operation
    that was repeated. `text` is the description that a maintenance asked for. `age` is how old a
    document may be, in seconds, by its Age header; 0 if it has none.
    """

    client: str
    server: str
    kind: Kind
    asked_at: float
    answered_at: float
    status: int
    scope: str = ""
    vm: str = ""
    incarnation: int = 0
    view: str = ""
    events: tuple[Shown, ...] = ()
    key: str = ""
    text: str = ""
    not_before: float = 0.0
    age: int = 0

    @property
    def is_poll_response(self) -> bool:
        return self.kind in POLLS and self.status in (200, 304)

    @property
    def is_confirmed_read(self) -> bool:
        """Whether its document is what was committed. With an Age, it is from the memory of a
        server that has lost the store, and the time does not count as notice.
        """
        return self.is_poll_response and self.age == 0

    @property
    def is_acknowledged(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_refused(self) -> bool:
        """Whether the server promised that nothing has changed and nothing will."""
        return 400 <= self.status < 500


class Stage(StrEnum):
    BEGUN = "begun"
    DONE = "done"


class ImpactRun(msgspec.Struct, frozen=True):
    """A line that the command of the exec platform wrote: independent of what servers report."""

    stage: Stage
    event: str
    vm: str
    server: str
    at: float


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the service's history, as its API shows it. `at` is by the server's clock."""

    number: int
    at: float
    what: str
    scope: str = ""
    event: str = ""
    type: str = ""
    cause: str = ""
    resources: tuple[str, ...] = ()
    vm: str = ""
    not_before: float = 0.0
    description: str = ""
    detail: str = ""


class Fault(msgspec.Struct, frozen=True):
    """A fault that the harness made. It is over when all servers are ready again."""

    name: str
    target: str
    began_at: float
    ended_at: float
    recovered_at: float
    clock_seconds: float = 0.0
    """By how much the clock of the target was wrong meanwhile."""


class Members(msgspec.Struct, frozen=True):
    """A scope of the fleet: its approval policy and its VMs."""

    approval: str
    vms: tuple[str, ...]


class Run(msgspec.Struct, frozen=True):
    """What the harness knows about a run."""

    seed: int
    began_at: float
    ended_at: float
    servers: tuple[str, ...]
    notice_seconds: dict[str, float]
    fleet: dict[str, Members]
    faults: tuple[Fault, ...]


class Recording(msgspec.Struct, frozen=True):
    """Everything that is known about a run. The calls of one client are in order."""

    run: Run
    calls: tuple[Call, ...] = ()
    views: dict[str, tuple[Shown, ...]] = {}
    impacts: tuple[ImpactRun, ...] = ()
    entries: tuple[HistoryEntry, ...] = ()


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a client process: a call, or a view that is new to this process."""

    call: Call | None = None
    view: str = ""
    shown: tuple[Shown, ...] = ()


class Recorder:
    """Writes the calls of one process. May be used by all its threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = Lock()
        self._views: set[str] = set()

    def call(self, call: Call) -> None:
        self._write(Line(call=call))

    def view(self, view: str, shown: tuple[Shown, ...]) -> str:
        """Record what a view contains, once. Returns the view."""
        if view not in self._views:
            self._write(Line(view=view, shown=shown))
            self._views.add(view)
        return view

    def _write(self, line: Line) -> None:
        with self._lock:
            self._file.write(msgspec.json.encode(line) + b"\n")


def view_of_bytes(body: bytes) -> tuple[str, tuple[Shown, ...]]:
    """What raw bytes show. The view differs if any byte does."""
    shown = tuple(
        Shown(
            event["EventId"],
            event["EventStatus"],
            parsedate_to_datetime(event["NotBefore"]).timestamp() if event["NotBefore"] else 0.0,
        )
        for event in msgspec.json.decode(body)["Events"]
    )
    return f"bytes-{hashlib.sha256(body).hexdigest()[:24]}", shown


def view_of_document(document: Document) -> tuple[str, tuple[Shown, ...]]:
    """What our own client understood of a document. The view differs if any member does."""
    shown = tuple(
        Shown(event.key, event.status, event.not_before.timestamp() if event.not_before else 0.0)
        for event in document.events
    )
    content = repr((document.incarnation, document.events)).encode()
    return f"client-{hashlib.sha256(content).hexdigest()[:24]}", shown


def read_recording(folder: Path) -> Recording:
    """Everything that a run left in its folder."""
    calls, views = [], dict[str, tuple[Shown, ...]]()
    decoder = msgspec.json.Decoder(Line)
    for path in sorted(folder.glob(CALLS_FILE.format("*"))):
        for text in path.read_bytes().splitlines():
            line = decoder.decode(text)
            if line.call is not None:
                calls.append(line.call)
            else:
                views[line.view] = line.shown
    entries = msgspec.json.decode((folder / ENTRIES_FILE).read_bytes())
    return Recording(
        run=msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=Run),
        calls=tuple(calls),
        views=views,
        impacts=tuple(read_impacts((folder / IMPACTS_FILE).read_text().splitlines())),
        entries=tuple(sorted(map(entry_of, entries), key=lambda entry: entry.number)),
    )


def read_impacts(lines: Iterable[str]) -> Iterable[ImpactRun]:
    """What the command wrote; see `cluster.IMPACT_COMMAND`."""
    for line in lines:
        stage, event, vm, server, at = line.split()
        yield ImpactRun(Stage(stage), event, vm, server, float(at))


def entry_of(entry: dict[str, Any]) -> HistoryEntry:
    """An entry as the control API shows it, with its times as seconds."""
    times = {name: seconds_of(entry[name]) for name in ("at", "not_before") if entry.get(name)}
    known: Sequence[str] = HistoryEntry.__struct_fields__
    fields = {name: value for name, value in entry.items() if name in known and value is not None}
    return msgspec.convert(fields | times, HistoryEntry)


def seconds_of(text: str) -> float:
    """An RFC 3339 time as seconds."""
    return datetime.fromisoformat(text).timestamp()
