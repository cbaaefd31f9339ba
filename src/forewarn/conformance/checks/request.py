"""Requests: paths, methods, headers, connections, and what errors look like."""

from forewarn.conformance.check import MUST, SHOULD, Need, check, expect, expect_equal, rule
from forewarn.conformance.expectation import (
    a_document,
    a_rejection,
    an_error,
    gives,
    json_equal,
    media_type,
    sends,
    served,
    status,
)
from forewarn.conformance.raw_http import METADATA, TREE, VERSION_LIST, RawResponse, Request, post
from forewarn.conformance.session import Session
from forewarn.conformance.spec import EVENTS, JSON, NO_HEADER, OLDEST, TEXT, VERSIONS

PIECE_SECONDS = 0.05
CONTINUE_SECONDS_MAX = 2.0
REQUESTS = 5
NO_APPROVALS = b'{"StartRequests":[]}'

BARE, BARE_OLDEST = Request(headers={}), Request(version=OLDEST, headers={})
UNKNOWN_VERSION = Request(version="preview")
UNKNOWN_PATH = Request("/metadata/no-such-thing")
UNKNOWN_ELEMENT = TREE._replace(path=f"{TREE.path}/compute/noSuchThing", query=TEXT)
PUT = Request(method="PUT")
FORWARDED = Request(headers={**METADATA, "X-Forwarded-For": "10.0.0.1"})
CLOSE = Request(headers={**METADATA, "Connection": "close"})


def polls_with(header: str, *values: str) -> list[Request]:
    """A poll with each of these values of a header."""
    return [Request(headers={**METADATA, header: value}) for value in values]


def _not_redirected(response: RawResponse) -> None:
    expect(not 300 <= response.status < 400, "a response that is not a redirect", response)


@rule(MUST, "PROTOCOL 3: no redirect", sends(_not_redirected))
def path_does_not_redirect() -> None:
    """curl and other documented clients do not follow redirects."""


def _without_login(response: RawResponse) -> None:
    expect(response.status not in (401, 407), "a response without a login", response)


@rule(MUST, "PROTOCOL 3: no auth", sends(_without_login))
def path_needs_no_login() -> None:
    """No client sends credentials: the endpoint knows the caller by its address."""


PATHS = ("/metadata/scheduledEvents", "/Metadata/ScheduledEvents")


@rule(SHOULD, "PROTOCOL 3: path case (DISC)", served(*map(Request, PATHS)))
def path_in_any_case() -> None:
    """Microsoft's C# sample requests /metadata/scheduledEvents."""


@rule(SHOULD, "PROTOCOL 3: trailing slash", served(Request(EVENTS + "/")))
def path_with_trailing_slash() -> None:
    """Clients that join base URLs and paths often leave a slash at the end."""


@rule(MUST, "PROTOCOL 5: 404", gives(404, UNKNOWN_PATH))
def path_unknown_is_404() -> None:
    """A client that probes for a path learns from 404 that it is missing; cloud-init retries."""


@rule(SHOULD, "PROTOCOL 5: 404", gives(404, Request(EVENTS + "/no-such-part")))
def path_below_the_document_is_404() -> None:
    """The document has no parts with paths of their own."""


@rule(MUST, "PROTOCOL 5: 405", gives(405, PUT))
def method_put_is_405() -> None:
    """Only GET and POST are documented; anything else is a mistake that must show."""


@rule(MUST, "PROTOCOL 5: 405", gives(405, Request(method="DELETE")))
def method_delete_is_405() -> None:
    """No call cancels an event, and a client must not believe that one does."""


@check(SHOULD, "PROTOCOL 10: 405 with Allow")
def method_not_allowed_names_the_allowed(session: Session) -> None:
    """HTTP requires the allowed methods with every 405."""
    allow = session.send(PUT).header("allow")
    allowed = {name.strip() for name in allow.split(",")}
    expect({"GET", "POST"} <= allowed, "an Allow header with GET and POST", allow)


@check(SHOULD, "RFC 9110 9.3.2")
def method_head_has_the_content_length(session: Session) -> None:
    """Health checks send HEAD, and reuse the connection as if no body came."""
    with session.connect(Request(method="HEAD"), Request()) as connection:
        head, document = connection.receive(expects_body=False), connection.receive()
    responses = [(each.status, each.header("content-length")) for each in (head, document)]
    expect_equal("status and Content-Length of HEAD to be those of GET,", *responses)


@check(MUST, "PROTOCOL 3: Metadata header, from 2017-08-01 on", each=VERSIONS[1:])
def header_required_in(version: str, session: Session) -> None:
    """The header shows intent: an attacker who makes a program fetch a URL can rarely set it."""
    session.send(Request(version=version, headers={}), status(400))


