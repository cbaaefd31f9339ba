"""What a check works on: the endpoint, asked as a VM would, and where leave is given events made on
demand.

Nothing is sent that could approve unless `may_approve`. What was made is taken back: see `tidy` and
`release`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import quote

from forewarn.conformance.check import NEEDS, Check, Failed, Need, NotRun, holds
from forewarn.conformance.document import Document, Entry
from forewarn.conformance.raw_http import SECONDS_MAX, Answer, Endpoint, Line, Time, encode
from forewarn.conformance.spec import EVENTS, INSTANCE, INSTANCE_VERSION, NEWEST
from forewarn.errors import AlreadyPending, Error, NotFound, Unavailable, UnknownVm, WrongStatus

TRUE: Mapping[str, str] = {"Metadata": "true"}
FIRST_SECONDS_MAX = 130.0
"""The first call of all may take up to two minutes (6.1)."""
SETTLE_SECONDS_MAX = 2.0
LOOK_AGAIN_SECONDS = 0.02
BUSY_TRIES_MAX = 10
BUSY_SECONDS = 1.0
PATIENCE_MAX = 600
"""How often in all an endpoint is given time: the real one takes five requests a second."""
NOTICE = timedelta(hours=6)
"""How far ahead events are made: long enough that none starts by itself, whatever the service's
rate.
"""


class Control(Protocol):
    """Forewarn's control API, as the CLI's client speaks it."""

    def get(self, *path: str) -> Any: ...

    def post(self, *path: str, body: Mapping[str, object] | None = None) -> Any: ...


@dataclass(frozen=True)
class Story:
    """What the document said along one event's life."""

    event_id: str
    before: Document
    scheduled: Document
    started: Document
    started_old: Document
    gone: Document


