"""Monitors of what is expected of each event of a name: an approval, a course, a document that
shows it. Pure.
"""

from datetime import datetime, timedelta
from typing import Any

from forewarn import duration
from forewarn.client.models import Event
from forewarn.lab.scenario import expectation as expect
from forewarn.lab.scenario.result import Monitor
from forewarn.lab.scenario.timeline import ENDS, Happening, Known, Story, shown


class EachEvent(Monitor):
    """For what is expected of each event of a name: those that it has not been seen of yet wait, in
    the order they came.
    """

    done_word = "so"
    takes_silent = False
    """Whether an operation that nobody was told of can be as expected."""

    def __init__(self, expected: Any, story: Story) -> None:
        super().__init__(expected, story)
        self.name = self.called(expected)
        self.waiting: dict[str, Known] = {}
        self.done: list[timedelta] = []
        self.within = None if expected.within is None else story.patience(expected.within)
        self.notes: dict[str, str] = {}

    def watch(self, happening: Happening) -> None:
        if self.waiting:
            self.expire(happening.at)
        known = happening.known
        if (
            known is not None
            and happening.change
            and known.name == self.name
            and self.is_concerned(known)
        ):
            if happening.change == "scheduled" or (
                happening.change == "executed_silently" and self.takes_silent
            ):
                self.waiting[known.id] = known
            elif happening.change == "executed_silently":
                self.fail(
                    f"{known.name} was done at {self.clock(happening.at)} at once: nobody polled, so nobody was told"
                )
            elif known.id in self.waiting:
                self.change(known, happening)
        if not self.failure:
            self.look(happening)

    def called(self, expected: Any) -> str:
        """The name of the events that matter."""
        return str(expected.of)

    def is_concerned(self, known: Known) -> bool:
        return True

    def look(self, happening: Happening) -> None:
        """An entry of any kind."""

    def change(self, known: Known, happening: Happening) -> None:
        """Something became true of an event that is waited for."""

    def settle(self, known: Known, at: datetime) -> None:
        """It has been seen of this one."""
        took = self.story.span(known.at, at)
        if self.within is not None and at > known.at + self.within:
            self.fail(
                f"{known} was {self.done_word} only {shown(took)} after it was Scheduled, at {self.clock(at)}"
            )
            return
        del self.waiting[known.id]
        self.done.append(took)

    def expire(self, now: datetime) -> None:
        """All wait equally long, so the first to have come is the first to be late."""
        if self.within is None or not self.waiting:
            return
        first = next(iter(self.waiting.values()))
        if now > first.at + self.within:
            late = self.notes.get(first.id, "")
            self.fail(
                f"{first}, Scheduled at {self.clock(first.at)}, was not {self.done_word} in time{late and f': {late}'}"
            )

    def conclude(self, now: datetime) -> str:
        self.expire(now)
        if self.waiting:
            first = next(iter(self.waiting.values()))
            note = self.notes.get(first.id, "")
            return self.fail(
                f"{first}, Scheduled at {self.clock(first.at)}, was never {self.done_word}{note and f': {note}'}"
            )
        if not self.done:
            return self.fail(
                f"nothing named {self.name} was {self.done_word}: no such event came, or all were canceled before"
            )
        longest = shown(max(self.done))
        return (
            f"after {longest}"
            if len(self.done) == 1
            else f"{len(self.done)} times, after {longest} at most"
        )


class ApprovalMonitor(EachEvent):
    def __init__(self, expected: expect.Approval, story: Story) -> None:
        super().__init__(expected, story)
        self.done_word = f"approved by {expect.who(expected.by)}"
        self.after = duration.parse_duration(expected.after or "0s") / story.rate - story.grace

    def is_concerned(self, known: Known) -> bool:
        """A VM's word is asked for events of its own scope only; a host may hold VMs of several."""
        by = self.expected.by
        return by in (None, expect.OWN, expect.LEADER) or by in known.members

    def look(self, happening: Happening) -> None:
        for vm, known in happening.approvals:
            if known.id not in self.waiting:
                continue
            if not is_meant(self.expected.by, vm, known):
                self.notes[known.id] = f"{vm} approved it at {self.clock(happening.at)}"
                continue
            if happening.at < known.at + self.after:
                took = self.story.span(known.at, happening.at)
                self.fail(
                    f"{vm} approved {known} {shown(took)} after it was Scheduled, too soon, at {self.clock(happening.at)}"
                )
                return
            self.settle(known, happening.at)

    def change(self, known: Known, happening: Happening) -> None:
        if happening.change == "started" and known.id not in self.notes:
            self.fail(
                f"{known} was Started at {self.clock(happening.at)}, and no VM had approved it"
            )
        elif happening.change == "canceled":
            del self.waiting[known.id]


class CourseMonitor(EachEvent):
    takes_silent = True

    def __init__(self, expected: expect.Course, story: Story) -> None:
        super().__init__(expected, story)
        self.done_word = str(expected.becomes)

    def change(self, known: Known, happening: Happening) -> None:
        if happening.change == self.expected.becomes:
            self.settle(known, happening.at)
        elif happening.change in ENDS:
            self.fail(f"{known} was {happening.change} at {self.clock(happening.at)} instead")
        elif happening.change in ("started", "impact-failed", "extended"):
            detail = happening.entry.detail
            self.notes[known.id] = (
                f"{happening.change} at {self.clock(happening.at)}{detail and f' ({detail})'}"
            )


class DocumentMonitor(EachEvent):
    """Without an event's name, the first document that shows such an event does."""

    done_word = "shown so"

    def called(self, expected: Any) -> str:
        return expected.shows.event or ""

    def is_concerned(self, known: Known) -> bool:
        return bool(self.name) and self.expected.vm in known.members

    def look(self, happening: Happening) -> None:
        if (
            happening.entry.vm != self.expected.vm
            or happening.document is None
            or (self.done and not self.name)
        ):
            return
        for event in happening.document.events:
            known = self.waiting.get(event.key)
            is_so = is_as(event, self.expected.shows)
            if known is not None and is_so:
                self.settle(known, happening.at)
            elif known is not None:
                self.notes[known.id] = (
                    f"it was last shown as {event.status} {event.type} at {self.clock(happening.at)}"
                )
            elif is_so and not self.name:
                self.show(happening.at)
                return

    def show(self, at: datetime) -> None:
        if self.within is not None and at > self.story.start + self.within:
            self.fail(f"it came at {self.clock(at)} only")
        self.done.append(self.story.span(self.story.start, at))

    def conclude(self, now: datetime) -> str:
        if not self.name and not self.done:
            return self.fail(f"no document that {self.expected.vm} was given showed one")
        return super().conclude(now)


def is_as(event: Event, wanted: expect.Shows) -> bool:
    """Whether an event in a document is as it should be shown."""
    pairs = (
        (wanted.type, event.type),
        (wanted.status, event.status),
        (wanted.source, event.source),
    )
    return all(asked in (None, shown_) for asked, shown_ in pairs)


def is_meant(by: str | None, vm: str, known: Known) -> bool:
    """Whether this VM's word is the one that is expected."""
    match by:
        case None:
            return True
        case expect.OWN:
            return vm in known.resources
        case expect.LEADER:
            return vm == known.resources[0]
        case _:
            return vm == by
