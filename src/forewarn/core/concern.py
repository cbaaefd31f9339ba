"""What a change concerns: the event's type, cause and VMs, and the host. The history is searched by these."""

from collections.abc import Sequence

from msgspec.structs import replace

from forewarn.core.change import Change, What
from forewarn.core.event import Event, Impact
from forewarn.core.fleet import Scope, Vm

NEW_EVENT = (What.SCHEDULED, What.EXTENDED)


def with_concerns(changes: Sequence[Change], before: Scope, after: Scope) -> tuple[Change, ...]:
    """The changes with all that the scope knows of what they are about. What has ended is found in the scope before."""
    if not changes:
        return ()
    events: dict[str, Event | Impact] = {}
    for scope in (before, after):
        events.update((impact.event_id, impact) for impact in scope.impacts)
    for scope in (before, after):
        events.update((event.id, event) for event in scope.events)
    was, is_ = ({vm.name: vm for vm in scope.vms} for scope in (before, after))
    return tuple(_with_concern(change, events.get(change.event_id), was, is_) for change in changes)


def _with_concern(change: Change, about: Event | Impact | None, was: dict[str, Vm], is_: dict[str, Vm]) -> Change:
    event = about if isinstance(about, Event) else None
    resources = event.resources if event else (about.vm,) if isinstance(about, Impact) else ()
    actor = "" if change.what is What.APPROVED else change.vm  # an event need not name the VM that approves it
    name = actor or (resources[0] if resources else "")
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
    if change.what is What.MOVED and name in is_:
        return replace(told, host=is_[name].host, host_before=told.host)
    return told
