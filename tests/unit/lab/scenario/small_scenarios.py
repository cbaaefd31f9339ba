"""Small scenarios for tests, run in virtual time."""

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import uvloop

from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.run_options import RunOptions
from forewarn.lab.scenario.runner import run
from forewarn.lab.scenario.schema import START, Scenario, parse_scenario
from forewarn.lab.scenario.verdict import RunResult
from forewarn.lab.transcript import TranscriptEntry, TranscriptKind

WEB = {
    "name": "web",
    "kind": "availability-set",
    "vms": [
        {"name": "web-0", "host": "host-a"},
        {"name": "web-1", "host": "host-b", "update_domain": 1},
    ],
}
TOLD = ("scheduled", "approved", "extended")
DB = {"name": "db", "vms": [{"name": "db-0", "host": "host-a"}]}


def scene(
    *steps: dict[str, Any],
    until: str = "1h",
    scopes: Sequence[dict[str, Any]] = (WEB, DB),
    **more: Any,
) -> Scenario:
    """A scenario with two scopes on two hosts; all VMs are played by guests that never approve,
    by default.
    """
    whole = {
        "name": "test",
        "fleet": {"scopes": list(scopes)},
        "guests": [{"approve": "never"}],
        "until": until,
    }
    return parse_scenario(json.dumps({**whole, "steps": steps, **more}).encode(), "test.json")


def play(scenario: Scenario, console: Console | None = None, **options: Any) -> RunResult:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the command line does
        return runner.run(
            run(scenario, RunOptions(**options), console or Console(lambda line: None))
        )


def seconds(entry: TranscriptEntry) -> float:
    """When it was, since the start."""
    return (entry.at - START) / timedelta(seconds=1)


def changes(result: RunResult, *names: str) -> list[str]:
    """The changes of these kinds, in order: when, what, and of which VM or event."""
    entries = [
        entry
        for entry in result.transcript.entries
        if entry.kind is TranscriptKind.CHANGE and entry.what in names
    ]
    words = {
        entry.number: entry.vm or (entry.detail if entry.what in TOLD else "") for entry in entries
    }
    return [f"{seconds(entry):g} {entry.what} {words[entry.number]}".strip() for entry in entries]


def requests(result: RunResult, vm: str, method: str = "GET") -> list[TranscriptEntry]:
    entries = result.transcript.entries
    return [
        entry
        for entry in entries
        if entry.kind is TranscriptKind.REQUEST and (entry.vm, entry.method) == (vm, method)
    ]
