"""`forewarn history`: what happened, when, by whom and why."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from forewarn.cli.api import Client, connect
from forewarn.cli.exit_codes import Usage
from forewarn.cli.output import Json, show_json, show_list
from forewarn.cli.watch import OfChange, OfEvent, OfHost, OfScope, OfVm, follow, query_of
from forewarn.cli.watch import show as show_entry

Since = Annotated[
    str | None,
    typer.Option(help="Only from then on: 90s, 15m, 2h or 7d ago, or 2030-01-31T12:00:00Z."),
]
Until = Annotated[str | None, typer.Option(help="Only before then, said as --since.")]
Limit = Annotated[int, typer.Option(help="At most so many.", min=1, max=1_000_000)]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow", "-f", help="The oldest of them first, and then what happens from now on."
    ),
]

PAGE_MAX = 1000
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
COLUMNS = ("at", "what", "scope", "about", "host", "by", "event", "detail")
BY_LENGTH_MAX = 20


def history(
    context: typer.Context,
    *,
    vm: OfVm = None,
    scope: OfScope = None,
    host: OfHost = None,
    event: OfEvent = None,
    what: OfChange = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    is_followed: Follow = False,
    as_json: Json = False,
) -> None:
    """What happened, the newest first: when, what, where, by whom and why."""
    client, now = connect(context), datetime.now(UTC)
    asked = {"vm": vm, "scope": scope, "host": host, "event": event, "what": what}
    if is_followed and until:
        raise Usage("--follow goes on for good; expected no --until with it")
    newest = read(client, {}, 1)["history"] if is_followed else []
    answer = read(
        client, {**asked, "since": moment(since, now), "until": moment(until, now)}, limit
    )
    if is_followed:
        tell_on(client, asked, answer["history"], newest, as_json=as_json)
    elif as_json:
        show_json(answer)
    else:
        rows = [row(entry) for entry in answer["history"]]
        show_list({"history": rows, "total": len(rows)}, "history", COLUMNS, as_json=False)
        if answer["next"]:
            typer.echo(f"{len(rows)} are shown; --limit shows more", err=True)


def read(client: Client, asked: Mapping[str, str | None], limit: int) -> dict[str, Any]:
    """At most `limit` entries as one answer, page by page.

    A page may be empty where much is looked through.
    """
    found: list[dict[str, Any]] = []
    cursor = None
    while True:  # ends: every page is older than the one before
        size = min(limit - len(found), PAGE_MAX)
        page = client.get(
            "history", query=query_of({**asked, "limit": str(size), "cursor": cursor})
        )
        found += page["history"]
        cursor = page["next"]
        if not cursor or len(found) >= limit:
            return {"history": found, "next": cursor}


def tell_on(
    client: Client,
    asked: Mapping[str, str | None],
    found: Sequence[Mapping[str, Any]],
    newest: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
) -> None:
    """What was found, the oldest first, and then what comes: nothing is told twice, and nothing is
    left out.

    `newest` is what was the newest of all before anything was looked for.
    """
    for entry in reversed(found):
        show_entry(entry, as_json=as_json)
    last = max((entry["number"] for entry in (*found[:1], *newest)), default=0)
    for entry in follow(client, asked, str(last)):
        show_entry(entry, as_json=as_json)


def row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as a line of the table."""
    return {
        **entry,
        "at": f"{entry['at'][:19]}Z",
        "about": entry["vm"] or entry["resources"],
        "by": entry["by"][:BY_LENGTH_MAX],
        "detail": entry["detail"].partition("\n")[0],
    }


def moment(said: str | None, now: datetime) -> str | None:
    """A span back from now as a moment; whatever else is said is for the service to read."""
    found = re.fullmatch(r"([0-9]{1,5})([smhd])", said or "")
    if not found:
        return said
    return (now - timedelta(**{UNITS[found[2]]: int(found[1])})).isoformat().replace("+00:00", "Z")
