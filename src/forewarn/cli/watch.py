"""`forewarn watch`: what happens, as it happens, in words.

And the reading of the stream, for whoever follows it.
"""

import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode

import typer

from forewarn.cli.api import Client, connect
from forewarn.cli.output import Json, plain
from forewarn.errors import Unavailable

SHOWN = {
    "enabled": "a VM polls: from now on it is told before anything is done to it",
    "ordered": "{vm}: {detail} at once, without notice",
    "scheduled": "Scheduled: {detail}",
    "approved": "approved by {detail}",
    "extended": "put off {detail}",
    "started": "Started",
    "impacted": "{vm} is through it",
    "impact-failed": "{vm}: {detail}",
    "moved": "{vm} has moved from {detail}",
    "left": "{vm} has left the fleet",
    "completed": "Completed",
    "canceled": "Canceled",
    "failed": "Failed",
    "campaign": "{detail}",
}
"""The changes that a demo tells of, in words."""
PAUSE_SECONDS_MAX = 30.0

OfVm = Annotated[str | None, typer.Option("--vm", help="Only what concerns this VM.")]
OfScope = Annotated[str | None, typer.Option("--scope", help="Only this scope.")]
OfHost = Annotated[str | None, typer.Option("--host", help="Only what happens on this host.")]
OfEvent = Annotated[str | None, typer.Option("--event", help="Only this event.")]
OfChange = Annotated[
    str | None, typer.Option("--what", help="Only changes of this kind, such as started or failed.")
]


class Message(NamedTuple):
    """One server-sent event."""

    id: str
    event: str
    data: str


def watch(
    context: typer.Context,
    *,
    vm: OfVm = None,
    scope: OfScope = None,
    host: OfHost = None,
    event: OfEvent = None,
    what: OfChange = None,
    as_json: Json = False,
) -> None:
    """Tell what happens, as it happens, until Ctrl-C. A service that goes away is waited for."""
    asked = {"vm": vm, "scope": scope, "host": host, "event": event, "what": what}
    for entry in follow(connect(context), asked):
        show(entry, as_json=as_json)


def show(entry: Mapping[str, Any], *, as_json: bool) -> None:
    typer.echo(json.dumps(entry, ensure_ascii=False) if as_json else line(entry))


def line(entry: Mapping[str, Any]) -> str:
    """An entry of the history in a line."""
    told = {name: entry[name] for name in ("scope", "what", "vm", "event")}
    return plain(sentence(at=entry["at"][11:19], detail=entry["detail"].partition("\n")[0], **told))


def sentence(*, at: str, scope: str, what: str, vm: str, detail: str, event: str) -> str:
    words = SHOWN.get(what, f"{what} {{vm}} {{detail}}").format(vm=vm, detail=detail)
    return f"{at}  {scope:10}  {' '.join(words.split())}{f'  ({event[:8]})' if event else ''}"


def follow(
    client: Client, asked: Mapping[str, str | None], after: str = ""
) -> Iterator[dict[str, Any]]:
    """Entries as they come.

    Once it has been reached, a service that does not answer is tried again, ever less often.
    """
    failures, is_told = 0, False
    while True:  # ends when the caller has enough, or when the service says no
        try:
            for message in messages(
                client.lines("stream", query=query_of({**asked, "after": after}))
            ):
                failures, is_told, after = 0, False, message.id or after
                if message.event == "gap":
                    typer.echo(
                        "forewarn: some of what happened is not kept any more, and is left out",
                        err=True,
                    )
                elif message.data:
                    yield json.loads(message.data)
        except Unavailable as problem:
            if not after:
                raise
            if not is_told:
                typer.echo(f"forewarn: {problem.message}; trying again", err=True)
            is_told = True
        time.sleep(random.uniform(0.5, 1) * min(2.0**failures, PAUSE_SECONDS_MAX))
        failures += 1


def query_of(asked: Mapping[str, str | None]) -> str:
    return urlencode({name: value for name, value in asked.items() if value})


def messages(lines: Iterable[bytes]) -> Iterator[Message]:
    """Lines of text/event-stream as messages. An id stands for all that come after it, too."""
    last, event, data = "", "", ""
    for raw in lines:
        name, _, value = raw.decode(errors="replace").rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            last = value
        elif name == "event":
            event = value
        elif name == "data":
            data += value
        elif not name and not value and not raw.startswith(b":"):
            yield Message(last, event, data)
            event, data = "", ""