@rule(SHOULD, "PROTOCOL 3 and 10: 2017-03-01 does not enforce it", served(BARE_OLDEST))
def header_not_required_in_2017_03_01() -> None:
    """Clients of the preview do not send it."""


NAMES = [Request(headers={name: "true"}) for name in ("metadata", "METADATA")]


@rule(MUST, "PROTOCOL 3: header name", served(*NAMES))
def header_name_in_any_case() -> None:
    """Microsoft's Python sample sends it as metadata, and HTTP libraries rewrite header names."""


TRUE = polls_with("Metadata", "True", "TRUE")


@rule(MUST, "PROTOCOL 3: header value (IMDS prints Metadata:True)", served(*TRUE))
def header_value_in_any_case() -> None:
    """PowerShell users send True, as an example in the articles does."""


@rule(SHOULD, "PROTOCOL 3: other values", gives(400, *polls_with("Metadata", "false")))
def header_value_false_is_400() -> None:
    """A client that sends false does not mean the metadata service."""


@rule(MUST, "PROTOCOL 3: body for a missing header (IMDS)", sends(json_equal(NO_HEADER), BARE))
def header_missing_has_the_documented_message() -> None:
    """People search for this very sentence, and it is in the FAQ."""


@rule(MUST, "PROTOCOL 8.1, IMDS", gives(400, TREE._replace(headers={})))
def header_required_by_instance() -> None:
    """The instance tree reveals more about a VM than the document, so the rule applies there."""


@rule(SHOULD, "PROTOCOL 8.1: by the general rule", gives(400, VERSION_LIST._replace(headers={})))
def header_required_by_versions() -> None:
    """One rule for all paths needs no lookup."""


@rule(MUST, "PROTOCOL 3: X-Forwarded-For is rejected", sends(a_rejection, FORWARDED))
def header_forwarded_is_rejected() -> None:
    """A forwarded request hides its origin: an open proxy must not reach the endpoint."""


@rule(SHOULD, "PROTOCOL 10: X-Forwarded-For gives 400", gives(400, FORWARDED))
def header_forwarded_is_400() -> None:
    """It is a mistake in the request, reported like the other mistakes."""


@check(MUST, "PROTOCOL 3: X-Forwarded-For is rejected")
def header_forwarded_is_rejected_by_instance(session: Session) -> None:
    """Metadata about a VM is as private as its events."""
    session.send(TREE._replace(headers=FORWARDED.headers), a_rejection)


ACCEPT = polls_with("Accept", "text/html", "application/xml;q=1", "*/*")


@rule(MUST, "PROTOCOL 3: Accept is ignored", served(*ACCEPT))
def header_accept_changes_nothing() -> None:
    """Browsers and PowerShell accept HTML first, and still want the document."""


USER_AGENT = polls_with("User-Agent", "Pacemaker-ResourceAgent/4.10 SLES")


@rule(MUST, "PROTOCOL 3: User-Agent has no rule", served(Request(), *USER_AGENT))
def header_user_agent_changes_nothing() -> None:
    """Pacemaker's agent sends its own name, a shell script sends none."""


HOST = polls_with("Host", "169.254.169.254", "localhost")


@rule(MUST, "PROTOCOL 7: clients call by any name", served(*HOST))
def header_host_changes_nothing() -> None:
    """Unmodified clients send Host: 169.254.169.254, wherever a DNAT rule takes them."""


@check(MUST, "PROTOCOL 3: required on POST", Need.APPROVE)
def header_required_to_approve(session: Session) -> None:
    """A page in a browser on the VM can send a POST, but not with this header."""
    response = session.send(post(NO_APPROVALS, headers={}), status(400))
    expect_equal("the body", response.json(), NO_HEADER)


@check(MUST, "PROTOCOL 3: HTTP/1.1")
def http_1_1_is_spoken(session: Session) -> None:
    """HTTP/1.1 clients keep a connection open only with an HTTP/1.1 server."""
    expect_equal("the HTTP version to be", session.send(Request()).http, "HTTP/1.1")


@check(SHOULD, "PROTOCOL 5: client time-outs (NTH 5 s)")
def response_within_5_seconds(session: Session) -> None:
    """The AKS termination handler times out after five seconds; only the first may be slow."""
    seconds = session.send(Request()).seconds
    expect(seconds < 5, "a response within 5 s", f"{seconds:.1f} s")


