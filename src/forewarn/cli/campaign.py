"""`forewarn campaign`: maintenance of many hosts, a few at a time."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from forewarn.cli.api import ControlClient, api_command, complete_names, connect
from forewarn.cli.exit_codes import Exit
from forewarn.cli.lookup import find_campaign
from forewarn.cli.output import format_time, show_warnings
from forewarn.cli.progress import show_progress
from forewarn.cli.reconnect import keep_trying
from forewarn.cli.resource import (
    AllowUnreachable,
    Cause,
    Description,
    Duration,
    Type,
    resource,
)

# fmt: off
Id = Annotated[str, typer.Argument(metavar="CAMPAIGN", help="Its id or its name.",
    autocompletion=complete_names("campaigns"))]
Hosts = Annotated[list[str], typer.Option(autocompletion=complete_names("hosts"),
    help="A shell pattern such as 'rack7-*'; may be repeated.")]
Name = Annotated[str | None, typer.Option(help="Its name in the history; by default its id.")]
MaxHosts = Annotated[int | None, typer.Option(help="How many hosts at a time.")]
MaxUnavailable = Annotated[str | None, typer.Option(
    help="How many VMs of a scope at a time: a number or a percentage such as 25%.")]
PauseOnFailure = Annotated[bool | None, typer.Option(
    "--pause-on-failure/--no-pause-on-failure", help="Pause when an impact fails.")]
Plan = Annotated[bool, typer.Option("--plan", help="Only print the waves; nothing is started.")]
# fmt: on
COLUMNS = ("id", "name", "type", "state", "estimated_end", "started_at", "hosts")
WATCH_INTERVAL_SECONDS = 1.0
SHOWN_IN_WATCH = ("hosts", "in_progress", "waiting_for")

app = resource(
    "campaign",
    "Campaigns, maintenance of many hosts: start, list, show, watch, pause, resume, cancel.",
    COLUMNS,
    "kernel",
)


def show_campaign_or_plan(response: Mapping[str, Any]) -> None:
    if response.get("plan"):
        print_plan(response["plan"])
    else:
        print_campaign(response["campaign"])
    show_warnings(response)


@api_command(app, show_campaign_or_plan)
def start(
    client: ControlClient,
    *,
    event_type: Type,
    hosts: Hosts,
    name: Name = None,
    max_hosts: MaxHosts = None,
    max_unavailable: MaxUnavailable = None,
    pause_on_failure: PauseOnFailure = None,
    cause: Cause = None,
    duration_seconds: Duration = None,
    description: Description = None,
    plan: Plan = False,
    allow_unreachable: AllowUnreachable = False,
) -> Any:
    """Maintain all matching hosts, a few at a time, within the budget of every scope.

    Example: forewarn campaign start --type Reboot --hosts 'rack7-*' --name kernel --plan
    """
    is_number = max_unavailable is not None and max_unavailable.isdecimal()
    body = {
        "type": event_type,
        "hosts": hosts,
        "name": name,
        "max_hosts": max_hosts,
        "max_unavailable": int(max_unavailable or 0) if is_number else max_unavailable,
        "pause_on_failure": pause_on_failure,
        "cause": cause,
        "duration_seconds": duration_seconds,
        "description": description,
        "plan": plan or None,
        "allow_unreachable": allow_unreachable or None,
    }
    return client.post("campaigns", body=body)


def _add_action(verb: str, help_: str) -> None:
    help_ = f"{help_}\n\nExample: forewarn campaign {verb} kernel"

    @api_command(app, show_campaign_or_plan, name=verb, help_=help_)
    def act(client: ControlClient, campaign: Id) -> Any:
        return client.post("campaigns", find_campaign(client, campaign), verb)


_add_action("pause", "Start no more hosts. Announced hosts continue.")
_add_action("resume", "Continue with the next hosts, also after a failure.")
_add_action(
    "cancel", "Start no more hosts, and cancel Scheduled events. Started ones end by themselves."
)


@app.command()
def watch(context: typer.Context, campaign: Id) -> None:
    """Show the progress until the campaign ends, or is paused by a failure or a health command.

    Continues when the service is back after a restart. Exit code 1 unless all hosts are done.

    Example: forewarn campaign watch kernel
    """
    client = connect(context)
    campaign = find_campaign(client, campaign)
    shown: Mapping[str, Any] = {}

    def observe() -> tuple[Mapping[str, Any], str]:
        """The campaign, and what to print if it has changed: on a terminal, that too is read from
        the service, because times are relative to its clock.
        """
        found = client.get("campaigns", campaign)
        is_changed = any(found[name] != shown.get(name) for name in SHOWN_IN_WATCH)
        return found, describe_progress(found) if is_changed else ""

    with show_progress("hosts") as update:
        while True:  # ends with the campaign, or when a failure has paused it and no host runs
            shown, line = keep_trying(observe)
            hosts = shown["hosts"]
            update(hosts["done"] + hosts["skipped"] + hosts["failed"], hosts["total"])
            if line:
                print(line, flush=True)
            if shown["ended_at"] or (shown["paused_by_failure"] and not shown["in_progress"]):
                break
            time.sleep(WATCH_INTERVAL_SECONDS)
    print_campaign(shown)
    if not is_all_done(shown):
        raise typer.Exit(Exit.REFUSED)


def print_plan(plan: Mapping[str, Any]) -> None:
    for number, wave in enumerate(plan["waves"], start=1):
        typer.echo(f"wave {number}: {', '.join(wave)}")
    for blocker in plan["waiting"]:
        typer.echo(f"would wait: {blocker['host']}: {blocker['why']}")
    for blocker in plan["too_large"]:
        typer.echo(f"too large: {blocker['why']}")
    for each in plan["unreachable"]:
        typer.echo(f"unreachable: {each['host']}: {each['why']}")
    for each in plan["unmovable"]:
        typer.echo(f"cannot move: {each['vm']} on {each['host']}: {each['why']}")
    hosts, waves = plan["total"], len(plan["waves"])
    hosts_text = f"{hosts} host{'s' * (hosts != 1)}"
    typer.echo(f"{hosts_text} in {waves} wave{'s' * (waves != 1)}; nothing was done")


def print_campaign(campaign: Mapping[str, Any]) -> None:
    reason = f": {campaign['pause_reason']}" if campaign["pause_reason"] else ""
    counts = describe_counts(campaign)
    typer.echo(f"campaign {campaign['id']} is {campaign['state']}{reason}; {counts}")


def is_all_done(campaign: Mapping[str, Any]) -> bool:
    """Whether every host has had its maintenance. A skipped host has not."""
    hosts = campaign["hosts"]
    return bool(campaign["state"] == "done" and hosts["done"] == hosts["total"])


def describe_counts(campaign: Mapping[str, Any]) -> str:
    hosts = campaign["hosts"]
    others = [
        f"{hosts[name]} {name.replace('_', ' ')}"
        for name in ("in_progress", "waiting", "skipped", "failed")
        if hosts[name]
    ]
    return ", ".join([f"{hosts['done']} of {hosts['total']} hosts done", *others])


def describe_progress(campaign: Mapping[str, Any]) -> str:
    """How far it is, what it is waiting for, and when it probably ends, in a line."""
    end = campaign["estimated_end"]
    left = f"; probably ends {format_time(end)}" if end else ""
    runs = [
        f"{run['host']}: {run['waiting_for']}"
        + (f" ({format_time(run['until'])})" if run["until"] else "")
        for run in campaign["in_progress"]
    ]
    wait = "; ".join(runs[:3] + ["…"] * (len(runs) > 3)) or campaign["waiting_for"] or "nothing"
    if campaign["state"] == "paused":
        wait = f"an operator: {campaign['pause_reason']}"
    return f"{describe_counts(campaign)}; waiting for {wait}{left}"
