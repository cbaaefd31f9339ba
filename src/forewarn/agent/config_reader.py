"""Reads a table of the configuration file into a frozen dataclass, driven by its fields.

A field's name is the key in the file, and its type hint says what is accepted. `Annotated` adds
what a type cannot say: a `Range`, `OneOf`, `CountMax`, the `Key` in the file where it differs from
the field, `NotInFile`, or a text that describes the expected value in error messages. What depends
on several fields is checked in `__post_init__`, which raises `SettingError`.

A class may also define
    SHORT    the field that a bare value stands for: `log = "text"` is `log = {text = "text"}`
    REMOVED  keys of earlier versions, and what to use instead
    from_table(table, path)    its own way to be read

Every error names the path of the field, such as `rule[2].prepare[0].http.url`.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from forewarn.errors import Invalid

SHOWN_LENGTH_MAX = 60
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """Both ends included. For a list, each item must be in the range."""

    least: float
    most: float = math.inf

    def __str__(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The values that a list may hold, in any case of letters."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"a list of {', '.join(self.values)}"


@dataclass(frozen=True, slots=True)
class CountMax:
    """How many tables a list may hold."""

    count: int


@dataclass(frozen=True, slots=True)
class Key:
    """The key in the file, where it is not the name of the field."""

    name: str


@dataclass(frozen=True, slots=True)
class NotInFile:
    """A field that only code sets, such as a test."""


class SettingError(ValueError):
    """Raised by `__post_init__`: the field's value is not what was expected."""

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: expected {expected}")
        self.field = field
        self.expected = expected


def read(kind: type[T], value: object, path: str) -> T:
    """Create a `kind` from a table of the file. Raises Invalid, naming the path of the field."""
    from_table: Callable[[object, str], T] | None = getattr(kind, "from_table", None)
    if from_table is not None:
        return from_table(value, path)
    keys = file_keys(kind)
    short = None if isinstance(value, dict) else getattr(kind, "SHORT", None)
    table = {short: value} if short else value
    if not isinstance(table, dict):
        reject(path, value, f"a table with {', '.join(keys)}")
    reject_unknown(table, tuple(keys), path, removed=getattr(kind, "REMOVED", {}))
    paths = {keys[key]: path if key == short else join(path, key) for key in keys}
    given = {keys[key]: item for key, item in table.items()}
    hints, required = _hints(kind), _required_fields(kind)
    for name in required:
        if name not in given:
            reject(paths[name], _MISSING, _description(hints[name]))
    arguments = {
        name: _convert(hints[name], item, paths[name], is_required=name in required)
        for name, item in given.items()
    }
    try:
        return kind(**arguments)
    except SettingError as error:
        where = paths.get(error.field, path)
        value = given.get(error.field, table if error.field not in paths else _MISSING)
        reject(where, value, error.expected)


def file_keys(kind: type) -> dict[str, str]:
    """The keys that a table of this kind may have, each with the name of its field."""
    keys = {}
    for name, hint in _hints(kind).items():
        constraints = _constraints(hint)
        if NotInFile() not in constraints:
            alias = next((part.name for part in constraints if isinstance(part, Key)), name)
            keys[alias] = name
    return keys


def reject(path: str, value: object, expected: str) -> NoReturn:
    got = "nothing" if value is _MISSING else shorten(repr(value))
    raise Invalid(f"{path}: expected {expected}, got {got}", field=path)


def reject_unknown(
    table: Mapping[str, object], known: Sequence[str], path: str, *, removed: Mapping[str, str]
) -> None:
    for key in table:
        where = join(path, key)
        if key in removed:
            raise Invalid(f"{where}: no longer supported; {removed[key]}", field=where)
        if key not in known:
            raise Invalid(f"{where}: unknown key; {suggest(key, known)}", field=where)


def suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:SHOWN_LENGTH_MAX], known, 1)
    return f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)}"


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH_MAX else text[:SHOWN_LENGTH_MAX] + "…"


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


_MISSING = object()


def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _required_fields(kind: type) -> list[str]:
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing and field.default_factory is missing
    ]


