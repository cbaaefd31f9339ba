"""The POST body, as clients in the field really send it."""

import pytest

from forewarn.errors import Invalid
from forewarn.wire.approval import parse

SHAPE = '{"StartRequests":[{"EventId":"<id>"}]}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"StartRequests":[{"EventId":"4CAEA225"}]}',
        b'{"StartRequests": [{"EventId": "4caea225"}]}\n',
        b'{"DocumentIncarnation":"5","StartRequests":[{"EventId":"4CAEA225"}]}',
        b'{"DocumentIncarnation":5,"StartRequests":[{"EventId":"4CAEA225"}]}',
        b'{"DocumentIncarnation":[{"odd":null}],"StartRequests":[{"EventId":"4CAEA225"}]}',
        b'{"StartRequests":[{"EventId":"4CAEA225","EventType":"Reboot","NotBefore":null}],"Comment":""}',
        b'\xef\xbb\xbf{"StartRequests":[{"EventId":"4CAEA225"}]}',
        b'{"StartRequests":[{"EventId":"4CAEA225"},{"EventId":"4caea225"}]}',
        b'{"startRequests":[{"eventId":"4CAEA225"}]}',
        b'{"StartRequests":[{"EventId":"4CAEA225"}],"DocumentIncarnation":1e999}',
        b'{"STARTREQUESTS":[{"eventid":"4CAEA225"}]}',
        b'{"StartRequests":[{"EventId":"4CAEA225"}],"Event":{"EventId":1,"eventid":2}}',
    ],
)
def test_every_known_client_body_is_accepted(body: bytes) -> None:
    """The incarnation came as string, as number and not at all;

    PowerShell writes a byte order mark, .NET camelCase; ids differ in case only. Members that are
    not read may hold anything.
    """
    assert parse(body) == ("4CAEA225",)


def test_several_ids_keep_their_order() -> None:
    """Pacemaker sends a whole set; the answer is all or nothing, in a fixed order."""
    assert parse(
        b'{"StartRequests":[{"EventId":"b"},{"EventId":"a"},{"EventId":"B"},{"EventId":"c"}]}'
    ) == ("B", "A", "C")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Input data was truncated"),
        (b"{", "Input data was truncated"),
        (b"StartRequests=1", "JSON is malformed: invalid character (byte 0)"),
        (
            b'{"StartRequests":[{"EventId":"A"}]} x',
            "JSON is malformed: trailing characters (byte 37)",
        ),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b"{}", "Object missing required field `StartRequests`"),
        (b'{"startrequest":[{"EventId":"A"}]}', "Object missing required field `StartRequests`"),
        (
            b'{"StartRequests":[{"EventId":"A"}],"startRequests":[{"EventId":"B"}]}',
            "`StartRequests` and `startRequests` are the same member",
        ),
        (
            b'{"startRequests":[{"eventid":"A","EventID":"A"}]}',
            "`eventid` and `EventID` are the same member",
        ),
        (b'{"StartRequests":null}', "Expected `array`, got `null` - at `$.StartRequests`"),
        (
            b'{"StartRequests":{"EventId":"A"}}',
            "Expected `array`, got `object` - at `$.StartRequests`",
        ),
        (b'{"StartRequests":[]}', "Expected `array` of length >= 1 - at `$.StartRequests`"),
        (b'{"StartRequests":["A"]}', "Expected `object`, got `str` - at `$.StartRequests[0]`"),
        (
            b'{"StartRequests":[{"EventId":"A"},{}]}',
            "Object missing required field `EventId` - at `$.StartRequests[1]`",
        ),
        (
            b'{"StartRequests":[{"Event":"A"}]}',
            "Object missing required field `EventId` - at `$.StartRequests[0]`",
        ),
        (
            b'{"StartRequests":[{"EventId":1}]}',
            "Expected `str`, got `int` - at `$.StartRequests[0].EventId`",
        ),
        (
            b'{"StartRequests":[{"EventId":""}]}',
            "Expected `str` of length >= 1 - at `$.StartRequests[0].EventId`",
        ),
    ],
)
def test_malformed_body_error_says_what_was_expected(body: bytes, reason: str) -> None:
    """The one thing a person debugging a guest sees is this message."""
    with pytest.raises(Invalid) as refused:
        parse(body)

    assert refused.value.message == f"Bad request. Expected {SHAPE}; {reason}"


def test_an_id_of_64_characters_is_read_and_one_of_65_is_not() -> None:
    """Everything has a limit; a GUID has 36."""
    assert parse(b'{"StartRequests":[{"EventId":"%s"}]}' % (b"A" * 64)) == ("A" * 64,)
    with pytest.raises(Invalid, match="length <= 64"):
        parse(b'{"StartRequests":[{"EventId":"%s"}]}' % (b"A" * 65))


def test_a_thousand_entries_are_read_and_one_more_is_not() -> None:
    """A scope never has as many events; a body that long is no approval."""
    assert parse(b'{"StartRequests":[%s]}' % b",".join([b'{"EventId":"A"}'] * 1000)) == ("A",)
    with pytest.raises(Invalid, match="length <= 1000"):
        parse(b'{"StartRequests":[%s]}' % b",".join([b'{"EventId":"A"}'] * 1001))


def test_utf16_is_refused() -> None:
    """JSON on the wire is UTF-8 (RFC 8259); no client was seen sending anything else."""
    with pytest.raises(Invalid, match="'utf-8' codec can't decode byte 0xff in position 0"):
        parse('{"StartRequests":[{"EventId":"A"}]}'.encode("utf-16"))


def test_deeply_nested_json_is_refused() -> None:
    """A guest must not be able to stop the server with brackets."""
    with pytest.raises(Invalid, match="recursion depth exceeded"):
        parse(b'{"DocumentIncarnation":' + b"[" * 100_000)


@pytest.mark.parametrize("number", [b"0", b"0.0", b"1e999"])
def test_event_id_that_is_a_number_is_refused(number: bytes) -> None:
    """It must not become a text by the way in which numbers are read."""
    with pytest.raises(Invalid):
        parse(b'{"StartRequests":[{"EventId":%b}]}' % number)
