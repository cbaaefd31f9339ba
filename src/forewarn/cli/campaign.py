"""`forewarn campaign`: maintenance of many hosts, a few at a time."""

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from forewarn.cli.api import Client, connect
from forewarn.cli.exit_codes import Exit, Usage
from forewarn.cli.options import Json
from forewarn.cli.output import show_json
from forewarn.cli.resource import Cause, Description, Duration, Type, resource

Id = Annotated[str, typer.Argument(metavar="CAMPAIGN")]
Hosts = Annotated[
    list[str], typer.Option(help="A shell pattern such as 'rack7-*'; may be given several times.")
]
Name = Annotated[str | None, typer.Option(help="What the history calls it; without one, its id.")]
MaxHosts = Annotated[int | None, typer.Option(help="At most so many hosts at once.")]
MaxUnavailable = Annotated[
    str | None,
    typer.Option(
        help="At most so many VMs of a scope at once: a number, or a percentage such as 25%."
    ),
]
Brake = Annotated[
    bool | None,
    typer.Option("--pause-on-failure/--no-pause-on-failure", help="Pause when an impact fails."),
]
Health = Annotated[str | None, typer.Option(hidden=True)]
HealthMax = Annotated[str | None, typer.Option(hidden=True)]
Plan = Annotated[bool, typer.Option("--plan", help="Only print the waves; nothing is done.")]
COLUMNS = ("id", "name", "type", "state", "hosts", "started_at", "estimated_end")
EVERY_SECONDS = 1.0

app = resource(
    "campaign",
    "Campaigns, maintenance of many hosts: start, list, show, watch, pause, resume, cancel.",
    COLUMNS,
)


@app.command()
def start(
    context: typer.Context,
    *,
    event_type: Type,
    hosts: Hosts,
    name: Name = None,
    max_hosts: MaxHosts = None,
    max_unavailable: MaxUnavailable = None,
    pause_on_failure: Brake = None,
    health_command: Health = None,
    health_seconds_max: HealthMax = None,
    cause: Cause = None,
    duration_seconds: Duration = None,
    description: Description = None,
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Maintain all hosts that match, a few at a time, within every scope's budget."""
    for removed, given in (
        ("health-command", health_command),
        ("health-seconds-max", health_seconds_max),
    ):
        if given is not None:
            raise Usage(
                f"--{removed} is an option of the server now: give it to `forewarn serve` as --campaign-{removed}"
            )
    said = {
        "type": event_type,
        "hosts": hosts,
        "name": name,
        "max_hosts": max_hosts,
        "pause_on_failure": pause_on_failure,
    }
    said |= {
        "cause": cause,
        "duration_seconds": duration_seconds,
        "description": description,
        "plan": plan or None,
    }
    said["max_unavailable"] = (
        int(max_unavailable) if max_unavailable and max_unavailable.isdecimal() else max_unavailable
    )
    answer = connect(context).post("campaigns", body=said)
    if as_json:
        show_json(answer)
    elif plan:
        show_plan(answer["plan"])
    else:
        tell(answer["campaign"])


@app.command()
def pause(context: typer.Context, campaign: Id, *, as_json: Json = False) -> None:
    """No new hosts; what is announced goes on."""
    _act(connect(context), campaign, "pause", as_json=as_json)


@app.command()
def resume(context: typer.Context, campaign: Id, *, as_json: Json = False) -> None:
    """Go on with the next hosts, also after a failure."""
    _act(connect(context), campaign, "resume", as_json=as_json)


@app.command()
def cancel(context: typer.Context, campaign: Id, *, as_json: Json = False) -> None:
    """No new hosts; Scheduled events are canceled, Started ones end by themselves."""
    _act(connect(context), campaign, "cancel", as_json=as_json)


@app.command()
def watch(context: typer.Context, campaign: Id) -> None:
    """Show how far it is until it ends, or until a failure or a health command paused it.

    Exit code 1 unless all are done.
    """
    shown = _followed(_looks(connect(context), campaign))
    tell(shown)
    if not is_all_done(shown):
        raise typer.Exit(Exit.REFUSED)


def show_plan(plan: Mapping[str, Any]) -> None:
    for number, wave in enumerate(plan["waves"], start=1):
        typer.echo(f"wave {number}: {', '.join(wave)}")
    for one in plan["waiting"]:
        typer.echo(f"would wait: {one['host']}: {one['why']}")
    for one in plan["too_large"]:
        typer.echo(f"too large: {one['why']}")
    typer.echo(f"{plan['total']} hosts in {len(plan['waves'])} waves; nothing was done")


def tell(campaign: Mapping[str, Any]) -> None:
    why = f": {campaign['why_paused']}" if campaign["why_paused"] else ""
    typer.echo(f"campaign {campaign['id']} is {campaign['state']}{why}; {counted(campaign)}")


def is_all_done(campaign: Mapping[str, Any]) -> bool:
    """Whether every host has had its maintenance: one that was skipped has not, though nothing
    failed.
    """
    return bool(
        campaign["state"] == "done" and campaign["hosts"]["done"] == campaign["hosts"]["total"]
    )


def counted(campaign: Mapping[str, Any]) -> str:
    hosts = campaign["hosts"]
    told = [
        f"{hosts[name]} {name.replace('_', ' ')}"
        for name in ("under_way", "waiting", "skipped", "failed")
        if hosts[name]
    ]
    return ", ".join([f"{hosts['done']} of {hosts['total']} hosts done", *told])


def awaited(campaign: Mapping[str, Any]) -> str:
    """What it is waiting for, in a line."""
    if campaign["state"] == "paused":
        return f"a person: {campaign['why_paused']}"
    told = [
        f"{one['host']}: {one['waiting_for']}{moment_of(one['until'], ' until ')}"
        for one in campaign["under_way"]
    ]
    return "; ".join(told[:3] + ["…"] * (len(told) > 3)) or campaign["waiting_for"] or "nothing"


def _act(client: Client, campaign: str, verb: str, *, as_json: bool) -> None:
    answer = client.post("campaigns", campaign, verb)
    if as_json:
        show_json(answer)
    else:
        tell(answer["campaign"])


def _looks(client: Client, campaign: str) -> Iterator[Mapping[str, Any]]:
    """The campaign again and again, until there is nothing left to wait for."""
    while True:  # ends with the campaign, or when it has been braked and nothing is under way
        shown = client.get("campaigns", campaign)
        yield shown
        if shown["ended_at"] or (shown["is_braked"] and not shown["under_way"]):
            return
        time.sleep(EVERY_SECONDS)


def _followed(looks: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last look.

    On the way a bar on a terminal, and in a pipe a line whenever there is something new.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    is_terminal, last = sys.stdout.isatty(), ""
    shown: Mapping[str, Any] = {}
    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total} hosts"),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(), disable=not is_terminal) as bar:
        task = bar.add_task("", total=None)
        for shown in looks:
            hosts = shown["hosts"]
            text = f"{counted(shown)}; waiting for {awaited(shown)}"
            end = moment_of(shown["estimated_end"], "; probably ends ")
            ended = hosts["done"] + hosts["skipped"] + hosts["failed"]
            bar.update(task, completed=ended, total=hosts["total"], description=text + end)
            if text != last and not is_terminal:
                typer.echo(text + end)
            last = text
    return shown


def moment_of(moment: str | None, words: str) -> str:
    """A moment in a sentence, to the second; nothing where there is none."""
    return f"{words}{moment[:19]}Z" if moment else ""
