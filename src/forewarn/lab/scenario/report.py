"""The reports of a run: live on the console, and as JUnit for CI systems."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

from forewarn.duration import format_duration
from forewarn.junit import TestCase, render
from forewarn.lab.names import count
from forewarn.lab.scenario.timeline import Observation, Timeline, is_good
from forewarn.lab.scenario.verdict import RunResult, VerdictOutcome
from forewarn.lab.transcript import TranscriptKind

SHOWN_CHARS_MAX = 200
LINES_MAX = 2000
COLOURS = {
    VerdictOutcome.PASSED: "green",
    VerdictOutcome.FAILED: "red",
    VerdictOutcome.NOT_REACHED: "yellow",
}

CHANGES = {
    "enabled": "a VM polls: Scheduled Events are enabled for the scope",
    "executed-silently": "{vm}: {detail} without an event",
    "scheduled": "Scheduled: {detail}",
    "approved": "approved by {detail}",
    "started": "Started",
    "extended": "postponed {detail}",
    "impact-failed": "{vm}: {detail}",
    "moved": "{vm} has moved from {detail}",
    "left": "{vm} has left the fleet",
    "joined": "{vm} has joined the fleet",
    "completed": "completed",
    "canceled": "cancelled",
    "failed": "failed",
}
"""The changes that the console shows."""


class Verbosity(IntEnum):
    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


@dataclass(eq=False)
class Console:
    """Prints a run line by line. QUIET prints only the verdicts.

    `paint` gives a text a colour, `progress` replaces the status line of a terminal. `lines` are
    the newest ones, printed or not.
    """

    write: Callable[[str], None]
    verbosity: Verbosity = Verbosity.NORMAL
    paint: Callable[[str, str], str] = lambda text, colour: text
    progress: Callable[[str], None] | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_MAX), init=False)
    _bad: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict, init=False)
    """The last bad response and how often it came in a row, by VM and method."""

    def print(self, line: str) -> None:
        self.lines.append(line)
        if self.verbosity > Verbosity.QUIET:
            self.write(line)

    def print_output(self, vm: str, line: str) -> None:
        """Print a line of the software under test."""
        self.print(f"{'':12}{vm} | {line}")

    def print_observation(self, observation: Observation, timeline: Timeline) -> None:
        """Print what matters of a transcript entry, if anything."""
        entry = observation.entry
        text = self._describe(observation)
        if text:
            time = timeline.format_time(entry.at)
            subject = entry.vm if entry.kind is TranscriptKind.REQUEST else entry.scope or entry.vm
            shown = text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"
            self.print(f"{time:>11} {subject or entry.kind:12} {shown}")

    def show_progress(self, timeline: Timeline, waiting: Sequence[tuple[datetime, str]]) -> None:
        """Show how far the run is, and until when it waits for which expectation."""
        if self.progress is None:
            return
        whole = timeline.format_time(timeline.planned_end)[1:]
        text = f"{timeline.format_time(timeline.end)} of {whole}"
        if waiting:  # the time comes first: a terminal of 80 columns cuts the end
            deadline, expected = min(waiting)
            left = format_duration(timeline.measure(timeline.end, deadline))
            text += f", {left} left for 1 of {len(waiting)}: {expected}"
        self.progress(text)

    def print_result(self, name: str, result: RunResult) -> None:
        """Print how the run ended, and the verdicts at any verbosity."""
        self.print(result.ending)
        for step in result.skipped:
            self.print(f"{VerdictOutcome.NOT_REACHED}  {step}")
        for expected, reason, outcome, *_ in result.verdicts:
            word = "FAILED" if outcome is VerdictOutcome.FAILED else str(outcome)
            self.write(f"{self.paint(word, COLOURS[outcome])}  {expected}: {reason}")
        counts = Counter(verdict.outcome for verdict in result.verdicts)
        of = "passed (" if result.is_passed else f"FAILED ({counts[VerdictOutcome.FAILED]} of "
        missed = counts[VerdictOutcome.NOT_REACHED]
        more = f", {missed} not reached" if missed else ""
        whole = f"{name} {of}{count(len(result.verdicts), 'expectation')}{more})"
        self.write(self.paint(whole, "green" if result.is_passed else "red"))

    def _describe(self, observation: Observation) -> str:
        entry = observation.entry
        if entry.kind is TranscriptKind.CHANGE:
            text = CHANGES.get(entry.what, "").format(vm=entry.vm, detail=entry.detail)
            name = observation.event.name if observation.event else ""
            return f"{text} [{name or entry.event[:8]}]" if text and entry.event else text
        if entry.kind is TranscriptKind.REQUEST:
            return self._describe_request(observation)
        if entry.kind is TranscriptKind.CLOCK and entry.what == "advance":
            return ""
        return f"{entry.what} {entry.detail}"

    def _describe_request(self, observation: Observation) -> str:
        """Describe approvals, and bad responses once in a row; VERBOSE describes every request."""
        entry, approvals = observation.entry, observation.approvals
        request = f"{entry.method} {entry.path}"
        if approvals:
            names = (each.event.name or each.event.id[:8] for each in approvals)
            request = f"approves {', '.join(names)}"
        faults = f" ({', '.join(entry.faults)})" if entry.faults else ""
        text = f"{request} -> {entry.status or 'no response'}{faults}"
        if self.verbosity is Verbosity.VERBOSE:
            return f"{text} {entry.response_body}"
        key = (entry.vm, entry.method)
        before, times = self._bad.pop(key, ("", 0))
        if not is_good(entry):
            self._bad[key] = (text, times + 1 if text == before else 1)
            return "" if text == before else text
        if entry.method == "POST":
            return text
        return f"good responses again, after {count(times, 'bad one')}" if times else ""


def render_junit(name: str, result: RunResult) -> bytes:
    """Render a case per expectation. Failures end with the newest transcript entries.

    Times are those of the scenario.
    """
    cases = [
        TestCase(
            name=verdict.expected,
            classname=f"forewarn.lab.{name}",
            failure="" if verdict.is_passed else f"{verdict.outcome}: {verdict.reason}",
            details=f"{verdict.expected}: {verdict.reason}\n\n{result.transcript}",
            seconds=verdict.seconds,
        )
        for verdict in result.verdicts
    ]
    return render(name, cases, result.timeline.seconds)


def render_json(name: str, result: RunResult) -> dict[str, object]:
    """Return the result for programs. Times are those of the scenario."""
    members = ("expected", "outcome", "reason", "seconds")
    return {
        "scenario": name,
        "is_passed": result.is_passed,
        "seconds": result.timeline.seconds,
        "ending": result.ending,
        "expectations": [{each: getattr(v, each) for each in members} for v in result.verdicts],
        "steps_not_reached": result.skipped,
    }
