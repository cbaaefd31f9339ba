"""The reports of a run: live on the console, and as JUnit for CI systems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from forewarn.junit import TestCase, render
from forewarn.lab.scenario.expectations import ScenarioVerdict
from forewarn.lab.scenario.timeline import Observation, Timeline, is_good
from forewarn.lab.transcript import Transcript, TranscriptKind

SHOWN_CHARS_MAX = 200

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
    """Prints a run line by line. QUIET prints only the verdicts."""

    write: Callable[[str], None]
    verbosity: Verbosity = Verbosity.NORMAL
    _bad: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict, init=False)
    """The last bad response and how often it came in a row, by VM and method."""

    def print(self, line: str) -> None:
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

    def print_verdicts(self, name: str, verdicts: Sequence[ScenarioVerdict]) -> None:
        """Print the verdicts at any verbosity."""
        for verdict in verdicts:
            result = "passed" if verdict.is_passed else "FAILED"
            self.write(f"{result}  {verdict.expected}: {verdict.reason}")
        failed = sum(not verdict.is_passed for verdict in verdicts)
        result = f"FAILED ({failed} of {len(verdicts)}" if failed else f"passed ({len(verdicts)}"
        self.write(f"{name} {result} expectations)")

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
        before, count = self._bad.pop(key, ("", 0))
        if not is_good(entry):
            self._bad[key] = (text, count + 1 if text == before else 1)
            return "" if text == before else text
        if entry.method == "POST":
            return text
        return f"good responses again, after {count} bad ones" if count else ""


def render_junit(name: str, verdicts: Sequence[ScenarioVerdict], transcript: Transcript) -> bytes:
    """Render a case per expectation. Failures end with the newest transcript entries."""
    cases = [
        TestCase(
            name=verdict.expected,
            classname=f"forewarn.lab.{name}",
            failure="" if verdict.is_passed else verdict.reason,
            details=f"{verdict.expected}: {verdict.reason}\n\n{transcript}",
        )
        for verdict in verdicts
    ]
    return render(name, cases)
