"""The monitor for each kind of expectation; here are those that look at approvals, starts and
requests as a whole. Pure.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from forewarn.lab.scenario import expectation as expect
from forewarn.lab.scenario.monitors import ApprovalMonitor, CourseMonitor, DocumentMonitor
from forewarn.lab.scenario.result import Monitor
from forewarn.lab.scenario.timeline import ENDS, Happening, Known, Story
from forewarn.lab.transcript import Kind


class NoApprovalMonitor(Monitor):
    has_come = False

    def watch(self, happening: Happening) -> None:
        if (
            happening.change == "scheduled"
            and happening.known
            and happening.known.name == self.expected.of
        ):
            self.has_come = True
        for vm, known in happening.approvals:
            if known.name == self.expected.of and self.expected.by in (None, vm):
                self.fail(f"{vm} approved {known} at {self.clock(happening.at)}")

    def conclude(self, now: datetime) -> str:
        return (
            "it did not" if self.has_come else self.fail(f"no event named {self.expected.of} came")
        )


class NoForeignMonitor(Monitor):
    count = 0

    def watch(self, happening: Happening) -> None:
        for vm, known in happening.approvals:
            if self.expected.vms and vm not in self.expected.vms:
                continue
            if vm not in known.resources:
                self.fail(
                    f"{vm} approved {known} at {self.clock(happening.at)}, which does not name it"
                )
            self.count += happening.change == "approved"

    def conclude(self, now: datetime) -> str:
        return (
            f"{self.count} approvals, each by a VM that the event names"
            if self.count
            else "nothing was approved"
        )


class OrderMonitor(Monitor):
    def __init__(self, expected: expect.Order, story: Story) -> None:
        super().__init__(expected, story)
        self.left = list(expected.vms)

    def watch(self, happening: Happening) -> None:
        for vm, known in happening.approvals:
            if self.expected.of not in (None, known.name) or vm not in self.left:
                continue
            if vm != self.left[0]:
                self.fail(
                    f"{vm} approved {known} at {self.clock(happening.at)}, before {self.left[0]} had approved"
                )
                return
            del self.left[0]

    def conclude(self, now: datetime) -> str:
        return self.fail(f"{self.left[0]} never approved") if self.left else "they did"


class StartsMonitor(Monitor):
    """For what is expected of the starts of the events of a name, compared with each other."""

    def __init__(self, expected: expect.OneAtATime | expect.Together, story: Story) -> None:
        super().__init__(expected, story)
        self.under_way: dict[str, Known] = {}
        self.starts: list[tuple[datetime, Known]] = []

    def watch(self, happening: Happening) -> None:
        known = happening.known
        if known is None or known.name != self.expected.of:
            return
        if happening.change in ENDS:
            self.under_way.pop(known.id, None)
        if happening.change == "started":
            self.compare(known, happening.at)
            self.under_way[known.id] = known
            self.starts.append((happening.at, known))

    def compare(self, known: Known, at: datetime) -> None:
        if isinstance(self.expected, expect.OneAtATime):
            for other in self.under_way.values():
                self.fail(f"{known} was Started at {self.clock(at)}, while {other} still was")
        elif self.starts and at > self.starts[0][0] + self.story.patience("1s"):
            first_at, first = self.starts[0]
            self.fail(
                f"{known} was Started at {self.clock(at)}, but {first} at {self.clock(first_at)}"
            )

    def conclude(self, now: datetime) -> str:
        if len(self.starts) < 2:
            return self.fail(
                f"{len(self.starts)} of the events named {self.expected.of} was Started; expected two or more"
            )
        return f"{len(self.starts)} were"


class PollsMonitor(Monitor):
    def __init__(self, expected: expect.Polls, story: Story) -> None:
        super().__init__(expected, story)
        self.every = story.patience(expected.every)
        self.last = story.start
        self.is_gone = False
        self.count = 0

    def watch(self, happening: Happening) -> None:
        self.expire(happening.at)
        if happening.entry.vm != self.expected.vm:
            return
        if happening.is_poll:
            self.last = happening.at
            self.count += 1
        self.is_gone = self.is_gone or happening.change == "left"

    def expire(self, now: datetime) -> None:
        if not self.is_gone and now > self.last + self.every:
            self.fail(f"it did not poll from {self.clock(self.last)} to {self.clock(now)}")

    def conclude(self, now: datetime) -> str:
        self.expire(now)
        return f"{self.count} polls"


class RecoveryMonitor(Monitor):
    """While a door is shut, nobody hears who calls there; so its opening counts as a bad answer,
    and nothing before it does.
    """

    def __init__(self, expected: expect.Recovery, story: Story) -> None:
        super().__init__(expected, story)
        self.within = story.patience(expected.within)
        self.bad: Happening | None = None
        self.refusals: set[str] = set()
        self.count = 0

    def watch(self, happening: Happening) -> None:
        self.expire(happening.at)
        entry = happening.entry
        if (
            entry.kind is Kind.FAULT
            and entry.detail.endswith(" refuse")
            and (not entry.vm or self.expected.vm in entry.vm.split(", "))
        ):
            self.refuse(happening)
        if entry.vm != self.expected.vm or not entry.method:
            return
        self.bad = None if happening.is_good else happening
        self.count += not happening.is_good

    def expire(self, now: datetime) -> None:
        if self.bad and now > self.bad.at + self.within:
            self.fail(f"after {self.bad_words()} it did not ask again until {self.clock(now)}")

    def refuse(self, happening: Happening) -> None:
        self.bad = None
        if happening.entry.what == "added":
            self.refusals.add(happening.entry.detail)
            return
        self.refusals.discard(happening.entry.detail)
        if not self.refusals:
            self.bad = happening
            self.count += 1

    def bad_words(self) -> str:
        assert self.bad is not None
        entry = self.bad.entry
        if entry.kind is Kind.FAULT:
            return f"the refusal that ended at {self.clock(self.bad.at)}"
        faults = f" ({', '.join(entry.faults)})" if entry.faults else ""
        return (
            f"the answer {entry.status or 'that never came'}{faults} at {self.clock(self.bad.at)}"
        )

    def conclude(self, now: datetime) -> str:
        self.expire(now)
        if self.bad:
            return self.fail(f"{self.bad_words()} was its last")
        if not self.count:
            return self.fail(f"{self.expected.vm} never had a bad answer")
        return f"{self.count} bad answers, then good ones"


MONITORS: dict[type[expect.Expected], Callable[[Any, Story], Monitor]] = {
    expect.Approval: ApprovalMonitor,
    expect.NoApproval: NoApprovalMonitor,
    expect.NoForeignApproval: NoForeignMonitor,
    expect.Order: OrderMonitor,
    expect.Document: DocumentMonitor,
    expect.Course: CourseMonitor,
    expect.OneAtATime: StartsMonitor,
    expect.Together: StartsMonitor,
    expect.Polls: PollsMonitor,
    expect.Recovery: RecoveryMonitor,
}


def monitor(expected: expect.Expected, story: Story) -> Monitor:
    """The one that watches over an expectation."""
    return MONITORS[type(expected)](expected, story)
