"""Reading responses from the wire: complete, with limits, and Failed if they are not HTTP."""

import pytest

from forewarn.conformance.check import Failed
from forewarn.conformance.raw_http import RawConnection, RawResponse
from tests.unit.conformance.scripted_endpoint import CLOCK, serving

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def read(response: bytes) -> RawResponse:
    with serving(response) as endpoint, RawConnection(endpoint, CLOCK) as connection:
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        return connection.receive()


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"\r\n{}",
    ],
)
def test_body_is_read_with_every_framing(rest: bytes) -> None:
    """Mocks use a length, chunks, or the end of the connection."""
    response = read(OK + b"Date: now\r\n" + rest)

    assert (response.http, response.status, response.body) == ("HTTP/1.1", 200, b"{}")
    assert response.header("date") == "now"


def test_pipelined_responses_are_read_one_by_one() -> None:
    """An interim response counts as one."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    final = OK + b"Content-Length: 2\r\n\r\n{}"
    with (
        serving(interim + final + b"rest") as endpoint,
        RawConnection(endpoint, CLOCK) as connection,
    ):
        connection.send(b"GET / HTTP/1.1\r\n\r\n")

        assert [connection.receive().status for _ in range(2)] == [100, 200]
        assert connection.receive_rest() == b"rest"


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        OK + b"no header\r\n\r\n",
        OK + b"Content-Length: two\r\n\r\n{}",
        OK + b"Content-Length: 3\r\n\r\n{}",
        OK + b"Content-Length: 99999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        CHUNKED + b"x\r\n",
        CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
        OK + b"A: " + b"a" * 70_000,
    ],
)
def test_non_http_response_fails_with_what_was_received(response: bytes) -> None:
    with pytest.raises(Failed, match=r"^expected .*; got "):
        read(response)
