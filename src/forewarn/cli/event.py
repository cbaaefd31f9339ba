"""`forewarn event`: what VMs are being told."""

from typing import Annotated

import typer

from forewarn.cli.api import connect
from forewarn.cli.output import Json, show_events
from forewarn.cli.resource import noun

Id = Annotated[str, typer.Argument(metavar="EVENT", help="The event's id, in any case of letters.")]
Vm = Annotated[
    str | None,
    typer.Option(
        help="Say it in the name of this VM; the scope's policy decides whether that suffices."
    ),
]
NotBefore = Annotated[
    str, typer.Option(help="The new earliest moment, such as 2030-01-31T12:00:00Z.")
]
COLUMNS = ("id", "type", "status", "scope", "resources", "not_before", "source", "cause")

app = noun(
    "event",
    "Events, what VMs are being told: list, show, approve, cancel, extend, complete.",
    COLUMNS,
)


@app.command()
def approve(context: typer.Context, event: Id, *, vm: Vm = None, as_json: Json = False) -> None:
    """Let a Scheduled event start before its time."""
    show_events(connect(context).post("events", event, "approve", said={"vm": vm}), as_json=as_json)


@app.command()
def cancel(context: typer.Context, event: Id, *, as_json: Json = False) -> None:
    """Take a Scheduled event back."""
    show_events(connect(context).post("events", event, "cancel"), done="canceled", as_json=as_json)


@app.command()
def extend(
    context: typer.Context, event: Id, *, not_before: NotBefore, as_json: Json = False
) -> None:
    """Put a Scheduled event off: more notice, never less."""
    show_events(
        connect(context).post("events", event, "extend", said={"not_before": not_before}),
        as_json=as_json,
    )


@app.command()
def complete(context: typer.Context, event: Id, *, as_json: Json = False) -> None:
    """Say that what a Started event announced is done."""
    show_events(
        connect(context).post("events", event, "complete"), done="completed", as_json=as_json
    )
