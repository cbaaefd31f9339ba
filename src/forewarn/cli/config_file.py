"""The config file, and values as text. Without typer, which the host daemon does without."""

import difflib
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

from forewarn.config import Option, options
from forewarn.errors import Invalid

FILE_BYTES_MAX = 1 << 20


def read_keys(path: Path, *config_classes: type[Any]) -> dict[str, Any]:
    """The keys as text, or lists of text, as they would be given in flags.

    Invalid if one is not an option of these classes.
    """
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
    return {key: _as_text(known[key], value, path) for key, value in keys.items()}


def _as_text(each: Option, value: Any, path: Path) -> str | list[str]:
    values = value if isinstance(value, list) and each.is_repeatable else [value]
    if not all(isinstance(item, str | int | float) for item in values):
        raise each.reject(value, f"{each.name} in {path}")
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in values]
    if not each.is_repeatable:
        return texts[0]
    return texts[0].split(",") if isinstance(value, str) else texts


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
