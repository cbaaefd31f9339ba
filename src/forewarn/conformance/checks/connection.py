"""Connections: how HTTP itself is spoken."""

from forewarn.conformance.check import Level, Need, check, fail, holds, same
from forewarn.conformance.checks.path import status
from forewarn.conformance.document import Document
from forewarn.conformance.session import TRUE, Stage
from forewarn.conformance.spec import VERSIONS_PATH

MUST, SHOULD = Level.MUST, Level.SHOULD
KEPT = 5
ANSWER_SECONDS_MAX = 5.0
PIECE_SECONDS = 0.05
CONTINUE_SECONDS_MAX = 2.0
CLOSE = {**TRUE, "Connection": "close"}


@check(MUST, "PROTOCOL 3: HTTP/1.1")
def http_1_1_is_spoken(stage: Stage) -> None:
    """Clients that speak HTTP/1.1 keep a connection only with a server that says so."""
    same("the answer's protocol to be", stage.get().http, "HTTP/1.1")


@check(SHOULD, "PROTOCOL 5: client time-outs (NTH 5 s)")
def answer_comes_within_5_seconds(stage: Stage) -> None:
    """The AKS termination handler gives up after five seconds; only the first call of all may be
    slow.
    """
    answer = stage.get()
    holds(
        answer.seconds < ANSWER_SECONDS_MAX,
        f"an answer within {ANSWER_SECONDS_MAX:g} s",
        f"{answer.seconds:.1f} s",
    )


@check(SHOULD, "RFC 9112 9.3")
def connection_is_kept(stage: Stage) -> None:
    """A poll every second on a new connection each costs more than the poll."""
    with stage.line() as line:
        for _ in range(KEPT):
            line.send(stage.request())
            status(line.answer(), 200)


@check(SHOULD, "RFC 9112 9.3")
def connection_is_kept_after_a_refusal(stage: Stage) -> None:
    """One wrong request must not cost the others their connection."""
    with stage.line() as line:
        for headers, wanted in (({}, 400), (TRUE, 200)):
            line.send(stage.request(headers=headers))
            status(line.answer(), wanted)


@check(SHOULD, "RFC 9112 9.3.2")
def connection_answers_in_order(stage: Stage) -> None:
    """Requests that were sent at once get their answers in their order, or a client takes one for
    another.
    """
    versions = stage.request(stage.target(VERSIONS_PATH, None))
    with stage.line() as line:
        line.send(stage.request() + versions + stage.request())
        first, second, third = line.answer(), line.answer(), line.answer()
    Document.of(first)
    holds(b"apiVersions" in second.body, "the versions as the second answer", second)
    Document.of(third)


@check(SHOULD, "PROTOCOL 10: Connection: close is echoed (NODE)")
def connection_close_is_echoed(stage: Stage) -> None:
    """Microsoft's Node client keeps using a connection that ends without having been told."""
    for target in (stage.target(), stage.target("/metadata/no-such-thing")):
        answer = stage.ask(stage.request(target, CLOSE))
        same("the Connection header", (answer.header("connection") or "").lower(), "close")


@check(MUST, "RFC 9112 9.6")
def connection_close_closes(stage: Stage) -> None:
    """A client that reads to the end of the connection would wait for ever."""
    with stage.line() as line:
        line.send(stage.request(headers=CLOSE))
        line.answer()
        same("the rest of the connection to be", line.rest(CONTINUE_SECONDS_MAX), b"")


@check(SHOULD, "RFC 9112 2.5")
def http_1_0_is_answered_and_closed(stage: Stage) -> None:
    """Small clients and health checks speak HTTP/1.0 and read to the end of the connection."""
    with stage.line() as line:
        line.send(stage.request(http="1.0"))
        Document.of(line.answer())
        same("the rest of the connection to be", line.rest(CONTINUE_SECONDS_MAX), b"")


@check(SHOULD, "RFC 9112 2.2")
def request_may_come_in_pieces(stage: Stage) -> None:
    """Networks cut requests where they like."""
    request = stage.request()
    with stage.line() as line:
        line.send(request[:20])
        stage.time.sleep(PIECE_SECONDS)
        line.send(request[20:])
        Document.of(line.answer())


@check(MUST, "PROTOCOL 3: Expect: 100-continue (.NET)", Need.APPROVE)
def expect_100_continue_is_told_to_go_on(stage: Stage) -> None:
    """Old .NET sends no body before it was told to go on."""
    body = b'{"StartRequests":[]}'
    headers = {**TRUE, "Expect": "100-continue", "Content-Length": str(len(body))}
    with stage.line() as line:
        line.send(stage.request(headers=headers, method="POST"))
        interim = line.answer(seconds=CONTINUE_SECONDS_MAX)
        status(interim, 100)
        line.send(body)
        final = line.answer()
    if final.status < 200:
        fail("a final answer after 100", final)
