"""`forewarn history` and `forewarn watch`: what happened, and what happens now."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer

from forewarn.cli.api import ControlClient, complete_names, connect
from forewarn.cli.exit_codes import Usage
from forewarn.cli.lookup import find_event
from forewarn.cli.options import Json, Limit
from forewarn.cli.output import printable, show_json, show_list
from forewarn.cli.reconnect import pause_seconds, report_retry
from forewarn.cli.times import PAST, parse_time
from forewarn.errors import Unavailable

SENTENCES = {
    "enabled": "first poll: from now on VMs get notice",
    "executed-silently": "{vm}: {detail} now, without notice",
    "scheduled": "Scheduled: {detail}",
    "approved": "approved by {detail}",
    "extended": "postponed {detail}",
    "started": "Started",
    "restarted": "{vm}: restarted, not back yet",
    "impacted": "{vm}: impact finished: {detail}",
    "impact-failed": "{vm}: {detail}",
    "moved": "{vm} moved from {detail}",
    "left": "{vm} left the fleet",
    "completed": "Completed",
    "canceled": "Canceled",
    "failed": "Failed",
    "campaign": "{detail}",
}
"""The changes that a demo prints. Other changes are printed by their name."""
COLUMNS = ("at", "what", "event", "about", "detail", "by", "scope", "host")
What = StrEnum(
    "What",
    "executed-silently scheduled approved started claimed restarted impacted impact-failed extended"
    " completed canceled failed enabled joined left moved updated retired unserved served campaign"
    " token-created token-revoked restored",
)


def only(noun: str) -> Any:
    help_ = f"Only changes of this {noun}."
    return typer.Option(f"--{noun}", help=help_, autocompletion=complete_names(f"{noun}s"))


# fmt: off
OnlyVm = Annotated[str | None, only("vm")]
OnlyScope = Annotated[str | None, only("scope")]
OnlyHost = Annotated[str | None, only("host")]
OnlyEvent = Annotated[str | None, only("event")]
OnlyChange = Annotated[What | None, typer.Option(
    "--what", case_sensitive=False, metavar="CHANGE",
    help=f"Only this kind of change: {', '.join(What)}.")]
Since = Annotated[str | None, typer.Option(
    metavar="TIME", help=f"Only from this time on, such as {PAST}.")]
Until = Annotated[str | None, typer.Option(
    metavar="TIME", help="Only before this time; same format as --since.")]
Follow = Annotated[bool, typer.Option(
    "--follow", "-f", help="Oldest first, then continue with what happens from now on.")]
# fmt: on


class Message(NamedTuple):
    """One server-sent event."""

    id: str
    event: str
    data: str


def watch(
    context: typer.Context,
    *,
    vm: OnlyVm = None,
    scope: OnlyScope = None,
    host: OnlyHost = None,
    event: OnlyEvent = None,
    what: OnlyChange = None,
    as_json: Json = False,
) -> None:
    """Print changes as they happen, until Ctrl-C. Reconnects if the service goes away.

    Example: forewarn watch --vm web-0
    """
    client = connect(context)
    query = _filters(client, vm=vm, scope=scope, host=host, event=event, what=what)
    for entry in follow(client, query):
        show_entry(entry, as_json=as_json)


def history(
    context: typer.Context,
    *,
    vm: OnlyVm = None,
    scope: OnlyScope = None,
    host: OnlyHost = None,
    event: OnlyEvent = None,
    what: OnlyChange = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    is_followed: Follow = False,
    as_json: Json = False,
) -> None:
    """Show what happened, newest first: when, what, where, by whom and why.

    Example: forewarn history --vm web-0 --since 2h
    """
    if is_followed and until:
        raise Usage("--follow does not end; it cannot be combined with --until")
    client = connect(context)
    times = {
        "since": parse_time("--since", since, client.now, PAST),
        "until": parse_time("--until", until, client.now, PAST),
    }
    query = _filters(client, vm=vm, scope=scope, host=host, event=event, what=what)
    # Read before the entries, so that following from here repeats and misses nothing.
    newest = client.list("history", 1)["history"] if is_followed else []
    response = client.list("history", limit, {**query, **times})
    entries = response["history"]
    if is_followed:
        for entry in reversed(entries):
            show_entry(entry, as_json=as_json)
        last = max((entry["number"] for entry in (*entries[:1], *newest)), default=0)
        for entry in follow(client, query, str(last)):
            show_entry(entry, as_json=as_json)
    elif as_json:
        show_json(response)
    else:
        rows = [table_row(entry) for entry in entries]
        show_list({"history": rows, "total": len(rows)}, "history", COLUMNS)
        if response["next"]:
            print(f"showing {len(rows)}; use --limit to see more", file=sys.stderr)


def _filters(client: ControlClient, **given: str | None) -> dict[str, str | None]:
    """The query of the filters. The event may be given by the start of its id."""
    return {**given, "event": given["event"] and find_event(client, given["event"])}


def follow(
    client: ControlClient,
    query: Mapping[str, str | None],
    after: str = "",
    *,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """Entries as they happen.

    Once connected, it reconnects with growing pauses and continues after the last entry. A stream
    without a message is that of a server that is cut off from its store, and says nothing about it.
    """
    failures, is_reported = 0, False
    while True:  # ends when the caller stops, or when the service refuses
        is_empty = True
        try:
            lines = client.lines("stream", query={**query, "after": after or None})
            for message in parse_messages(lines):
                failures, is_reported, is_empty, after = 0, False, False, message.id or after
                if message.event == "gap":
                    text = "forewarn: some entries are no longer stored and are missing"
                    print(text, file=sys.stderr)
                elif message.data:
                    yield json.loads(message.data)
            if is_empty:
                client.use_next_server()
                if not is_reported:
                    report_retry(Unavailable("the stream ended without a message"))
                is_reported = True
        except Unavailable as error:
            if not after:
                raise
            if not is_reported:
                report_retry(error)
            is_reported = True
        sleep(pause_seconds(failures))
        failures += 1


def parse_messages(lines: Iterable[bytes]) -> Iterator[Message]:
    """Lines of text/event-stream as messages. An id holds until the next id."""
    last_id, event, data = "", "", ""
    for raw in lines:
        name, _, value = raw.decode(errors="replace").rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            last_id = value
        elif name == "event":
            event = value
        elif name == "data":
            data += value
        elif not name and not value and not raw.startswith(b":"):
            yield Message(last_id, event, data)
            event, data = "", ""


def show_entry(entry: Mapping[str, Any], *, as_json: bool) -> None:
    print(json.dumps(entry, ensure_ascii=False) if as_json else format_entry(entry), flush=True)


def format_entry(entry: Mapping[str, Any]) -> str:
    """An entry of the history in one line."""
    at, what, event = entry["at"][11:19], entry["what"], entry["event"]
    detail = entry["detail"].partition("\n")[0]
    sentence = SENTENCES.get(what, f"{what} {{vm}} {{detail}}")
    text = " ".join(sentence.format(vm=entry["vm"], detail=detail).split()).removesuffix(":")
    return printable(f"{at}  {entry['scope']:10}  {text}{f'  ({event[:8]})' if event else ''}")


def table_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **entry,
        "about": entry["vm"] or entry["resources"],
        "detail": entry["detail"].partition("\n")[0],
    }
