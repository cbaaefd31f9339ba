"""The document as a whole: its form, incarnation, headers and ETag, and waiting for a change."""

import re
from itertools import pairwise

from forewarn.conformance.check import MUST, SHOULD, Need, check, expect, expect_equal
from forewarn.conformance.raw_http import JsonObject, RawResponse, expect_document, expect_status
from forewarn.conformance.session import METADATA, Session
from forewarn.conformance.spec import HTTP_DATE, VERSIONS

POLLS = 5
MEMBERS = ["DocumentIncarnation", "Events"]
CLOSE = {**METADATA, "Connection": "close"}
WAIT_SECONDS = 1
LONG_WAIT_SECONDS = 10
TOLERANCE_SECONDS = 0.05
OTHER_ETAG = '"987654321"'
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_QUOTED = re.compile(r'(?:W/)?"[!#-~]*"')


@check(MUST, "PROTOCOL 3: zero-byte bodies were seen (NTH #70)")
def document_is_a_json_object(session: Session) -> None:
    """A 200 without a body, or with anything but an object, broke the AKS termination handler."""
    response = session.get()
    expect_status(response, 200)
    response.object()


@check(MUST, "PROTOCOL 2.1: every capture")
def document_has_two_members_in_order(session: Session) -> None:
    """Every capture has just these two in this order, and scripts extract them as text."""
    for version in VERSIONS:
        members = list(session.get(version=version).object())
        expect_equal(f"the members in {version} to be", members, MEMBERS)


@check(MUST, "PROTOCOL 2.1: compact, one line")
def document_is_compact(session: Session) -> None:
    """Real bodies are one line without spaces or a final newline; shell scripts match on that."""
    for version in VERSIONS:
        response = session.get(version=version)
        is_compact = not re.search(rb"\s", _STRING.sub(b"", response.body))
        expect(is_compact, "JSON without white space between its parts", response)


@check(MUST, "PROTOCOL 2.2: DocumentIncarnation")
def document_incarnation_is_an_integer(session: Session) -> None:
    """Go clients decode it into an int; a string or a fraction breaks them."""
    incarnation = session.get().object()["DocumentIncarnation"]
    expect(type(incarnation) is int, "a DocumentIncarnation that is an integer", incarnation)


@check(SHOULD, "PROTOCOL 2.6: sentinels")
def document_incarnation_is_at_least_1(session: Session) -> None:
    """0 and -1 mean `nothing seen yet` to clients: they would miss the first event."""
    incarnation = session.get().object()["DocumentIncarnation"]
    is_positive = type(incarnation) is int and incarnation >= 1
    expect(is_positive, "a DocumentIncarnation of at least 1", incarnation)


@check(MUST, "PROTOCOL 2.2")
def document_events_is_a_list_of_objects(session: Session) -> None:
    """Every client loops over it, also when it is empty: never null, never missing."""
    events = session.get().object()["Events"]
    is_list = isinstance(events, list) and all(isinstance(each, JsonObject) for each in events)
    expect(is_list, "a list of objects", events)


@check(MUST, "PROTOCOL 2.6: not on mere polling")
def document_incarnation_stays_while_nothing_changes(session: Session) -> None:
    """Clients act on every new incarnation; one that counts polls keeps them busy for nothing."""
    for earlier, later in pairwise(session.document() for _ in range(POLLS)):
        is_stable = earlier.incarnation == later.incarnation or earlier.events != later.events
        expect(is_stable, f"DocumentIncarnation {earlier.incarnation} for the same events", later)


@check(MUST, "PROTOCOL 2.2: same number, same content")
def document_of_the_same_incarnation_is_the_same(session: Session) -> None:
    """Clients skip a document whose incarnation they know."""
    seen: dict[int, bytes] = {}
    for _ in range(POLLS):
        document = session.document()
        known = seen.setdefault(document.incarnation, document.response.body)
        expect(known == document.response.body, f"the bytes {known!r} again", document)


@check(MUST, "PROTOCOL 3: Content-Type (DASK)")
def document_is_application_json(session: Session) -> None:
    """aiohttp parses JSON of no other type, so neither does dask-cloudprovider."""
    expect_equal("the Content-Type", session.get().media_type, "application/json")


@check(SHOULD, "PROTOCOL 3: captured headers of IMDS")
def document_has_charset_utf_8(session: Session) -> None:
    """Old PowerShell assumes Latin-1 without a charset."""
    content_type = session.get().headers.get("content-type", "").replace(" ", "").lower()
    expect("charset=utf-8" in content_type, "a Content-Type with charset=utf-8", content_type)


@check(MUST, "PROTOCOL 3: captured headers of IMDS")
def document_content_length_is_exact(session: Session) -> None:
    """Clients that reuse a connection count bytes: one too many corrupts the next response."""
    with session.connect() as connection:
        connection.send(session.request(headers=CLOSE))
        headers = connection.receive().headers
        has_length = "content-length" in headers and "transfer-encoding" not in headers
        expect(has_length, "a Content-Length", dict(headers))
        rest = connection.receive_rest()
        expect_equal("the rest after Content-Length bytes to be", rest, b"")


@check(MUST, "PROTOCOL 3: captured headers of IMDS")
def response_has_a_date(session: Session) -> None:
    """A client on a VM with a wrong clock can still compute how far away NotBefore is."""
    date = session.get().header("date") or ""
    expect(bool(HTTP_DATE.fullmatch(date)), "a Date as 'Thu, 22 Jul 2021 04:50:17 GMT'", date)


@check(SHOULD, "PROTOCOL 10: Server header")
def response_has_a_server_header(session: Session) -> None:
    """It tells which software responded, which helps to debug a fleet."""
    expect(bool(session.get().header("server")), "a Server header", None)


