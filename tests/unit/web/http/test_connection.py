"""The error behind a parser's error.

The limits themselves are tested on real sockets, in `e2e`.
"""

import httptools
import pytest

from forewarn.errors import Invalid
from forewarn.web.http.head import translate
from forewarn.web.http_status import HeadTooLarge


class Raising:
    """A connection that finds something at the end of the headers."""

    def __init__(self, found: Exception) -> None:
        self._found = found

    def on_headers_complete(self) -> None:
        raise self._found


def error_from(data: bytes, found: Exception) -> httptools.HttpParserError:
    with pytest.raises(httptools.HttpParserError) as raised:
        httptools.HttpRequestParser(Raising(found)).feed_data(data)
    return raised.value


REQUEST = b"GET / HTTP/1.1\r\n\r\n"


def test_malformed_http_is_a_400() -> None:
    assert isinstance(translate(error_from(b"HELLO", KeyError())), Invalid)


def test_reached_connection_limit_is_counted() -> None:
    limit = HeadTooLarge("too large")
    assert translate(error_from(REQUEST, limit)) is limit


def test_request_target_that_is_not_a_url_is_rejected() -> None:
    assert isinstance(
        translate(error_from(REQUEST, httptools.HttpParserInvalidURLError("no"))), Invalid
    )


def test_bug_in_a_callback_is_not_a_client_error() -> None:
    """A 400 would hide it for ever."""
    with pytest.raises(KeyError):
        translate(error_from(REQUEST, KeyError("ours")))
