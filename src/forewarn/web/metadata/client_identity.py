"""Which VM sends a request: by its address, by a trusted proxy's signature, or by the path.

The protocol has no credentials, so a VM is identified by where its requests come from. Each way
must be enabled. The path is for the lab: any client may name any VM.
"""

import hmac
from typing import NamedTuple

from forewarn.config import Config, Identify
from forewarn.engine.board import Board, PublishedScope
from forewarn.errors import Forbidden, Invalid
from forewarn.web.metadata.request import MetadataRequest

ID, SIGNATURE = b"x-instance-id", b"x-instance-id-signature"
"""The headers of OpenStack's metadata proxy; the signature is the HMAC-SHA256 of the id, in hex."""


class ClientIdentity(NamedTuple):
    """A VM of the fleet and its scope: the only one it may read, and approve in."""

    vm: str
    place: PublishedScope


def identify(
    request: MetadataRequest, board: Board, config: Config, proxy_key: bytes
) -> ClientIdentity:
    """Forbidden if the client is not a VM of this fleet, or its signature is wrong."""
    is_signed = ID in request.headers or SIGNATURE in request.headers
    if is_signed and Identify.PROXY in config.identify and not request.vm:
        name = _verify(request, board, proxy_key)
    else:
        # The origin of a forwarded request is unknown (protocol 3); only a signing proxy may
        # forward requests.
        if b"x-forwarded-for" in request.headers:
            raise Invalid("Bad request. X-Forwarded-For is not accepted")
        is_by_address = not request.vm and Identify.ADDRESS in config.identify
        name = board.addresses.get(request.address, "") if is_by_address else request.vm
    place = board.vms.get(name)
    if place is None:
        client = name or request.address or "The client"
        raise Forbidden(f"Forbidden. {client} is not a VM of this fleet")
    return ClientIdentity(name, place)


def _verify(request: MetadataRequest, board: Board, key: bytes) -> str:
    """The VM with the signed id, or else with that name.

    Ids come first: proxies send ids, and a VM must not be able to impersonate another by its name.
    A repeated header was joined, so its signature does not match.
    """
    value = request.headers.get(ID, b"")
    signature = hmac.digest(key, value, "sha256").hex().encode()
    if not hmac.compare_digest(signature, request.headers.get(SIGNATURE, b"").lower()):
        raise Forbidden("Forbidden. The signature does not match the instance id")
    name = value.decode("latin-1")
    if name.lower() in board.shared_ids:
        raise Forbidden(f"Forbidden. Several VMs have the id {name}")
    return board.ids.get(name.lower(), name)
