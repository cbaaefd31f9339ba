"""The reports of a run: live on the console, and as JUnit for CI systems."""

from collections.abc import Callable, Sequence
from enum import IntEnum

from forewarn.errors import Invalid
from forewarn.junit import TestCase, render
from forewarn.lab.scenario.timeline import ObservedEntry
from forewarn.lab.scenario.verdicts import ScenarioVerdict
from forewarn.lab.transcript import Transcript, TranscriptKind
from forewarn.wire import approval

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


class Console:
    """Prints a run line by line. QUIET prints only the verdicts."""

    def __init__(
        self, write: Callable[[str], None], verbosity: Verbosity = Verbosity.NORMAL
    ) -> None:
        self._write = write
        self._verbosity = verbosity
        self._bad: dict[tuple[str, str], tuple[str, int]] = {}
        """The last bad response and how often it came in a row, by VM and method."""

    def print(self, line: str) -> None:
        if self._verbosity > Verbosity.QUIET:
            self._write(line)

    def print_output(self, vm: str, line: str) -> None:
        """Print a line of the software under test."""
        self.print(f"{'':12}{vm} | {line}")

    def print_observation(self, observation: ObservedEntry) -> None:
        """Print what matters of a transcript entry, if anything."""
        if self._verbosity is Verbosity.QUIET:
            return
        entry = observation.entry
        text = self._describe(observation)
        if text:
            time = observation.timeline.format_time(entry.at)
            subject = entry.vm if entry.kind is TranscriptKind.REQUEST else entry.scope or entry.vm
            if len(text) > SHOWN_CHARS_MAX:
                text = text[:SHOWN_CHARS_MAX] + "…"
            self.print(f"{time:>11} {subject or entry.kind:12} {text}")

    def print_failure(self, verdict: ScenarioVerdict) -> None:
        self.print(f"{'':11} FAILED       {verdict.expected}: {verdict.reason}")

    def print_verdicts(self, name: str, verdicts: Sequence[ScenarioVerdict]) -> None:
        """Print the verdicts at any verbosity."""
        for verdict in verdicts:
            result = "passed" if verdict.is_passed else "FAILED"
            self._write(f"{result}  {verdict.expected}: {verdict.reason}")
        failed = sum(not verdict.is_passed for verdict in verdicts)
        if failed:
            self._write(f"{name} FAILED ({failed} of {len(verdicts)} expectations)")
        else:
            self._write(f"{name} passed ({len(verdicts)} expectations)")

    def _describe(self, observation: ObservedEntry) -> str:
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

    def _describe_request(self, observation: ObservedEntry) -> str:
        """Describe approvals, and bad responses once in a row; VERBOSE describes every request."""
        entry = observation.entry
        request = f"{entry.method} {entry.path}"
        if entry.method == "POST":
            request = f"approves {describe_approved(observation)}".rstrip()
        faults = f" ({', '.join(entry.faults)})" if entry.faults else ""
        text = f"{request} -> {entry.status or 'no response'}{faults}"
        if self._verbosity is Verbosity.VERBOSE:
            return f"{text} {entry.response_body}"
        key = (entry.vm, entry.method)
        before, count = self._bad.pop(key, ("", 0))
        if observation.is_good:
            if entry.method == "POST":
                return text
            return f"good responses again, after {count} bad ones" if count else ""
        self._bad[key] = (text, count + 1 if text == before else 1)
        return "" if text == before else text


def describe_approved(observation: ObservedEntry) -> str:
    """Return the names, or short ids, of the events that a request approves."""
    body, events = observation.entry.request_body, observation.timeline.events
    try:
        ids = approval.parse(body.encode())
    except Invalid:
        return body
    names = [events[event_id].name if event_id in events else "" for event_id in ids]
    return ", ".join(name or event_id[:8] for name, event_id in zip(names, ids, strict=True))


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
