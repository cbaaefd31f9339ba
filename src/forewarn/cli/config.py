"""`forewarn config`, and the table of options as flags and as the reference page.

`python -m forewarn.cli.config docs/configuration.md` writes that page's tables anew.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

import forewarn
from forewarn.cli.api import Asked
from forewarn.cli.exit_codes import Usage
from forewarn.cli.output import Json, show_json, show_list
from forewarn.config import (
    ClientConfig,
    Config,
    Identify,
    LogLevel,
    Option,
    Resolved,
    flag,
    options,
    resolve,
    variable,
)
from forewarn.errors import Invalid

DEMO: Mapping[str, object] = {
    "fleet": Path(forewarn.__file__).with_name("demo.yaml"),
    "store": "memory",
    "identify": (Identify.ADDRESS, Identify.PATH),
    "rate": 60.0,
    "log_level": LogLevel.WARNING,
}
"""What `forewarn demo` takes where nothing is said.

It tells of changes in words, so the log need not.
"""
BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"

Show = Annotated[bool, typer.Option("--show", help="Show them (there is nothing else to do).")]


def show(found: Resolved[Config], *, is_show: Show = True, as_json: Json = False) -> None:
    """Every option, its value here, and where that came from.

    Takes the flags of `serve`, to see what they would come to.
    """
    client = resolved(ClientConfig, found.file, {})
    rows = [
        {"option": name, "value": _public(name, option, value), "from": one.origins[name]}
        for one in (found, client)
        for name, option in options(type(one.config)).items()
        for value in [getattr(one.config, name)]
    ]
    if as_json:
        show_json(rows)
        return
    show_list(
        {"options": rows, "total": len(rows)}, "options", ("option", "value", "from"), as_json=False
    )


def with_options(
    command: Callable[..., None], defaults: Mapping[str, object] | None = None
) -> Callable[..., None]:
    """A command line for a command that takes a config: its own parameters, and a flag for every
    option.
    """
    _, *own = inspect.signature(command).parameters.values()
    file_type = Annotated[
        Path | None, typer.Option("--config", help="The file to read instead of ./forewarn.toml.")
    ]

    def run(context: typer.Context, **given: Any) -> None:
        file = given.pop("file") or (context.find_object(Asked) or Asked()).file
        flags = {name: given.pop(name) for name in options(Config)}
        command(resolved(Config, file, flags, defaults), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    context, _ = inspect.signature(run).parameters.values()
    file = inspect.Parameter("file", keyword, default=None, annotation=file_type)
    flags = [
        inspect.Parameter(
            name, keyword, default=None, annotation=_flag_type(name, option, defaults or {})
        )
        for name, option in options(Config).items()
    ]
    run.__signature__ = inspect.Signature([context, *own, file, *flags])  # type: ignore[attr-defined]
    run.__doc__ = command.__doc__
    return run


def resolved(
    kind: type[Any],
    file: Path | None,
    flags: Mapping[str, Any],
    defaults: Mapping[str, object] | None = None,
) -> Any:
    """The config that the command line and the environment come to; a wrong one is a wrong command
    line.
    """
    try:
        return resolve(kind, flags=flags, environ=os.environ, file=file, defaults=defaults)
    except Invalid as problem:
        raise Usage(problem.message) from problem


def reference() -> str:
    """The tables of `docs/configuration.md`."""
    return "".join(_tables(Config)) + "".join(_tables(ClientConfig)) + _demo_defaults()


def shown(value: object) -> str:
    """A value as it would be written in a flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}s"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        is_pair = len(value) == 2 and isinstance(value[1], timedelta)
        return ("=" if is_pair else ",").join(shown(part) for part in value)
    return "" if value is None else str(value)


def _public(name: str, option: Option, value: Any) -> str:
    """A value as it may be shown: no secret, and of a webhook not the path, which may hold one."""
    if option.is_secret and value:
        return "***"
    if name == "webhook":
        return ",".join(f"{url.scheme}://{url.netloc}/***" for url in map(urlsplit, value))
    return shown(value)


def _flag_type(name: str, option: Option, defaults: Mapping[str, object]) -> Any:
    default = defaults.get(name, _default(Config, name))
    panel = option.section
    if isinstance(default, bool):
        return Annotated[
            bool | None,
            typer.Option(
                f"{flag(name)}/--no{flag(name)[1:]}", help=option.help, rich_help_panel=panel
            ),
        ]
    help_, text = f"{option.help} {_expected(option)}", list[str] if option.is_repeatable else str
    told = typer.Option(
        flag(name),
        help=help_,
        metavar="VALUE",
        show_default=shown(default) or False,
        rich_help_panel=panel,
    )
    return Annotated[text | None, told]


def _expected(option: Option) -> str:
    return f"Expected: {option.kind.expects}{', several times if needed' if option.is_repeatable else ''}."


def _default(kind: type[Any], name: str) -> object:
    return next(one.default for one in fields(kind) if one.name == name)


def _tables(kind: type[Any]) -> Iterator[str]:
    for section, group in groupby(options(kind).items(), key=lambda pair: pair[1].section):
        yield f"### {section}\n\n| key | flag | variable | default | what it does |\n|---|---|---|---|---|\n"
        for name, option in group:
            default = shown(_default(kind, name))
            flag_cell = (
                "none: a secret does not stand on a command line"
                if option.is_secret
                else f"`{flag(name)}`"
            )
            cells = [
                f"`{name}`",
                flag_cell,
                f"`{variable(name, option)}`",
                f"`{default}`" if default else "none",
            ]
            yield f"| {' | '.join(cells)} | {option.help} {_expected(option)} |\n"
        yield "\n"


def _demo_defaults() -> str:
    told = [
        f"`{name}` {'its own small fleet' if name == 'fleet' else f'`{shown(value)}`'}"
        for name, value in DEMO.items()
    ]
    return f"`forewarn demo` has other defaults for {', '.join(told)}.\n"


def _write(page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n" + reference() + "\n" + END + after)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
