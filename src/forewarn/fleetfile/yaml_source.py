"""YAML or JSON text to plain values, with the line of every error. Knows nothing about fleets.

YAML is read as JSON with comments: plain `true`, `false`, `null` and integers are themselves, and
everything else is text, so `off` is a word and `22.10` keeps its zero. Anchors work. Tags, merge
keys and duplicate keys are rejected.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml
from yaml import events

from forewarn.errors import Invalid

SIZE_MAX = 64 * 1024 * 1024
DEPTH_MAX = 16
NODES_MAX = 4_000_000
SHOWN_MAX = 60
LIMITS = ("from", "minimum"), ("to", "maximum")

Path = tuple[str | int, ...]
T = TypeVar("T")

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_SURROGATE = re.compile(r"\\u[dD][89A-Fa-f][0-9A-Fa-f]{2}")
_PATH_STEP = re.compile(r"\.(\w+)|\[([0-9]+)\]")


class FieldError(Exception):
    """The value at a path is invalid. `SourceText.locate` adds the source and the line."""

    def __init__(self, path: Path, expected: str = "") -> None:
        super().__init__(format_path(path))
        self.path = path
        self.expected = expected


class SourceText(NamedTuple):
    """A text in YAML or JSON, and the name that errors give it."""

    name: str
    text: bytes

    def load(self) -> object:
        """Return the values of the text.

        JSON has a fast path; what fails there is read as YAML, which knows the line of every error.
        """
        if len(self.text) > SIZE_MAX:
            size = len(self.text)
            raise Invalid(f"{self.name}: expected at most {SIZE_MAX} bytes, got {size}", size=size)
        try:
            decoded = self.text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = self.text.count(b"\n", 0, error.start) + 1
            message = f"expected UTF-8, got the byte 0x{self.text[error.start]:02x}"
            raise self.invalid(line, (), message) from error
        if decoded.lstrip().startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                return _load_json(decoded)
        return _YamlReader(self, decoded).read()

    def locate(self, error: FieldError, schema: Mapping[str, Any]) -> Invalid:
        """Return the error to raise: source, line, field, what was expected and what was found."""
        path, message = explain(error, self.load(), schema)
        return self.invalid(self.find_line(path), path, message)

    def find_line(self, path: Path) -> int:
        """Return the line of the value at a path, or of its nearest parent that exists.

        Only structure and lines matter here, so surrogate escapes, which YAML lacks, are masked.
        """
        decoded = _SURROGATE.sub("______", self.text.decode("utf-8-sig"))
        reader = _YamlReader(self, decoded, target=path)
        with contextlib.suppress(Invalid):
            reader.read()
        return reader.line

    def invalid(self, line: int, path: Path, message: str) -> Invalid:
        field = format_path(path)
        where = f"{self.name}:{line}: {field}: " if path else f"{self.name}:{line}: "
        return Invalid(f"{where}{message}", source=self.name, line=line, field=field)


def convert(values: object, type_: type[T], at: Path = (), *, strict: bool = True) -> T:
    """Convert plain values to a type. `at` is the path of the values.

    YAML keeps `0.5` as text, so types with fractions are converted with `strict=False`.
    """
    try:
        return msgspec.convert(values, type_, strict=strict)
    except msgspec.ValidationError as error:
        _, path = split_message(error)
        raise FieldError((*at, *path)) from error


def split_message(error: msgspec.ValidationError) -> tuple[str, Path]:
    """What msgspec says, and the path of the invalid value, which is at the end of its message."""
    message, separator, where = str(error).rpartition(" - at ")
    if not separator:
        return where, ()
    return message, tuple(name or int(index) for name, index in _PATH_STEP.findall(where))


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


def _load_json(text: str) -> object:
    """ValueError for what is not JSON, duplicate keys, NaN and lone surrogates.

    The hook is Python, so that other threads can run in between.
    """
    values: object = json.loads(text, object_pairs_hook=_make_dict, parse_constant=_refuse)
    if _SURROGATE.search(text):
        json.dumps(values, ensure_ascii=False).encode()
    return values


def _make_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    return members if len(members) == len(pairs) else _refuse("duplicate key")


def _refuse(what: str) -> Any:
    raise ValueError(what)


class _YamlReader:
    """One pass over the parser's events. `yaml.compose` would crash in C on deep nesting."""

    def __init__(self, source: SourceText, text: str, target: Path = ()) -> None:
        self.source = source
        self.text = text
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
            reason = error.problem
            cause: Exception = error
        except yaml.reader.ReaderError as error:
            line = self.text.encode().count(b"\n", 0, error.position) + 1
            reason, cause = error.reason, error
        raise self.source.invalid(line, (), f"not valid YAML or JSON: {reason}") from cause

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
        is_mapping = isinstance(event, events.MappingStartEvent)
        members: dict[str | int, object] = {}
        while not isinstance(event := next(self.events), events.CollectionEndEvent):
            step = self._read_key(event, path, members) if is_mapping else len(members)
            inner = (*path, step)
            if inner == self.target[: len(inner)]:  # the longest prefix of the target comes last
                self.line = event.start_mark.line + 1
            members[step] = self._read_value(next(self.events) if is_mapping else event, inner)
        return members if is_mapping else list(members.values())

    def _read_key(self, event: Any, path: Path, members: Container[str | int]) -> str:
        if not isinstance(event, events.ScalarEvent):
            raise self._error(event, path, "expected a name as key, got another kind of value")
        if event.value in members:
            raise self._error(event, (*path, event.value), "duplicate key")
        return str(event.value)

    def _error(self, event: Any, path: Path, message: str) -> Invalid:
        return self.source.invalid(event.start_mark.line + 1, path, message)


def _parse_scalar(event: Any) -> object:
    is_plain, value = event.implicit[0], event.value
    if is_plain and value in _CONSTANTS:
        return _CONSTANTS[value]
    return int(value) if is_plain and _INTEGER.fullmatch(value) else value


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
    if "description" in node:
        return str(node["description"])
    if "anyOf" in node:  # a value or nothing
        return _describe(node["anyOf"][0])
    match node.get("type"):
        case "integer" | "number" as kind:
            limits = (f"{word} {node[key]}" for word, key in LIMITS if key in node)
            return " ".join(["a whole number" if kind == "integer" else "a number", *limits])
        case "string" if "maxLength" in node:
            return f"a text of at most {node['maxLength']} characters"
        case "string":
            return "a text"
        case "boolean":
            return "true or false"
        case "object":
            return "a mapping"
    return "a list"


def _show(value: object) -> str:
    if value is None:
        return "nothing"
    is_text = isinstance(value, str)
    return _shorten(repr(value) if is_text else json.dumps(value, ensure_ascii=False))


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"