def _etag(session: Session) -> str:
    response = session.get()
    etag = response.header("etag") or ""
    expect(bool(etag), "an ETag header", dict(response.headers))
    return etag


def _get_unless(session: Session, etags: str, **headers: str) -> RawResponse:
    return session.get(headers={**METADATA, "If-None-Match": etags, **headers})


@check(MUST, "PROTOCOL 2.7 (NODE)")
def etag_is_sent(session: Session) -> None:
    """Microsoft's Node client stores the ETag of every response and sends it with the next poll."""
    _etag(session)


@check(SHOULD, "RFC 9110 8.8.3")
def etag_is_quoted(session: Session) -> None:
    """HTTP libraries and caches drop an ETag without quotes."""
    etag = _etag(session)
    expect(bool(_QUOTED.fullmatch(etag)), "an ETag in quotes", etag)


@check(SHOULD, "PROTOCOL 10: ETag")
def etag_is_the_incarnation(session: Session) -> None:
    """The article on Terminate calls DocumentIncarnation an ETag."""
    for version in VERSIONS:
        document = session.document(version)
        expect_equal("the ETag", document.response.header("etag"), f'"{document.incarnation}"')


@check(MUST, "PROTOCOL 2.7 (NODE)")
def etag_known_is_304(session: Session) -> None:
    """Microsoft's Node client needs 304 for `nothing new`, or it handles events at every poll."""
    expect_status(_get_unless(session, _etag(session)), 304)


@check(MUST, "RFC 9110 15.4.5")
def etag_304_has_no_body(session: Session) -> None:
    """A body after a 304 would be read as the beginning of the next response."""
    headers = {**CLOSE, "If-None-Match": _etag(session)}
    with session.connect() as connection:
        connection.send(session.request(headers=headers))
        expect_status(connection.receive(), 304)
        rest = connection.receive_rest()
        expect_equal("the rest after the head of a 304 to be", rest, b"")


@check(SHOULD, "RFC 9110 15.4.5")
def etag_304_repeats_the_tag(session: Session) -> None:
    """Microsoft's Node client stores the ETag of every response: a 304 without one clears it."""
    etag = _etag(session)
    expect_equal("the ETag of the 304", _get_unless(session, etag).header("etag"), etag)


@check(MUST, "PROTOCOL 2.7 (NODE begins with 0)")
def etag_0_gives_the_document(session: Session) -> None:
    """Microsoft's Node client sends If-None-Match: 0 before it has seen anything."""
    expect_document(_get_unless(session, "0"))


@check(MUST, "RFC 9110 13.1.2")
def etag_of_another_document_gives_the_document(session: Session) -> None:
    """A client with an old ETag wants the new document."""
    expect_document(_get_unless(session, OTHER_ETAG))


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_without_quotes_is_304(session: Session) -> None:
    """Shell scripts lose the quotes."""
    expect_status(_get_unless(session, _etag(session).strip('"')), 304)


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_as_weak_is_304(session: Session) -> None:
    """Proxies that recompress make an ETag weak."""
    expect_status(_get_unless(session, f"W/{_etag(session)}"), 304)


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_among_others_is_304(session: Session) -> None:
    """HTTP allows a client to send all ETags that it has."""
    expect_status(_get_unless(session, f"{OTHER_ETAG}, {_etag(session)}"), 304)


@check(MUST, "PROTOCOL 2.7", Need.CONTROL)
def etag_changes_with_the_document(session: Session) -> None:
    """A client with the old ETag must not get a 304."""
    before = _etag(session)
    session.create_shown()
    expect_document(_get_unless(session, before))
    after = _etag(session)
    expect(after != before, "another ETag after an event was announced", after)


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N")
def wait_holds_the_response(session: Session) -> None:
    """Waiting instead of polling: a VM learns of a change immediately, with fewer requests."""
    response = _get_unless(session, _etag(session), Prefer=f"wait={WAIT_SECONDS}")
    expect_status(response, 304)
    was_held = response.seconds > WAIT_SECONDS - TOLERANCE_SECONDS
    expect(was_held, f"a response after {WAIT_SECONDS} s", f"{response.seconds:.2f} s")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N; RFC 7240 3")
def wait_sends_preference_applied(session: Session) -> None:
    """A client that knows its preference was applied need not pause before the next request."""
    response = _get_unless(session, _etag(session), Prefer=f"wait={WAIT_SECONDS}")
    applied = response.header("preference-applied")
    expect_equal("Preference-Applied", applied, f"wait={WAIT_SECONDS}")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N")
def wait_needs_a_known_etag(session: Session) -> None:
    """A client that has no document yet wants it now."""
    headers = {**METADATA, "Prefer": f"wait={LONG_WAIT_SECONDS}"}
    response = session.get(headers=headers, seconds=LONG_WAIT_SECONDS * 2)
    expect_document(response)
    is_immediate = response.seconds < WAIT_SECONDS
    expect(is_immediate, "an immediate response", f"{response.seconds:.2f} s")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N", Need.CONTROL)
def wait_ends_with_the_change(session: Session) -> None:
    """A short notice is worth little to a VM that learns of it a minute late."""
    etag, before = _etag(session), session.document()
    prefer = {"If-None-Match": etag, "Prefer": f"wait={LONG_WAIT_SECONDS}"}
    with session.connect() as connection:
        connection.send(session.request(headers={**METADATA, **prefer}))
        session.clock.sleep(TOLERANCE_SECONDS)
        session.create("restart")
        response = connection.receive(seconds=LONG_WAIT_SECONDS * 2)
    is_new = expect_document(response).incarnation != before.incarnation
    expect(is_new, "the document after the change", response)
    is_prompt = response.seconds < LONG_WAIT_SECONDS / 2
    expect(is_prompt, "a response when the event was announced", f"{response.seconds:.2f} s")