class Stage:
    """One run.

    `names` are the VMs to speak for; without any, the endpoint knows the caller by itself.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        names: tuple[str, ...],
        control: Control | None,
        may_approve: bool,
        time: Time,
    ) -> None:
        self.endpoint = endpoint
        self.names = names
        self.may_approve = may_approve
        self.time = time
        self._control = control
        self._made: list[str] = []
        self._approved: list[str] = []
        self._patience = PATIENCE_MAX
        self._line: Line | None = None

    # --- asking

    def reach(self) -> None:
        """The first call:

        Unavailable if nothing answers, UnknownVm if not to a VM that was named.
        """
        for name in self.names or ("",):
            try:
                answer = self.get(vm=name, seconds=FIRST_SECONDS_MAX)
            except Failed as failed:
                raise Unavailable(
                    f"no endpoint answers at http://{self.endpoint}: {failed}"
                ) from failed
            if name and answer.status in (403, 404):
                raise UnknownVm(
                    f"a call as {name!r} is answered with {answer.status}; expected a VM of this endpoint",
                    vm=name,
                )

    def survey(self, checks: Iterable[Check]) -> None:
        """What the control API says before them:

        UnknownVm if it lacks one that is named, AlreadyPending if ours has an event.
        """
        if self._control is None:
            return
        ours, *_ = [self._control.get("vms", name) for name in self.names or (self.vm,)]
        if ours["events"] and any(
            {Need.EVENT, Need.CONTROL} & set(check.needs) for check in checks
        ):
            what = f"{self.vm} has an event already ({ours['events'][0]}); expected none, to make some for the checks"
            raise AlreadyPending(
                f"{what}: cancel or complete it, or leave out --control",
                vm=self.vm,
                event=ours["events"][0],
            )

    def line(self) -> Line:
        """A connection to send anything on.

        Where requests are counted, it begins with a full measure of them.
        """
        if self._patience < PATIENCE_MAX:
            self._give_time()
        self._line = Line(self.endpoint, self.time)
        return self._line

    def learns_of_rate_limit(self) -> bool:
        """Whether the latest connection of `line` met the first 429 of all: the next one begins
        with a full measure.
        """
        is_first = (
            self._patience == PATIENCE_MAX
            and self._line is not None
            and self._line.was_rate_limited
        )
        if is_first:
            self._patience -= 1
        return is_first

    def _give_time(self) -> None:
        self._patience = max(self._patience - 1, 0)
        self.time.sleep(BUSY_SECONDS)

    def target(
        self, path: str = EVENTS, version: str | None = NEWEST, *, query: str = "", vm: str = ""
    ) -> str:
        name = vm or (self.names[0] if self.names else "")
        asked = "&".join(
            part for part in ("" if version is None else f"api-version={version}", query) if part
        )
        return (
            self.endpoint.prefix
            + (f"/as/{quote(name, safe='')}" if name else "")
            + path
            + (f"?{asked}" if asked else "")
        )

    def request(
        self,
        target: str = "",
        headers: Mapping[str, str] = TRUE,
        *,
        method: str = "GET",
        body: bytes = b"",
        http: str = "1.1",
    ) -> bytes:
        host = {"Host": str(self.endpoint)} if http == "1.1" and "Host" not in headers else {}
        return encode(method, target or self.target(), host | dict(headers), body, http=http)

    def ask(self, request: bytes, *, seconds: float = SECONDS_MAX) -> Answer:
        """One request on a connection of its own.

        An endpoint that is asked too often is given time, but not for ever.
        """
        for _ in range(BUSY_TRIES_MAX):
            with Line(self.endpoint, self.time) as line:
                line.send(request)
                answer = line.answer(has_body=not request.startswith(b"HEAD "), seconds=seconds)
            if answer.status != 429 or not self._patience:
                break
            self._give_time()
        holds(answer.status != 429, f"fewer than {BUSY_TRIES_MAX} answers 429 in a row", answer)
        return answer

    def get(
        self,
        path: str = EVENTS,
        version: str | None = NEWEST,
        headers: Mapping[str, str] = TRUE,
        *,
        query: str = "",
        vm: str = "",
        method: str = "GET",
        seconds: float = SECONDS_MAX,
    ) -> Answer:
        request = self.request(
            self.target(path, version, query=query, vm=vm), headers, method=method
        )
        return self.ask(request, seconds=seconds)

    def post(
        self,
        body: bytes,
        version: str | None = NEWEST,
        headers: Mapping[str, str] = TRUE,
        *,
        vm: str = "",
    ) -> Answer:
        assert self.may_approve, "a check that posts must say that it needs leave"
        length = {} if body else {"Content-Length": "0"}
        return self.ask(
            self.request(
                self.target(version=version, vm=vm), {**headers, **length}, method="POST", body=body
            )
        )

    def document(self, version: str = NEWEST, *, vm: str = "") -> Document:
        return Document.of(self.get(version=version, vm=vm))

    def instance(
        self, path: str = "", version: str = INSTANCE_VERSION, *, query: str = "", vm: str = ""
    ) -> Answer:
        return self.get(INSTANCE + path, version, query=query, vm=vm)

    # --- what is there to work with

    def lacks(self, need: Need) -> str:
        """Why the need is not met; empty if it is."""
        is_met = {
            Need.EVENT: lambda: self._control is not None or bool(self.document().events),
            Need.APPROVE: lambda: self.may_approve,
            Need.CONTROL: lambda: self._control is not None,
            Need.NAME: lambda: bool(self.names),
            Need.PEER: lambda: bool(self.find_other(is_peer=True)),
            Need.STRANGER: lambda: bool(self.find_other(is_peer=False)),
        }
        return "" if is_met[need]() else f"it needs {NEEDS[need]}"

    @property
    def control(self) -> Control:
        if self._control is None:
            raise NotRun(f"it needs {NEEDS[Need.CONTROL]}")
        return self._control

    @cached_property
    def vm(self) -> str:
        """The name of the VM that is spoken for: as Resources and the instance tree have it."""
        if self.names:
            return self.names[0]
        answer = self.instance("/compute/name", query="format=text")
        holds(answer.status == 200 and bool(answer.body), "the name of the calling VM", answer)
        return answer.body.decode("latin-1")

    def find_other(self, *, is_peer: bool) -> str:
        """Another VM that was given, of the same scope or of another one; empty if there is none."""
        if self._control is None or len(self.names) < 2:
            return ""
        scopes = {name: self._control.get("vms", name)["scope"] for name in self.names}
        first, *others = self.names
        return next((name for name in others if (scopes[name] == scopes[first]) is is_peer), "")

    def events(self, version: str = NEWEST) -> tuple[Entry, ...]:
        """The events to judge: those of the document, and if we may one that is made for it."""
        if self._control is None:
            return self.document(version).events
        event_id = self.make("restart")
        self.until_shown(event_id)
        document = self.document(version)
        holds(
            document.find(event_id) is not None,
            f"the event {event_id} in version {version}",
            document,
        )
        return document.events

    # --- making events

    def make(self, what: str) -> str:
        """Have something announced to our VM, hours ahead:

        `restart`, `redeploy`, `evict`, `delete`, or a host's `freeze`.
        """
        said: dict[str, object] = {"not_before": self._far()}
        vm = self.control.get("vms", self.vm)
        if what == "freeze":
            said |= {"type": "Freeze", "duration_seconds": 9}
            made = self.control.post("hosts", vm["host"], "maintain", body=said)["events"]
        else:
            made = [self.control.post("vms", self.vm, what, body=said)["event"]]
        self._made += [event["id"] for event in made]
        return next(str(event["id"]) for event in made if self.vm in event["resources"])

    def _far(self) -> str:
        """Six hours after our last poll by the service's own clock, which may be another than ours."""
        self.document()
        scope = self.control.get("scopes", self.control.get("vms", self.vm)["scope"])
        if scope["seen_at"] is None:
            raise NotRun(f"the control API has seen no poll of {self.vm}: it is another service's")
        return (datetime.fromisoformat(scope["seen_at"]) + NOTICE).isoformat()

    def told(self, event_id: str) -> Any:
        """The event as the control API has it."""
        return self.control.get("events", event_id)

    def until(self, expected: str, is_so: Callable[[Document], bool]) -> Document:
        """The document once it is so, which takes a moment where several servers share a store."""
        until = self.time.now() + SETTLE_SECONDS_MAX
        while not is_so(document := self.document()):  # ends when the time is up
            holds(self.time.now() < until, f"{expected} within {SETTLE_SECONDS_MAX:g} s", document)
            self.time.sleep(LOOK_AGAIN_SECONDS)
        return document

    def until_shown(self, event_id: str) -> Document:
        return self.until(
            f"the event {event_id} in the document",
            lambda document: document.find(event_id) is not None,
        )

    def until_status(self, event_id: str, status: str) -> Document:
        expected = f"the event {event_id} to be {status}"
        return self.until(
            expected,
            lambda document: (document.find(event_id) or Entry()).get("EventStatus") == status,
        )

    def until_gone(self, event_id: str) -> Document:
        return self.until(
            f"no event {event_id} in the document", lambda document: document.find(event_id) is None
        )

    def to_approve(self) -> str:
        """A Scheduled event that may be approved: one made for it, or without a control API one
        that is there.
        """
        if self._control is not None:
            event_id = self.make("restart")
            self.until_shown(event_id)
            return event_id
        found = [
            str(event["EventId"])
            for event in self.document().events
            if event["EventStatus"] == "Scheduled"
        ]
        if not found:
            raise NotRun("no event in the document is Scheduled")
        return found[0]

    def approved(self) -> str:
        """An event that has been approved and is not over.

        All checks share one, so that as little as possible is impacted.
        """
        for event_id in self._approved:
            if self.document().find(event_id) is not None:
                return event_id
            if self._control is None:  # one of somebody else's is enough
                raise NotRun(f"the event {event_id}, which was approved, is over")
        event_id = self.to_approve()
        answer = self.post(approval(event_id))
        holds(answer.status == 200, "status 200 for an approval", answer)
        self._made = [one for one in self._made if one != event_id]
        self._approved.append(event_id)
        return event_id

    @cached_property
    def story(self) -> Story:
        """One event from its announcement to its end, as the document told it."""
        before = self.document()
        event_id = self.make("restart")
        scheduled = self.until_shown(event_id)
        self.control.post("events", event_id, "approve")
        started, old = self.until_status(event_id, "Started"), self.document("2017-08-01")
        self.control.post("events", event_id, "complete")
        return Story(event_id, before, scheduled, started, old, self.until_gone(event_id))

    def tidy(self) -> None:
        """Take back what the last check made."""
        made, self._made = self._made, []
        for event_id in made:
            self._end(event_id)

    def release(self) -> None:
        """End what was approved."""
        approved, self._approved = self._approved, []
        for event_id in approved if self._control is not None else ():
            self._end(event_id)

    def _end(self, event_id: str) -> None:
        for verb in ("cancel", "complete"):
            try:
                self.control.post("events", event_id, verb)
            except WrongStatus:
                continue
            except NotFound:  # it is over already
                return
            return
        raise Error(
            f"the event {event_id} could be neither canceled nor completed; end it by hand",
            event=event_id,
        )


def approval(*event_ids: str, **more: object) -> bytes:
    """The body of a POST that lets these events start."""
    return json.dumps(
        {**more, "StartRequests": [{"EventId": event_id} for event_id in event_ids]}
    ).encode()
