"""CloudEvents 1.0 and the signatures of Standard Webhooks."""

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.engine.entry import Entry
from forewarn.errors import Invalid
from forewarn.history.cloudevents import encode, headers, parse_secrets

AT = datetime(2030, 1, 31, 12, tzinfo=UTC)


def started() -> Entry:
    return Entry(
        number=42,
        at=AT,
        by="vm web-1",
        what=ChangeKind.STARTED,
        scope="web",
        event="E1",
        resources=("web-0",),
        detail="approved by web-1",
    )


def test_a_cloudevent_has_all_attributes_of_the_specification() -> None:
    """Receivers know the specification, not us."""
    event = json.loads(encode("7b1c", started()))

    assert event.pop("data")["detail"] == "approved by web-1"
    assert event == {
        "specversion": "1.0",
        "id": "7b1c-42",
        "source": "/forewarn/7b1c",
        "type": "forewarn.event.started",
        "subject": "E1",
        "time": "2030-01-31T12:00:00Z",
        "datacontenttype": "application/json",
    }


@pytest.mark.parametrize(
    ("fields", "type_", "subject"),
    [
        ({"event": "", "vm": "web-0", "what": ChangeKind.JOINED}, "forewarn.vm.joined", "web-0"),
        ({"event": "", "what": ChangeKind.ENABLED}, "forewarn.scope.enabled", "web"),
        (
            {"event": "", "scope": "", "what": ChangeKind.TOKEN_CREATED},
            "forewarn.service.token-created",
            "forewarn",
        ),
    ],
)
def test_type_and_subject_name_what_changed(
    fields: dict[str, object], type_: str, subject: str
) -> None:
    event = json.loads(encode("7b1c", replace(started(), **fields)))

    assert (event["type"], event["subject"]) == (type_, subject)


def test_the_signature_covers_id_timestamp_and_body() -> None:
    """None of the three can be replaced, as Standard Webhooks requires."""
    secret = b"MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = headers("7b1c-42", b'{"a":1}', AT, [secret])

    seconds = int(AT.timestamp())
    expected = hmac.new(secret, f'7b1c-42.{seconds}.{{"a":1}}'.encode(), hashlib.sha256).digest()
    assert signed == {
        "content-type": "application/cloudevents+json; charset=utf-8",
        "webhook-id": "7b1c-42",
        "webhook-timestamp": str(seconds),
        "webhook-signature": f"v1,{base64.b64encode(expected).decode()}",
    }


def test_the_signature_matches_a_published_example() -> None:
    """Our own reading of the specification proves nothing."""
    (secret,) = parse_secrets(b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n", "secret")
    at = datetime.fromtimestamp(1614265330, UTC)

    signed = headers("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', at, [secret])
    assert signed["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_every_secret_of_the_file_signs() -> None:
    """A secret can be replaced: the receiver learns the new one while the old one is valid."""
    secrets = parse_secrets(
        b"first secret of twenty-four\n\nsecond secret of twenty-four\n", "secret"
    )

    assert len(headers("1", b"", AT, secrets)["webhook-signature"].split(" ")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "0 secrets; 1 to 5"),
        (b"\n".join([b"x" * 30] * 6), "6 secrets; 1 to 5"),
        (b"too short", "9 bytes; expected at least 24"),
        (b"whsec_" + base64.b64encode(b"x" * 23), "23 bytes"),
        (b"whsec_not*base64", "is not base64"),
    ],
)
def test_a_weak_secret_is_rejected_and_not_repeated(text: bytes, message: str) -> None:
    with pytest.raises(Invalid, match=message) as error:
        parse_secrets(text, "secret.txt")
    assert "too short" not in str(error.value)
    assert "not*base64" not in str(error.value)
