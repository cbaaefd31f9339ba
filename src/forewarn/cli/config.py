"""`forewarn config`: every option, its value, and where the value came from."""

from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from forewarn.cli.config_file import format_value
from forewarn.cli.options import (
    File,
    Json,
    read_client_config,
    read_config,
    with_options,
)
from forewarn.cli.output import show_json, show_list
from forewarn.config import Config, Option, options

Show = Annotated[bool, typer.Option("--show", help="Show them; this is the default.")]


@with_options(Config)
def config(
    context: typer.Context, *, file: File = None, is_show: Show = True, as_json: Json = False
) -> None:
    """Show every option, its value, and where the value came from.

    Takes the flags of `serve`, to preview what they do.

    Example: forewarn config --rate 60
    """
    rows = [
        {
            "option": each.name,
            "value": _format_public(each, getattr(resolved.config, each.name)),
            "from": resolved.sources[each.name],
        }
        for resolved in (read_config(context, Config), read_client_config(context))
        for each in options(type(resolved.config))
    ]
    if as_json:
        show_json(rows)
    else:
        show_list({"options": rows, "total": len(rows)}, "options", ("option", "value", "from"))


def _format_public(each: Option, value: Any) -> str:
    """A value without secrets. The path of a webhook URL may be one."""
    if each.is_secret and value:
        return "***"
    if each.name == "webhook":
        return ",".join(f"{url.scheme}://{url.netloc}/***" for url in map(urlsplit, value))
    return format_value(value)
