"""Requests: paths, methods, headers, connections, and what errors look like."""

from forewarn.conformance.check import MUST, SHOULD, Need, check, expect, expect_equal
from forewarn.conformance.raw_http import (
    RawResponse,
    expect_document,
    expect_error,
    expect_rejected,
    expect_status,
)
from forewarn.conformance.session import METADATA, Session
from forewarn.conformance.spec import (
    EVENTS,
    INSTANCE,
    INSTANCE_VERSION,
    NO_HEADER,
    OLDEST,
    VERSIONS,
    VERSIONS_PATH,
)

RESPONSE_SECONDS_MAX = 5.0
PIECE_SECONDS = 0.05
CONTINUE_SECONDS_MAX = 2.0
REQUESTS = 5
UNKNOWN_PATH = "/metadata/no-such-thing"
NO_APPROVALS = b'{"StartRequests":[]}'
FORWARDED = {**METADATA, "X-Forwarded-For": "10.0.0.1"}
CLOSE = {**METADATA, "Connection": "close"}


@check(MUST, "PROTOCOL 3: no redirect")
def path_does_not_redirect(session: Session) -> None:
    """curl and other documented clients do not follow redirects."""
    response = session.get()
    expect(not 300 <= response.status < 400, "a response that is not a redirect", response)


@check(MUST, "PROTOCOL 3: no auth")
def path_needs_no_login(session: Session) -> None:
    """No client sends credentials: the endpoint knows the caller by its address."""
    response = session.get()
    expect(response.status not in (401, 407), "a response without a login", response)


@check(SHOULD, "PROTOCOL 3: path case (DISC)")
def path_in_any_case(session: Session) -> None:
    """Microsoft's C# sample requests /metadata/scheduledEvents."""
    expect_document(session.get("/metadata/scheduledEvents"))
    expect_document(session.get("/Metadata/ScheduledEvents"))


@check(SHOULD, "PROTOCOL 3: trailing slash")
def path_with_trailing_slash(session: Session) -> None:
    """Clients that join base URLs and paths often leave a slash at the end."""
    expect_document(session.get(EVENTS + "/"))


@check(MUST, "PROTOCOL 5: 404")
def path_unknown_is_404(session: Session) -> None:
    """A client that probes for a path learns from 404 that it is missing; cloud-init retries."""
    expect_status(session.get(UNKNOWN_PATH), 404)


@check(SHOULD, "PROTOCOL 5: 404")
def path_below_the_document_is_404(session: Session) -> None:
    """The document has no parts with paths of their own."""
    expect_status(session.get(EVENTS + "/no-such-part"), 404)


@check(MUST, "PROTOCOL 5: 405")
def method_put_is_405(session: Session) -> None:
    """Only GET and POST are documented; anything else is a mistake that must show."""
    expect_status(session.get(method="PUT"), 405)


@check(MUST, "PROTOCOL 5: 405")
def method_delete_is_405(session: Session) -> None:
    """No call cancels an event, and a client must not believe that one does."""
    expect_status(session.get(method="DELETE"), 405)


@check(SHOULD, "PROTOCOL 10: 405 with Allow")
def method_not_allowed_names_the_allowed(session: Session) -> None:
    """HTTP requires the allowed methods with every 405."""
    allow = session.get(method="PUT").header("allow") or ""
    allowed = {name.strip() for name in allow.split(",")}
    expect({"GET", "POST"} <= allowed, "an Allow header with GET and POST", allow)


@check(SHOULD, "RFC 9110 9.3.2")
def method_head_has_the_content_length(session: Session) -> None:
    """Health checks send HEAD, and reuse the connection as if no body came."""
    with session.connect() as connection:
        connection.send(session.request(method="HEAD") + session.request())
        head, document = connection.receive(expects_body=False), connection.receive()
    expect_equal("the status of HEAD to be that of GET,", head.status, document.status)
    lengths = (head.header("content-length"), document.header("content-length"))
    expect_equal("the Content-Length of HEAD to be that of GET,", *lengths)


@check(MUST, "PROTOCOL 3: Metadata header, from 2017-08-01 on", each=VERSIONS[1:])
def header_required_in(version: str, session: Session) -> None:
    """The header shows intent: an attacker who makes a program fetch a URL can rarely set it."""
    expect_status(session.get(version=version, headers={}), 400)


@check(SHOULD, "PROTOCOL 3 and 10: 2017-03-01 does not enforce it")
def header_not_required_in_2017_03_01(session: Session) -> None:
    """Clients of the preview do not send it."""
    expect_document(session.get(version=OLDEST, headers={}))


@check(MUST, "PROTOCOL 3: header name")
def header_name_in_any_case(session: Session) -> None:
    """Microsoft's Python sample sends it as metadata, and HTTP libraries rewrite header names."""
    for name in ("metadata", "METADATA"):
        expect_document(session.get(headers={name: "true"}))


