"""`forewarn host`: the hosts, and what befalls them."""

from collections.abc import Mapping
from typing import Annotated

import typer

from forewarn.cli.api import connect
from forewarn.cli.output import Json, show_events
from forewarn.cli.resource import NotBefore, noun

Name = Annotated[str, typer.Argument(metavar="HOST")]
Type = Annotated[str, typer.Option("--type", help="Freeze, Reboot or Redeploy.", metavar="TYPE")]
Cause = Annotated[str | None, typer.Option(help="maintenance, infrastructure or live-migration.")]
Duration = Annotated[int | None, typer.Option(help="How long VMs will notice it; -1 for unknown.")]
Description = Annotated[
    str | None, typer.Option(help="What VMs read, instead of the cause's own words.")
]

app = noun(
    "host", "Hosts: list, show, maintain, degrade, fail.", ("name", "vms", "scopes", "events")
)


@app.command()
def maintain(
    context: typer.Context,
    host: Name,
    *,
    event_type: Type,
    cause: Cause = None,
    duration_seconds: Duration = None,
    not_before: NotBefore = None,
    description: Description = None,
    as_json: Json = False,
) -> None:
    """Announce maintenance to every VM on a host: one event for each scope and update domain."""
    said = {"type": event_type, "cause": cause, "duration_seconds": duration_seconds}
    _befall(
        context,
        host,
        "maintain",
        said | {"not_before": not_before, "description": description},
        as_json=as_json,
    )


@app.command()
def degrade(
    context: typer.Context, host: Name, *, not_before: NotBefore = None, as_json: Json = False
) -> None:
    """Tell every VM on a host that its hardware is expected to fail."""
    _befall(context, host, "degrade", {"not_before": not_before}, as_json=as_json)


@app.command()
def fail(context: typer.Context, host: Name, *, as_json: Json = False) -> None:
    """The hardware has failed: move every VM on a host at once, without notice."""
    _befall(context, host, "fail", {}, as_json=as_json)


def _befall(
    context: typer.Context, host: str, verb: str, said: Mapping[str, object], *, as_json: bool
) -> None:
    answer = connect(context).post("hosts", host, verb, said=said)
    show_events(
        answer, f"{verb} of {host} makes no event: it concerns no VM there", as_json=as_json
    )
