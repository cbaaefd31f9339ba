"""Who is calling: the VM at this address, the VM that a trusted proxy vouches for, or the VM that
the path names.

The protocol has no identity of its own, so a VM is known by where it calls from. Each way must be
switched on. The path is for the lab: whoever may use it may speak for any VM.
"""

import hmac
from typing import NamedTuple

from forewarn.config import Identify
from forewarn.engine.board import Board, PublishedScope
from forewarn.errors import Forbidden, Invalid
from forewarn.web.metadata.request import Request
from forewarn.web.settings import Settings

ID, SIGNATURE = b"x-instance-id", b"x-instance-id-signature"
"""The headers of OpenStack's metadata proxy; the signature is HMAC-SHA256 over the id, in
hexadecimal.
"""

_MAPPED = "::ffff:"


class ClientIdentity(NamedTuple):
    """A VM of the fleet and its scope: the only one that it may read, and approve in."""

    vm: str
    place: PublishedScope


def identify(request: Request, board: Board, settings: Settings) -> ClientIdentity:
    """The VM that is calling.

    Forbidden if it is no VM of this fleet, or is not who it says it is.
    """
    is_vouched_for = Identify.PROXY in settings.identify and (
        ID in request.headers or SIGNATURE in request.headers
    )
    if is_vouched_for and not request.vm:
        name = _vouched_for(request, board, settings.proxy_key)
    else:
        _refuse_forwarded(request)
        name = request.vm or (
            board.addresses.get(request.address, "")
            if Identify.ADDRESS in settings.identify
            else ""
        )
    place = board.vms.get(name)
    if place is None:
        raise Forbidden(
            f"Forbidden. {name or request.address or 'The caller'} is no VM of this fleet",
            address=request.address,
        )
    return ClientIdentity(name, place)


def plain(address: str) -> str:
    """An address as the fleet file writes it:

    IPv4 as IPv4 though it came over an IPv6 socket, and without an interface.
    """
    if ":" not in address:
        return address
    return address.removeprefix(_MAPPED) if "." in address else address.partition("%")[0]


def _vouched_for(request: Request, board: Board, key: bytes) -> str:
    """The VM with this id, or else with this name: ids are what a proxy knows, and no VM may be
    named so as to get another's.

    A header that came twice was joined, and then fits no signature.
    """
    said = request.headers.get(ID, b"")
    signature = hmac.digest(key, said, "sha256").hex().encode()
    if not hmac.compare_digest(signature, request.headers.get(SIGNATURE, b"").lower()):
        raise Forbidden("Forbidden. The signature does not fit the instance id")
    name = said.decode("latin-1")
    if name.lower() in board.shared_ids:
        raise Forbidden(f"Forbidden. Several VMs have the id {name}")
    return board.ids.get(name.lower(), name)


def _refuse_forwarded(request: Request) -> None:
    """A request that was passed on came from nobody knows where (protocol 3).

    Only a proxy that signs may pass one on.
    """
    if b"x-forwarded-for" in request.headers:
        raise Invalid("Bad request. X-Forwarded-For is not accepted")
