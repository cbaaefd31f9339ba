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


class Marker(NamedTuple):
    """The event that acts on a domain, empty if none does.

    A move begins on `host`. Its VM may run on `target`, even if it is off on `host`. `given_up` is
    an event that has stopped the domain to move it, and that no target has started it for; the
    domain stays, and the event stops it no more.
    """

    event: str = ""
    host: str = ""
    target: str = ""
    given_up: str = ""


def mark(handle: Any, *marker: str) -> None:
    """Record what acts on this domain. Called before the first action."""
    fields = Marker(*marker)._asdict().items()
    element = " ".join(f"{name}={quoteattr(value)}" for name, value in fields)
    handle.setMetadata(
        ELEMENT, f"<impact {element}/>", "forewarn-impact", NAMESPACE, _flags(handle)
    )


def read(handle: Any) -> Marker:
    with ignoring(libvirt.VIR_ERR_NO_DOMAIN_METADATA, libvirt.VIR_ERR_NO_DOMAIN):
        element = ElementTree.fromstring(handle.metadata(ELEMENT, NAMESPACE))  # noqa: S314 ours
        return Marker(*(element.get(name, "") for name in Marker._fields))
    return Marker()


def unmark(handle: Any) -> None:
    """Remove the marker. One left behind by mistake makes the next event ask its target."""
    with suppress(libvirt.libvirtError):
        handle.setMetadata(ELEMENT, None, None, NAMESPACE, _flags(handle))


def unmark_moved(handle: Any, event_id: str) -> None:
    """Remove the marker of a move, unless another event has begun to act on the VM since."""
    if read(handle).event in ("", event_id):
        unmark(handle)


def suspend(handle: Any, event_id: str) -> None:
    mark(handle, event_id)
    handle.suspend()


def resume(handle: Any) -> None:
    """Resume the domain if it is suspended."""
    if handle.state()[0] == libvirt.VIR_DOMAIN_PAUSED:
        handle.resume()
    unmark(handle)


def start(handle: Any) -> None:
    handle.create()
    unmark(handle)


def stay(handle: Any, event_id: str) -> None:
    """Start a domain that no target has started, and give its move up.

    Until it runs, the marker names its event as the one that acts: the next try starts it.
    """
    mark(handle, event_id, "", "", event_id)
    if not handle.isActive():
        handle.create()
    mark(handle, "", "", "", event_id)


def reset(handle: Any) -> None:
    """Reset, and resume: a suspended domain would stay suspended."""
    handle.reset(0)
    resume(handle)


def _flags(handle: Any) -> int:
    """Affect the running domain and its persistent definition."""
    live = libvirt.VIR_DOMAIN_AFFECT_LIVE if handle.isActive() else 0
    return live | (libvirt.VIR_DOMAIN_AFFECT_CONFIG if handle.isPersistent() else 0)
