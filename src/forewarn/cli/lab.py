"""`forewarn lab`: a lab, its clock, faults and transcript. Scenarios are in `lab_run.py`."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from forewarn.cli import lab_run
from forewarn.cli.api import connect
from forewarn.cli.config import DEMO
from forewarn.cli.exit_codes import Usage, needs_server_parts
from forewarn.cli.output import Json, show_json, show_list, show_one
from forewarn.cli.serve import run_until_stopped
from forewarn.config import Address
from forewarn.duration import EXPECTED, parse_duration
from forewarn.errors import Invalid

FAULT_COLUMNS = ("id", "fault", "vms", "begins_at", "ends_at", "requests_left")
URLS_SHOWN_MAX = 20

app = typer.Typer(
    help="The lab: the service with a clock you control, scenarios and faults.",
    no_args_is_help=True,
)
clock = typer.Typer(
    help="The lab's clock: show, advance, jump, pause, resume, rate.", no_args_is_help=True
)
fault = typer.Typer(help="Faults at the endpoint: list, add, remove, clear.", no_args_is_help=True)
app.add_typer(clock, name="clock")
app.add_typer(fault, name="fault")
app.command("run")(lab_run.run)
app.command("scenarios")(lab_run.scenarios)
app.command("schema")(lab_run.schema)


class ClockKind(StrEnum):
    VIRTUAL = "virtual"
    REAL = "real"


Fleet = Annotated[Path | None, typer.Option(help="The fleet file. Default: the demo's fleet.")]
Kind = Annotated[ClockKind, typer.Option("--clock", help="A clock that you move, or the real one.")]
Rate = Annotated[
    float,
    typer.Option(
        help="How many times shorter notices and durations are.", min=0.001, max=1_000_000
    ),
]
Start = Annotated[
    str | None,
    typer.Option(help="The start of a virtual clock, such as 2030-01-31T12:00:00Z. Default: now."),
]
Seed = Annotated[int, typer.Option(help="The seed of event ids and random choices.")]
Running = Annotated[
    bool, typer.Option("--running", help="Let a virtual clock follow the real time.")
]
Port = Annotated[
    int, typer.Option(help="The port of the metadata endpoint; 0: a free port.", min=0, max=65535)
]
ControlPort = Annotated[
    int, typer.Option(help="The port of the control API; 0: a free port.", min=0, max=65535)
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(help="A JSON file with all URLs, which exists while the lab is ready."),
]


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
    """Run a lab until SIGTERM or Ctrl-C."""
    is_virtual = clock_kind is ClockKind.VIRTUAL
    if start is not None and not is_virtual:
        raise Usage(f"--start {start} needs --clock virtual: the real clock starts now")
    with needs_server_parts("lab serve"):
        import asyncio

        from forewarn.fleetfile.parser import parse
        from forewarn.lab.service import Setup, open_lab
        from forewarn.server import read_file

    path = fleet or Path(str(DEMO["fleet"]))
    setup = Setup(
        fleet=parse(read_file(path, "fleet file"), str(path)),
        is_virtual=is_virtual,
        is_running=is_running,
        start=None if start is None else parse_time(start),
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
            with write_ready_file(ready_file, {**urls, "pid": os.getpid()}):
                typer.echo(describe_urls(urls))
                if is_virtual and not is_running:
                    typer.echo("The clock is paused; `forewarn lab clock advance 15m` moves it.")
                await asyncio.get_running_loop().create_future()

    remove_ready_file(ready_file)  # a lab that was killed may have left one
    run_until_stopped(work)


def describe_urls(urls: dict[str, Any]) -> str:
    vms = [f"  {vm:16} {url}" for vm, url in list(urls["vms"].items())[:URLS_SHOWN_MAX]]
    ready = f"the lab is ready: metadata {urls['metadata']}, control {urls['control']}"
    return "\n".join([ready, "Each VM has its own endpoint:", *vms])


@contextmanager
def write_ready_file(path: Path | None, values: dict[str, Any]) -> Iterator[None]:
    """Keep the file while the lab runs. It appears in one piece, by a rename."""
    if path is None:
        yield
        return
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(values, indent=2) + "\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        raise _ready_file_error(path, error) from error
    try:
        yield
    finally:
        remove_ready_file(path)


def remove_ready_file(path: Path | None) -> None:
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        assert path is not None
        raise _ready_file_error(path, error) from error


def _ready_file_error(path: Path, error: OSError) -> Invalid:
    reason = error.strerror or error
    return Invalid(f"the ready file {path} cannot be written: {reason}", file=str(path))


@app.command()
def transcript(
    context: typer.Context,
    *,
    after: Annotated[
        int | None,
        typer.Option(help="Start after the entry of this number. Default: the newest.", min=0),
    ] = None,
    limit: Annotated[int, typer.Option(help="The most entries to show.", min=1, max=10_000)] = 1000,
    as_json: Json = False,
) -> None:
    """Show every request with its response, every change and every step."""
    begin = "newest=true" if after is None else f"after={after}"
    page = connect(context).get("transcript", query=f"{begin}&limit={limit}")
    if as_json:
        show_json(page)
        return
    with needs_server_parts("lab transcript"):
        import msgspec

        from forewarn.lab.transcript import Entry, format_entry

    for entry in msgspec.convert(page["entries"], list[Entry]):
        typer.echo(format_entry(entry))
    if page["left_out"]:
        where = "earlier" if after is None else "later"
        typer.echo(f"{page['left_out']} {where} entries are not shown; raise --limit", err=True)


@clock.command("show")
def show_clock(context: typer.Context, *, as_json: Json = False) -> None:
    """Show the lab's time and rate."""
    show_one(connect(context).get("clock"), as_json=as_json)


