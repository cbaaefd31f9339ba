"""What checks work with: requests to the endpoint, and events created on demand.

Removes everything it created: see `clean_up` and `release`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from forewarn.conformance.calls import EndpointCalls
from forewarn.conformance.check import Check, Failed, Need, NotRun, expect
from forewarn.conformance.expectation import PolledDocument, status
from forewarn.conformance.raw_http import JsonObject, Request, approval, post
from forewarn.conformance.spec import NEWEST
from forewarn.errors import AlreadyPending, Error, NotFound, Unavailable, UnknownVm, WrongStatus

FIRST_SECONDS_MAX = 130.0
"""The very first response may take up to two minutes (6.1)."""
SETTLE_SECONDS_MAX = 2.0
POLL_SECONDS = 0.02
NOTICE = timedelta(hours=6)
"""Of events we create: long enough that none starts by itself, whatever the service's rate."""


class Control(Protocol):
    """Forewarn's control API, as the CLI's client calls it."""

    def get(self, *path: str) -> Any: ...

    def post(self, *path: str, body: Mapping[str, object] | None = None) -> Any: ...


class EventHistory(NamedTuple):
    """The documents during the life of one event. `started_old` is of api-version 2017-08-01."""

    event_id: str
    before: PolledDocument
    scheduled: PolledDocument
    started: PolledDocument
    started_old: PolledDocument
    gone: PolledDocument

    def event(self, document: PolledDocument) -> JsonObject:
        return document.event(self.event_id)


