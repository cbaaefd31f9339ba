"""YAML or JSON text to plain values, with the line of every error. Knows nothing about fleets.

YAML is read as JSON with comments: plain `true`, `false`, `null` and integers are themselves, and
everything else is text, so `off` is a word and `22.10` keeps its zero. Anchors work. Tags, merge
keys and duplicate keys are rejected.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import yaml
from yaml import events

from forewarn.errors import Invalid

SIZE_MAX = 64 * 1024 * 1024
DEPTH_MAX = 16
NODES_MAX = 4_000_000
SHOWN_MAX = 60

Path = tuple[str | int, ...]
T = TypeVar("T")

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_SURROGATE = re.compile(r"\\u[dD][89A-Fa-f][0-9A-Fa-f]{2}")
_PATH_STEP = re.compile(r"\.(\w+)|\[([0-9]+)\]")


class FieldError(Exception):
    """The value at a path is invalid. `locate` adds the source and the line."""

    def __init__(self, path: Path, expected: str = "") -> None:
        super().__init__(format_path(path))
        self.path = path
        self.expected = expected


def load(text: bytes, source: str) -> object:
    """Return the values of a text.

    JSON has a fast path; what fails there is read as YAML, which knows the line of every error.
    """
    if len(text) > SIZE_MAX:
        raise Invalid(
            f"{source}: expected at most {SIZE_MAX} bytes, got {len(text)}",
            source=source,
            size=len(text),
            size_max=SIZE_MAX,
        )
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        message = f"expected UTF-8, got the byte 0x{text[error.start]:02x}"
        raise _invalid(source, line, (), message) from error
    if decoded.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, msgspec.DecodeError, RecursionError):
            json.loads(decoded, object_pairs_hook=_refuse_duplicate_keys)
            return _decode_in_pieces(decoded)
    return _YamlReader(decoded, source).read()


def convert(values: object, type_: type[T], at: Path = (), *, strict: bool = True) -> T:
    """Convert plain values to a type. `at` is the path of the values.

    `load` keeps `0.5` as text, so types with fractions are converted with `strict=False`.
    """
    try:
        return msgspec.convert(values, type_, strict=strict)
    except msgspec.ValidationError as error:
        # msgspec's message ends with the path of the invalid value.
        _, separator, where = str(error).rpartition(" - at ")
        steps = _PATH_STEP.findall(where) if separator else []
        raise FieldError((*at, *(name or int(index) for name, index in steps))) from error


def locate(
    error: FieldError, values: Any, *, text: bytes, source: str, schema: Mapping[str, Any]
) -> Invalid:
    """Return the error to raise: source, line, field, what was expected and what was found."""
    path, message = explain(error, values, schema)
    return _invalid(source, find_line(text, path), path, message)


def explain(error: FieldError, values: Any, schema: Mapping[str, Any]) -> tuple[Path, str]:
    """Return the path of the error, and what the schema expects there and what was found."""
    path: Path = ()
    steps = list(error.path)
    node = _resolve(schema, schema, values)
    while True:  # ends at the end of the path, or one step after it
        if "properties" in node and isinstance(values, dict):
            unknown = [key for key in values if key not in node["properties"]]
            if unknown and not node.get("additionalProperties", True):
                return (*path, unknown[0]), f"unknown member; {_suggest(unknown[0], node)}"
            steps = steps or [name for name in node["required"] if name not in values][:1]
        if not steps:
            return path, f"expected {error.expected or _describe(node)}, got {_show(values)}"
        step = steps.pop(0)
        path = (*path, step)
        values = values.get(step) if isinstance(values, dict) else values[step]
        child = node["items"] if isinstance(step, int) else node["properties"][step]
        node = _resolve(child, schema, values)


def format_path(path: Path) -> str:
    """Format a path as people write it: `scopes[0].vms[1].name`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{_shorten(step)}" for step in path)
    return "".join(steps).removeprefix(".")


def find_line(text: bytes, path: Path) -> int:
    """Return the line of the value at a path, or of its nearest parent that exists.

    Only structure and lines matter here, so surrogate escapes, which YAML lacks, are masked.
    """
    reader = _YamlReader(_SURROGATE.sub("______", text.decode("utf-8-sig")), "", target=path)
    with contextlib.suppress(Invalid):
        reader.read()
    return reader.line


def _decode_in_pieces(text: str) -> object:
    """Decode the long lists of an object item by item, so that other threads can run."""
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return {
        name: _decode_list(raw) if bytes(memoryview(raw)[:1]) == b"[" else msgspec.json.decode(raw)
        for name, raw in members.items()
    }


def _decode_list(raw: msgspec.Raw) -> list[object]:
    return [msgspec.json.decode(item) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]