@check(MUST, "PROTOCOL 3: header value (IMDS prints Metadata:True)")
def header_value_in_any_case(session: Session) -> None:
    """PowerShell users send True, as an example in the articles does."""
    for value in ("True", "TRUE"):
        expect_document(session.get(headers={"Metadata": value}))


@check(SHOULD, "PROTOCOL 3: other values")
def header_value_false_is_400(session: Session) -> None:
    """A client that sends false does not mean the metadata service."""
    expect_status(session.get(headers={"Metadata": "false"}), 400)


@check(MUST, "PROTOCOL 3: body for a missing header (IMDS)")
def header_missing_has_the_documented_message(session: Session) -> None:
    """People search for this very sentence, and it is in the FAQ."""
    expect_equal("the body", session.get(headers={}).json(), NO_HEADER)


@check(MUST, "PROTOCOL 8.1, IMDS")
def header_required_by_instance(session: Session) -> None:
    """The instance tree reveals more about a VM than the document, so the rule applies there."""
    expect_status(session.get(INSTANCE, INSTANCE_VERSION, headers={}), 400)


@check(SHOULD, "PROTOCOL 8.1: by the general rule")
def header_required_by_versions(session: Session) -> None:
    """One rule for all paths needs no lookup."""
    expect_status(session.get(VERSIONS_PATH, None, headers={}), 400)


@check(MUST, "PROTOCOL 3: X-Forwarded-For is rejected")
def header_forwarded_is_rejected(session: Session) -> None:
    """A forwarded request hides its origin: an open proxy must not reach the endpoint."""
    expect_rejected(session.get(headers=FORWARDED))


@check(SHOULD, "PROTOCOL 10: X-Forwarded-For gives 400")
def header_forwarded_is_400(session: Session) -> None:
    """It is a mistake in the request, reported like the other mistakes."""
    expect_status(session.get(headers=FORWARDED), 400)


@check(MUST, "PROTOCOL 3: X-Forwarded-For is rejected")
def header_forwarded_is_rejected_by_instance(session: Session) -> None:
    """Metadata about a VM is as private as its events."""
    expect_rejected(session.get(INSTANCE, INSTANCE_VERSION, FORWARDED))


@check(MUST, "PROTOCOL 3: Accept is ignored")
def header_accept_changes_nothing(session: Session) -> None:
    """Browsers and PowerShell accept HTML first, and still want the document."""
    for accept in ("text/html", "application/xml;q=1", "*/*"):
        expect_document(session.get(headers={**METADATA, "Accept": accept}))


@check(MUST, "PROTOCOL 3: User-Agent has no rule")
def header_user_agent_changes_nothing(session: Session) -> None:
    """Pacemaker's agent sends its own name, a shell script sends none."""
    for agent in ({}, {"User-Agent": "Pacemaker-ResourceAgent/4.10 SLES"}):
        expect_document(session.get(headers={**METADATA, **agent}))


@check(MUST, "PROTOCOL 7: clients call by any name")
def header_host_changes_nothing(session: Session) -> None:
    """Unmodified clients send Host: 169.254.169.254, wherever a DNAT rule takes them."""
    for host in ("169.254.169.254", "localhost"):
        expect_document(session.get(headers={**METADATA, "Host": host}))


@check(MUST, "PROTOCOL 3: required on POST", Need.APPROVE)
def header_required_to_approve(session: Session) -> None:
    """A page in a browser on the VM can send a POST, but not with this header."""
    response = session.post(NO_APPROVALS, headers={})
    expect_status(response, 400)
    expect_equal("the body", response.json(), NO_HEADER)


@check(MUST, "PROTOCOL 3: HTTP/1.1")
def http_1_1_is_spoken(session: Session) -> None:
    """HTTP/1.1 clients keep a connection open only with an HTTP/1.1 server."""
    expect_equal("the HTTP version to be", session.get().http, "HTTP/1.1")


@check(SHOULD, "PROTOCOL 5: client time-outs (NTH 5 s)")
def response_within_5_seconds(session: Session) -> None:
    """The AKS termination handler times out after five seconds; only the first may be slow."""
    seconds = session.get().seconds
    expected = f"a response within {RESPONSE_SECONDS_MAX:g} s"
    expect(seconds < RESPONSE_SECONDS_MAX, expected, f"{seconds:.1f} s")


@check(SHOULD, "RFC 9112 9.3")
def connection_is_kept_alive(session: Session) -> None:
    """A new connection for each poll costs more than the poll."""
    with session.connect() as connection:
        for _ in range(REQUESTS):
            connection.send(session.request())
            expect_status(connection.receive(), 200)


