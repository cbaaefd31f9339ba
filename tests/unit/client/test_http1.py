"""HTTP/1.1 as a guest reads it: a whole response or an error, never half of one."""

import pytest

from forewarn.client import ConnectionFailed, InvalidResponse
from forewarn.client.http1 import (
    BODY_BYTES_MAX,
    INTERIM_MAX,
    LINE_BYTES_MAX,
    LINES_MAX,
    Endpoint,
    Reader,
    Response,
    encode,
)
from forewarn.errors import Invalid

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def read(*pieces: bytes) -> Response:
    """The response in these pieces, after which the connection ends."""
    reader = Reader()
    for piece in (*pieces, b""):
        response = reader.feed(piece)
        if response is not None:
            return response
    raise AssertionError("neither a response nor an error")


def sized(body: bytes, *headers: bytes) -> bytes:
    return (
        OK
        + b"".join(header + b"\r\n" for header in headers)
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )


def test_response_with_a_length_keeps_the_connection() -> None:
    assert read(sized(b"{}", b'ETag: "2"')) == Response(
        200, {"etag": '"2"', "content-length": "2"}, b"{}", is_last=False
    )


def test_chunked_response_is_joined() -> None:
    """Extensions and trailers are ignored."""
    response = read(CHUNKED + b"2\r\n{}\r\nA;x=y\r\n0123456789\r\n0\r\nDigest: x\r\n\r\n")

    assert (response.body, response.is_last) == (b"{}0123456789", False)


def test_response_without_a_length_ends_with_the_connection() -> None:
    """As from old servers; the connection cannot be reused."""
    response = read(b"HTTP/1.0 200 OK\r\n\r\n{", b"}")

    assert (response.body, response.is_last) == (b"{}", True)


@pytest.mark.parametrize("status", [204, 304])
def test_bodiless_response_ends_with_its_head(status: int) -> None:
    """Even with the length that a body would have."""
    response = Reader().feed(b"HTTP/1.1 %d X\r\nContent-Length: 500\r\n\r\n" % status)

    assert response is not None
    assert (response.status, response.body, response.is_last) == (status, b"", False)


def test_interim_response_is_skipped() -> None:
    assert read(b"HTTP/1.1 100 Continue\r\n\r\n" * INTERIM_MAX + sized(b"{}")).body == b"{}"


@pytest.mark.parametrize(
    "response",
    [
        sized(b"{}", b"Connection: close"),
        sized(b"{}", b"Connection: Keep-Alive, Close"),
        sized(b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"),
        sized(b"{}") + b"HTTP/1.1 200 OK\r\n",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n") + b"2\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_closing_or_ambiguous_connection_is_not_reused(response: bytes) -> None:
    """The rest would be taken for the response to the next request."""
    assert read(response).is_last


def test_repeated_headers_are_joined_and_names_lower_cased() -> None:
    assert read(sized(b"", b"X-One: a", b"x-one:  b ")).headers["x-one"] == "a, b"


def test_lines_may_end_with_a_bare_newline() -> None:
    """RFC 9112 recommends that readers accept it."""
    assert read(sized(b"{}").replace(b"\r\n", b"\n")).body == b"{}"


@pytest.mark.parametrize(
    "response",
    [
        sized(b"{}")[:-1],
        sized(b"{}")[:-2],
        OK + b"Content-Length: 5\r\n\r\n{}",
        OK + b"Content-Le",
        OK,
        b"H",
        CHUNKED,
        CHUNKED + b"5\r\n{}",
        CHUNKED + b"2\r\n{}\r\n",
        CHUNKED + b"2\r\n{}\r\n0\r\n",
    ],
)
def test_truncated_response_is_an_error(response: bytes) -> None:
    """Half a document has fewer events than the whole."""
    with pytest.raises(InvalidResponse, match="cut off"):
        read(response)


@pytest.mark.parametrize(
    "response",
    [
        b"{}\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (INTERIM_MAX + 1),
        OK + b"no colon\r\n\r\n",
        OK + b": no name\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: two\r\n\r\n{}",
        OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        CHUNKED + b"x\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"1\r\n{}\r\n",
    ],
)
def test_invalid_http_is_an_error(response: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read(response)


def test_connection_closed_before_a_byte_is_a_failed_connection() -> None:
    """Unlike half a response: such a request may be repeated."""
    with pytest.raises(ConnectionFailed):
        Reader().feed(b"")


def test_body_over_the_limit_is_rejected_before_it_arrives() -> None:
    assert len(read(sized(b"x" * BODY_BYTES_MAX)).body) == BODY_BYTES_MAX
    with pytest.raises(InvalidResponse, match=str(BODY_BYTES_MAX)):
        Reader().feed(OK + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1))


def test_endless_body_is_rejected() -> None:
    with pytest.raises(InvalidResponse, match=str(BODY_BYTES_MAX)):
        read(OK + b"\r\n", *[b"x" * 65536] * 17)
    with pytest.raises(InvalidResponse, match=str(BODY_BYTES_MAX)):
        read(CHUNKED, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 17)


def test_endless_head_is_rejected() -> None:
    with pytest.raises(InvalidResponse, match=str(LINE_BYTES_MAX)):
        read(OK, *[b"x" * 1024] * 10)
    with pytest.raises(InvalidResponse, match=str(LINES_MAX)):
        read(OK + b"X: y\r\n" * (LINES_MAX + 1))


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://169.254.169.254", Endpoint("169.254.169.254", 80, "")),
        ("http://127.0.0.1:8080/", Endpoint("127.0.0.1", 8080, "")),
        ("HTTP://host/as/web-0", Endpoint("host", 80, "/as/web-0")),
        ("http://[fd00::1]:81", Endpoint("fd00::1", 81, "")),
    ],
)
def test_endpoint_is_parsed_from_a_url(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(url) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1",
        "https://host",
        "ftp://host",
        "http://",
        "http://user@host",
        "http://host:port",
        "http://host:99999",
        "http://host:0",
        "http://host/?x",
        "http://host/#x",
        "http://host/a b",
        "http://host/\r\nX: y",
        "http://[::1",
        f"http://{'a' * 64}",
    ],
)
def test_invalid_endpoint_url_is_rejected(url: str) -> None:
    """The protocol has neither TLS nor passwords, and a line break could inject a header."""
    with pytest.raises(Invalid, match="expected a URL"):
        Endpoint.parse(url)


def test_request_is_encoded_as_given() -> None:
    """The conformance checks send headers and versions that a client would not."""
    post = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"

    assert encode("POST", "/x", {"Host": "h"}, b"{}") == post
    assert encode("GET", "/x", {}, http="1.0") == b"GET /x HTTP/1.0\r\n\r\n"


def test_reader_keeps_the_raw_head_and_what_follows() -> None:
    """The conformance checks look at both."""
    reader = Reader()
    response = reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}next")

    assert response is not None
    assert response.head == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
    assert reader.unread == b"next"


def test_interim_response_is_returned_on_request() -> None:
    response = Reader(wants_interim=True).feed(b"HTTP/1.1 100 Continue\r\n\r\n")

    assert response is not None
    assert response.status == 100


def test_response_to_head_has_no_body() -> None:
    response = Reader(expects_body=False).feed(sized(b"{}")[:-2])

    assert response is not None
    assert (response.body, response.headers["content-length"]) == (b"", "2")
