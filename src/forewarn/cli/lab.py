"""`forewarn lab`: the service as a lab.

Its clock, its faults, its transcript; scenarios are in `lab_run.py`.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from forewarn import duration
from forewarn.cli import lab_run
from forewarn.cli.api import connect
from forewarn.cli.config import DEMO
from forewarn.cli.exit_codes import Usage, needs_server_parts
from forewarn.cli.output import Json, show_json, show_list, show_one
from forewarn.cli.serve import run_until_stopped
from forewarn.config import Address
from forewarn.errors import Invalid

FAULT_COLUMNS = ("id", "fault", "vms", "begins_at", "ends_at", "requests_left")

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


Fleet = Annotated[Path | None, typer.Option(help="The fleet file; else the demo's fleet.")]
Kind = Annotated[ClockKind, typer.Option("--clock", help="A clock that you move, or the real one.")]
Rate = Annotated[
    float,
    typer.Option(
        help="How many times shorter notices and durations are.", min=0.001, max=1_000_000
    ),
]
Start = Annotated[
    str | None,
    typer.Option(help="Where a virtual clock begins, such as 2030-01-31T12:00:00Z; else now."),
]
Seed = Annotated[int, typer.Option(help="Ids and chance come from it.")]
Running = Annotated[
    bool,
    typer.Option("--running", help="A virtual clock follows the real time until it is paused."),
]
Port = Annotated[int, typer.Option(help="Where VMs call; 0 takes a free port.", min=0, max=65535)]
ControlPort = Annotated[
    int, typer.Option(help="Where the control API is; 0 takes a free port.", min=0, max=65535)
]
ReadyFile = Annotated[
    Path | None, typer.Option(help="There while all is ready: a JSON file that tells where.")
]
Duration = Annotated[str, typer.Argument(metavar="SPAN", help="Such as 90s, 15m, 2h, 1h30m or 7d.")]


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
    """Run a lab until it is told to stop (SIGTERM or Ctrl-C)."""
    if start is not None and clock_kind is ClockKind.REAL:
        raise Usage(
            f"--start {start} cannot be: the real clock starts now; expected --clock virtual, or no --start"
        )
    with needs_server_parts("lab serve"):
        import asyncio

        from forewarn.fleetfile.parser import parse
        from forewarn.lab.service import Setup, laboratory
        from forewarn.server import read_file

        path = fleet or Path(str(DEMO["fleet"]))
        setup = Setup(
            fleet=parse(read_file(path, "fleet file"), str(path)),
            is_virtual=clock_kind is ClockKind.VIRTUAL,
            is_running=is_running,
            start=_moment(start),
            rate=rate,
            seed=seed,
        )

        async def work() -> None:
            async with laboratory(setup) as lab:
                at = await lab.listen(
                    Address("127.0.0.1", port), Address("127.0.0.1", control_port)
                )
                told = {
                    "metadata": f"http://{at.metadata}",
                    "control": f"http://{at.control}",
                    "vms": await lab.doors(),
                }
                with announced(ready_file, {**told, "pid": os.getpid()}):
                    typer.echo(_welcome(told, setup.is_virtual and not is_running))
                    await asyncio.get_running_loop().create_future()

        withdraw(ready_file)
        run_until_stopped(work)


def _welcome(told: dict[str, Any], stands_still: bool) -> str:
    doors = "\n".join(f"  {vm:16} {url}" for vm, url in list(told["vms"].items())[:20])
    still = (
        "\nThe clock stands still: `forewarn lab clock advance 15m` lets time pass."
        if stands_still
        else ""
    )
    where = f"the lab is ready: metadata {told['metadata']}, control {told['control']}"
    return f"{where}\nEach VM has a door of its own:\n{doors}{still}"


@contextmanager
def announced(path: Path | None, told: dict[str, Any]) -> Iterator[None]:
    """While it is so, the file says so: whoever waits for it finds all of it or none."""
    if path is None:
        yield
        return
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(told, indent=2) + "\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield
    finally:
        withdraw(path)


def withdraw(path: Path | None) -> None:
    """What a lab that was killed has left there must not be taken for ours."""
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> Invalid:
    return Invalid(
        f"the ready file {path} cannot be written: {error.strerror or error}", file=str(path)
    )


@app.command()
def transcript(
    context: typer.Context,
    *,
    after: Annotated[
        int | None,
        typer.Option(help="Begin after the entry of this number; else the newest.", min=0),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=10_000)] = 1000,
    as_json: Json = False,
) -> None:
    """What happened so far: every request with its answer, every change, every step."""
    begin = "newest=true" if after is None else f"after={after}"
    answer = connect(context).get("transcript", query=f"{begin}&limit={limit}")
    if as_json:
        show_json(answer)
        return
    with needs_server_parts("lab transcript"):
        import msgspec

        from forewarn.lab.transcript import Entry, readable

        for entry in msgspec.convert(answer["entries"], list[Entry]):
            typer.echo(readable(entry))
    if answer["left_out"]:
        where = "before" if after is None else "after"
        typer.echo(f"{answer['left_out']} more lines {where} these; --limit shows more", err=True)


@clock.command("show")
def show_clock(context: typer.Context, *, as_json: Json = False) -> None:
    """The lab's time, and how fast things happen."""
    show_one(connect(context).get("clock"), as_json=as_json)


