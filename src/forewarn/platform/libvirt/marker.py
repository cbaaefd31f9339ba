"""A mark of ours in a domain's metadata: an impact has begun to act on it. It outlives us, so the
next try knows what we did.

Without it nobody could tell a VM that we have suspended or stopped from one that its owner had.
"""

from contextlib import suppress
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import libvirt

NAMESPACE = "urn:forewarn:impact:1"
ELEMENT = libvirt.VIR_DOMAIN_METADATA_ELEMENT


def mark(handle: Any, event_id: str) -> None:
    """From now on what happens to this domain is the event's doing. Set before the first verb."""
    handle.setMetadata(
        ELEMENT,
        f"<impact event={quoteattr(event_id)}/>",
        "forewarn-impact",
        NAMESPACE,
        _where(handle),
    )


def is_marked(handle: Any, event_id: str) -> bool:
    """Whether this event has begun to act on the domain."""
    try:
        told = handle.metadata(ELEMENT, NAMESPACE)
    except libvirt.libvirtError as error:
        if error.get_error_code() in (
            libvirt.VIR_ERR_NO_DOMAIN_METADATA,
            libvirt.VIR_ERR_NO_DOMAIN,
        ):
            return False
        raise
    return ElementTree.fromstring(told).get("event") == event_id  # noqa: S314 what we wrote, kept by libvirt


def unmark(handle: Any) -> None:
    """It is over. A mark that stays by mistake means nothing to the next event."""
    with suppress(libvirt.libvirtError):
        handle.setMetadata(ELEMENT, None, None, NAMESPACE, _where(handle))


def suspend(handle: Any, event_id: str) -> None:
    mark(handle, event_id)
    handle.suspend()


def wake(handle: Any) -> None:
    """Resume it if it is suspended."""
    if handle.state()[0] == libvirt.VIR_DOMAIN_PAUSED:
        handle.resume()
    unmark(handle)


def start(handle: Any) -> None:
    handle.create()
    unmark(handle)


def reset(handle: Any) -> None:
    """A reset of a suspended domain would leave it suspended."""
    handle.reset(0)
    wake(handle)


def _where(handle: Any) -> int:
    """In what runs, and in the definition that stays when it is stopped."""
    live = libvirt.VIR_DOMAIN_AFFECT_LIVE if handle.isActive() else 0
    return live | (libvirt.VIR_DOMAIN_AFFECT_CONFIG if handle.isPersistent() else 0)
