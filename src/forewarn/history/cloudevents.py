"""History entries as CloudEvents 1.0 in JSON, and the signature that a receiver can check. Pure.

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


def event_id(identity: str, entry: Entry) -> str:
    """Numbers are unique within a store, so the id has the store's identity."""
    return f"{identity}-{entry.number}"


def encode(identity: str, entry: Entry) -> bytes:
    """The CloudEvent of an entry. Its subject is what the entry names first."""
    subjects = {"event": entry.event, "vm": entry.vm, "scope": entry.scope, "service": "forewarn"}
    noun = next(noun for noun, name in subjects.items() if name)
    return msgspec.json.encode(
        {
            "specversion": "1.0",
            "id": event_id(identity, entry),
            "source": f"/forewarn/{identity}",
            "type": f"forewarn.{noun}.{entry.what}",
            "subject": subjects[noun],
            "time": entry.at,
            "datacontenttype": "application/json",
            "data": entry,
        }
    )


def headers(message_id: str, body: bytes, at: datetime, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers of a request at this time. Each secret signs, so that secrets can be rotated."""
    seconds = str(int(at.timestamp()))
    signed = b".".join((message_id.encode(), seconds.encode(), body))
    signatures = (
        base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets
    )
    return {
        "content-type": CONTENT_TYPE,
        "webhook-id": message_id,
        "webhook-timestamp": seconds,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def parse_secrets(text: bytes, where: str) -> tuple[bytes, ...]:
    """The secrets of a file, one per line: `whsec_` and base64, or the bytes themselves.

    Error messages do not repeat them.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(lines) <= SECRETS_MAX:
        raise Invalid(
            f"{where}: {len(lines)} secrets; 1 to {SECRETS_MAX} are accepted, one per line",
            file=where,
        )
    return tuple(_parse_secret(line, where) for line in lines)


def _parse_secret(line: bytes, where: str) -> bytes:
    secret = line
    if line.startswith(SECRET_PREFIX.encode()):
        try:
            secret = base64.b64decode(line[len(SECRET_PREFIX) :], validate=True)
        except binascii.Error as error:
            raise Invalid(
                f"{where}: the text after {SECRET_PREFIX} is not base64", file=where
            ) from error
    if len(secret) < SECRET_BYTES_MIN:
        raise Invalid(
            f"{where}: a secret of {len(secret)} bytes; expected at least {SECRET_BYTES_MIN}",
            file=where,
        )
    return secret