class _YamlReader:
    """One pass over the parser's events. `yaml.compose` would crash in C on deep nesting."""

    def __init__(self, text: str, source: str, target: Path = ()) -> None:
        self.text = text
        self.source = source
        self.target = target
        self.line = 1
        self.nodes = 0
        self.anchors: dict[str, tuple[object, int]] = {}
        self.events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)

    def read(self) -> object:
        try:
            next(self.events)
            if isinstance(next(self.events), events.StreamEndEvent):
                return None
            value = self._read_value(next(self.events), ())
            next(self.events)
            if not isinstance(extra := next(self.events), events.StreamEndEvent):
                raise self._error(extra, (), "expected one document, got a second one")
            return value
        except yaml.MarkedYAMLError as error:
            # The parser reports the end of the text as the line after the last one.
            lines = len(self.text.splitlines())
            line = min(error.problem_mark.line + 1, lines) if error.problem_mark else self.line
            raise self._unreadable(line, error.problem) from error
        except yaml.reader.ReaderError as error:
            line = self.text.encode().count(b"\n", 0, error.position) + 1
            raise self._unreadable(line, error.reason) from error

    def _read_value(self, event: Any, path: Path) -> object:
        """Read a value. An alias counts as everything it repeats: no "billion laughs"."""
        before = self.nodes
        if not isinstance(event, events.AliasEvent):
            self.nodes += 1
            value = self._read_node(event, path)
            if event.anchor:
                self.anchors[event.anchor] = (value, self.nodes - before)
        elif event.anchor in self.anchors:
            value, nodes = self.anchors[event.anchor]
            self.nodes += nodes
        else:
            raise self._error(event, path, f"expected a defined anchor, got '*{event.anchor}'")
        if self.nodes > NODES_MAX:
            raise self._error(event, path, f"expected at most {NODES_MAX} values, got more")
        return value

    def _read_node(self, event: Any, path: Path) -> object:
        if event.tag is not None:
            raise self._error(event, path, f"expected a value without a tag, got {event.tag!r}")
        if isinstance(event, events.ScalarEvent):
            return _parse_scalar(event)
        if len(path) == DEPTH_MAX:
            raise self._error(event, path, f"expected at most {DEPTH_MAX} levels, got more")
        if isinstance(event, events.SequenceStartEvent):
            return self._read_sequence(path)
        return self._read_mapping(path)

    def _read_sequence(self, path: Path) -> list[object]:
        items: list[object] = []
        while not isinstance(event := next(self.events), events.SequenceEndEvent):
            self._note_line(event, (*path, len(items)))
            items.append(self._read_value(event, (*path, len(items))))
        return items

    def _read_mapping(self, path: Path) -> dict[str, object]:
        members: dict[str, object] = {}
        while not isinstance(key := next(self.events), events.MappingEndEvent):
            if not isinstance(key, events.ScalarEvent):
                raise self._error(key, path, "expected a name as key, got another kind of value")
            if key.value in members:
                raise self._error(key, (*path, key.value), "duplicate key")
            self._note_line(key, (*path, key.value))
            members[key.value] = self._read_value(next(self.events), (*path, key.value))
        return members

    def _note_line(self, event: Any, path: Path) -> None:
        """Keep the line of the longest prefix of the target path."""
        if path == self.target[: len(path)]:
            self.line = event.start_mark.line + 1

    def _error(self, event: Any, path: Path, message: str) -> Invalid:
        return _invalid(self.source, event.start_mark.line + 1, path, message)

    def _unreadable(self, line: int, reason: str | None) -> Invalid:
        return _invalid(self.source, line, (), f"not valid YAML or JSON: {reason}")


def _parse_scalar(event: Any) -> object:
    is_plain, value = event.implicit[0], event.value
    if is_plain and value in _CONSTANTS:
        return _CONSTANTS[value]
    return int(value) if is_plain and _INTEGER.fullmatch(value) else value


def _refuse_duplicate_keys(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("duplicate key")


def _resolve(node: Mapping[str, Any], schema: Mapping[str, Any], values: Any) -> Mapping[str, Any]:
    """Follow a reference; of a tagged union, take the entry that the tag in `values` names.

    An optional node is described as if it were present.
    """
    choices = [entry for entry in node.get("anyOf", ()) if entry != {"type": "null"}]
    if len(choices) == 1:
        node = {**choices[0], **{key: value for key, value in node.items() if key != "anyOf"}}
    if "discriminator" in node:
        tag, entries = node["discriminator"]["propertyName"], node["discriminator"]["mapping"]
        name = values.get(tag) if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in entries:
            return {"properties": {tag: {"enum": list(entries)}}, "required": [tag]}
        node = {"$ref": entries[name]}
    return {**schema["$defs"][node["$ref"].rpartition("/")[2]], **node} if "$ref" in node else node


def _suggest(name: str, node: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name[:SHOWN_MAX], node["properties"], 1)
    if matches:
        return f"did you mean '{matches[0]}'?"
    return f"expected one of {', '.join(node['properties'])}"


def _describe(node: Mapping[str, Any]) -> str:
    """Describe what a node accepts. Descriptions of enums and entries say what they are for."""
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "properties" in node:
        return f"a mapping with {', '.join(node['properties'])}"
    return str(node.get("description", "a list"))


def _show(value: object) -> str:
    if value is None:
        return "nothing"
    is_text = isinstance(value, str)
    return _shorten(repr(value) if is_text else json.dumps(value, ensure_ascii=False))


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


def _invalid(source: str, line: int, path: Path, message: str) -> Invalid:
    where = f"{format_path(path)}: " if path else ""
    return Invalid(
        f"{source}:{line}: {where}{message}", source=source, line=line, field=format_path(path)
    )
