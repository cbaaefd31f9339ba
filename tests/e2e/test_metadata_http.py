"""HTTP as it is spoken on the wire: raw bytes against a real server."""

import json
import logging
import threading
import time
from datetime import timedelta

import pytest

from forewarn.config import Config
from forewarn.web.http.admission import Limits
from tests.e2e.metadata_world import EVENT_ID, POLL, TARGET, World

MOMENT = timedelta(seconds=0.1)
APPROVAL = json.dumps({"StartRequests": [{"EventId": EVENT_ID}]}).encode()
APPROVE = f"POST {TARGET} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n".encode()
WAIT = POLL.replace(b"Host: h", b'Host: h\r\nPrefer: wait=60\r\nIf-None-Match: "1"')


def approval(*lines: bytes, body: bytes = APPROVAL) -> bytes:
    return b"".join(
        [
            APPROVE,
            *(line + b"\r\n" for line in lines),
            b"Content-Length: %d\r\n\r\n" % len(body),
            body,
        ]
    )


def test_keep_alive_has_no_request_limit() -> None:
    with World() as world, world.connect() as client:
        for _ in range(5):
            client.send(POLL)
            response = client.response()
            assert response.status == 200
            assert "connection" not in response.headers


def test_pipelined_requests_are_answered_in_order() -> None:
    """Quick and careful ones alike: the third must not overtake the second."""
    versions = POLL.replace(b"scheduledevents?api-version=2020-07-01", b"versions")
    with World() as world, world.connect() as client:
        world.ask(POLL)
        world.restart()
        client.send(
            POLL + versions + POLL + approval() + POLL + POLL.replace(b"GET", b"HEAD") + versions
        )
        bodies = [client.response(has_body=number != 5).body[:12] for number in range(7)]
        first, second = b'{"DocumentIn', b'{"apiVersion'
        assert bodies == [first, second, first, b"", first, b"", second]


def test_request_behind_a_long_poll_waits() -> None:
    with World() as world, world.connect() as client:
        client.send(WAIT)
        assert client.is_silent(MOMENT)
        client.send(POLL)
        assert client.is_silent(MOMENT)
        world.restart()
        assert "preference-applied" in client.response().headers
        assert "preference-applied" not in client.response().headers


def test_a_request_may_be_cut_in_two_anywhere() -> None:
    """Even within the blank line at its end, and with another request behind it."""
    with World() as world, world.connect() as client:
        for at in range(1, len(POLL)):
            client.send(POLL[:at])
            time.sleep(0.002)
            client.send(POLL[at:] + POLL)
            assert [client.response().status for _ in range(2)] == [200, 200]


def test_a_request_may_come_byte_by_byte() -> None:
    with World() as world, world.connect() as client:
        world.ask(POLL)
        world.restart()
        for byte in approval(b"Content-Type: application/json"):
            client.send(bytes([byte]))
            time.sleep(0.001)
        assert client.response().status == 200
        assert world.scope().events[0].approvals == ("web-0",)


def test_http_1_0_connection_is_closed() -> None:
    with World() as world:
        for _ in range(3):
            with world.connect() as client:
                client.send(f"GET {TARGET} HTTP/1.0\r\nMetadata: true\r\n\r\n".encode())
                response = client.response()
                assert (response.status, response.headers["connection"]) == (200, "close")
                assert client.read_to_end() == b""


def test_http_1_0_keep_alive_is_honoured() -> None:
    request = POLL.replace(b"HTTP/1.1", b"HTTP/1.0").replace(
        b"Host: h", b"Host: h\r\nConnection: Keep-Alive"
    )
    with World() as world, world.connect() as client:
        for _ in range(3):
            client.send(request)
            response = client.response()
            assert (response.status, response.headers["connection"]) == (200, "keep-alive")


@pytest.mark.parametrize(
    "path",
    [b"/metadata/scheduledevents?api-version=2020-07-01", b"/metadata/versions", b"/nothing"],
)
def test_connection_close_is_echoed(path: bytes) -> None:
    """A client written for Node breaks otherwise."""
    request = (
        b"GET " + path + b" HTTP/1.1\r\nHost: h\r\nMetadata: true\r\nConnection: close\r\n\r\n"
    )
    with World() as world:
        for _ in range(3):
            with world.connect() as client:
                client.send(request)
                assert client.response().headers["connection"] == "close"
                assert client.read_to_end() == b""


def test_head_has_content_length_and_no_body() -> None:
    with World() as world, world.connect() as client:
        client.send(POLL.replace(b"GET", b"HEAD") + POLL)
        head = client.response(has_body=False)
        assert head.headers["content-length"] == "37"
        assert client.response().headers["content-length"] == "37"


