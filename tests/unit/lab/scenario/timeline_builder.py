"""Timelines for verdicts: entries one by one, each some seconds after noon."""

import json
from datetime import datetime, timedelta
from typing import Any

import msgspec

from forewarn.core.event import Cause, Event, EventType, Source, Status
from forewarn.core.fleet import Scope
from forewarn.engine.board import PublishedScope
from forewarn.lab.scenario.expectations import Expectation
from forewarn.lab.scenario.timeline import Timeline
from forewarn.lab.scenario.verdict import ScenarioVerdict, judge
from forewarn.lab.transcript import TranscriptEntry, TranscriptKind
from tests.builders import NOON, guid, vm

MEMBERS = ("web-0", "web-1")


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


class TimelineBuilder:
    """A timeline, and the verdict on one expectation about it."""

    def __init__(self, *, rate: float = 1.0, is_real: bool = False, **expected: Any) -> None:
        self._live: dict[str, tuple[PublishedScope, Event]] = {}
        self._count = 0
        self._expected: Expectation = msgspec.convert(expected, Expectation)
        self.timeline = Timeline(NOON, self._live.get, rate=rate, is_real=is_real)

    def scheduled(
        self,
        number: int = 1,
        *,
        seconds: float,
        name: str = "patch",
        resources: tuple[str, ...] = ("web-0",),
    ) -> "TimelineBuilder":
        event = Event(
            id=guid(number),
            type=EventType.REBOOT,
            status=Status.SCHEDULED,
            source=Source.PLATFORM,
            cause=Cause.MAINTENANCE,
            resources=resources,
            update_domain=0,
            not_before=at(seconds + 900),
            duration_seconds=-1,
            description="",
            created_at=at(seconds),
        )
        scope = Scope(name="web", vms=tuple(vm(name) for name in MEMBERS))
        self._live[event.id] = (PublishedScope(scope), event)
        return self.change("scheduled", number, seconds=seconds, by=f"scenario: {name}")

    def change(
        self, what: str, number: int = 1, *, seconds: float, **more: str
    ) -> "TimelineBuilder":
        return self._add(
            seconds, kind=TranscriptKind.CHANGE, what=what, event=guid(number), scope="web", **more
        )

    def approves(
        self, vm: str, *numbers: int, seconds: float, status: int = 200, **more: Any
    ) -> "TimelineBuilder":
        body = json.dumps(
            {"StartRequests": [{"EventId": guid(number).lower()} for number in numbers or (1,)]}
        )
        return self._request(
            seconds, vm=vm, method="POST", request_body=body, status=status, **more
        )

    def polls(
        self,
        vm: str,
        *shown: tuple[int, str],
        seconds: float,
        status: int = 200,
        faults: tuple[str, ...] = (),
    ) -> "TimelineBuilder":
        """`shown` are events with their status."""
        events = [
            {
                "EventId": guid(number),
                "EventType": "Reboot",
                "EventStatus": word,
                "Resources": ["web-0"],
                "NotBefore": "",
            }
            for number, word in shown
        ]
        body = json.dumps({"DocumentIncarnation": 1, "Events": events}) if status == 200 else ""
        return self._request(
            seconds, vm=vm, method="GET", status=status, response_body=body, faults=faults
        )

    def ends(self, seconds: float = 3600) -> ScenarioVerdict:
        self.timeline.end = at(seconds)
        return judge(self._expected, self.timeline)

    def _request(self, seconds: float, **members: Any) -> "TimelineBuilder":
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        return self._add(seconds, kind=TranscriptKind.REQUEST, path=path, **members)

    def _add(self, seconds: float, **members: Any) -> "TimelineBuilder":
        self._count += 1
        self.timeline.add(TranscriptEntry(number=self._count, at=at(seconds), **members))
        return self
