"""A document as ready bytes: all that follows the Date and Server lines of a 200.

Made once per change and api-version.
"""

from collections.abc import Iterable

from forewarn.core.fleet import Scope
from forewarn.engine.board import PublishedScope
from forewarn.wire import document
from forewarn.wire.versions import Version

Header = tuple[bytes, bytes]

BLANK_LINE = b"\r\n\r\n"
CONTENT_TYPE: Header = (b"content-type", b"application/json; charset=utf-8")


def page(place: PublishedScope, version: Version, *, iso_not_before: bool) -> bytes:
    key = f"{version.name} iso" if iso_not_before else version.name
    found = place.pages.get(key)
    if found is None:
        body = document.body(place.scope, version, iso_not_before=iso_not_before)
        found = place.pages[key] = lines(headers(place.scope, body)) + b"\r\n" + body
    return found


def body_of(page: bytes) -> bytes:
    return page.partition(BLANK_LINE)[2]


def headers(scope: Scope, body: bytes) -> tuple[Header, ...]:
    return CONTENT_TYPE, etag(scope), content_length(body)


def content_length(body: bytes) -> Header:
    return b"content-length", b"%d" % len(body)


def etag(scope: Scope) -> Header:
    return b"etag", document.etag(scope).encode()


def lines(headers: Iterable[Header]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)