@dataclass(kw_only=True, eq=False)
class Session(EndpointCalls):
    """One run. Without a control API only existing events can be checked."""

    control_api: Control | None
    _created: list[str] = field(default_factory=list)
    _approved: list[str] = field(default_factory=list)

    def reach(self) -> None:
        """The first call. Unavailable if there is no endpoint, UnknownVm if it rejects a name."""
        for name in self.names or ("",):
            try:
                response = self.send(Request(vm=name), seconds=FIRST_SECONDS_MAX)
            except Failed as failed:
                raise Unavailable(f"no endpoint at http://{self.endpoint}: {failed}") from failed
            if name and response.status in (403, 404):
                raise UnknownVm(
                    f"a call as {name!r} gives {response.status}; expected a VM of this endpoint",
                    vm=name,
                )

    def preflight(self, checks: Iterable[Check]) -> None:
        """Look for reasons not to start, in the control API.

        UnknownVm if it does not know a name, AlreadyPending if our VM has an event.
        """
        if self.control_api is None:
            return
        ours, *_ = [self.control_api.get("vms", name) for name in self.names or (self.vm,)]
        creates = any({Need.EVENT, Need.CONTROL} & set(check.needs) for check in checks)
        if ours["events"] and creates:
            event_id = ours["events"][0]
            raise AlreadyPending(
                f"{self.vm} already has an event ({event_id}); expected none, as the checks"
                " create some: cancel or complete it, or leave out --control",
                vm=self.vm,
                event=event_id,
            )

    def require(self, need: Need) -> None:
        """NotRun if the need is not met."""
        is_met: dict[Need, Callable[[], object]] = {
            Need.EVENT: lambda: self.control_api or self.document().events,
            Need.APPROVE: lambda: self.may_approve,
            Need.CONTROL: lambda: self.control_api,
            Need.NAME: lambda: self.names,
            Need.PEER: lambda: self.peer,
            Need.STRANGER: lambda: self.stranger,
        }
        if not is_met[need]():
            raise NotRun(f"needs {need.remedy}")

    @property
    def control(self) -> Control:
        if self.control_api is None:
            raise NotRun(f"needs {Need.CONTROL.remedy}")
        return self.control_api

    @cached_property
    def peer(self) -> str:
        """Another VM that was named, of the same scope; empty if there is none."""
        return next((name for name in self.names[1:] if self._is_peer(name)), "")

    @cached_property
    def stranger(self) -> str:
        """A VM that was named, of another scope; empty if there is none."""
        return next((name for name in self.names[1:] if self._is_peer(name) is False), "")

    def _is_peer(self, name: str) -> bool | None:
        """None if it is not known."""
        if self.control_api is None:
            return None
        scope, ours = (self.control_api.get("vms", vm)["scope"] for vm in (name, self.vm))
        return bool(scope == ours)

    def events(self, version: str = NEWEST) -> tuple[JsonObject, ...]:
        """The events to check: those of the document, plus a new one if we may create it."""
        if self.control_api is None:
            return self.document(version).events
        event_id = self.create_shown()["EventId"]
        document = self.document(version)
        expect(document.find(event_id), f"the event {event_id} in {version}", document)
        return document.events

    def create(self, operation: str = "restart") -> str:
        """Schedule a restart, redeploy, evict, delete, or a freeze of its host, for our VM.

        Six hours ahead, by the service's own clock, which may differ from ours.
        """
        self.document()
        vm = self.control.get("vms", self.vm)
        seen_at = self.control.get("scopes", vm["scope"])["seen_at"]
        if seen_at is None:
            raise NotRun(
                f"the control API has seen no poll of {self.vm}: it belongs to another service"
            )
        body = {"not_before": (datetime.fromisoformat(seen_at) + NOTICE).isoformat()}
        if operation == "freeze":
            maintenance = {**body, "type": "Freeze", "duration_seconds": 9}
            events = self.control.post("hosts", vm["host"], "maintain", body=maintenance)["events"]
        else:
            events = [self.control.post("vms", self.vm, operation, body=body)["event"]]
        self._created += [event["id"] for event in events]
        for event in events:
            if self.vm in event["resources"]:
                return str(event["id"])
        raise NotRun(f"the {operation} has no event of {self.vm}")

    def create_shown(self, operation: str = "restart") -> JsonObject:
        """Create an event and wait until the document shows it."""
        event_id = self.create(operation)
        return self.until_shown(event_id).event(event_id)

    def approvals(self, event_id: str) -> Any:
        """Who has approved the event, from the control API."""
        return self.control.get("events", event_id)["approvals"]

    @contextmanager
    def expect_unchanged(self, vm: str = "") -> Iterator[None]:
        """Whatever happens inside must not change the incarnation, unless events changed too."""
        before = self.document(vm=vm)
        yield
        after = self.document(vm=vm)
        is_same = before.incarnation == after.incarnation or before.events != after.events
        expect(is_same, f"DocumentIncarnation {before.incarnation} again", after)

    def until(self, expected: str, condition: Callable[[PolledDocument], object]) -> PolledDocument:
        """Poll until it is true, which takes some time where several servers share a store."""
        deadline = self.clock.now() + SETTLE_SECONDS_MAX
        expected = f"{expected} within {SETTLE_SECONDS_MAX:g} s"
        while not condition(document := self.document()):
            expect(self.clock.now() < deadline, expected, document)
            self.clock.sleep(POLL_SECONDS)
        return document

    def until_shown(self, event_id: str) -> PolledDocument:
        return self.until(f"the event {event_id}", lambda document: document.find(event_id))

    def until_gone(self, event_id: str) -> PolledDocument:
        return self.until(f"no event {event_id}", lambda document: not document.find(event_id))

    def until_started(self, event_id: str) -> PolledDocument:
        def is_started(document: PolledDocument) -> bool:
            return (document.find(event_id) or JsonObject()).get("EventStatus") == "Started"

        return self.until(f"the event {event_id} to be Started", is_started)

    def cancel(self, event_id: str) -> PolledDocument:
        self.control.post("events", event_id, "cancel")
        return self.until_gone(event_id)

    def approvable(self) -> str:
        """A Scheduled event: a new one, or without a control API one that exists."""
        if self.control_api is not None:
            return str(self.create_shown()["EventId"])
        for event in self.document().events:
            if event["EventStatus"] == "Scheduled":
                return str(event["EventId"])
        raise NotRun("no event in the document is Scheduled")

    def approved(self) -> str:
        """An event that has been approved and has not ended.

        All checks of a topic share one, to impact the VM as little as possible.
        """
        for event_id in self._approved:
            if self.document().find(event_id) is not None:
                return event_id
            if self.control_api is None:  # approve only one event that is not ours
                raise NotRun(f"the approved event {event_id} has ended")
        event_id = self.approvable()
        self.send(post(approval(event_id)), status(200))
        self._created = [created for created in self._created if created != event_id]
        self._approved.append(event_id)
        return event_id

    @cached_property
    def history(self) -> EventHistory:
        """One event from its announcement to its end, observed once for all checks."""
        before = self.document()
        event_id = self.create()
        scheduled = self.until_shown(event_id)
        self.control.post("events", event_id, "approve")
        started, started_old = self.until_started(event_id), self.document("2017-08-01")
        self.control.post("events", event_id, "complete")
        gone = self.until_gone(event_id)
        return EventHistory(event_id, before, scheduled, started, started_old, gone)

    def clean_up(self) -> None:
        """Cancel what the last check created."""
        while self._created:
            self._end(self._created.pop(0))

    def release(self) -> None:
        """End the event that was approved, if it is ours."""
        approved, self._approved = self._approved, []
        for event_id in approved if self.control_api is not None else ():
            self._end(event_id)

    def _end(self, event_id: str) -> None:
        for operation in ("cancel", "complete"):
            with suppress(WrongStatus):
                with suppress(NotFound):  # it has already ended
                    self.control.post("events", event_id, operation)
                return
        raise Error(
            f"cannot cancel or complete the event {event_id}; end it by hand", event=event_id
        )
