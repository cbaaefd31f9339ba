"""Which VM sends a request: by its address, by a signature, or by the path.

The protocol has no credentials, so a VM is identified by where its requests come from. Host
daemons sign for the VMs of their own host, by their token of the role `host`. Each other way must
be enabled. The path is for the lab: any client may name any VM.
"""

import hmac
from collections.abc import Mapping
from typing import NamedTuple

from forewarn.auth.tokens import Tokens
from forewarn.config import Config, Identify
from forewarn.engine.board import Board, PublishedScope
from forewarn.engine.clock import Clock
from forewarn.errors import Forbidden, Invalid
from forewarn.web.metadata.request import MetadataRequest

ID, SIGNATURE = b"x-instance-id", b"x-instance-id-signature"
"""The headers of OpenStack's metadata proxy; the signature is the HMAC-SHA256 of the id, in hex."""
HOST, TIME = b"x-forewarn-host", b"x-forewarn-time"
"""Where a host daemon signs: the name of its token, whose digest is the key, and the time, which is
signed with the id. So a client that has read a request can repeat it for a few minutes only.
"""
SIGNED_SECONDS_MAX = 300


class ClientIdentity(NamedTuple):
    """A VM of the fleet and its scope: the only one it may read, and approve in."""

    vm: str
    place: PublishedScope


class HostSignature(NamedTuple):
    """A host daemon's statement that the VM with this id sends the request."""

    token: str
    id: str
    time: int
    signature: bytes


def read_host_signature(headers: Mapping[bytes, bytes]) -> HostSignature | None:
    """None if no host daemon has signed. A repeated header was joined, so it is not valid."""
    if HOST not in headers:
        return None
    name, vm_id = (headers.get(each, b"").decode("latin-1") for each in (HOST, ID))
    time = headers.get(TIME, b"")
    seconds = int(time) if time.isdigit() and len(time) < 20 else 0
    return HostSignature(name, vm_id, seconds, headers.get(SIGNATURE, b""))


class AcceptedTimes(NamedTuple):
    """When a host daemon may have signed a request that arrives now.

    If the machine's clock has jumped, either time may be right: guests must not all be refused. The
    times between them are not.
    """

    now: int
    jumped: int

    def __contains__(self, time: object) -> bool:
        assert isinstance(time, int)
        near = SIGNED_SECONDS_MAX
        return abs(time - self.now) <= near or abs(time - self.jumped) <= near


def accepted_times(clock: Clock) -> AcceptedTimes:
    now = int(clock.now().timestamp())
    return AcceptedTimes(now, now + int(clock.jump_seconds))


def check_signed_time(headers: Mapping[bytes, bytes], clock: Clock) -> None:
    """Forbidden if a host daemon has signed too long ago. A long poll may take longer than that."""
    signed = read_host_signature(headers)
    if signed is not None and signed.time not in accepted_times(clock):
        raise Forbidden(
            "Forbidden. The signature is of another time; the clock of the host may differ from the"
            f" server's by {SIGNED_SECONDS_MAX} seconds"
        )


def find_signed_vm(signed: HostSignature, board: Board, tokens: Tokens | None) -> str:
    """The name of the VM; Forbidden unless it is on the host of the daemon that has signed.

    The token and the VM's host are looked up each time: a token may be revoked, a VM may move.
    """
    token = tokens.find_host_token(signed.token) if tokens is not None else None
    if token is None:
        raise Forbidden(f"Forbidden. {signed.token!r} is not a valid token of a host daemon")
    value = f"{signed.id} {signed.time}".encode("latin-1")
    if not _is_signature(signed.signature, value, token.digest.encode()):
        raise Forbidden("Forbidden. The signature does not match the instance id")
    name = _find_id(signed.id, board)
    if name not in board.hosts.get(token.host, ()):
        raise Forbidden(f"Forbidden. {signed.id} is not a VM on host {token.host}")
    return name


def identify(
    request: MetadataRequest,
    board: Board,
    config: Config,
    proxy_key: bytes,
    tokens: Tokens | None = None,
) -> ClientIdentity:
    """Forbidden if the client is not a VM of this fleet, or its signature is wrong."""
    is_signed = ID in request.headers or SIGNATURE in request.headers
    by_host = read_host_signature(request.headers)
    if by_host is not None:
        name = find_signed_vm(by_host, board, tokens)
    elif is_signed and Identify.PROXY in config.identify and not request.vm:
        name = _verify(request, board, proxy_key)
    else:
        # The origin of a forwarded request is unknown (protocol 3); only a signing proxy may
        # forward requests.
        if b"x-forwarded-for" in request.headers:
            raise Invalid("Bad request. X-Forwarded-For is not accepted")
        is_by_address = not request.vm and Identify.ADDRESS in config.identify
        if is_by_address and request.address in board.shared_addresses:
            raise Forbidden(
                f"Forbidden. Several VMs have the address {request.address}; expected forewarn"
                " hostd on their hosts, or --identify proxy"
            )
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
    if not _is_signature(request.headers.get(SIGNATURE, b""), value, key):
        raise Forbidden("Forbidden. The signature does not match the instance id")
    name = value.decode("latin-1")
    return _find_id(name, board) or name


def _is_signature(signature: bytes, value: bytes, key: bytes) -> bool:
    expected = hmac.digest(key, value, "sha256").hex().encode()
    return hmac.compare_digest(expected, signature.lower())


def _find_id(vm_id: str, board: Board) -> str:
    """The name of the VM with this id; empty if there is none."""
    if vm_id.lower() in board.shared_ids:
        raise Forbidden(f"Forbidden. Several VMs have the id {vm_id}")
    return board.ids.get(vm_id.lower(), "")
