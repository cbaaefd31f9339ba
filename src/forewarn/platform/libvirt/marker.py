"""A marker in a domain's metadata: an impact has begun to act on it.

It survives a crash of the service, so the next try can tell a VM that an impact suspended or
stopped from one that its owner did. It moves with the domain, so it also tells where the VM was.
"""

from contextlib import suppress
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import libvirt

from forewarn.platform.libvirt.connection import ignoring

NAMESPACE = "urn:forewarn:impact:1"
ELEMENT = libvirt.VIR_DOMAIN_METADATA_ELEMENT
LIVE, CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG


class Marker(NamedTuple):
    """The event that acts on a domain, empty if none does.

    A move begins on `host`. Its VM may run on `target`, even if it is off on `host`.

    `stopped_by` is an event that stops the domain to move it, which it does once. It is recorded
    before the stop, in the definition and not in the domain that runs: one that runs with it was
    started since. If there is no `target` with it, the event has given the move up, and the domain
    stays. `suspended_by` is an event that suspends the domain; it is recorded before that, too.
    """

    event: str = ""
    host: str = ""
    target: str = ""
    stopped_by: str = ""
    suspended_by: str = ""


def mark(handle: Any, *marker: str) -> None:
    """Record what acts on this domain. Called before the first action."""
    _write(handle, Marker(*marker), sum(_parts(handle)))


def mark_move(handle: Any, event_id: str, host: str, target: str) -> None:
    """Record a move. The definition carries the marker along."""
    for part in _parts(handle):
        _write(handle, Marker(event_id, host, target, read(handle, part).stopped_by), part)


def mark_stop(handle: Any, event_id: str) -> bool:
    """Record that the event stops the domain. False if it did, and the domain was started since.

    A transient domain loses its metadata when it stops.
    """
    if was_stopped(handle, event_id):
        return False
    if handle.isPersistent():
        _write(handle, read(handle, CONFIG)._replace(stopped_by=event_id), CONFIG)
    return True


def was_stopped(handle: Any, event_id: str) -> bool:
    """Whether the event has stopped the domain: it is off since, or was started again."""
    return read(handle).stopped_by == event_id


def is_stopping(handle: Any, event_id: str) -> bool:
    """Whether the event has begun to stop a domain that still runs."""
    parts = [read(handle, part).stopped_by == event_id for part in _parts(handle)]
    return parts == [False, True]


def read(handle: Any, part: int = libvirt.VIR_DOMAIN_AFFECT_CURRENT) -> Marker:
    """The marker of the domain that runs; of its definition if it is off."""
    with ignoring(libvirt.VIR_ERR_NO_DOMAIN_METADATA, libvirt.VIR_ERR_NO_DOMAIN):
        text = handle.metadata(ELEMENT, NAMESPACE, part)
        element = ElementTree.fromstring(text)  # noqa: S314 ours
        return Marker(*(element.get(name, "") for name in Marker._fields))
    return Marker()


def unmark(handle: Any) -> None:
    """Remove the marker. One left behind by mistake makes the next event ask its target."""
    with suppress(libvirt.libvirtError):
        handle.setMetadata(ELEMENT, None, None, NAMESPACE, sum(_parts(handle)))


def unmark_failed(handle: Any) -> None:
    """Remove the marker of a move that failed, except that its event has stopped the domain."""
    stopped_by = read(handle).stopped_by
    unmark(handle)
    if stopped_by:
        mark(handle, "", "", "", stopped_by)


def unmark_moved(handle: Any, event_id: str) -> None:
    """Remove the marker of a move, unless another event has begun to act on the VM since."""
    if read(handle).event in ("", event_id):
        unmark(handle)


def suspend(handle: Any, event_id: str) -> None:
    mark(handle, event_id, "", "", "", event_id)
    handle.suspend()


def resume(handle: Any) -> None:
    """Resume the domain if it is suspended."""
    if handle.state()[0] == libvirt.VIR_DOMAIN_PAUSED:
        handle.resume()
    unmark(handle)


def start(handle: Any) -> None:
    handle.create()
    unmark(handle)


def ensure_running(handle: Any) -> None:
    if not handle.isActive():
        handle.create()


def stay(handle: Any, event_id: str) -> None:
    """Start a domain that no target has started, and give its move up.

    Until it runs, the marker names its event as the one that acts: the next try starts it.
    """
    mark(handle, event_id, "", "", event_id)
    ensure_running(handle)
    mark(handle, "", "", "", event_id)


def reset(handle: Any) -> None:
    """Reset, and resume: a suspended domain would stay suspended."""
    handle.reset(0)
    resume(handle)


def _write(handle: Any, marker: Marker, parts: int) -> None:
    element = " ".join(f"{name}={quoteattr(value)}" for name, value in marker._asdict().items())
    handle.setMetadata(ELEMENT, f"<impact {element}/>", "forewarn-impact", NAMESPACE, parts)


def _parts(handle: Any) -> list[int]:
    """What has metadata: the domain that runs, and its definition."""
    return [LIVE] * handle.isActive() + [CONFIG] * handle.isPersistent()