@pytest.mark.parametrize("method", [b"OPTIONS", b"PUT", b"DELETE", b"PATCH"])
def test_405_lists_the_allowed_methods(method: bytes) -> None:
    with World() as world, world.connect() as client:
        client.send(POLL.replace(b"GET", method))
        response = client.response()
        assert (response.status, response.headers["allow"]) == (405, "GET, POST, HEAD")
        assert list(json.loads(response.body)) == ["error"]
        client.send(POLL)
        assert client.response().status == 200


def test_expect_100_continue_is_answered() -> None:
    """Old .NET does so with every POST."""
    with World() as world, world.connect() as client:
        world.ask(POLL)
        world.restart()
        client.send(APPROVE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(APPROVAL))
        assert client.response().status == 100
        client.send(APPROVAL)
        assert client.response().status == 200


def test_too_large_content_length_is_rejected_before_the_body() -> None:
    with World() as world, world.connect() as client:
        client.send(APPROVE + b"Expect: 100-continue\r\nContent-Length: 70000\r\n\r\n")
        response = client.response()
        assert (response.status, response.headers["connection"]) == (413, "close")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /metadata HTTP/1.1\r\nHost: h\r\nA: " + b"a" * 8_000_000 + b"\r\n\r\n",
        approval(body=b" " * 8_000_000),
    ],
    ids=["head", "body"],
)
def test_client_that_sends_too_much_can_read_the_error(request_: bytes) -> None:
    """Closing at once would reset the connection and destroy the answer."""
    with World() as world, world.connect() as client:
        client.send(request_)
        response = client.response()
        assert response.status in (413, 431)
        assert list(json.loads(response.body)) == ["error"]
        assert client.read_to_end() == b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/1.1\nHost: h\n\n",
        b"GET / HTTP/1.1\r\nHost : h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nA: \x00\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"\x00" * 1000,
        b"GET a://b HTTP/1.1\r\nHost:\r\n\r\n",
        b"POST http://h?q HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET http://u:p@h HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_are_rejected_and_not_logged(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can connect could fill the log."""
    caplog.set_level(logging.DEBUG, logger="uvicorn")
    with World() as world, world.connect() as client:
        caplog.clear()
        client.send(garbage)
        response = client.response()
        assert (response.status, response.headers["connection"]) == (400, "close")
        assert list(json.loads(response.body)) == ["error"]
        assert client.read_to_end() == b""
        assert world.ask(POLL).status == 200
        assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
def test_other_http_version_is_rejected(version: bytes) -> None:
    with World() as world:
        assert world.ask(POLL.replace(b"HTTP/1.1", version)).status == 505


def test_garbage_after_a_request_does_not_affect_its_response() -> None:
    with World() as world, world.connect() as client:
        client.send(WAIT)
        assert client.is_silent(MOMENT)
        client.send(b"GARBAGE\r\n\r\n")
        assert client.is_silent(MOMENT)
        world.restart()
        assert client.response().status == 200
        response = client.response()
        assert (response.status, response.headers["connection"]) == (400, "close")
        assert client.read_to_end() == b""


