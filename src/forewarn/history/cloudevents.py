"""A history entry as a CloudEvent 1.0 in JSON, and the signature that tells a receiver whose it is.
Pure.

The signature is that of Standard Webhooks: `v1,` and the base64 of HMAC-SHA256 over
`id.timestamp.body`.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from datetime import datetime

import msgspec

from forewarn.engine.entry import Entry
from forewarn.errors import Invalid

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
SECRET_PREFIX = "whsec_"  # noqa: S105
SECRET_BYTES_MIN = 24
SECRETS_MAX = 5


class CloudEvent(msgspec.Struct, frozen=True):
    """The attributes that the specification names.

    `source` and `id` together are of one note, for ever.
    """

    specversion: str
    id: str
    source: str
    type: str
    subject: str
    time: datetime
    datacontenttype: str
    data: Entry


def cloud_event(identity: str, shown: Entry) -> CloudEvent:
    """What a webhook tells of an entry.

    `identity` is that of the store: another store numbers its notes from 1 too.
    """
    return CloudEvent(
        specversion="1.0",
        id=f"{identity}-{shown.number}",
        source=f"/forewarn/{identity}",
        type=f"forewarn.{_noun(shown)}.{shown.what}",
        subject=shown.event or shown.vm or shown.scope or "forewarn",
        time=shown.at,
        datacontenttype="application/json",
        data=shown,
    )


def encode(event: CloudEvent) -> bytes:
    return msgspec.json.encode(event)


def headers(event_id: str, body: bytes, at: datetime, secrets: Sequence[bytes]) -> dict[str, str]:
    """What goes with the body when it is sent at this moment: a signature for each secret, so that
    secrets can be changed.
    """
    seconds = str(int(at.timestamp()))
    signed = b".".join((event_id.encode(), seconds.encode(), body))
    signatures = (
        base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets
    )
    return {
        "content-type": CONTENT_TYPE,
        "webhook-id": event_id,
        "webhook-timestamp": seconds,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def parse_secrets(text: bytes, where: str) -> tuple[bytes, ...]:
    """The secrets of a file, one a line:

    `whsec_` and base64, or the bytes themselves. What is refused is not repeated.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(lines) <= SECRETS_MAX:
        raise Invalid(
            f"{where}: {len(lines)} secrets; 1 to {SECRETS_MAX} are accepted, one a line",
            file=where,
        )
    return tuple(_secret(line, where) for line in lines)


def _secret(line: bytes, where: str) -> bytes:
    secret = line
    if line.startswith(SECRET_PREFIX.encode()):
        try:
            secret = base64.b64decode(line[len(SECRET_PREFIX) :], validate=True)
        except binascii.Error as error:
            raise Invalid(
                f"{where}: what follows {SECRET_PREFIX} is not base64", file=where
            ) from error
    if len(secret) < SECRET_BYTES_MIN:
        raise Invalid(
            f"{where}: a secret of {len(secret)} bytes; expected at least {SECRET_BYTES_MIN}",
            file=where,
        )
    return secret


def _noun(shown: Entry) -> str:
    if shown.event:
        return "event"
    if shown.vm:
        return "vm"
    return "scope" if shown.scope else "service"
