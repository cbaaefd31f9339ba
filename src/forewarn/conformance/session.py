"""What checks work with: requests to the endpoint as a VM, and events created on demand.

Sends nothing that could approve an event unless `may_approve`. Removes everything it created: see
`clean_up` and `release`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import quote

from forewarn.client.http1 import Endpoint, encode
from forewarn.conformance.check import NEEDS, Check, Failed, Need, NotRun, expect
from forewarn.conformance.raw_http import (
    TIMEOUT_SECONDS,
    JsonObject,
    PolledDocument,
    RawConnection,
    RawResponse,
    SessionClock,
    expect_document,
    expect_status,
)
from forewarn.conformance.spec import EVENTS, INSTANCE, INSTANCE_VERSION, NEWEST
from forewarn.errors import AlreadyPending, Error, NotFound, Unavailable, UnknownVm, WrongStatus

METADATA: Mapping[str, str] = {"Metadata": "true"}
FIRST_SECONDS_MAX = 130.0
"""The very first response may take up to two minutes (6.1)."""
SETTLE_SECONDS_MAX = 2.0
POLL_SECONDS = 0.02
TRIES_MAX = 10
PAUSE_SECONDS = 1.0
PAUSES_MAX = 600
"""After a 429, in one session: the real endpoint allows five requests a second."""
NOTICE = timedelta(hours=6)
"""Of events we create: long enough that none starts by itself, whatever the service's rate."""


class Control(Protocol):
    """Forewarn's control API, as the CLI's client calls it."""

    def get(self, *path: str) -> Any: ...

    def post(self, *path: str, body: Mapping[str, object] | None = None) -> Any: ...


def parse_endpoint(url: str) -> Endpoint:
    """With or without the path of the document."""
    return Endpoint.parse(re.sub(rf"{EVENTS}/?$", "", url, flags=re.IGNORECASE))


@dataclass(frozen=True)
class EventHistory:
    """The documents during the life of one event. `started_old` is of api-version 2017-08-01."""

    event_id: str
    before: PolledDocument
    scheduled: PolledDocument
    started: PolledDocument
    started_old: PolledDocument
    gone: PolledDocument


