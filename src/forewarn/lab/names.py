"""Members of faults and scenarios that refer to a name, marked in their types.

A type says how a name is written; only the fleet and the steps of a scenario know which ones exist.
"""

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from forewarn.fleetfile.schema import Name, list_of
from forewarn.fleetfile.yaml_source import FieldError, Path

ANY, OWN, LEADER = "any", "own", "leader"
SHOWN_MAX = 8
VMS_MAX = 10_000


class Reference(NamedTuple):
    """Marks a member whose value must be one of these names, or one of the words in `also`."""

    what: str
    also: tuple[str, ...] = ()


VM = "a VM of the fleet"
HOST = "a host of the fleet"
EVENT = "a name that a step gives with `as`"
FAULT = "a name that a step gives to a fault with `as`"

_NAME_OR_ANY = Meta(description="a name, or any: one without a pending event, chosen by the seed")
VmName = Annotated[Name, Reference(VM)]
VmNames = Annotated[tuple[VmName, ...], list_of("VM names", VMS_MAX)]
TwoVmNames = Annotated[
    tuple[VmName, ...],
    Meta(min_length=2, max_length=VMS_MAX, description="a list of two or more VM names"),
]
VmOrAny = Annotated[Name, _NAME_OR_ANY, Reference(VM, also=(ANY,))]
HostOrAny = Annotated[Name, _NAME_OR_ANY, Reference(HOST, also=(ANY,))]
EventName = Annotated[Name, Meta(description=EVENT), Reference(EVENT)]
FaultName = Annotated[Name, Reference(FAULT)]
Approver = Annotated[
    Name,
    Meta(description="a VM; own: one that the event names; leader: the first that it names"),
    Reference(VM, also=(OWN, LEADER)),
]


def check_names(entry: msgspec.Struct, known: Mapping[str, Collection[str]], at: Path) -> None:
    """Check every member of an entry that refers to a name. `known` has the names of each kind."""
    references = _find_references(type(entry))
    for member in entry.__struct_fields__:
        value, path = getattr(entry, member), (*at, member)
        if isinstance(value, msgspec.Struct):
            check_names(value, known, path)
        elif isinstance(value, str) and member in references:
            _check_name(value, references[member], known, path)
        elif isinstance(value, tuple) and member in references:
            for index, name in enumerate(value):
                _check_name(name, references[member], known, (*path, index))


def _check_name(
    name: str, reference: Reference, known: Mapping[str, Collection[str]], path: Path
) -> None:
    names = known[reference.what]
    if name not in names and name not in reference.also:
        raise FieldError(path, f"{reference.what}: {shorten_list(names)}")


def shorten_list(names: Collection[str]) -> str:
    """Join the first names for a message."""
    shown = ", ".join(list(names)[:SHOWN_MAX]) or "(none)"
    return f"{shown}, …" if len(names) > SHOWN_MAX else shown


@functools.cache
def _find_references(type_: type[msgspec.Struct]) -> dict[str, Reference]:
    hints = get_type_hints(type_, include_extras=True)
    return {member: mark for member, hint in hints.items() for mark in _find_marks(hint)}


def _find_marks(hint: object) -> Iterator[Reference]:
    """Look into types such as `tuple[VmName, ...]` and `VmName | None`."""
    if isinstance(hint, Reference):
        yield hint
    for part in get_args(hint):
        yield from _find_marks(part)


def count(number: int, noun: str) -> str:
    """Format a number of things, such as `1 event`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
