"""The document as a whole: its form, incarnation, headers and ETag, and waiting for a change."""

import re
from itertools import pairwise

from forewarn.conformance.check import MUST, SHOULD, Need, check, expect, expect_equal, rule
from forewarn.conformance.checks.request import CLOSE, receive_last
from forewarn.conformance.expectation import a_document, media_type, sends, served, status
from forewarn.conformance.raw_http import METADATA, JsonObject, RawResponse, Request, is_list_of
from forewarn.conformance.session import Session
from forewarn.conformance.spec import HTTP_DATE, JSON, VERSIONS

POLLS = 5
MEMBERS = ["DocumentIncarnation", "Events"]
WAIT_SECONDS = 1
LONG_WAIT_SECONDS = 10
TOLERANCE_SECONDS = 0.05
OTHER_ETAG = '"987654321"'
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_QUOTED = re.compile(r'(?:W/)?"[!#-~]*"')


def is_integer(value: object) -> bool:
    return type(value) is int


def _is_object(response: RawResponse) -> None:
    status(200)(response)
    response.object()


@rule(MUST, "PROTOCOL 3: zero-byte bodies were seen (NTH #70)", sends(_is_object))
def document_is_a_json_object() -> None:
    """A 200 without a body, or with anything but an object, broke the AKS termination handler."""


@check(MUST, "PROTOCOL 2.1: every capture")
def document_has_two_members_in_order(session: Session) -> None:
    """Every capture has just these two in this order, and scripts extract them as text."""
    for version in VERSIONS:
        members = list(session.send(Request(version=version)).object())
        expect_equal(f"the members in {version} to be", members, MEMBERS)


@check(MUST, "PROTOCOL 2.1: compact, one line")
def document_is_compact(session: Session) -> None:
    """Real bodies are one line without spaces or a final newline; shell scripts match on that."""
    for version in VERSIONS:
        response = session.send(Request(version=version))
        is_compact = not re.search(rb"\s", _STRING.sub(b"", response.body))
        expect(is_compact, "JSON without white space between its parts", response)


@check(MUST, "PROTOCOL 2.2: DocumentIncarnation")
def document_incarnation_is_an_integer(session: Session) -> None:
    """Go clients decode it into an int; a string or a fraction breaks them."""
    incarnation = session.send(Request()).object()["DocumentIncarnation"]
    expect(is_integer(incarnation), "a DocumentIncarnation that is an integer", incarnation)


@check(SHOULD, "PROTOCOL 2.6: sentinels")
def document_incarnation_is_at_least_1(session: Session) -> None:
    """0 and -1 mean `nothing seen yet` to clients: they would miss the first event."""
    incarnation = session.send(Request()).object()["DocumentIncarnation"]
    is_positive = is_integer(incarnation) and incarnation >= 1
    expect(is_positive, "a DocumentIncarnation of at least 1", incarnation)


@check(MUST, "PROTOCOL 2.2")
def document_events_is_a_list_of_objects(session: Session) -> None:
    """Every client loops over it, also when it is empty: never null, never missing."""
    events = session.send(Request()).object()["Events"]
    expect(is_list_of(JsonObject, events), "a list of objects", events)


@check(MUST, "PROTOCOL 2.6: not on mere polling")
def document_incarnation_stays_while_nothing_changes(session: Session) -> None:
    """Clients act on every new incarnation; one that counts polls keeps them busy for nothing."""
    for _ in range(POLLS):
        with session.expect_unchanged():
            pass


@check(MUST, "PROTOCOL 2.2: same number, same content")
def document_of_the_same_incarnation_is_the_same(session: Session) -> None:
    """Clients skip a document whose incarnation they know."""
    for earlier, later in pairwise(session.document() for _ in range(POLLS)):
        is_same = earlier.response.body == later.response.body
        is_other = earlier.incarnation != later.incarnation
        expect(is_same or is_other, f"{earlier.response} again", later)


@rule(MUST, "PROTOCOL 3: Content-Type (DASK)", sends(media_type(JSON)))
def document_is_application_json() -> None:
    """aiohttp parses JSON of no other type, so neither does dask-cloudprovider."""


@check(SHOULD, "PROTOCOL 3: captured headers of IMDS")
def document_has_charset_utf_8(session: Session) -> None:
    """Old PowerShell assumes Latin-1 without a charset."""
    content_type = session.send(Request()).header("content-type").replace(" ", "").lower()
    expect("charset=utf-8" in content_type, "a Content-Type with charset=utf-8", content_type)


@check(MUST, "PROTOCOL 3: captured headers of IMDS")
def document_content_length_is_exact(session: Session) -> None:
    """Clients that reuse a connection count bytes: one too many corrupts the next response."""
    headers = receive_last(session, CLOSE).headers
    has_length = "content-length" in headers and "transfer-encoding" not in headers
    expect(has_length, "a Content-Length", dict(headers))


@check(MUST, "PROTOCOL 3: captured headers of IMDS")
def response_has_a_date(session: Session) -> None:
    """A client on a VM with a wrong clock can still compute how far away NotBefore is."""
    date = session.send(Request()).header("date")
    expect(HTTP_DATE.fullmatch(date), "a Date as 'Thu, 22 Jul 2021 04:50:17 GMT'", date)


