"""How answers are read from the wire: whole, bounded, and refused where they are no HTTP."""

import pytest

from forewarn.conformance.check import Failed
from forewarn.conformance.raw_http import Answer, Endpoint, Line, encode
from forewarn.errors import Invalid
from tests.unit.conformance.canned import TIME, saying


def read(answer: bytes) -> Answer:
    with saying(answer) as endpoint, Line(endpoint, TIME) as line:
        line.send(b"GET / HTTP/1.1\r\n\r\n")
        return line.answer()


@pytest.mark.parametrize(
    ("head", "framing"),
    [
        (b"Content-Length: 2\r\n\r\n{}", "length"),
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", "chunked"),
        (b"\r\n{}", "end"),
    ],
)
def test_a_body_is_read_however_its_end_is_told(head: bytes, framing: str) -> None:
    """Mocks frame their answers in all three ways."""
    answer = read(b"HTTP/1.1 200 OK\r\nDate: now\r\n" + head)

    assert (answer.status, answer.body, answer.framing, answer.header("date")) == (
        200,
        b"{}",
        framing,
        "now",
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000,
    ],
)
def test_what_is_no_http_is_a_failure_that_says_what_came(answer: bytes) -> None:
    with pytest.raises(Failed, match=r"^expected .*; got "):
        read(answer)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://169.254.169.254", Endpoint("169.254.169.254", 80)),
        ("http://h:8080/", Endpoint("h", 8080)),
        ("http://[::1]:8080/lab/", Endpoint("::1", 8080, "/lab")),
        ("http://h/metadata/scheduledEvents", Endpoint("h", 80)),
    ],
)
def test_an_endpoint_is_a_host_a_port_and_what_stands_before_every_path(
    url: str, wanted: Endpoint
) -> None:
    assert Endpoint.parse(url) == wanted


@pytest.mark.parametrize(
    "url", ["", "169.254.169.254", "https://h", "http://", "http://h:x", "http://a@h", "http://h#x"]
)
def test_what_is_no_address_of_an_endpoint_is_refused(url: str) -> None:
    """HTTP only: the protocol has no TLS and no login."""
    with pytest.raises(Invalid, match="expected http://HOST"):
        Endpoint.parse(url)


def test_a_request_is_written_as_it_is_asked_for() -> None:
    assert (
        encode("POST", "/x", {"Host": "h"}, b"{}")
        == b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert encode("GET", "/x", {}, http="1.0") == b"GET /x HTTP/1.0\r\n\r\n"