@clock.command()
def advance(context: typer.Context, span: Duration, *, as_json: Json = False) -> None:
    """Let time pass, moment by moment; returns when all that was due is done."""
    show_one(
        connect(context).post("clock", "advance", said={"seconds": _seconds(span)}), as_json=as_json
    )


@clock.command()
def jump(
    context: typer.Context,
    moment: Annotated[str, typer.Argument(metavar="MOMENT", help="Such as 2030-01-31T12:00:00Z.")],
    *,
    as_json: Json = False,
) -> None:
    """Be at a later moment at once, as a machine that slept."""
    _set_clock(context, {"now": moment}, as_json=as_json)


@clock.command()
def pause(context: typer.Context, *, as_json: Json = False) -> None:
    """Let a virtual clock stand still."""
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
    """Make notices and durations of what is asked from now on so many times shorter."""
    _set_clock(context, {"rate": rate}, as_json=as_json)


def _set_clock(context: typer.Context, said: dict[str, object], *, as_json: bool) -> None:
    show_one(connect(context).put("clock", body=json.dumps(said).encode()), as_json=as_json)


@fault.command("list")
def list_faults(context: typer.Context, *, as_json: Json = False) -> None:
    """The faults that are in force or will be."""
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
    vm: Annotated[list[str] | None, typer.Option(help="Whom it befalls; else all.")] = None,
    as_json: Json = False,
) -> None:
    """Let the endpoint misbehave."""
    said: dict[str, object] = {"fault": kind, **dict(map(_setting, settings or ()))}
    if vm:
        said["vms"] = vm
    added = connect(context).post("faults", said=said)
    show_one(added["fault"], as_json=as_json)


@fault.command("remove")
def remove_fault(
    context: typer.Context,
    fault_id: Annotated[str, typer.Argument(metavar="ID")],
    *,
    as_json: Json = False,
) -> None:
    """Let the endpoint behave again in this respect."""
    show_one(connect(context).delete("faults", fault_id)["fault"], as_json=as_json)


@fault.command("clear")
def clear_faults(context: typer.Context, *, as_json: Json = False) -> None:
    """Let the endpoint behave again."""
    _show_faults(connect(context).delete("faults"), as_json=as_json)


def _show_faults(answer: dict[str, Any], *, as_json: bool) -> None:
    rows = [{column: one.get(column) for column in FAULT_COLUMNS} for one in answer["faults"]]
    show_list(
        answer if as_json else {**answer, "faults": rows}, "faults", FAULT_COLUMNS, as_json=as_json
    )


def _setting(said: str) -> tuple[str, object]:
    """A whole number is one; the rest is text, which the service reads."""
    name, equals, value = said.partition("=")
    if not equals or not name:
        raise Usage(f"{said!r} is no setting; expected NAME=VALUE, such as code=500")
    return name, int(value) if re.fullmatch(r"-?[0-9]{1,9}", value) else value


def _seconds(span: str) -> float:
    try:
        return duration.parse_duration(span).total_seconds()
    except ValueError as error:
        raise Usage(f"{span!r} is no span of time; expected {duration.EXPECTED}") from error


def _moment(said: str | None) -> datetime | None:
    if said is None:
        return None
    try:
        moment = datetime.fromisoformat(said)
        if moment.tzinfo is None:
            raise Usage(f"{said!r} has no time zone; expected a moment such as {said}Z")
        return moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Usage(f"{said!r} is no moment; expected one such as 2030-01-31T12:00:00Z") from error