@check(SHOULD, "RFC 9112 9.3")
def connection_is_kept_alive_after_an_error(session: Session) -> None:
    """One bad request must not cost the others their connection."""
    with session.connect() as connection:
        for headers, status in (({}, 400), (METADATA, 200)):
            connection.send(session.request(headers=headers))
            expect_status(connection.receive(), status)


@check(SHOULD, "RFC 9112 9.3.2")
def connection_responds_in_order(session: Session) -> None:
    """A client matches pipelined requests and responses by their order."""
    versions = session.request(session.target(VERSIONS_PATH, None))
    with session.connect() as connection:
        connection.send(session.request() + versions + session.request())
        first, second, third = (connection.receive() for _ in range(3))
    expect_document(first)
    expect(b"apiVersions" in second.body, "the versions as the second response", second)
    expect_document(third)


@check(SHOULD, "PROTOCOL 10: Connection: close is echoed (NODE)")
def connection_close_is_echoed(session: Session) -> None:
    """Microsoft's Node client reuses a connection that ends without notice."""
    for target in (session.target(), session.target(UNKNOWN_PATH)):
        connection = session.send(session.request(target, CLOSE)).header("connection") or ""
        expect_equal("the Connection header", connection.lower(), "close")


@check(MUST, "RFC 9112 9.6")
def connection_close_closes(session: Session) -> None:
    """A client that reads to the end of the connection would wait forever."""
    _expect_closed(session, session.request(headers=CLOSE))


@check(SHOULD, "RFC 9112 2.5")
def http_1_0_is_supported_and_closed(session: Session) -> None:
    """Small clients and health checks speak HTTP/1.0 and read to the end of the connection."""
    expect_document(_expect_closed(session, session.request(http="1.0")))


def _expect_closed(session: Session, request: bytes) -> RawResponse:
    with session.connect() as connection:
        connection.send(request)
        response = connection.receive()
        rest = connection.receive_rest(CONTINUE_SECONDS_MAX)
    expect_equal("the rest of the connection to be", rest, b"")
    return response


@check(SHOULD, "RFC 9112 2.2")
def request_may_arrive_in_pieces(session: Session) -> None:
    """Networks split requests anywhere."""
    request = session.request()
    with session.connect() as connection:
        connection.send(request[:20])
        session.clock.sleep(PIECE_SECONDS)
        connection.send(request[20:])
        expect_document(connection.receive())


@check(MUST, "PROTOCOL 3: Expect: 100-continue (.NET)", Need.APPROVE)
def expect_100_continue_is_continued(session: Session) -> None:
    """Old .NET sends no body until it gets a 100."""
    expect(post_after_continue(session, NO_APPROVALS).status >= 200, "a final response", 100)


def post_after_continue(session: Session, body: bytes) -> RawResponse:
    """POST with Expect: 100-continue: the body follows the 100."""
    headers = {**METADATA, "Expect": "100-continue", "Content-Length": str(len(body))}
    with session.connect() as connection:
        connection.send(session.request(headers=headers, method="POST"))
        expect_status(connection.receive(seconds=CONTINUE_SECONDS_MAX), 100)
        connection.send(body)
        return connection.receive()


@check(MUST, "PROTOCOL 3: error body (SWG)")
def error_400_has_a_message(session: Session) -> None:
    """SDKs generated from the specification read the member `error`."""
    expect_error(session.get(headers={}), 400)
    expect_error(session.get(version="2016-01-01"), 400)


@check(MUST, "PROTOCOL 3: error body (SWG)")
def error_404_has_a_message(session: Session) -> None:
    """SDKs generated from the specification read the member `error`."""
    expect_error(session.instance("/compute/noSuchThing", query="format=text"), 404)


@check(SHOULD, "PROTOCOL 10: error bodies")
def error_405_has_a_message(session: Session) -> None:
    """Clients can rely on one form for all errors."""
    expect_error(session.get(method="PUT"), 405)


@check(SHOULD, "PROTOCOL 10: error bodies")
def error_for_a_forwarded_request_has_a_message(session: Session) -> None:
    """Whoever set up the proxy must learn why it does not work."""
    expect_error(session.get(headers=FORWARDED), 400)


@check(MUST, "PROTOCOL 3: Content-Type")
def error_is_application_json(session: Session) -> None:
    """aiohttp parses the error only if its Content-Type is JSON."""
    for response in (session.get(headers={}), session.get(UNKNOWN_PATH)):
        expect_equal("the Content-Type", response.media_type, "application/json")


@check(SHOULD, "PROTOCOL 10")
def error_changes_nothing(session: Session) -> None:
    """A rejected request is not a change: the next poll reads what the last one did."""
    with session.expect_unchanged():
        session.get(headers={})
        session.get(version="2016-01-01")
