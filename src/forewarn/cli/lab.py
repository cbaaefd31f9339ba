"""`forewarn lab`: scenarios, and the service with a clock and faults that you control."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from forewarn.cli import lab_exec, scenario
from forewarn.cli.api import ControlClient, api_command, complete_names
from forewarn.cli.event_loop import run_until_stopped
from forewarn.cli.exit_codes import Usage, needs_extra
from forewarn.cli.files import read_file
from forewarn.cli.fleet import FILE_BYTES_MAX
from forewarn.cli.options import DEMO
from forewarn.cli.output import show_list, show_one
from forewarn.cli.times import FUTURE, parse_time
from forewarn.duration import EXPECTED, parse_duration
from forewarn.errors import Invalid
from forewarn.option_kind import Address

FAULT_COLUMNS = ("id", "fault", "vms", "begins_at", "ends_at", "requests_left")
VMS_SHOWN_MAX = 20

app = typer.Typer(
    help="The lab: scenarios, and the service with a clock and faults that you control.",
    no_args_is_help=True,
)
clock = typer.Typer(
    help="The lab's clock: show, advance, jump, pause, resume, rate.", no_args_is_help=True
)
fault = typer.Typer(help="Faults of the endpoint: list, add, remove, clear.", no_args_is_help=True)
app.add_typer(clock, name="clock")
app.add_typer(fault, name="fault")
for command in (scenario.run, scenario.scenarios, scenario.schema):
    app.command()(command)
app.command("exec")(lab_exec.run_at_azure_address)


class ClockKind(StrEnum):
    VIRTUAL = "virtual"
    REAL = "real"


# fmt: off
Fleet = Annotated[Path | None, typer.Option(help="The fleet file; default: the demo's fleet.")]
Kind = Annotated[ClockKind, typer.Option("--clock", help="A clock that you move, or the real one.")]
Rate = Annotated[float, typer.Option(min=0.001, max=1_000_000,
    help="Divide notices and durations by this.")]
Start = Annotated[str | None, typer.Option(
    help="The start of a virtual clock, such as 2030-01-31T12:00:00Z; default: now.")]
Seed = Annotated[int, typer.Option(help="The seed of ids and random choices.")]
Running = Annotated[bool, typer.Option("--running",
    help="Let a virtual clock follow the real time until it is paused.")]
Port = Annotated[int, typer.Option(min=0, max=65535,
    help="The port that VMs call; 0 takes a free port.")]
ControlPort = Annotated[int, typer.Option(min=0, max=65535,
    help="The port of the control API; 0 takes a free port.")]
ReadyFile = Annotated[Path | None, typer.Option(
    help="A JSON file with the URLs; it exists while the lab is ready.")]
DurationText = Annotated[str, typer.Argument(metavar="DURATION",
    help="Such as 90s, 15m, 2h, 1h30m or 7d.")]
TimeText = Annotated[str, typer.Argument(metavar="TIME", help=f"Such as {FUTURE}.")]
After = Annotated[int | None, typer.Option(min=0,
    help="Start after the entry with this number; default: the newest entries.")]
TranscriptLimit = Annotated[int, typer.Option(help="Show at most this many.", min=1, max=10_000)]
FaultName = Literal["first-call", "latency", "refuse", "status", "short-notice", "no-started",
    "skew", "stale", "incarnation-reset", "no-events", "text-plain", "empty", "truncate", "reset",
    "lapse"]
FaultKind = Annotated[FaultName, typer.Argument(metavar="KIND", case_sensitive=False,
    help="Such as status, latency or truncate: see docs/faults.md.")]
FaultSettings = Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...",
    help="Such as code=500 for=2m.")]
FaultVms = Annotated[list[str] | None, typer.Option("--vm", autocompletion=complete_names("vms"),
    help="Only requests of this VM; may be repeated.")]
# fmt: on


@app.command()
def serve(
    *,
    fleet: Fleet = None,
    clock_kind: Kind = ClockKind.VIRTUAL,
    rate: Rate = 1.0,
    start: Start = None,
    seed: Seed = 0,
    is_running: Running = False,
    port: Port = 8080,
    control_port: ControlPort = 8081,
    ready_file: ReadyFile = None,
) -> None:
    """Run a lab until SIGTERM or Ctrl-C.

    Example: forewarn lab serve --running --rate 60
    """
    if start is not None and clock_kind is ClockKind.REAL:
        raise Usage(f"--start {start} needs --clock virtual: the real clock cannot be set")
    with needs_extra("lab serve"):
        import asyncio

        from forewarn.fleetfile.parser import parse
        from forewarn.lab.service import Setup, open_lab

    path = fleet or Path(DEMO["fleet"])
    setup = Setup(
        fleet=parse(read_file(path, "fleet file", FILE_BYTES_MAX), str(path)),
        is_virtual=clock_kind is ClockKind.VIRTUAL,
        is_running=is_running,
        start=_parse_time(start),
        rate=rate,
        seed=seed,
    )

    async def work() -> None:
        async with open_lab(setup) as lab:
            urls = {
                "metadata": await lab.listen_metadata(Address("127.0.0.1", port)),
                "control": await lab.listen_control(Address("127.0.0.1", control_port)),
                "vms": await lab.listen_vms(),
            }
            with _announce(ready_file, {**urls, "pid": os.getpid()}):
                typer.echo(_format_welcome(urls, is_paused=setup.is_virtual and not is_running))
                await asyncio.get_running_loop().create_future()

    _remove(ready_file)  # a lab that was killed may have left one
    run_until_stopped(work)


def show_transcript(response: Mapping[str, Any]) -> None:
    with needs_extra("lab transcript"):
        import msgspec

        from forewarn.lab.transcript import TranscriptEntry, format_entry

    for entry in msgspec.convert(response["entries"], list[TranscriptEntry]):
        print(format_entry(entry))
    if response["left_out"]:
        print(f"{response['left_out']} more entries; use --limit to see them", file=sys.stderr)


def show_faults(response: Mapping[str, Any]) -> None:
    rows = [{column: each.get(column) for column in FAULT_COLUMNS} for each in response["faults"]]
    show_list({**response, "faults": rows}, "faults", FAULT_COLUMNS)


@api_command(app, show_transcript)
def transcript(client: ControlClient, *, after: After = None, limit: TranscriptLimit = 1000) -> Any:
    """Show what happened so far: every request and response, every change, every step.

    Example: forewarn lab transcript --limit 20
    """
    start = {"newest": "true"} if after is None else {"after": after}
    return client.get("transcript", query={**start, "limit": limit})


@api_command(clock, show_one, name="show")
def show_clock(client: ControlClient) -> Any:
    """Show the lab's time and rate.

    Example: forewarn lab clock show
    """
    return client.get("clock")


@api_command(clock, show_one)
def advance(client: ControlClient, duration: DurationText) -> Any:
    """Let time pass, deadline by deadline. Returns when everything that was due is done.

    Example: forewarn lab clock advance 15m
    """
    return client.post("clock", "advance", body={"seconds": _parse_seconds(duration)})


@api_command(clock, show_one)
def jump(client: ControlClient, time: TimeText) -> Any:
    """Set the clock to a later time in one step, like a machine that was suspended.

    Example: forewarn lab clock jump 2030-01-31T12:00:00Z
    """
    return _set_clock(client, now=parse_time("TIME", time, client.now))


@api_command(clock, show_one)
def pause(client: ControlClient) -> Any:
    """Stop a virtual clock.

    Example: forewarn lab clock pause
    """
    return _set_clock(client, is_running=False)


@api_command(clock, show_one)
def resume(client: ControlClient) -> Any:
    """Let a virtual clock follow the real time.

    Example: forewarn lab clock resume
    """
    return _set_clock(client, is_running=True)


@api_command(clock, show_one, name="rate")
def set_rate(client: ControlClient, rate: Annotated[float, typer.Argument(metavar="RATE")]) -> Any:
    """Divide the notices and durations of new events by this.

    Example: forewarn lab clock rate 60
    """
    return _set_clock(client, rate=rate)


def _set_clock(client: ControlClient, **settings: object) -> Any:
    return client.put("clock", body=json.dumps(settings).encode())


@api_command(fault, show_faults, name="list")
def list_faults(client: ControlClient) -> Any:
    """List the active and planned faults.

    Example: forewarn lab fault list
    """
    return client.get("faults")


@api_command(fault, show_one, name="add")
def add_fault(
    client: ControlClient, kind: FaultKind, settings: FaultSettings = None, *, vm: FaultVms = None
) -> Any:
    """Make the endpoint misbehave.

    Example: forewarn lab fault add status code=500 requests=3 --vm web-0
    """
    body = {"fault": kind, **dict(map(_parse_setting, settings or ())), "vms": vm or None}
    return client.post("faults", body=body)["fault"]


def show_removed(response: Mapping[str, Any]) -> None:
    print("\n".join(f"removed {each['id']}" for each in response["faults"]) or "no faults")


@api_command(fault, lambda removed: show_removed({"faults": [removed]}), name="remove")
def remove_fault(
    client: ControlClient, fault_id: Annotated[str, typer.Argument(metavar="ID")]
) -> Any:
    """Remove one fault.

    Example: forewarn lab fault remove f1
    """
    return client.delete("faults", fault_id)["fault"]


@api_command(fault, show_removed, name="clear")
def clear_faults(client: ControlClient) -> Any:
    """Remove all faults.

    Example: forewarn lab fault clear
    """
    return client.delete("faults")


def _format_welcome(urls: dict[str, Any], *, is_paused: bool) -> str:
    vms = "\n".join(f"  {vm:16} {url}" for vm, url in list(urls["vms"].items())[:VMS_SHOWN_MAX])
    paused = "\nThe clock is paused: `forewarn lab clock advance 15m` lets time pass."
    return (
        f"Console: {urls['control']}/\n"
        f"the lab is ready: metadata {urls['metadata']}, control {urls['control']}\n"
        f"Each VM has an endpoint of its own:\n{vms}{paused if is_paused else ''}"
    )


@contextmanager
def _announce(path: Path | None, content: dict[str, Any]) -> Iterator[None]:
    """Keep the file while the block runs. It appears in one step, so no reader sees half of it."""
    if path is None:
        yield
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(path)
    except OSError as error:
        raise _ready_file_error(path, error) from error
    try:
        yield
    finally:
        _remove(path)


def _remove(path: Path | None) -> None:
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _ready_file_error(path, error) from error


def _ready_file_error(path: Path | None, error: OSError) -> Invalid:
    return Invalid(f"cannot write the ready file {path}: {error.strerror or error}", file=str(path))


def _parse_setting(text: str) -> tuple[str, object]:
    """Whole numbers become numbers; the service parses the rest."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise Usage(f"{text!r} is not a setting; expected NAME=VALUE, such as code=500")
    return name, int(value) if re.fullmatch(r"-?[0-9]{1,9}", value) else value


def _parse_seconds(text: str) -> float:
    try:
        return parse_duration(text).total_seconds()
    except ValueError as error:
        raise Usage(f"{text!r} is not a duration; expected {EXPECTED}") from error


def _parse_time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise Usage(f"{text!r} has no time zone; expected a time such as {text}Z")
        return time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Usage(f"{text!r} is not a time; expected one such as 2030-01-31T12:00:00Z") from error