def _constraints(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def _base(hint: Any) -> Any:
    """The type itself, without Annotated and without `| None`."""
    base = hint.__origin__ if get_origin(hint) is Annotated else hint
    if get_origin(base) is UnionType:
        parts = [part for part in get_args(base) if part is not NoneType]
        return parts[0] if len(parts) == 1 else tuple(parts)
    return base


def _is_optional(hint: Any) -> bool:
    base = hint.__origin__ if get_origin(hint) is Annotated else hint
    return NoneType in get_args(base)


def _description(hint: Any) -> str:
    """What a value of this type is, in words."""
    base, constraints = _base(hint), _constraints(hint)
    for wanted in (str, OneOf, Range):
        for part in constraints:
            if isinstance(part, wanted):
                return str(part)
    if base is bool:
        return "true or false"
    if base in (int, float):
        return "a number"
    if base is Path:
        return "the path of a file"
    if isinstance(base, type) and issubclass(base, StrEnum):
        return f"one of {', '.join(base)}"
    if get_origin(base) is Literal:
        return f"one of {', '.join(filter(None, get_args(base)))}"
    if get_origin(base) is tuple:
        counts = [part.count for part in constraints if isinstance(part, CountMax)]
        return f"a list of at most {counts[0]} tables" if counts else "a list of names"
    return "a table of names and texts" if get_origin(base) is Mapping else "text"


def _convert(hint: Any, value: object, path: str, *, is_required: bool) -> object:
    """The value as the field's type has it, or Invalid."""
    base = _base(hint)
    if isinstance(base, type) and dataclasses.is_dataclass(base):
        return read(base, value, path)
    if get_origin(base) is tuple and dataclasses.is_dataclass(get_args(base)[0]):
        return _convert_tables(hint, value, path)
    converted = _convert_plain(base, _constraints(hint), value)
    is_empty = converted is None and not _is_optional(hint)
    if converted is _MISSING or is_empty or (is_required and not converted):
        reject(path, value, _description(hint))
    return converted


def _convert_tables(hint: Any, value: object, path: str) -> object:
    counts = [part.count for part in _constraints(hint) if isinstance(part, CountMax)]
    if not isinstance(value, list) or len(value) > counts[0]:
        reject(path, value, _description(hint))
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            reject(f"{path}[{index}]", item, "a table")
    kind = get_args(_base(hint))[0]
    return tuple(read(kind, item, f"{path}[{index}]") for index, item in enumerate(value))


def _convert_plain(base: Any, constraints: tuple[Any, ...], value: object) -> object:
    """_MISSING where the value is not of this type or not within its constraints."""
    if isinstance(base, tuple):
        results = (_convert_plain(part, constraints, value) for part in base)
        return next((result for result in results if result is not _MISSING), _MISSING)
    if base is bool:
        return value if isinstance(value, bool) else _MISSING
    if base in (int, float):
        return value if _is_number(value, base, constraints) else _MISSING
    if base is Path:
        return _MISSING if not _is_text(value) else Path(str(value)) if value else None
    if base is str:
        return value if _is_text(value) else _MISSING
    if isinstance(base, type) and issubclass(base, StrEnum):
        return base(value) if isinstance(value, str) and value in list(base) else _MISSING
    if get_origin(base) is Literal:
        return value if isinstance(value, str) and value in get_args(base) else _MISSING
    if get_origin(base) is tuple:
        return _convert_list(get_args(base)[0], constraints, value)
    assert get_origin(base) is Mapping, f"no reader for fields of type {base}"
    is_table = isinstance(value, dict) and all(
        _is_text(item) and key and not {"=", "\0"} & set(key) for key, item in value.items()
    )
    return value if is_table else _MISSING


def _convert_list(base: Any, constraints: tuple[Any, ...], value: object) -> object:
    """An empty list is rejected: omit the key to match anything."""
    if not isinstance(value, list) or not value:
        return _MISSING
    items = [_convert_plain(base, constraints, item) for item in value]
    if _MISSING in items or "" in items:
        return _MISSING
    for part in constraints:
        if isinstance(part, OneOf):
            known = {name.casefold() for name in part.values}
            if not all(isinstance(item, str) and item.casefold() in known for item in items):
                return _MISSING
    return tuple(items)


def _is_number(value: object, base: Any, constraints: tuple[Any, ...]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if base is int else int | float):
        return False
    return all(part.least <= value <= part.most for part in constraints if isinstance(part, Range))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