class Session:
    """One run. `names` are the VMs to call as; without any, the endpoint identifies the caller."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        names: tuple[str, ...],
        control: Control | None,
        may_approve: bool,
        clock: SessionClock,
    ) -> None:
        self.endpoint = endpoint
        self.names = names
        self.may_approve = may_approve
        self.clock = clock
        self._control = control
        self._created: list[str] = []
        self._approved: list[str] = []
        self._pauses = PAUSES_MAX
        self._connection: RawConnection | None = None

    def reach(self) -> None:
        """The first call. Unavailable if there is no endpoint, UnknownVm if it rejects a name."""
        for name in self.names or ("",):
            try:
                response = self.get(vm=name, seconds=FIRST_SECONDS_MAX)
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
        if self._control is None:
            return
        ours, *_ = [self._control.get("vms", name) for name in self.names or (self.vm,)]
        creates = any({Need.EVENT, Need.CONTROL} & set(check.needs) for check in checks)
        if ours["events"] and creates:
            event_id = ours["events"][0]
            raise AlreadyPending(
                f"{self.vm} already has an event ({event_id}); expected none, as the checks"
                " create some: cancel or complete it, or leave out --control",
                vm=self.vm,
                event=event_id,
            )

    def connect(self) -> RawConnection:
        """A connection to send anything on.

        If the endpoint has a rate limit, it begins with the full allowance.
        """
        if self._pauses < PAUSES_MAX:
            self._pause()
        self._connection = RawConnection(self.endpoint, self.clock)
        return self._connection

    def discovers_rate_limit(self) -> bool:
        """Whether the latest `connect` met the session's first 429, so that it is worth a retry."""
        connection = self._connection
        is_first = self._pauses == PAUSES_MAX and connection and connection.was_rate_limited
        if is_first:
            self._pauses -= 1
        return bool(is_first)

    def _pause(self) -> None:
        self._pauses = max(self._pauses - 1, 0)
        self.clock.sleep(PAUSE_SECONDS)

    def target(
        self, path: str = EVENTS, version: str | None = NEWEST, *, query: str = "", vm: str = ""
    ) -> str:
        name = vm or (self.names[0] if self.names else "")
        prefix = self.endpoint.prefix + (f"/as/{quote(name, safe='')}" if name else "")
        parameters = ["" if version is None else f"api-version={version}", query]
        query = "&".join(filter(None, parameters))
        return prefix + path + (f"?{query}" if query else "")

    def request(
        self,
        target: str = "",
        headers: Mapping[str, str] = METADATA,
        *,
        method: str = "GET",
        body: bytes = b"",
        http: str = "1.1",
    ) -> bytes:
        host = {"Host": str(self.endpoint)} if http == "1.1" and "Host" not in headers else {}
        return encode(method, target or self.target(), host | dict(headers), body, http=http)

    def send(self, request: bytes, *, seconds: float = TIMEOUT_SECONDS) -> RawResponse:
        """Send on a new connection; on 429 pause and retry."""
        has_body = not request.startswith(b"HEAD ")
        for _ in range(TRIES_MAX):
            with RawConnection(self.endpoint, self.clock) as connection:
                connection.send(request)
                response = connection.receive(expects_body=has_body, seconds=seconds)
            if response.status != 429 or not self._pauses:
                break
            self._pause()
        expect(response.status != 429, f"fewer than {TRIES_MAX} times 429 in a row", response)
        return response

    def get(
        self,
        path: str = EVENTS,
        version: str | None = NEWEST,
        headers: Mapping[str, str] = METADATA,
        *,
        query: str = "",
        vm: str = "",
        method: str = "GET",
        seconds: float = TIMEOUT_SECONDS,
    ) -> RawResponse:
        target = self.target(path, version, query=query, vm=vm)
        return self.send(self.request(target, headers, method=method), seconds=seconds)

    def post(
        self,
        body: bytes,
        version: str | None = NEWEST,
        headers: Mapping[str, str] = METADATA,
        *,
        vm: str = "",
    ) -> RawResponse:
        assert self.may_approve, "a check that posts needs Need.APPROVE"
        length = {} if body else {"Content-Length": "0"}
        target = self.target(version=version, vm=vm)
        return self.send(self.request(target, {**headers, **length}, method="POST", body=body))

    def document(self, version: str = NEWEST, *, vm: str = "") -> PolledDocument:
        return expect_document(self.get(version=version, vm=vm))

    def instance(
        self, path: str = "", version: str = INSTANCE_VERSION, *, query: str = "", vm: str = ""
    ) -> RawResponse:
        return self.get(INSTANCE + path, version, query=query, vm=vm)

    def missing(self, need: Need) -> str:
        """Why the need is not met; empty if it is."""
        is_met = {
            Need.EVENT: lambda: self._control is not None or bool(self.document().events),
            Need.APPROVE: lambda: self.may_approve,
            Need.CONTROL: lambda: self._control is not None,
            Need.NAME: lambda: bool(self.names),
            Need.PEER: lambda: bool(self.peer),
            Need.STRANGER: lambda: bool(self.stranger),
        }
        return "" if is_met[need]() else f"it needs {NEEDS[need]}"

    @property
    def control(self) -> Control:
        if self._control is None:
            raise NotRun(f"it needs {NEEDS[Need.CONTROL]}")
        return self._control

    @cached_property
    def vm(self) -> str:
        """The name of the VM that we call as, as in Resources and the instance tree."""
        if self.names:
            return self.names[0]
        response = self.instance("/compute/name", query="format=text")
        is_name = response.status == 200 and bool(response.body)
        expect(is_name, "the name of the calling VM", response)
        return response.body.decode("latin-1")

    @cached_property
    def peer(self) -> str:
        """Another VM that was named, of the same scope; empty if there is none."""
        return next((name for name in self.names[1:] if self._is_peer(name)), "")

    @cached_property
    def stranger(self) -> str:
        """A VM that was named, of another scope; empty if there is none."""
        if self._control is None:
            return ""
        return next((name for name in self.names[1:] if not self._is_peer(name)), "")

    def _is_peer(self, name: str) -> bool:
        if self._control is None:
            return False
        scope, ours = (self._control.get("vms", vm)["scope"] for vm in (name, self.names[0]))
        return bool(scope == ours)

    def events(self, version: str = NEWEST) -> tuple[JsonObject, ...]:
        """The events to check: those of the document, plus a new one if we may create it."""
        if self._control is None:
            return self.document(version).events
        event_id = self.create("restart")
        self.until_shown(event_id)
        document = self.document(version)
        expect(bool(document.find(event_id)), f"the event {event_id} in {version}", document)
        return document.events

    def create(self, operation: str) -> str:
        """Schedule a restart, redeploy, evict, delete, or a freeze of its host, for our VM.

        Six hours ahead, by the service's own clock, which may differ from ours.
        """
        body: dict[str, object] = {"not_before": self._far_ahead()}
        vm = self.control.get("vms", self.vm)
        if operation == "freeze":
            body |= {"type": "Freeze", "duration_seconds": 9}
            events = self.control.post("hosts", vm["host"], "maintain", body=body)["events"]
        else:
            events = [self.control.post("vms", self.vm, operation, body=body)["event"]]
        self._created += [event["id"] for event in events]
        return next(str(event["id"]) for event in events if self.vm in event["resources"])

    def _far_ahead(self) -> str:
        self.document()
        scope = self.control.get("scopes", self.control.get("vms", self.vm)["scope"])
        if scope["seen_at"] is None:
            raise NotRun(
                f"the control API has seen no poll of {self.vm}: it belongs to another service"
            )
        return (datetime.fromisoformat(scope["seen_at"]) + NOTICE).isoformat()

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

    def until(self, expected: str, condition: Callable[[PolledDocument], bool]) -> PolledDocument:
        """Poll until it is true, which takes some time where several servers share a store."""
        deadline = self.clock.now() + SETTLE_SECONDS_MAX
        expected = f"{expected} within {SETTLE_SECONDS_MAX:g} s"
        while not condition(document := self.document()):
            expect(self.clock.now() < deadline, expected, document)
            self.clock.sleep(POLL_SECONDS)
        return document

    def until_shown(self, event_id: str) -> PolledDocument:
        return self.until(f"the event {event_id}", lambda document: bool(document.find(event_id)))

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
        if self._control is not None:
            event_id = self.create("restart")
            self.until_shown(event_id)
            return event_id
        events = self.document().events
        scheduled = [event["EventId"] for event in events if event["EventStatus"] == "Scheduled"]
        if not scheduled:
            raise NotRun("no event in the document is Scheduled")
        return str(scheduled[0])

    def approved(self) -> str:
        """An event that has been approved and has not ended.

        All checks of a topic share one, to impact the VM as little as possible.
        """
        for event_id in self._approved:
            if self.document().find(event_id) is not None:
                return event_id
            if self._control is None:  # approve only one event that is not ours
                raise NotRun(f"the approved event {event_id} has ended")
        event_id = self.approvable()
        expect_status(self.post(approval(event_id)), 200)
        self._created = [created for created in self._created if created != event_id]
        self._approved.append(event_id)
        return event_id

    @cached_property
    def history(self) -> EventHistory:
        """One event from its announcement to its end, observed once for all checks."""
        before = self.document()
        event_id = self.create("restart")
        scheduled = self.until_shown(event_id)
        self.control.post("events", event_id, "approve")
        started, started_old = self.until_started(event_id), self.document("2017-08-01")
        self.control.post("events", event_id, "complete")
        gone = self.until_gone(event_id)
        return EventHistory(event_id, before, scheduled, started, started_old, gone)

    def clean_up(self) -> None:
        """Cancel what the last check created."""
        created, self._created = self._created, []
        for event_id in created:
            self._end(event_id)

    def release(self) -> None:
        """End the event that was approved."""
        approved, self._approved = self._approved, []
        for event_id in approved if self._control is not None else ():
            self._end(event_id)

    def _end(self, event_id: str) -> None:
        for operation in ("cancel", "complete"):
            try:
                self.control.post("events", event_id, operation)
            except WrongStatus:
                continue
            except NotFound:  # it has already ended
                return
            return
        raise Error(
            f"cannot cancel or complete the event {event_id}; end it by hand", event=event_id
        )


def approval(*event_ids: str, **extra: object) -> bytes:
    """The body of a POST that approves these events."""
    requests = [{"EventId": event_id} for event_id in event_ids]
    return json.dumps({**extra, "StartRequests": requests}).encode()
