"""`forewarn fleet`: the fleet as a file."""

import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from forewarn.cli.api import Asked, Client, connect
from forewarn.cli.config import resolved
from forewarn.cli.exit_codes import needs_server_parts
from forewarn.cli.output import Json, show_json, show_list
from forewarn.config import Config
from forewarn.errors import FleetChanged, Invalid

app = typer.Typer(
    help="The fleet: show, export, diff, apply, sync, check, schema.", no_args_is_help=True
)


class Source(StrEnum):
    LIBVIRT = "libvirt"


File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A fleet file, YAML or JSON, or a folder of them; - is standard input."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell what would change.")]
From = Annotated[Source, typer.Argument(metavar="SOURCE", help="What tells of the VMs: libvirt.")]
Uri = Annotated[
    list[str] | None,
    typer.Option("--uri", metavar="URI", help="As libvirt_uri, several times if needed."),
]
Apply = Annotated[bool, typer.Option("--apply", help="Make it so.")]
COLUMNS = ("scope", "kind", "name", "update_domain", "host", "address")
BLANK = {"update_domain": 0, "host": "", "address": ""}
SYNC_TRIES_MAX = 5
FILE_BYTES_MAX = 64 * 1024 * 1024


@app.command()
def show(context: typer.Context, *, as_json: Json = False) -> None:
    """The fleet, a line for each VM."""
    answer = connect(context).get("fleet")
    if as_json:
        show_json(answer)
        return
    rows = [
        BLANK | vm | {"scope": scope["name"], "kind": scope.get("kind", "vm")}
        for scope in answer["scopes"]
        for vm in scope.get("vms", ())
    ]
    show_list({"vms": rows, "total": len(rows)}, "vms", COLUMNS, as_json=False)


@app.command()
def export(context: typer.Context) -> None:
    """The fleet as a file that `apply` takes back."""
    show_json(connect(context).get("fleet"))


@app.command()
def apply(
    context: typer.Context, file: File, *, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Make the fleet what the file says."""
    body = _merge(file) if Path(file).is_dir() else _read(file)
    answer = connect(context).put("fleet", body=body, query="dry_run=true" if dry_run else "")
    _show_difference(answer, dry_run=dry_run, as_json=as_json)


@app.command()
def diff(context: typer.Context, file: File, *, as_json: Json = False) -> None:
    """Tell what `apply` would change, and change nothing."""
    apply(context, file, dry_run=True, as_json=as_json)


@app.command()
def sync(
    context: typer.Context,
    source: From,
    *,
    uri: Uri = None,
    is_apply: Apply = False,
    as_json: Json = False,
) -> None:
    """Bring the fleet in line with what libvirt tells; without --apply, only tell what would
    change.
    """
    with needs_server_parts(f"fleet sync {source}"):
        from forewarn.cli.sync import build_fleet_from_libvirt
    service, asked = connect(context), context.find_object(Asked) or Asked()
    config = resolved(Config, asked.file, {"libvirt_uri": uri or None}).config
    answer = _synced(
        service,
        lambda told: build_fleet_from_libvirt(told, config),
        query="" if is_apply else "dry_run=true",
    )
    _show_difference(answer, dry_run=not is_apply, as_json=as_json)


def _synced(service: Client, find: Callable[[Any], bytes], query: str) -> Any:
    """Put what was found, unless the fleet has changed since it was read: a VM may have moved while
    libvirt was asked.
    """
    for turn in range(SYNC_TRIES_MAX):
        told, tag = service.get_tagged("fleet")
        try:
            return service.put("fleet", body=find(told), query=query, tag=tag)
        except FleetChanged:
            if turn == SYNC_TRIES_MAX - 1:
                raise
    raise AssertionError("the last try returns or raises")


def _show_difference(answer: Mapping[str, Any], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    told = [
        f"{name.replace('_', ' ')}: {', '.join(names)}"
        for name, names in answer.items()
        if name != "dry_run" and names
    ]
    typer.echo("\n".join(told) or "the fleet is so already")
    if dry_run:
        typer.echo("nothing was changed: this was a dry run")


@app.command()
def check(file: File) -> None:
    """Check a fleet file without a service."""
    with needs_server_parts("fleet check"):
        from forewarn.fleetfile.files import read_sources
        from forewarn.fleetfile.parser import FleetText, parse_all
    fleet = parse_all(
        read_sources(Path(file)) if Path(file).is_dir() else [FleetText(file, _read(file))]
    )
    typer.echo(
        f"{file}: {len(fleet.scopes)} scopes with {sum(len(scope.vms) for scope in fleet.scopes)} VMs, all well"
    )


@app.command()
def schema() -> None:
    """The JSON Schema of the fleet file."""
    with needs_server_parts("fleet schema"):
        from forewarn.fleetfile.schema import SCHEMA
    show_json(SCHEMA)


def _merge(folder: str) -> bytes:
    """The files of a folder as one fleet, for a request."""
    with needs_server_parts("fleet apply FOLDER"):
        from forewarn.fleetfile.files import read_sources
        from forewarn.fleetfile.parser import dump_json, parse_all
    body = dump_json(parse_all(read_sources(Path(folder))))
    if len(body) > FILE_BYTES_MAX:
        raise Invalid(
            f"the fleet of {folder} has {len(body)} bytes as JSON; a request takes at most {FILE_BYTES_MAX}:"
            " start the service with --fleet and the folder instead",
            file=folder,
        )
    return body


def _read(file: str) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        with Path(file).open("rb") as stream:
            return stream.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise Invalid(
            f"{file!r} cannot be read: {getattr(error, 'strerror', None) or error}", file=file
        ) from error
