"""`forewarn fleet`: the fleet as a file."""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from forewarn.cli.api import ControlClient, api_command, connect
from forewarn.cli.exit_codes import needs_extra
from forewarn.cli.files import read_file
from forewarn.cli.options import Json, read_config, with_options
from forewarn.cli.output import printable, show_json, show_list
from forewarn.cli.progress import show_progress
from forewarn.config import Config
from forewarn.errors import FleetChanged, Invalid

app = typer.Typer(
    help="The fleet: show, export, diff, apply, sync, check, schema.", no_args_is_help=True
)


class SyncSource(StrEnum):
    LIBVIRT = "libvirt"


# fmt: off
FleetFile = Annotated[str, typer.Argument(
    metavar="FILE", help="A fleet file, YAML or JSON, or a folder of them; - is standard input.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change; change nothing.")]
From = Annotated[SyncSource, typer.Argument(metavar="SOURCE", help="Where the VMs are: libvirt.")]
Apply = Annotated[bool, typer.Option("--apply", help="Apply the changes.")]
# fmt: on
COLUMNS = ("name", "scope", "host", "update_domain", "kind", "address")
VM_DEFAULTS = {"update_domain": 0, "host": "", "address": ""}
SYNC_TRIES_MAX = 5
FILE_BYTES_MAX = 64 * 1024 * 1024
FIELD_SHOWN_MAX = 60


def show_fleet(fleet: Mapping[str, Any]) -> None:
    rows = [
        VM_DEFAULTS | vm | {"scope": scope["name"], "kind": scope.get("kind", "vm")}
        for scope in fleet["scopes"]
        for vm in scope.get("vms", ())
    ]
    show_list({"vms": rows, "total": len(rows)}, "vms", COLUMNS)


def show_difference(response: Mapping[str, Any]) -> None:
    lines = [
        f"{name.replace('_', ' ')}: {', '.join(names)}"
        for name, names in response.items()
        if name not in ("dry_run", "details") and names
    ]
    lines += [_format_item(item) for item in response.get("details", ())]
    print("\n".join(lines) or "no changes")
    if lines and response["dry_run"]:
        print("dry run: nothing was changed")


def _format_item(item: Mapping[str, Any]) -> str:
    fields = ", ".join(
        f"{one['field']} {_format_field(one['before'])} -> {_format_field(one['after'])}"
        for one in item["fields"]
    )
    return f"VM {item['vm']}: {fields}" if item["vm"] else f"scope {item['scope']}: {fields}"


def _format_field(value: object) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return printable(text if len(text) <= FIELD_SHOWN_MAX else text[:FIELD_SHOWN_MAX] + "…")


@api_command(app, show_fleet)
def show(client: ControlClient) -> Any:
    """Show the fleet as it was declared, a line for each VM. `vm list` shows its state.

    Example: forewarn fleet show
    """
    return client.get("fleet")


@app.command()
def export(context: typer.Context) -> None:
    """Print the fleet as a file that `apply` accepts.

    Example: forewarn fleet export > fleet.json
    """
    show_json(connect(context).get("fleet"))


@api_command(app, show_difference)
def apply(client: ControlClient, file: FleetFile, *, dry_run: DryRun = False) -> Any:
    """Change the fleet to what the file describes.

    Example: forewarn fleet apply fleet.yaml --dry-run
    """
    body = _merge(file) if Path(file).is_dir() else read_file(file, "fleet file", FILE_BYTES_MAX)
    try:
        with show_progress(f"applying {file}"):
            return client.put("fleet", body=body, query=_dry_run_query(is_dry=dry_run))
    except Invalid as error:  # the service calls the file `body`
        message = re.sub(r"\bbody(?=:\d+: )", lambda _: file, error.message)
        raise Invalid(message, **error.facts | {"source": file}) from error


@api_command(app, show_difference)
def diff(client: ControlClient, file: FleetFile) -> Any:
    """Show what `apply` would change. The same as `apply --dry-run`.

    Example: forewarn fleet diff fleet.yaml
    """
    return apply(client, file, dry_run=True)


@app.command()
@with_options(
    Config, only=("libvirt_uri", "libvirt_call_seconds_max"), flags={"libvirt_uri": "--uri"}
)
def sync(
    context: typer.Context, source: From, *, is_apply: Apply = False, as_json: Json = False
) -> None:
    """Compare the fleet with libvirt, and with --apply bring it in line.

    Example: forewarn fleet sync libvirt --uri qemu:///system
    """
    with needs_extra(f"fleet sync {source}"):
        from forewarn.cli.sync import build_fleet_from_libvirt
    config, client = read_config(context, Config).config, connect(context)
    query, tries = _dry_run_query(is_dry=not is_apply), count(1)
    while True:  # until nobody changes the fleet while libvirt is queried
        current, tag = client.get_tagged("fleet")
        body = build_fleet_from_libvirt(current, config)
        try:
            response = client.put("fleet", body=body, query=query, tag=tag)
            break
        except FleetChanged:
            if next(tries) == SYNC_TRIES_MAX:
                raise
    (show_json if as_json else show_difference)(response)


@app.command()
def check(file: FleetFile) -> None:
    """Check a fleet file, without a service.

    Example: forewarn fleet check fleet.yaml
    """
    with needs_extra("fleet check"):
        from forewarn.fleetfile.files import read_sources
        from forewarn.fleetfile.parser import parse_all
        from forewarn.fleetfile.yaml_source import SourceText
    is_folder = Path(file).is_dir()
    fleet = parse_all(
        read_sources(Path(file))
        if is_folder
        else [SourceText(file, read_file(file, "fleet file", FILE_BYTES_MAX))]
    )
    vms = sum(len(scope.vms) for scope in fleet.scopes)
    print(f"{file}: OK, {len(fleet.scopes)} scopes with {vms} VMs")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the fleet file.

    Example: forewarn fleet schema > fleet.schema.json
    """
    with needs_extra("fleet schema"):
        from forewarn.fleetfile.schema import SCHEMA
    show_json(SCHEMA)


def _dry_run_query(*, is_dry: bool) -> Mapping[str, str]:
    return {"dry_run": "true"} if is_dry else {}


def _merge(folder: str) -> bytes:
    """The files of a folder as one fleet file."""
    with needs_extra("fleet apply FOLDER"):
        from forewarn.fleetfile.files import read_sources
        from forewarn.fleetfile.parser import dump_json, parse_all
    body = dump_json(parse_all(read_sources(Path(folder))))
    if len(body) > FILE_BYTES_MAX:
        raise Invalid(
            f"the fleet of {folder} is {len(body)} bytes of JSON; a request takes at most "
            f"{FILE_BYTES_MAX}. Start the service with --fleet {folder} instead",
            file=folder,
        )
    return body
