"""HTTP as a guest reads it: a whole answer or a problem, never half of one."""

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
    """The answer in these pieces, after which the connection ends."""
    reader = Reader()
    for piece in (*pieces, b""):
        answer = reader.feed(piece)
        if answer is not None:
            return answer
    raise AssertionError("neither an answer nor a problem")


def sized(body: bytes, *headers: bytes) -> bytes:
    return (
        OK
        + b"".join(header + b"\r\n" for header in headers)
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )


def test_an_answer_with_a_length_is_read_and_the_connection_is_kept() -> None:
    assert read(sized(b"{}", b'ETag: "2"')) == Response(
        200, {"etag": '"2"', "content-length": "2"}, b"{}", is_last=False
    )


def test_an_answer_in_chunks_is_put_together() -> None:
    """With extensions and trailers, which mean nothing to us."""
    answer = read(CHUNKED + b"2\r\n{}\r\nA;x=y\r\n0123456789\r\n0\r\nDigest: x\r\n\r\n")

    assert (answer.body, answer.is_last) == (b"{}0123456789", False)


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    """Old servers do so; the connection cannot be used again."""
    answer = read(b"HTTP/1.0 200 OK\r\n\r\n{", b"}")

    assert (answer.body, answer.is_last) == (b"{}", True)


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_never_has_a_body_is_over_with_its_head(status: int) -> None:
    """Even if it names the length that a body would have."""
    answer = Reader().feed(b"HTTP/1.1 %d X\r\nContent-Length: 500\r\n\r\n" % status)

    assert answer is not None
    assert (answer.status, answer.body, answer.is_last) == (status, b"", False)


def test_a_provisional_answer_is_passed_over() -> None:
    assert read(b"HTTP/1.1 100 Continue\r\n\r\n" * INTERIM_MAX + sized(b"{}")).body == b"{}"


@pytest.mark.parametrize(
    "answer",
    [
        sized(b"{}", b"Connection: close"),
        sized(b"{}", b"Connection: Keep-Alive, Close"),
        sized(b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"),
        sized(b"{}") + b"HTTP/1.1 200 OK\r\n",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n") + b"2\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_a_connection_that_closes_or_says_too_much_is_not_used_again(answer: bytes) -> None:
    """What was left over would be taken for the answer to the next question."""
    assert read(answer).is_last


def test_a_repeated_header_is_joined_and_names_are_in_lower_case() -> None:
    assert read(sized(b"", b"X-One: a", b"x-one:  b ")).headers["x-one"] == "a, b"


def test_lines_may_end_without_a_carriage_return() -> None:
    """As HTTP asks of who reads."""
    assert read(sized(b"{}").replace(b"\r\n", b"\n")).body == b"{}"


@pytest.mark.parametrize(
    "answer",
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
def test_an_answer_that_was_cut_off_is_a_problem(answer: bytes) -> None:
    """Half a document has fewer events than the whole."""
    with pytest.raises(InvalidResponse, match="cut off"):
        read(answer)


@pytest.mark.parametrize(
    "answer",
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
def test_what_is_no_http_is_a_problem(answer: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read(answer)


def test_a_connection_that_ends_without_a_byte_is_no_answer() -> None:
    """It is told apart from half an answer: such a question may be asked again."""
    with pytest.raises(ConnectionFailed):
        Reader().feed(b"")


def test_the_largest_body_is_read_and_one_byte_more_is_refused_before_it_comes() -> None:
    assert len(read(sized(b"x" * BODY_BYTES_MAX)).body) == BODY_BYTES_MAX
    with pytest.raises(InvalidResponse, match=str(BODY_BYTES_MAX)):
        Reader().feed(OK + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1))


def test_a_body_that_grows_without_end_is_refused() -> None:
    with pytest.raises(InvalidResponse, match=str(BODY_BYTES_MAX)):
        read(OK + b"\r\n", *[b"x" * 65536] * 17)
    with pytest.raises(InvalidResponse, match=str(BODY_BYTES_MAX)):
        read(CHUNKED, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 17)


def test_a_head_that_grows_without_end_is_refused() -> None:
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
def test_an_endpoint_is_a_url(url: str, endpoint: Endpoint) -> None:
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
        "http://host/?x",
        "http://host/#x",
        "http://host/a b",
        "http://host/\r\nX: y",
        "http://[::1",
        f"http://{'a' * 64}",
    ],
)
def test_what_is_no_plain_http_url_is_refused(url: str) -> None:
    """The protocol has neither TLS nor passwords, and a line break would smuggle a header in."""
    with pytest.raises(Invalid, match="expected a URL"):
        Endpoint.parse(url)


def test_a_question_is_written_as_http_says() -> None:
    endpoint = Endpoint.parse("http://[::1]:8080/as/web-0")

    assert encode(endpoint, "POST", "/x", {"Metadata": "true"}, b"{}") == (
        b"POST /as/web-0/x HTTP/1.1\r\nHost: [::1]:8080\r\nMetadata: true\r\nContent-Length: 2\r\n\r\n{}"
    )
