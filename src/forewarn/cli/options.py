"""Config classes as typer options.

Flags are derived from the declarations in `forewarn.config`, and click reads them; `config_file.py`
adds the variables and the config file.
"""

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import urlsplit

import typer

import forewarn
from forewarn.cli.config_file import (
    NO_DEFAULTS,
    Given,
    Resolved,
    describe_expected,
    format_value,
    read_keys,
    resolve,
)
from forewarn.config import Config, Identify, LogLevel, Option, options
from forewarn.errors import Invalid
from forewarn.option_kind import FILE, OptionKind, parse_text, parse_url

C = TypeVar("C")
FILE_NAME, FILE_VARIABLE = "forewarn.toml", "FOREWARN_CONFIG"
SYSTEM_FILE = Path("/etc/forewarn/forewarn.toml")
DEMO: Mapping[str, Any] = {
    "fleet": Path(forewarn.__file__).with_name("demo.yaml"),
    "store": "memory",
    "identify": (Identify.ADDRESS, Identify.PATH),
    "rate": 60.0,
    "log_level": LogLevel.WARNING,
}
"""The defaults of `forewarn demo`. It prints changes itself, so the log is quiet."""


def _parse_control_url(text: str) -> str:
    if urlsplit(text).query:
        raise ValueError
    return parse_url(text.strip()).rstrip("/")


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """The options of the commands that call a running service."""

    # fmt: off
    control_url: Annotated[tuple[str, ...], Option("Client",
        OptionKind(_parse_control_url, "http://HOST:PORT", lambda text: text.split(",")),
        "The URL of the service's control API. With several servers, one URL each: if one does "
        "not answer, the next is used.",
        variable="FOREWARN_CONTROL")] = ("http://127.0.0.1:8081",)
    token: Annotated[str, Option("Client", OptionKind(parse_text, "a token"),
        "Sent as a bearer token.", is_secret=True)] = ""
    ca_file: Annotated[Path | None, Option("Client", FILE,
        "PEM file with the certificates to verify the service with, instead of the system's.",
        variable="FOREWARN_CA")] = None
    # fmt: on


def read_config(
    context: typer.Context,
    config_class: type[C],
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    **more: Given,
) -> Resolved[C]:
    """The config from the parameters of this command, and from `more`.

    Options that the command does not have keep their defaults.
    """
    file = _find_file(context, is_system_file_read=not defaults)  # `demo` ignores that file
    flags = {
        str(each.name): (each.opts[0], context.params.get(str(each.name)))
        for each in context.command.params
    }
    keys = read_keys(file, Config, ClientConfig) if file else {}
    return resolve(config_class, flags | more, os.environ, keys, defaults)


def _find_file(context: typer.Context, *, is_system_file_read: bool = True) -> Path | None:
    file: Path | None = context.find_root().obj
    if file is None and is_system_file_read and os.access(SYSTEM_FILE, os.R_OK):
        return SYSTEM_FILE
    return file


def check_store_kind(context: typer.Context, resolved: Resolved[Config]) -> None:
    """Refuse a flag or a variable with another kind of store than the file has.

    Servers with `store = "etcd://…"` in their file that a flag starts on SQLite are separate
    services, each with its own answers, and nothing else shows it. A token that a flag creates in
    another store is one that they do not know. The error names the kinds only:
    the URL in the file is not checked if a flag wins over it, and may hold a password.
    """
    file = _find_file(context)
    keys = read_keys(file, Config, ClientConfig) if file else {}
    key, url = keys.get("store", ("", ""))
    given, wanted = _kind_of_store(resolved.config.store), _kind_of_store(url)
    if url and given != wanted:
        raise Invalid(
            f"the kind of store is {given} (from {resolved.sources['store']}), "
            f"but {wanted} ({key}): "
            "servers with different kinds of store are different services; expected one kind",
            option="store",
        )


def _kind_of_store(url: str) -> str:
    return url.partition(":")[0]


def read_client_config(context: typer.Context, **more: Given) -> Resolved[ClientConfig]:
    """The options of the client are parameters of the root command."""
    root = cast("typer.Context", context.find_root())
    return read_config(root, ClientConfig, NO_DEFAULTS, **more)


def with_options(
    config_class: type[Any],
    *,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    only: Collection[str] = (),
    flags: Mapping[str, str] = NO_DEFAULTS,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command a flag for each option of a config class. It calls `read_config` for them.

    `only` limits the options, `flags` renames flags.
    """
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotate(each, flags.get(each.name, ""), defaults),
        )
        for each in options(config_class)
        if not only or each.name in only
    ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            return command(**{name: given[name] for name in own})

        run.__signature__ = inspect.Signature([*own.values(), *parameters])  # type: ignore[attr-defined]
        return run

    return decorate


def use_file(context: typer.Context, file: Path | None) -> Path | None:
    """Callback of `--config`, before or after the command: after it, it wins."""
    root = context.find_root()
    if file is None and root.obj is None and Path(FILE_NAME).is_file():
        file = Path(FILE_NAME)
    root.obj = file or root.obj
    return file


Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Limit = Annotated[int, typer.Option(help="Show at most this many.", min=1, max=1_000_000)]
FILE_HELP = f"The config file to read instead of ./{FILE_NAME} or {SYSTEM_FILE}."
# fmt: off
File = Annotated[Path | None, typer.Option("--config", help=FILE_HELP, callback=use_file)]
RootFile = Annotated[Path | None, typer.Option(
    "--config", help=FILE_HELP, callback=use_file, envvar=FILE_VARIABLE)]
# fmt: on


def _annotate(each: Option, flag: str, defaults: Mapping[str, Any]) -> Any:
    default = defaults.get(each.name, each.default)
    shown = format_value(default)
    common: dict[str, Any] = {"hidden": each.is_secret, "rich_help_panel": each.section}
    if isinstance(default, bool):
        return Annotated[bool | None, typer.Option(help=each.help, **common)]
    declared = typer.Option(
        flag or each.flag,
        help=f"{each.help} {describe_expected(each)}{f' Default: {shown}.' if shown else ''}",
        metavar="VALUE",
        show_default=False,  # typer would put it into parentheses
        **common,
    )
    return Annotated[list[str] | None if each.is_repeatable else str | None, declared]