@clock.command()
def advance(
    context: typer.Context,
    duration: Annotated[
        str, typer.Argument(metavar="DURATION", help="Such as 90s, 15m, 2h, 1h30m or 7d.")
    ],
    *,
    as_json: Json = False,
) -> None:
    """Let time pass; returns when everything that was due is done."""
    try:
        seconds = parse_duration(duration).total_seconds()
    except ValueError as error:
        raise Usage(f"{duration!r} is not a duration; expected {EXPECTED}") from error
    show_one(connect(context).post("clock", "advance", said={"seconds": seconds}), as_json=as_json)


@clock.command()
def jump(
    context: typer.Context,
    time: Annotated[str, typer.Argument(metavar="TIME", help="Such as 2030-01-31T12:00:00Z.")],
    *,
    as_json: Json = False,
) -> None:
    """Set a later time immediately, as on a machine that was suspended."""
    _set_clock(context, {"now": time}, as_json=as_json)


@clock.command()
def pause(context: typer.Context, *, as_json: Json = False) -> None:
    """Pause a virtual clock."""
    _set_clock(context, {"is_running": False}, as_json=as_json)


@clock.command()
def resume(context: typer.Context, *, as_json: Json = False) -> None:
    """Let a virtual clock follow the real time."""
    _set_clock(context, {"is_running": True}, as_json=as_json)


@clock.command("rate")
def set_rate(
    context: typer.Context,
    rate: Annotated[float, typer.Argument(metavar="RATE")],
    *,
    as_json: Json = False,
) -> None:
    """Make notices and durations of new events this many times shorter."""
    _set_clock(context, {"rate": rate}, as_json=as_json)


def _set_clock(context: typer.Context, change: dict[str, object], *, as_json: bool) -> None:
    show_one(connect(context).put("clock", body=json.dumps(change).encode()), as_json=as_json)


@fault.command("list")
def list_faults(context: typer.Context, *, as_json: Json = False) -> None:
    """List the faults that are active or will be."""
    _show_faults(connect(context).get("faults"), as_json=as_json)


@fault.command("add")
def add_fault(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="Such as status, latency or truncate: see docs/faults.md."
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Such as code=500 for=2m.")
    ] = None,
    *,
    vm: Annotated[list[str] | None, typer.Option(help="A VM to affect. Default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Add a fault to the endpoint."""
    members: dict[str, object] = {"fault": kind, **dict(map(_parse_setting, settings or ()))}
    if vm:
        members["vms"] = vm
    show_one(connect(context).post("faults", said=members)["fault"], as_json=as_json)


@fault.command("remove")
def remove_fault(
    context: typer.Context,
    fault_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    as_json: Json = False,
) -> None:
    """Remove a fault."""
    show_one(connect(context).delete("faults", fault_id)["fault"], as_json=as_json)


@fault.command("clear")
def clear_faults(context: typer.Context, *, as_json: Json = False) -> None:
    """Remove all faults."""
    _show_faults(connect(context).delete("faults"), as_json=as_json)


def _show_faults(page: dict[str, Any], *, as_json: bool) -> None:
    if not as_json:
        rows = [{column: each.get(column) for column in FAULT_COLUMNS} for each in page["faults"]]
        page = {**page, "faults": rows}
    show_list(page, "faults", FAULT_COLUMNS, as_json=as_json)


def _parse_setting(setting: str) -> tuple[str, object]:
    """Parse NAME=VALUE. The server reads numbers with a fraction from text."""
    name, equals, value = setting.partition("=")
    if not equals or not name:
        raise Usage(f"{setting!r} is not a setting; expected NAME=VALUE, such as code=500")
    is_whole = value.removeprefix("-").isdecimal() and value.isascii()
    return name, int(value) if is_whole and len(value) < 10 else value


def parse_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise Usage(f"{text!r} has no time zone; expected a time such as {text}Z")
        return time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Usage(f"{text!r} is not a time; expected one such as 2030-01-31T12:00:00Z") from error
