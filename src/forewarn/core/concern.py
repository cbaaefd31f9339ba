"""What a change concerns: the event's type, cause and VMs, and the host.

The history is searched by these.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.draft import Places
from forewarn.core.event import Event, Impact
from forewarn.core.fleet import Scope, Vm

NEW_EVENT = (ChangeKind.SCHEDULED, ChangeKind.EXTENDED)


def with_concerns(
    changes: Sequence[Change], before: Scope, after: Scope, places: Places
) -> tuple[Change, ...]:
    """The changes with all that the scope knows of what they are about.

    What has ended is found in the scope before.
    """
    if not changes:
        return ()
    about = _events({change.event_id for change in changes if change.event_id}, before, after)
    resources = [_resources(change, about.get(change.event_id)) for change in changes]
    names = [
        _subject(change) or (of_event[0] if of_event else "")
        for change, of_event in zip(changes, resources, strict=True)
    ]
    was = _members(before, names, places)
    is_ = was if after.vms is before.vms else _members(after, names, places)
    return tuple(
        _with_concern(change, about.get(change.event_id), of_event, name, was, is_)
        for change, of_event, name in zip(changes, resources, names, strict=True)
    )


def _members(scope: Scope, names: Sequence[str], places: Places) -> dict[str, Vm]:
    found = ((name, places.of_vm(scope.vms, name)) for name in names if name)
    return {name: scope.vms[place] for name, place in found if place is not None}


def _events(ids: set[str], before: Scope, after: Scope) -> dict[str, Event | Impact]:
    """The events of these ids as they are, or last were; for a silent operation its impact."""
    found: dict[str, Event | Impact] = {}
    for scope in (before, after):
        found.update((event.id, event) for event in scope.events if event.id in ids)
    silent = ids - found.keys()
    if silent:
        for scope in (before, after):
            found.update(
                (impact.event_id, impact) for impact in scope.impacts if impact.event_id in silent
            )
    return found


def _resources(change: Change, about: Event | Impact | None) -> tuple[str, ...]:
    """The VMs that a change is about: one, where it happened to one VM of an event, or else all
    that the event names.
    """
    if about is None:
        return ()
    if isinstance(about, Impact):
        return (about.vm,)
    subject = _subject(change)
    return (subject,) if subject else about.resources


def _subject(change: Change) -> str:
    """The one VM that a change happened to.

    An approval happens to the event, which need not name the VM that approves it.
    """
    return "" if change.what is ChangeKind.APPROVED else change.vm


def _with_concern(
    change: Change,
    about: Event | Impact | None,
    resources: tuple[str, ...],
    name: str,
    was: dict[str, Vm],
    is_: dict[str, Vm],
) -> Change:
    event = about if isinstance(about, Event) else None
    vm = was.get(name) or is_.get(name)
    is_new = event is not None and change.what in NEW_EVENT
    told = replace(
        change,
        type=about.type if about else None,
        cause=about.cause if about else None,
        resources=resources,
        host=(event.host if event else "") or (vm.host if vm else ""),
        not_before=event.not_before if event and is_new else None,
        description=event.description if event and is_new else "",
    )
    if change.what is ChangeKind.MOVED and name in is_:
        return replace(told, host=is_[name].host, host_before=told.host)
    return told
