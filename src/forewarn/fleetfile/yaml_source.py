"""YAML or JSON text to plain values, and from a path in them back to its line. Knows no fleet.

YAML is read as JSON with comforts: plain `true`, `false`, `null` and whole numbers are themselves
and all else is text, so `off` is a word and `22.10` keeps its zero. Anchors work. Tags, merge keys
and a key that stands twice are refused.
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
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_HALVES = re.compile(r"\\u[dD][89A-Fa-f][0-9A-Fa-f]{2}")
_STEP = re.compile(r"\.(\w+)|\[([0-9]+)\]")


class Misfit(Exception):
    """The value at a path is not what it should be.

    `refusal` makes a problem of it, with source and line.
    """

    def __init__(self, path: Path, expected: str = "") -> None:
        super().__init__(field(path))
        self.path = path
        self.expected = expected


def read(text: bytes, source: str) -> object:
    """The values of a text.

    JSON has a fast way; what fails there is read as YAML, which knows the line of every mistake.
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
        raise _invalid(
            source, line, (), f"expected UTF-8, got the byte 0x{text[error.start]:02x}"
        ) from error
    if decoded.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, msgspec.DecodeError, RecursionError):
            json.loads(decoded, object_pairs_hook=_each_once)
            return _decode_in_pieces(decoded)
    return _Walk(decoded, source).values()


def convert(values: object, type_: type[T], at: Path = ()) -> T:
    """Plain values as a type, or a Misfit at the path that msgspec names at the end of its message.

    The values stand at `at`.
    """
    try:
        return msgspec.convert(values, type_)
    except msgspec.ValidationError as error:
        _, found, where = str(error).rpartition(" - at ")
        steps = _STEP.findall(where) if found else []
        raise Misfit((*at, *(name or int(index) for name, index in steps))) from error


def refusal(
    misfit: Misfit, values: Any, *, text: bytes, source: str, schema: Mapping[str, Any]
) -> Invalid:
    """The problem to raise for a misfit: where it is, what the schema expects there, what came."""
    return _located(text, source, *explained(misfit, values, schema))


def explained(misfit: Misfit, values: Any, schema: Mapping[str, Any]) -> tuple[Path, str]:
    """Where a misfit is, and what the schema expects there and what came, in words."""
    path: Path = ()
    steps = list(misfit.path)
    node = _resolved(schema, schema, values)
    while True:  # ends at the end of the path, at the latest one step after it
        if "properties" in node and isinstance(values, dict):
            strays = [key for key in values if key not in node["properties"]]
            if strays and not node.get("additionalProperties", True):
                return (*path, strays[0]), f"unknown member; {_hint(strays[0], node)}"
            steps = steps or [name for name in node["required"] if name not in values][:1]
        if not steps:
            return path, f"expected {misfit.expected or _expected(node)}, got {_shown(values)}"
        step = steps.pop(0)
        path = (*path, step)
        values = values.get(step) if isinstance(values, dict) else values[step]
        node = _resolved(
            node["items"] if isinstance(step, int) else node["properties"][step], schema, values
        )


def field(path: Path) -> str:
    """`scopes[0].vms[1].name`, as a person writes it."""
    return "".join(
        f"[{step}]" if isinstance(step, int) else f".{_cut(step)}" for step in path
    ).removeprefix(".")


def line_of(text: bytes, path: Path) -> int:
    """The line of the value at a path; where the text ends before, of what comes nearest to it.

    Only structure and lines matter here, so JSON's escapes in two halves, which YAML does not have,
    are blotted out.
    """
    walk = _Walk(_HALVES.sub("______", text.decode("utf-8-sig")), "", wanted=path)
    with contextlib.suppress(Invalid):
        walk.values()
    return walk.line


def _decode_in_pieces(text: str) -> object:
    """The values of a JSON object.

    Its long lists are decoded item by item, so that other threads get their turn in between.
    """
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return {
        name: _decode_list(raw) if bytes(memoryview(raw)[:1]) == b"[" else msgspec.json.decode(raw)
        for name, raw in members.items()
    }


def _decode_list(raw: msgspec.Raw) -> list[object]:
    return [msgspec.json.decode(item) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]


