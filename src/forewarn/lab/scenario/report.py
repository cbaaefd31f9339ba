"""How a run is told: live and readable, then a verdict for each expectation; as JUnit for a CI
system.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from xml.etree import ElementTree

from forewarn.errors import Invalid
from forewarn.lab.scenario.result import Verdict
from forewarn.lab.scenario.schema import Scenario
from forewarn.lab.scenario.timeline import Happening, Story
from forewarn.lab.transcript import Entry, Kind, Transcript
from forewarn.wire import approval

SHOWN_CHARS_MAX = 200

CHANGES = {
    "enabled": "a VM polls: the scope is told from now on",
    "executed_silently": "{vm}: {detail} at once, nobody was told",
    "scheduled": "Scheduled: {detail}",
    "approved": "approved by {detail}",
    "started": "Started",
    "extended": "put off {detail}",
    "impact-failed": "{vm}: {detail}",
    "moved": "{vm} has moved from {detail}",
    "left": "{vm} has left the fleet",
    "joined": "{vm} has joined the fleet",
    "completed": "completed",
    "canceled": "canceled",
    "failed": "failed",
}
"""The changes that matter to a person, in words."""


class Loudness(IntEnum):
    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


class Progress:
    """Tells of a run, line by line. Quiet: nothing but the verdict."""

    def __init__(self, write: Callable[[str], None], loudness: Loudness = Loudness.NORMAL) -> None:
        self._write = write
        self._loudness = loudness
        self._trouble: dict[tuple[str, str], tuple[str, int]] = {}

    def say(self, line: str) -> None:
        if self._loudness > Loudness.QUIET:
            self._write(line)

    def output(self, vm: str, line: str) -> None:
        """What the software under test prints."""
        self.say(f"{'':12}{vm} | {line}")

    def tell(self, happening: Happening, story: Story) -> None:
        """What matters to a person."""
        entry = happening.entry
        words = self._words(happening, story) if self._loudness > Loudness.QUIET else ""
        if words:
            subject = entry.vm if entry.kind is Kind.REQUEST else entry.scope or entry.vm
            self.say(f"{story.clock(entry.at):>11} {subject or entry.kind:12} {cut(words)}")

    def failure(self, expected: str, reason: str) -> None:
        self.say(f"{'':11} FAILED       {expected}: {reason}")

    def _words(self, happening: Happening, story: Story) -> str:
        entry = happening.entry
        if entry.kind is Kind.CHANGE:
            words = CHANGES.get(entry.what, "").format(vm=entry.vm, detail=entry.detail)
            name = story.events[entry.event].name if entry.event in story.events else ""
            return f"{words} [{name or entry.event[:8]}]" if words and entry.event else words
        if entry.kind is Kind.REQUEST:
            return self._request(happening, story)
        if entry.kind is Kind.CLOCK and entry.what == "advance":
            return ""
        return f"{entry.what} {entry.detail}"

    def _request(self, happening: Happening, story: Story) -> str:
        """Approvals matter, and what goes wrong, but not over and over; the rest is for those who
        want to see everything.
        """
        entry = happening.entry
        asked = (
            f"approves {approved(entry, story)}".rstrip()
            if entry.method == "POST"
            else f"{entry.method} {entry.path}"
        )
        touched = f" ({', '.join(entry.faults)})" if entry.faults else ""
        words = f"{asked} -> {entry.status or 'no answer'}{touched}"
        if self._loudness is Loudness.VERBOSE:
            return f"{words} {entry.answered}"
        key = (entry.vm, entry.method)
        before, count = self._trouble.pop(key, ("", 0))
        if happening.is_good:
            again = f"good answers again, after {count} bad ones like that" if count else ""
            return words if entry.method == "POST" else again
        self._trouble[key] = (words, count + 1 if words == before else 1)
        return "" if words == before else words

    def verdicts(self, scenario: Scenario, verdicts: Sequence[Verdict]) -> None:
        """Said however quiet it is meant to be."""
        for verdict in verdicts:
            self._write(
                f"{'passed' if verdict.is_passed else 'FAILED'}  {verdict.expected}: {verdict.reason}"
            )
        failed = sum(not verdict.is_passed for verdict in verdicts)
        whole = (
            f"FAILED ({failed} of {len(verdicts)} expectations)"
            if failed
            else f"passed ({len(verdicts)} expectations)"
        )
        self._write(f"{scenario.file.name} {whole}")


def approved(entry: Entry, story: Story) -> str:
    """What a VM asks to be started, by name where it has one."""
    try:
        ids = approval.parse(entry.asked.encode())
    except Invalid:
        return entry.asked
    return ", ".join(
        (story.events[event].name if event in story.events else "") or event[:8] for event in ids
    )


def junit(scenario: Scenario, verdicts: Sequence[Verdict], transcript: Transcript) -> bytes:
    """One test case for each expectation; a failure ends with the newest lines of the transcript."""
    name = scenario.file.name
    failures = sum(not verdict.is_passed for verdict in verdicts)
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(verdicts)),
        failures=str(failures),
        errors="0",
        skipped="0",
    )
    for verdict in verdicts:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"forewarn.lab.{name}", name=legible(verdict.expected)
        )
        if not verdict.is_passed:
            failure = ElementTree.SubElement(case, "failure", message=legible(verdict.reason))
            failure.text = legible(f"{verdict.expected}: {verdict.reason}\n\n{transcript}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n".encode()


def legible(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def cut(words: str) -> str:
    return words if len(words) <= SHOWN_CHARS_MAX else words[:SHOWN_CHARS_MAX] + "…"
