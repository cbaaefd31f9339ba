"""A marker in a domain's metadata: an impact has begun to act on it.

It survives a crash of the service, so the next try can tell a VM that an impact suspended or
stopped from one that its owner did. It moves with the domain, so it also tells where the VM was.
"""

from contextlib import suppress
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import libvirt

from forewarn.platform.libvirt.connection import ignoring

NAMESPACE = "urn:forewarn:impact:1"
ELEMENT = libvirt.VIR_DOMAIN_METADATA_ELEMENT


def mark(handle: Any, event_id: str, host: str = "") -> None:
    """Record that the event acts on this domain. Called before the first action.

    `host` is where a move begins.
    """
    handle.setMetadata(
        ELEMENT,
        f"<impact event={quoteattr(event_id)} host={quoteattr(host)}/>",
        "forewarn-impact",
        NAMESPACE,
        _flags(handle),
    )


def is_marked(handle: Any, event_id: str) -> bool:
    """Whether this event has begun to act on the domain."""
    return began_on(handle, event_id) is not None


def began_on(handle: Any, event_id: str) -> str | None:
    """Return the host on which this event began to move the domain; None if it is not marked."""
    with ignoring(libvirt.VIR_ERR_NO_DOMAIN_METADATA, libvirt.VIR_ERR_NO_DOMAIN):
        marker = ElementTree.fromstring(handle.metadata(ELEMENT, NAMESPACE))  # noqa: S314 ours
        return marker.get("host", "") if marker.get("event") == event_id else None
    return None


def unmark(handle: Any) -> None:
    """Remove the marker. One left behind by mistake means nothing to the next event."""
    with suppress(libvirt.libvirtError):
        handle.setMetadata(ELEMENT, None, None, NAMESPACE, _flags(handle))


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


def reset(handle: Any) -> None:
    """Reset, and resume: a suspended domain would stay suspended."""
    handle.reset(0)
    resume(handle)


def _flags(handle: Any) -> int:
    """Affect the running domain and its persistent definition."""
    live = libvirt.VIR_DOMAIN_AFFECT_LIVE if handle.isActive() else 0
    return live | (libvirt.VIR_DOMAIN_AFFECT_CONFIG if handle.isPersistent() else 0)
