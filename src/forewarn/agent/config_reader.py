"""Reads a table of the configuration file into a frozen dataclass, driven by its fields.

A field's name is the key in the file. Its type says what is accepted, or a converter in
`Annotated`: a function that gets a value and its path, and returns the field's value or raises
Invalid. What depends on several fields is checked in `__post_init__`, which raises `SettingError`.

`Key` in `Annotated` is the key in the file where it differs from the field. A class may define
SHORT, the key that a bare value stands for: `log = "text"` is `log = {text = "text"}`.

Every error names the path of the field, such as `rule[2].prepare[0].http.url`.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from forewarn.errors import Invalid

SHOWN_LENGTH_MAX = 60

T = TypeVar("T")
Convert = Callable[[object, str], Any]


class Key(NamedTuple):
    name: str


class Setting(NamedTuple):
    field: str
    convert: Convert
    is_required: bool


class SettingError(ValueError):
    """Raised by `__post_init__`: the value of this key is not what was expected."""

    def __init__(self, key: str, expected: str) -> None:
        super().__init__(f"{key}: expected {expected}")
        self.key = key
        self.expected = expected


class Missing:
    """The value of a required key that the table lacks. No converter accepts it."""

    def __repr__(self) -> str:
        return "nothing"


def read(kind: type[T], value: object, path: str) -> T:
    """Create a `kind` from a table of the file. Raises Invalid, naming the path of the field."""
    known = settings_of(kind)  # type: ignore[arg-type] # classes are hashable
    short = None if isinstance(value, dict) else getattr(kind, "SHORT", None)
    table = {short: value} if short else value
    if not isinstance(table, dict):
        reject(path, value, f"a table with {', '.join(known)}")
    prefix = f"{path}." if path else ""
    paths = {key: path if key == short else prefix + key for key in (*known, *table)}
    for key in table:
        if key not in known:
            reject_unknown("key", key, known, paths[key])
    arguments = {
        setting.field: setting.convert(table.get(key, Missing()), paths[key])
        for key, setting in known.items()
        if key in table or setting.is_required
    }
    try:
        return kind(**arguments)
    except SettingError as error:
        given = table.get(error.key, Missing()) if error.key else table
        reject(paths.get(error.key, path), given, error.expected)


@cache
def settings_of(kind: Any) -> dict[str, Setting]:
    """The keys that a table of this kind may have."""
    hints = get_type_hints(kind, include_extras=True)
    settings = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        notes = hint.__metadata__ if get_origin(hint) is Annotated else ()
        key = next((note.name for note in notes if isinstance(note, Key)), field.name)
        convert = next(filter(callable, notes), None) or _converter_for(hint)
        is_required = field.default is field.default_factory  # neither is given
        settings[key] = Setting(field.name, convert, is_required)
    return settings


def reject(path: str, value: object, expected: str) -> NoReturn:
    raise Invalid(f"{path}: expected {expected}, got {shorten(repr(value))}", field=path)


def reject_unknown(what: str, name: str, known: Iterable[str], path: str) -> NoReturn:
    raise Invalid(f"{path}: unknown {what}; {suggest(name, known)}", field=path)


def suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:SHOWN_LENGTH_MAX], list(known), 1)
    return f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH_MAX else text[:SHOWN_LENGTH_MAX] + "…"


# Converters.


def checked(expected: str, is_valid: Callable[[Any], object]) -> Convert:
    def convert(value: object, path: str) -> object:
        if not is_valid(value):
            reject(path, value, expected)
        return value

    return convert


def is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def non_empty(expected: str) -> Convert:
    return checked(expected, lambda value: is_text(value) and value)


def number(least: float, most: float = math.inf) -> Convert:
    return checked(
        f"a number from {least:g} to {most:g}",
        lambda value: type(value) in (int, float) and least <= value <= most,
    )


def one_of(names: Iterable[str]) -> Convert:
    shown = ", ".join(filter(None, names))
    return checked(f"one of {shown}", lambda value: value in tuple(names))


def list_of(expected: str, is_valid: Callable[[Any], object]) -> Convert:
    """An empty list is rejected: omit the key to match anything."""

    def convert(value: object, path: str) -> object:
        if not isinstance(value, list) or not value or not all(map(is_valid, value)):
            reject(path, value, expected)
        return tuple(value)

    return convert


def names(expected: str = "a list of names", *, among: Iterable[str] = ()) -> Convert:
    """Of `among`, in any case of letters, if it is given."""
    known = {name.casefold() for name in among}
    return list_of(
        expected, lambda name: is_text(name) and name and (not known or name.casefold() in known)
    )


def tables(convert: Convert, count_max: int) -> Convert:
    def convert_all(value: object, path: str) -> object:
        if not isinstance(value, list) or len(value) > count_max:
            reject(path, value, f"a list of at most {count_max} tables")
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                reject(f"{path}[{index}]", item, "a table")
        return tuple(convert(item, f"{path}[{index}]") for index, item in enumerate(value))

    return convert_all


def path_of(thing: str) -> Convert:
    convert = non_empty(f"the path of {thing}")
    return lambda value, path: Path(convert(value, path))


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_text(item) and key and not {"=", "\0"} & set(key) for key, item in value.items()
    )


_CONVERTERS: dict[object, Convert] = {
    bool: checked("true or false", lambda value: isinstance(value, bool)),
    str: checked("text", is_text),
    Path: path_of("a file"),
    Path | None: lambda value, path: None if value == "" else path_of("a file")(value, path),
    tuple[str, ...]: names(),
    Mapping[str, str]: checked("a table of names and texts", _are_texts),
}


def _converter_for(hint: Any) -> Convert:
    if hint in _CONVERTERS:
        return _CONVERTERS[hint]
    if get_origin(hint) is Literal:
        return one_of(get_args(hint))
    if issubclass(hint, StrEnum):
        return lambda value, path: hint(one_of(hint)(value, path))
    return partial(read, hint)