@pytest.mark.parametrize(
    ("trailer", "missing"),
    [
        (b"Metadata: true", b"Metadata: true\r\n"),
        (b"X-Forwarded-For: 10.0.0.1", b""),
        (b"Origin: x", b""),
    ],
)
def test_trailer_is_not_a_header(trailer: bytes, missing: bytes) -> None:
    """It comes after the request was checked, so it can neither make it good nor bad."""
    body = b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(APPROVAL), APPROVAL, trailer)
    with World() as world, world.connect() as client:
        world.ask(POLL)
        world.restart()
        client.send(APPROVE.replace(missing, b"") + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        assert client.response().status == (400 if missing else 200)
        client.send(POLL.replace(b"Metadata: true\r\n", b""))
        assert client.response().status == 400


def test_zeros_before_a_content_length_are_accepted() -> None:
    """Thousands of them must not be an error of ours."""
    with World() as world, world.connect() as client:
        world.ask(POLL)
        world.restart()
        client.send(approval().replace(b"Content-Length: ", b"Content-Length: " + b"0" * 5000))
        assert client.response().status == 200


def test_a_broken_body_is_refused() -> None:
    with World() as world, world.connect() as client:
        client.send(APPROVE + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        assert client.is_silent(MOMENT)
        client.send(b"nonsense\r\n")
        assert client.response().status == 400
        assert client.read_to_end() == b""


def test_body_broken_after_the_response_closes_the_connection() -> None:
    """Two answers to one request would be taken for the answer to the next."""
    with World() as world, world.connect() as client:
        client.send(b"POST /nothing HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert client.response().status == 404
        client.send(b"nonsense\r\n")
        assert client.read_to_end() == b""


def test_upgrade_header_is_ignored() -> None:
    """Java's client offers HTTP/2 like this with every request."""
    offer = POLL.replace(
        b"Host: h",
        b"Host: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA",
    )
    with World() as world, world.connect() as client:
        client.send(offer + offer)
        assert [client.response().status for _ in range(2)] == [200, 200]
        client.send(POLL)
        assert client.response().status == 200


@pytest.mark.parametrize("is_in_pieces", [False, True])
def test_approval_with_an_upgrade_header_keeps_its_body(is_in_pieces: bool) -> None:
    """Java's client offers HTTP/2 with its approvals too."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c"
    sent = approval(offer) + POLL
    piece_size = 40 if is_in_pieces else len(sent)
    with World() as world, world.connect() as client:
        client.send(POLL)
        assert client.response().status == 200  # the scope is enabled, so a restart is an event
        world.restart()
        for start in range(0, len(sent), piece_size):
            client.send(sent[start : start + piece_size])
        assert client.response().status == 200
        assert b'"EventStatus":"Started"' in client.response().body


def test_absolute_form_target_is_accepted() -> None:
    with World() as world:
        assert (
            world.ask(POLL.replace(b"/metadata", b"http://169.254.169.254/metadata")).status == 200
        )


def test_half_closed_client_gets_its_responses() -> None:
    """As when a request is piped into a socket."""
    with World() as world:
        for _ in range(3):
            with world.connect() as client:
                client.send(POLL + POLL.replace(b"GET", b"PUT"))
                client.finish_sending()
                assert [client.response().status for _ in range(2)] == [200, 405]
                assert client.read_to_end() == b""


def test_half_closed_client_gets_a_late_response() -> None:
    with World(Config(first_call_delay_seconds=0.3)) as world, world.connect() as client:
        client.send(POLL)
        client.finish_sending()
        assert client.response().status == 200
        assert client.read_to_end() == b""


def test_disconnect_ends_a_wait_immediately() -> None:
    with World() as world:
        with world.connect() as client:
            client.send(WAIT)
            world.until(lambda: world.engine.board.scopes["web"].waiters is not None)
        world.until(lambda: world.engine.board.scopes["web"].waiters is None)
        world.until(lambda: not world.listener.state.tasks)


def test_a_request_that_arrives_too_slowly_is_dropped() -> None:
    with World(limits=Limits(stall_seconds=1)) as world, world.connect() as client:
        client.send(POLL[:20])
        assert client.response().status == 408


def test_an_idle_connection_is_closed() -> None:
    with World(limits=Limits(idle_seconds=1)) as world, world.connect() as client:
        client.send(POLL)
        client.response()
        assert client.read_to_end() == b""


def test_long_poll_ends_with_a_304() -> None:
    with World(Config(wait_seconds_max=1)) as world, world.connect() as client:
        client.send(WAIT)
        response = client.response()
        assert (response.status, response.headers["preference-applied"]) == (304, "wait=1")


def test_first_call_can_be_delayed() -> None:
    """As on Azure, where it takes up to two minutes: a client must survive it."""
    with World(Config(first_call_delay_seconds=1)) as world, world.connect() as client:
        began = time.monotonic()
        client.send(POLL)
        assert client.response().status == 200
        assert time.monotonic() - began >= 1


def test_stop_finishes_requests_in_flight() -> None:
    with (
        World() as world,
        world.connect() as waiting,
        world.connect() as sending,
        world.connect() as idle,
    ):
        waiting.send(WAIT)
        sending.send(approval()[:-10])
        idle.send(POLL)
        idle.response()
        world.until(lambda: len(world.listener.state.tasks) == 2)
        stopping = threading.Thread(target=world.stop)
        stopping.start()
        assert waiting.response().status == 304
        assert waiting.read_to_end() == b""
        assert idle.read_to_end() == b""
        sending.send(approval()[-10:])
        response = sending.response()
        assert (response.status, response.headers["connection"]) == (400, "close")
        stopping.join()


def test_stop_does_not_wait_for_a_stalled_client() -> None:
    with World() as world, world.connect() as client:
        client.send(approval()[:-10])
        world.until(lambda: len(world.listener.state.tasks) == 1)
        world.stop()
        assert client.read_to_end() == b""


def test_disconnect_drops_queued_requests() -> None:
    with World() as world:
        with world.connect() as client:
            client.send(WAIT + WAIT + WAIT)
            world.until(lambda: world.engine.board.scopes["web"].waiters is not None)
        world.until(lambda: world.engine.board.scopes["web"].waiters is None)
        world.until(lambda: not world.listener.state.tasks)


def test_nothing_is_answered_after_a_rejected_request() -> None:
    """What follows garbage is garbage too, even if it looks like a request."""
    with World() as world, world.connect() as client:
        client.send(b"HELLO\r\n\r\n")
        assert client.response().status == 400
        client.send(POLL)
        client.send(b"HELLO\r\n\r\n")
        assert client.read_to_end() == b""
