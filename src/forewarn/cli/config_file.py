"""Flags, variables and the config file become a config, with the source of each value.

Without typer, which the host daemon does without.
"""

import difflib
import tomllib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from forewarn.config import Config, Option, options
from forewarn.errors import Invalid

C = TypeVar("C")
FILE_BYTES_MAX = 1 << 20
DEFAULT = "default"
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

Given = tuple[str, Any]
"""Where a value came from, and its text, or list of texts."""


class Resolved(NamedTuple, Generic[C]):
    """A config, and for each option where its value came from."""

    config: C
    sources: Mapping[str, str]


def resolve(
    config_class: type[C],
    flags: Mapping[str, Given],
    environ: Mapping[str, str],
    keys: Mapping[str, Given],
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> Resolved[C]:
    """The config: flag, then variable, then file, then default. Invalid names the source.

    `flags` has all that the command has, with None for those that are not given. Options without a
    flag keep their defaults.
    """
    values, sources = dict(defaults), {}
    for each in options(config_class):
        sources[each.name], given = _find(each, flags, environ, keys)
        if sources[each.name] == each.flag and each.is_secret:
            raise Invalid(
                f"{each.flag}: other users can see a command line; set {each.variable} instead"
            )
        if given is not None:
            values[each.name] = each.parse(given, sources[each.name])
    config = config_class(**values)
    if isinstance(config, Config):
        config.check()
    return Resolved(config, sources)


def _find(
    each: Option, flags: Mapping[str, Given], environ: Mapping[str, str], keys: Mapping[str, Given]
) -> Given:
    flag, variable = flags.get(each.name), environ.get(each.variable)
    if flag is None:
        return DEFAULT, None
    if flag[1] not in (None, (), []):  # typer has an empty list
        return flag
    if variable:
        return each.variable, variable.split(",") if each.is_repeatable else variable
    return keys.get(each.name, (DEFAULT, None))


def read_keys(path: Path, *config_classes: type[Any]) -> dict[str, Given]:
    """The keys of a file. Invalid if one is not an option of these classes."""
    try:
        with path.open("rb") as file:
            keys = tomllib.loads(file.read(FILE_BYTES_MAX).decode())
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
    except ValueError as error:  # not UTF-8, or not TOML
        reason = " ".join(str(error).split())
        raise Invalid(f"{path} is not valid TOML: {reason}", file=str(path)) from error
    known = {each.name: each for each in chain.from_iterable(map(options, config_classes))}
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise Invalid(f"{path}: unknown key {key!r}{hint}", file=str(path), key=key)
    return {key: _as_given(known[key], value, f"{key} in {path}") for key, value in keys.items()}


def _as_given(each: Option, value: Any, source: str) -> Given:
    values = value if isinstance(value, list) and each.is_repeatable else [value]
    if not all(isinstance(item, str | int | float) for item in values):
        raise each.reject(value, source)
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in values]
    if not each.is_repeatable:
        return source, texts[0]
    return source, texts[0].split(",") if isinstance(value, str) else texts


def format_value(value: Any) -> str:
    """A value as it would be written in a flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if type(value) is tuple:
        return ",".join(map(format_value, value))
    return "" if value is None else str(value)


def describe_expected(each: Option) -> str:
    repeatable = "; may be repeated" if each.is_repeatable else ""
    return f"Expected: {each.kind.expects}{repeatable}."
