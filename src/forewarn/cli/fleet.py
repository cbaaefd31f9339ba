"""`forewarn fleet`: the fleet as a file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from forewarn.cli.client import connect
from forewarn.cli.output import Json, show_json, show_list
from forewarn.cli.usage import needs_server_parts
from forewarn.errors import Invalid

app = typer.Typer(help="The fleet: show, export, apply, check, schema.", no_args_is_help=True)

File = Annotated[str, typer.Argument(metavar="FILE", help="A fleet file, YAML or JSON; - is standard input.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell what would change.")]
COLUMNS = ("scope", "kind", "name", "update_domain", "host", "address")
BLANK = {"update_domain": 0, "host": "", "address": ""}
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
def apply(context: typer.Context, file: File, *, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Make the fleet what the file says."""
    answer = connect(context).put("fleet", body=_read(file), query="dry_run=true" if dry_run else "")
    if as_json:
        show_json(answer)
        return
    told = [f"{name.replace('_', ' ')}: {', '.join(names)}" for name, names in answer.items() if name != "dry_run" and names]
    typer.echo("\n".join(told) or "the fleet is so already")
    if dry_run:
        typer.echo("nothing was changed: this was a dry run")


@app.command()
def check(file: File) -> None:
    """Check a fleet file without a service."""
    with needs_server_parts("fleet check"):
        from forewarn.wire.fleet import parse
    fleet = parse(_read(file), file)
    typer.echo(f"{file}: {len(fleet.scopes)} scopes with {sum(len(scope.vms) for scope in fleet.scopes)} VMs, all well")


@app.command()
def schema() -> None:
    """The JSON Schema of the fleet file."""
    with needs_server_parts("fleet schema"):
        from forewarn.wire.fleet import SCHEMA
    show_json(SCHEMA)


def _read(file: str) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        with Path(file).open("rb") as stream:
            return stream.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise Invalid(f"{file!r} cannot be read: {getattr(error, 'strerror', None) or error}", file=file) from error