@check(SHOULD, "RFC 9112 9.3")
def connection_is_kept_alive(session: Session) -> None:
    """A new connection for each poll costs more than the poll."""
    with session.connect() as connection:
        for _ in range(REQUESTS):
            connection.send(session.encode(Request()))
            status(200)(connection.receive())


@check(SHOULD, "RFC 9112 9.3")
def connection_is_kept_alive_after_an_error(session: Session) -> None:
    """One bad request must not cost the others their connection."""
    with session.connect(BARE) as connection:
        status(400)(connection.receive())
        connection.send(session.encode(Request()))
        status(200)(connection.receive())


@check(SHOULD, "RFC 9112 9.3.2")
def connection_responds_in_order(session: Session) -> None:
    """A client matches pipelined requests and responses by their order."""
    with session.connect(Request(), VERSION_LIST, Request()) as connection:
        a_document(connection.receive())
        versions = connection.receive()
        expect(b"apiVersions" in versions.body, "the versions as the second response", versions)
        a_document(connection.receive())


@check(SHOULD, "PROTOCOL 10: Connection: close is echoed (NODE)")
def connection_close_is_echoed(session: Session) -> None:
    """Microsoft's Node client reuses a connection that ends without notice."""
    for request in (CLOSE, CLOSE._replace(path=UNKNOWN_PATH.path)):
        connection = session.send(request).header("connection")
        expect_equal("the Connection header", connection.lower(), "close")


@check(MUST, "RFC 9112 9.6")
def connection_close_closes(session: Session) -> None:
    """A client that reads to the end of the connection would wait forever."""
    receive_last(session, CLOSE)


@check(SHOULD, "RFC 9112 2.5")
def http_1_0_is_supported_and_closed(session: Session) -> None:
    """Small clients and health checks speak HTTP/1.0 and read to the end of the connection."""
    a_document(receive_last(session, Request(http="1.0")))


def receive_last(session: Session, request: Request) -> RawResponse:
    """The response, after which the connection must end."""
    with session.connect(request) as connection:
        response = connection.receive()
        rest = connection.receive_rest(CONTINUE_SECONDS_MAX)
    expect_equal("the rest after the response to be", rest, b"")
    return response


@check(SHOULD, "RFC 9112 2.2")
def request_may_arrive_in_pieces(session: Session) -> None:
    """Networks split requests anywhere."""
    request = session.encode(Request())
    with session.connect() as connection:
        connection.send(request[:20])
        session.clock.sleep(PIECE_SECONDS)
        connection.send(request[20:])
        a_document(connection.receive())


@check(MUST, "PROTOCOL 3: Expect: 100-continue (.NET)", Need.APPROVE)
def expect_100_continue_is_continued(session: Session) -> None:
    """Old .NET sends no body until it gets a 100."""
    expect(post_after_continue(session, NO_APPROVALS).status >= 200, "a final response", 100)


def post_after_continue(session: Session, body: bytes) -> RawResponse:
    """POST with Expect: 100-continue: the body follows the 100."""
    request = post(body, headers={**METADATA, "Expect": "100-continue"})
    with session.connect(request._replace(body=b"")) as connection:
        status(100)(connection.receive(seconds=CONTINUE_SECONDS_MAX))
        connection.send(body)
        return connection.receive()


@rule(MUST, "PROTOCOL 3: error body (SWG)", sends(an_error(400), BARE, UNKNOWN_VERSION))
def error_400_has_a_message() -> None:
    """SDKs generated from the specification read the member `error`."""


@rule(MUST, "PROTOCOL 3: error body (SWG)", sends(an_error(404), UNKNOWN_ELEMENT))
def error_404_has_a_message() -> None:
    """SDKs generated from the specification read the member `error`."""


@rule(SHOULD, "PROTOCOL 10: error bodies", sends(an_error(405), PUT))
def error_405_has_a_message() -> None:
    """Clients can rely on one form for all errors."""


@rule(SHOULD, "PROTOCOL 10: error bodies", sends(an_error(400), FORWARDED))
def error_for_a_forwarded_request_has_a_message() -> None:
    """The operator of the proxy must learn why it does not work."""


@rule(MUST, "PROTOCOL 3: Content-Type", sends(media_type(JSON), BARE, UNKNOWN_PATH))
def error_is_application_json() -> None:
    """aiohttp parses the error only if its Content-Type is JSON."""


@check(SHOULD, "PROTOCOL 10")
def error_changes_nothing(session: Session) -> None:
    """A rejected request is not a change: the next poll reads what the last one did."""
    with session.expect_unchanged():
        session.send(BARE)
        session.send(UNKNOWN_VERSION)
