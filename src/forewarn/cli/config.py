"""`forewarn config`, and the tables of docs/configuration.md.

`python -m forewarn.cli.config docs/configuration.md` writes the tables of that page.
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from forewarn.cli.options import (
    DEMO,
    ClientConfig,
    File,
    Json,
    describe_expected,
    format_value,
    read_client_config,
    read_config,
    with_options,
)
from forewarn.cli.output import show_json, show_list
from forewarn.config import Config, Option, options

BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"
HEADER = "| key | flag | variable | default | what it does |\n|---|---|---|---|---|\n"

Show = Annotated[bool, typer.Option("--show", help="Show them; this is the default.")]


@with_options(Config)
def config(
    context: typer.Context, *, file: File = None, is_show: Show = True, as_json: Json = False
) -> None:
    """Show every option, its value, and where the value came from.

    Takes the flags of `serve`, to preview what they do.
    """
    rows = [
        {
            "option": each.name,
            "value": _format_public(each, getattr(resolved.config, each.name)),
            "from": resolved.sources[each.name],
        }
        for resolved in (
            read_config(context, Config),
            read_client_config(context),
        )
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


def render_reference() -> str:
    """The tables of docs/configuration.md."""
    demo = ", ".join(
        f"`{name}` {'a small demo fleet' if name == 'fleet' else f'`{format_value(value)}`'}"
        for name, value in DEMO.items()
    )
    tables = "".join((*_render_tables(Config), *_render_tables(ClientConfig)))
    return f"{tables}`forewarn demo` has other defaults: {demo}.\n"


def _render_tables(config_class: type[Any]) -> Iterator[str]:
    for section, group in groupby(options(config_class), key=lambda each: each.section):
        yield f"### {section}\n\n{HEADER}"
        for each in group:
            flag = "none, because it is a secret" if each.is_secret else f"`{each.flag}`"
            default = format_value(each.default)
            cells = (
                f"`{each.name}`",
                flag,
                f"`{each.variable}`",
                f"`{default}`" if default else "",
            )
            yield f"| {' | '.join(cells)} | {each.help} {describe_expected(each)} |\n"
        yield "\n"


def _write_tables(page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{render_reference()}\n{END}{after}")


if __name__ == "__main__":
    _write_tables(Path(sys.argv[1]))