class _Walk:
    """One pass over the parser's events.

    `yaml.compose` would do it in a line, but recurses in C and dies on deep nesting.
    """

    def __init__(self, text: str, source: str, wanted: Path = ()) -> None:
        self.text = text
        self.source = source
        self.wanted = wanted
        self.line = 1
        self.nodes = 0
        self.anchors: dict[str, tuple[object, int]] = {}
        self.events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)

    def values(self) -> object:
        try:
            next(self.events)
            if isinstance(next(self.events), events.StreamEndEvent):
                return None
            value = self._value(next(self.events), ())
            next(self.events)
            if not isinstance(follower := next(self.events), events.StreamEndEvent):
                raise self._refused(follower, (), "expected one document, got a second one")
            return value
        except yaml.MarkedYAMLError as error:
            lines = len(
                self.text.splitlines()
            )  # the end of the text is on its last line, not after it
            line = min(error.problem_mark.line + 1, lines) if error.problem_mark else self.line
            raise _invalid(
                self.source,
                line,
                (),
                f"expected YAML or JSON, got what cannot be read: {error.problem}",
            ) from error
        except yaml.reader.ReaderError as error:
            line = self.text.encode().count(b"\n", 0, error.position) + 1
            raise _invalid(
                self.source,
                line,
                (),
                f"expected YAML or JSON, got what cannot be read: {error.reason}",
            ) from error

    def _value(self, event: Any, path: Path) -> object:
        """An alias counts as all that it stands for, or a few lines would make a fleet of billions."""
        before = self.nodes
        if not isinstance(event, events.AliasEvent):
            self.nodes += 1
            value = self._node(event, path)
            if event.anchor:
                self.anchors[event.anchor] = (value, self.nodes - before)
        elif event.anchor in self.anchors:
            value, nodes = self.anchors[event.anchor]
            self.nodes += nodes
        else:
            raise self._refused(
                event, path, f"expected an anchor that stands before, got '*{event.anchor}'"
            )
        if self.nodes > NODES_MAX:
            raise self._refused(event, path, f"expected at most {NODES_MAX} values, got more")
        return value

    def _node(self, event: Any, path: Path) -> object:
        if event.tag is not None:
            raise self._refused(
                event, path, f"expected a value without a tag, got the tag {event.tag!r}"
            )
        if isinstance(event, events.ScalarEvent):
            return _scalar(event)
        if len(path) == DEPTH_MAX:
            raise self._refused(event, path, f"expected at most {DEPTH_MAX} levels, got more")
        return (
            self._sequence(path)
            if isinstance(event, events.SequenceStartEvent)
            else self._mapping(path)
        )

    def _sequence(self, path: Path) -> list[object]:
        items: list[object] = []
        while not isinstance(
            event := next(self.events), events.SequenceEndEvent
        ):  # ends: the parser closes what it opens
            self._note(event, (*path, len(items)))
            items.append(self._value(event, (*path, len(items))))
        return items

    def _mapping(self, path: Path) -> dict[str, object]:
        members: dict[str, object] = {}
        while not isinstance(key := next(self.events), events.MappingEndEvent):  # ends: likewise
            if not isinstance(key, events.ScalarEvent):
                raise self._refused(key, path, "expected a name as key, got another kind of value")
            if key.value in members:
                raise self._refused(key, (*path, key.value), "expected each key once, got it twice")
            self._note(key, (*path, key.value))
            members[key.value] = self._value(next(self.events), (*path, key.value))
        return members

    def _note(self, event: Any, path: Path) -> None:
        """The line wanted is the one of the longest part of the path that exists."""
        if path == self.wanted[: len(path)]:
            self.line = event.start_mark.line + 1

    def _refused(self, event: Any, path: Path, message: str) -> Invalid:
        return _invalid(self.source, event.start_mark.line + 1, path, message)


def _scalar(event: Any) -> object:
    is_plain, value = event.implicit[0], event.value
    if is_plain and value in _WORDS:
        return _WORDS[value]
    return int(value) if is_plain and _WHOLE.fullmatch(value) else value


def _each_once(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any], values: Any) -> Mapping[str, Any]:
    """What a reference stands for; of a union, the entry that the values name by its tag. If they
    name none, that is amiss.

    What may be left out is what it is when it is told.
    """
    told = [entry for entry in node.get("anyOf", ()) if entry != {"type": "null"}]
    if len(told) == 1:
        node = {**told[0], **{key: value for key, value in node.items() if key != "anyOf"}}
    if "discriminator" in node:
        tag, entries = node["discriminator"]["propertyName"], node["discriminator"]["mapping"]
        named = values.get(tag) if isinstance(values, dict) else None
        if not isinstance(named, str) or named not in entries:
            return {"properties": {tag: {"enum": list(entries)}}, "required": [tag]}
        node = {"$ref": entries[named]}
    return {**schema["$defs"][node["$ref"].rpartition("/")[2]], **node} if "$ref" in node else node


def _hint(stray: str, node: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(stray[:SHOWN_MAX], node["properties"], 1)
    return (
        f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(node['properties'])}"
    )


def _expected(node: Mapping[str, Any]) -> str:
    """The words for a node.

    Enumerations and entries have descriptions too, but those speak of the thing, not of its form.
    """
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "properties" in node:
        return f"a mapping with {', '.join(node['properties'])}"
    return str(node.get("description", "a list"))


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    return _cut(repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


def _located(text: bytes, source: str, path: Path, message: str) -> Invalid:
    return _invalid(source, line_of(text, path), path, message)


def _invalid(source: str, line: int, path: Path, message: str) -> Invalid:
    where = f"{field(path)}: " if path else ""
    return Invalid(
        f"{source}:{line}: {where}{message}", source=source, line=line, field=field(path)
    )