@check(SHOULD, "PROTOCOL 10: Server header")
def response_has_a_server_header(session: Session) -> None:
    """It shows which software responded, which helps to debug a fleet."""
    expect(session.send(Request()).header("server"), "a Server header", None)


def _etag(session: Session) -> str:
    response = session.send(Request())
    expect(response.header("etag"), "an ETag header", dict(response.headers))
    return response.header("etag")


def _unless(etags: str, **headers: str) -> Request:
    return Request(headers={**METADATA, "If-None-Match": etags, **headers})


@rule(MUST, "PROTOCOL 2.7 (NODE)", _etag)
def etag_is_sent() -> None:
    """Microsoft's Node client stores the ETag of every response and sends it with the next poll."""


@check(SHOULD, "RFC 9110 8.8.3")
def etag_is_quoted(session: Session) -> None:
    """HTTP libraries and caches drop an ETag without quotes."""
    etag = _etag(session)
    expect(_QUOTED.fullmatch(etag), "an ETag in quotes", etag)


@check(SHOULD, "PROTOCOL 10: ETag")
def etag_is_the_incarnation(session: Session) -> None:
    """The article on Terminate calls DocumentIncarnation an ETag."""
    for document in map(session.document, VERSIONS):
        expect_equal("the ETag", document.response.header("etag"), f'"{document.incarnation}"')


@check(MUST, "PROTOCOL 2.7 (NODE)")
def etag_known_is_304(session: Session) -> None:
    """Microsoft's Node client needs 304 for `nothing new`, or it handles events at every poll."""
    session.send(_unless(_etag(session)), status(304))


@check(MUST, "RFC 9110 15.4.5")
def etag_304_has_no_body(session: Session) -> None:
    """A body after a 304 would be read as the beginning of the next response."""
    status(304)(receive_last(session, _unless(_etag(session), Connection="close")))


@check(SHOULD, "RFC 9110 15.4.5")
def etag_304_repeats_the_tag(session: Session) -> None:
    """Microsoft's Node client stores the ETag of every response: a 304 without one clears it."""
    etag = _etag(session)
    expect_equal("the ETag of the 304", session.send(_unless(etag)).header("etag"), etag)


@rule(MUST, "PROTOCOL 2.7 (NODE begins with 0)", served(_unless("0")))
def etag_0_gives_the_document() -> None:
    """Microsoft's Node client sends If-None-Match: 0 before it has seen anything."""


@rule(MUST, "RFC 9110 13.1.2", served(_unless(OTHER_ETAG)))
def etag_of_another_document_gives_the_document() -> None:
    """A client with an old ETag wants the new document."""


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_without_quotes_is_304(session: Session) -> None:
    """Shell scripts lose the quotes."""
    session.send(_unless(_etag(session).strip('"')), status(304))


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_as_weak_is_304(session: Session) -> None:
    """Proxies that recompress make an ETag weak."""
    session.send(_unless(f"W/{_etag(session)}"), status(304))


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_among_others_is_304(session: Session) -> None:
    """HTTP allows a client to send all ETags that it has."""
    session.send(_unless(f"{OTHER_ETAG}, {_etag(session)}"), status(304))


@check(MUST, "PROTOCOL 2.7", Need.CONTROL)
def etag_changes_with_the_document(session: Session) -> None:
    """A client with the old ETag must not get a 304."""
    before = _etag(session)
    session.create_shown()
    session.send(_unless(before), a_document)
    after = _etag(session)
    expect(after != before, "another ETag after an event was announced", after)


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N")
def wait_holds_the_response(session: Session) -> None:
    """Waiting instead of polling: a VM learns of a change immediately, with fewer requests."""
    response = session.send(_unless(_etag(session), Prefer=f"wait={WAIT_SECONDS}"), status(304))
    was_held = response.seconds > WAIT_SECONDS - TOLERANCE_SECONDS
    expect(was_held, f"a response after {WAIT_SECONDS} s", f"{response.seconds:.2f} s")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N; RFC 7240 3")
def wait_sends_preference_applied(session: Session) -> None:
    """A client that knows its preference was applied need not pause before the next request."""
    response = session.send(_unless(_etag(session), Prefer=f"wait={WAIT_SECONDS}"))
    expect_equal("Preference-Applied", response.header("preference-applied"), "wait=1")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N")
def wait_needs_a_known_etag(session: Session) -> None:
    """A client that has no document yet wants it now."""
    request = Request(headers={**METADATA, "Prefer": f"wait={LONG_WAIT_SECONDS}"})
    response = session.send(request, a_document, seconds=LONG_WAIT_SECONDS * 2)
    is_immediate = response.seconds < WAIT_SECONDS
    expect(is_immediate, "an immediate response", f"{response.seconds:.2f} s")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N", Need.CONTROL)
def wait_ends_with_the_change(session: Session) -> None:
    """A short notice is worth little to a VM that learns of it a minute late."""
    etag, before = _etag(session), session.document()
    with session.connect(_unless(etag, Prefer=f"wait={LONG_WAIT_SECONDS}")) as connection:
        session.clock.sleep(TOLERANCE_SECONDS)
        session.create()
        response = connection.receive(seconds=LONG_WAIT_SECONDS * 2)
    is_new = a_document(response).incarnation != before.incarnation
    expect(is_new, "the document after the change", response)
    is_prompt = response.seconds < LONG_WAIT_SECONDS / 2
    expect(is_prompt, "a response when the event was announced", f"{response.seconds:.2f} s")
