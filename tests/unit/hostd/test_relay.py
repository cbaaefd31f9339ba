"""What the relay sends to the servers, and what it answers itself."""

import asyncio
import hmac
import socket
import struct
import threading
from contextlib import ExitStack

import pytest

from forewarn.errors import Unavailable
from forewarn.hostd.ports import Peer
from forewarn.hostd.relay import sign
from forewarn.web.http.admission import Limits
from tests.unit.hostd.recording_server import DOCUMENT, RecordingServer, response
from tests.unit.hostd.relay_world import MINUTE, TOKEN, RelayWorld, until

TARGET = "/metadata/scheduledevents?api-version=2020-07-01"
POLL = f"GET {TARGET} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n\r\n".encode()
WAIT = POLL.replace(b"\r\n\r\n", b'\r\nIf-None-Match: "7"\r\nPrefer: wait=30\r\n\r\n')
APPROVAL = (
    f"POST {TARGET} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\nContent-Length: 2\r\n\r\n{{}}".encode()
)
UNAVAILABLE = b'{"error":"Service unavailable. Try again later"}'


def identity(vm: str = "id-1") -> list[bytes]:
    signature = hmac.digest(TOKEN.key, f"{vm} {MINUTE}".encode(), "sha256").hex()
    return [
        b"x-forewarn-host: hostd",
        f"x-instance-id: {vm}".encode(),
        f"x-forewarn-time: {MINUTE}".encode(),
        f"x-instance-id-signature: {signature}".encode(),
    ]


def sent_lines(server: RecordingServer) -> list[bytes]:
    return server.requests[-1].partition(b"\r\n\r\n")[0].split(b"\r\n")


async def never(_: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


def with_header(*lines: str, request: bytes = POLL) -> bytes:
    more = "".join(f"{line}\r\n" for line in lines).encode()
    return request.replace(b"\r\n\r\n", b"\r\n" + more + b"\r\n", 1)


def test_request_is_passed_on_with_the_guests_identity() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL, "127.0.0.2")

        first, *headers = sent_lines(world.servers[0])
        assert first == f"GET {TARGET} HTTP/1.1".encode()
        assert headers == [b"host: h", b"metadata: true", *identity("id-2")]


def test_signature_is_made_anew_each_minute() -> None:
    """Whoever has read one must not be able to use it for long."""
    first, other, second = sign(TOKEN, "id-1", 2), sign(TOKEN, "id-2", 2), sign(TOKEN, "id-1", 3)

    assert other[3] != first[3]
    assert (first[2][1], second[2][1]) == (b"120", b"180")
    assert first[3] != second[3]


def test_response_is_passed_on_unchanged() -> None:
    sent = response("200 OK", b"some bytes", b"x-more: 1", b"x-more: 2", b"preference-applied: a")
    with RelayWorld(RecordingServer(sent)) as world:
        assert world.ask(POLL).raw == sent


def test_hop_by_hop_headers_of_a_response_are_removed() -> None:
    sent = response("200 OK", DOCUMENT, b"Keep-Alive: timeout=5", b"Connection: keep-alive")
    with RelayWorld(RecordingServer(sent)) as world:
        assert world.ask(POLL).raw == response()


def test_chunked_response_gets_a_length() -> None:
    sent = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    with RelayWorld(RecordingServer(sent)) as world:
        assert world.ask(POLL).raw == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"


@pytest.mark.parametrize(
    "forged",
    [
        ["X-Instance-ID: id-2"],
        ["x-InStAnCe-Id: id-2", "X-INSTANCE-ID: id-3"],
        ["X-Forewarn-Host: other", "X-Instance-ID-Signature: 00", "X-Forewarn-Time: 1"],
        ["X-Instance-ID: id-2", "X-Instance-ID: id-2", "X-Instance-ID-Signature: 00"],
        ["X-Instance-ID:\tid-2"],
    ],
)
def test_forged_identity_never_reaches_a_server(forged: list[str]) -> None:
    with RelayWorld(RecordingServer(response())) as world:
        assert world.ask(with_header(*forged)).status == 200

        headers = sent_lines(world.servers[0])[1:]
        assert headers == [b"host: h", b"metadata: true", *identity()]


@pytest.mark.parametrize(
    "line",
    [
        "X-Instance-ID:\r\n id-2",
        "X-Other: a\r\n X-Instance-ID: id-2",
        "X-Instance-\r\n ID: id-2",
        "X-Instance-ID : id-2",
        "X-Instance-ID\x00: id-2",
        "X-Other: a\nX-Instance-ID: id-2",
    ],
)
def test_folded_or_malformed_header_is_refused(line: str) -> None:
    """Parsers differ in what they make of it."""
    with RelayWorld(RecordingServer(response())) as world:
        assert world.ask(with_header(line)).status == 400
        assert world.servers[0].requests == []


def test_trailer_of_a_chunked_body_is_not_an_identity() -> None:
    body = b"2\r\n{}\r\n0\r\nX-Instance-ID: id-2\r\n\r\n"
    head = with_header("Transfer-Encoding: chunked", request=POLL.replace(b"GET", b"POST"))
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(head + body)

        (sent,) = world.servers[0].requests
        assert sent.endswith(b"content-length: 2\r\n\r\n{}")
        assert b"id-2" not in sent


def test_forwarded_request_is_refused_as_by_the_service() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        refused = world.ask(with_header("x-FORWARDED-for: 10.0.0.1"))

        assert (refused.status, refused.body) == (
            400,
            b'{"error":"Bad request. X-Forwarded-For is not accepted"}',
        )
        assert world.servers[0].requests == []


def test_hop_by_hop_headers_of_a_request_are_removed() -> None:
    request = with_header(
        "Connection: keep-alive, X-Mine", "X-Mine: 1", "TE: trailers", "Keep-Alive: 5", "X-Kept: 2"
    )
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(request)

        headers = sent_lines(world.servers[0])[1:]
        assert headers == [b"host: h", b"metadata: true", b"x-kept: 2", *identity()]


def test_body_is_passed_on_after_100_continue() -> None:
    head = with_header("Content-Length: 2", "Expect: 100-continue", request=POLL).replace(
        b"GET", b"POST"
    )
    with RelayWorld(RecordingServer(response())) as world, world.connect() as client:
        client.send(head)
        assert client.response().status == 100
        client.send(b"{}")
        assert client.response().status == 200

        assert world.servers[0].requests[0].endswith(b"\r\n\r\n{}")


def test_peer_that_is_not_a_guest_is_forbidden() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        refused = world.ask(POLL, "127.0.0.9")

        message = "Forbidden. 127.0.0.9 is not a VM of this host"
        assert (refused.status, refused.body) == (403, f'{{"error":"{message}"}}'.encode())
        assert world.servers[0].requests == []


def test_guest_that_is_another_than_at_the_beginning_is_disconnected() -> None:
    with RelayWorld(RecordingServer(response())) as world, world.connect() as client:
        client.send(POLL)
        assert client.response().status == 200
        world.ports.vms["127.0.0.1"] = "id-2"
        client.send(POLL)
        refused = client.read_to_end()

        assert refused.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert b"is another VM than before" in refused
        assert len(world.servers[0].requests) == 1


def test_response_for_the_guest_before_is_not_sent_to_another() -> None:
    """A long poll may wait for a minute, in which a NIC can be moved."""
    answered = threading.Event()

    async def answer(_: bytes) -> bytes:
        world.ports.vms["127.0.0.1"] = "id-2"
        answered.set()
        return response()

    world = RelayWorld(RecordingServer(answer=answer))
    with world, world.connect() as client:
        client.send(POLL)
        refused = client.read_to_end()

        assert answered.is_set()
        assert refused.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert DOCUMENT not in refused


def test_guest_whose_port_is_in_doubt_gets_503() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ports.problem = Unavailable("two ports")
        refused = world.ask(POLL)

        assert (refused.status, refused.body) == (503, UNAVAILABLE)


SYN_COOKIES = (
    "connections of guests are refused: they come with SYN cookies, because too many are half open"
)


def test_connections_with_syn_cookies_are_refused_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel does not know from which port they come. Guests can make as many as they like."""
    with RelayWorld(RecordingServer(response()), saves_syn=False) as world:
        refused = [world.ask(POLL) for _ in range(3)]

        assert [(each.status, each.body) for each in refused] == [(503, UNAVAILABLE)] * 3
        assert world.servers[0].requests == []
    assert caplog.messages == [SYN_COOKIES]


def test_connection_that_was_reset_is_not_logged_as_one_with_a_syn_cookie(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has lost its first packet too, and any guest can reset connections."""
    with RelayWorld(RecordingServer(response()), saves_syn=False) as world:

        async def connect_and_reset() -> None:
            """Within one iteration of the event loop, so before the relay accepts it."""
            with socket.create_connection(world.listener.address) as guest:
                guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        world.run(connect_and_reset())
        until(lambda: world.ports.peers == [Peer("", b"", has_syn=False)])
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (with_header("X-Big: " + "x" * 70_000), 431),
        (with_header(*(f"X-{number}: 1" for number in range(120))), 431),
        (APPROVAL.replace(b"Content-Length: 2", b"Content-Length: 70000"), 413),
        (b"nonsense\r\n\r\n", 400),
        (POLL.replace(b"Host: h\r\n", b""), 400),
    ],
)
def test_limits_are_those_of_the_service(request_bytes: bytes, status: int) -> None:
    with RelayWorld(RecordingServer(response())) as world:
        refused = world.ask(request_bytes)

        assert refused.status == status
        assert refused.body.startswith(b'{"error":"')
        assert world.servers[0].requests == []


def test_long_poll_does_not_block_other_requests_of_its_guest() -> None:
    release = threading.Event()

    async def answer(request: bytes) -> bytes:
        if b"prefer" in request:
            while not release.is_set():
                await asyncio.sleep(0.005)
        return response()

    with RelayWorld(RecordingServer(answer=answer)) as world, world.connect() as waiting:
        waiting.send(WAIT)
        until(lambda: len(world.servers[0].requests) == 1)
        assert world.ask(POLL).status == 200
        release.set()
        assert waiting.response().status == 200


def test_long_poll_of_a_guest_that_left_is_ended_at_the_server() -> None:
    with RelayWorld(RecordingServer(answer=never)) as world:
        with world.connect() as client:
            client.send(WAIT)
            until(lambda: world.upstream.busy == 1)
        until(lambda: world.upstream.busy == 0)


def test_long_poll_whose_server_dies_is_not_sent_again() -> None:
    """The guest may have been reset meanwhile; a poll in its name would mean that it is back."""
    with (
        RelayWorld(RecordingServer(answer=never), RecordingServer(response())) as world,
        world.connect() as client,
    ):
        client.send(WAIT)
        until(lambda: len(world.servers[0].requests) == 1)
        world.run(world.servers[0].stop())

        assert (client.response().status, world.servers[1].requests) == (503, [])


class Suspended:
    """Answers like a server whose process can be stopped: then its connections stay open."""

    def __init__(self) -> None:
        self.is_stopped = False

    async def __call__(self, request: bytes) -> bytes:
        return await never(request) if self.is_stopped or b"prefer" in request else response()


def test_long_poll_ends_if_its_server_does_not_answer_a_check() -> None:
    """A process that is stopped keeps its connections: the guest would wait until it gives up."""
    answer = Suspended()
    with (
        RelayWorld(RecordingServer(answer=answer), RecordingServer(response())) as world,
        world.connect() as client,
    ):
        world.ask(POLL)
        client.send(WAIT)
        until(lambda: len(world.servers[0].requests) == 2)
        answer.is_stopped = True
        world.run(world.relay.check_servers(seconds_max=0.05))

        assert "age" in client.response().headers
        assert world.servers[1].requests == []
        assert "age" not in world.ask(POLL).headers
        assert len(world.servers[1].requests) == 1


def test_guest_that_only_waits_leaves_a_suspended_server() -> None:
    """A long poll is sent once, so that the next one begins with another server."""
    answer = Suspended()
    with (
        RelayWorld(RecordingServer(answer=answer), RecordingServer(answer=Suspended())) as world,
        world.connect() as client,
    ):
        world.ask(POLL)
        client.send(WAIT)
        until(lambda: len(world.servers[0].requests) == 2)
        answer.is_stopped = True
        world.run(world.relay.check_servers(seconds_max=0.05))
        assert "age" in client.response().headers
        for server in world.upstream._servers:
            server.retry_at = 0.0  # the guest has paused for a second
        client.send(WAIT)
        until(lambda: len(world.servers[1].requests) == 1)


def test_long_poll_waits_on_if_its_server_only_accepts_no_connections() -> None:
    """It may be stopping, or have too many."""

    class Full(Suspended):
        async def __call__(self, request: bytes) -> bytes:
            return b"" if b"versions" in request else await super().__call__(request)

    with RelayWorld(RecordingServer(answer=Full())) as world, world.connect() as client:
        client.send(WAIT)
        until(lambda: bool(world.servers[0].requests))
        world.run(world.relay.check_servers(seconds_max=5.0))
        assert world.upstream.busy == 1
        assert world.ask(POLL).status == 200


def test_long_poll_waits_on_if_its_server_answers_others_meanwhile() -> None:
    """It is slow, or one of several behind the same address."""

    async def slow(request: bytes) -> bytes:
        if b"versions" in request:
            return await never(request)
        return await Suspended()(request)

    with RelayWorld(RecordingServer(answer=slow)) as world, world.connect() as client:
        client.send(WAIT)
        until(lambda: bool(world.servers[0].requests))
        check = asyncio.run_coroutine_threadsafe(
            world.relay.check_servers(seconds_max=0.5), world._loop
        )
        until(lambda: len(world.servers[0].requests) == 2)
        assert world.ask(POLL).status == 200
        check.result(10)
        assert world.upstream.busy == 1


def test_check_of_a_server_is_a_request_of_a_guest_that_waits_there() -> None:
    """The server refuses others. It is no poll: that would mean that the guest is there."""
    servers = RecordingServer(answer=Suspended()), RecordingServer(answer=Suspended())
    with RelayWorld(*servers) as world, world.connect("127.0.0.2") as client:
        world.run(world.relay.check_servers())
        assert servers[0].requests == []
        client.send(WAIT)
        until(lambda: len(servers[0].requests) == 1)
        world.run(world.relay.check_servers())

        first, *headers = sent_lines(servers[0])
        assert first == b"GET /metadata/versions HTTP/1.1"
        assert {b"metadata: true", *identity("id-2")} < {*headers}
        assert servers[1].requests == []
        assert world.upstream.busy == 1  # it waits on


@pytest.mark.parametrize("path", ["scheduledevent%73", "%73cheduledevents", "instance"])
def test_no_other_request_of_a_guest_waits_at_a_server(path: str) -> None:
    """Servers decode the path. One that let it wait would be taken for one that does not answer,
    by all guests of the host.
    """
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(WAIT.replace(b"/scheduledevents", f"/{path}".encode()))
        is_poll = path != "instance"
        assert (b"prefer: wait=30" in sent_lines(world.servers[0])) is is_poll


@pytest.mark.parametrize(("ahead_seconds", "status"), [(59.0, 304), (61.0, 503)])
def test_long_poll_whose_server_dies_gets_the_last_document(
    ahead_seconds: float, status: int
) -> None:
    async def answer(request: bytes) -> bytes:
        return await never(request) if b"prefer" in request else response()

    with RelayWorld(RecordingServer(answer=answer), RecordingServer(response())) as world:
        world.ask(POLL)
        with world.connect() as client:
            client.send(WAIT)
            until(lambda: len(world.servers[0].requests) == 2)
            world.ahead_seconds = ahead_seconds
            world.run(world.servers[0].stop())

            assert client.response().status == status
        assert world.servers[1].requests == []


def test_long_poll_that_a_server_refuses_is_not_sent_to_another() -> None:
    refusal = response("503 Service Unavailable", b'{"error":"x"}')
    with RelayWorld(RecordingServer(refusal), RecordingServer(response())) as world:
        assert world.ask(WAIT).raw == refusal
        assert world.servers[1].requests == []


def test_long_poll_is_answered_at_once_if_too_many_wait() -> None:
    async def answer(request: bytes) -> bytes:
        return await never(request) if b"prefer" in request else response()

    with (
        RelayWorld(RecordingServer(answer=answer), connections_max=4) as world,
        ExitStack() as stack,
    ):
        sources = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        clients = [stack.enter_context(world.connect(source)) for source in sources]
        for client in clients:
            client.send(WAIT)
        until(lambda: world.upstream.busy == 3)

        assert world.ask(WAIT).status == 200


def test_stopped_relay_ends_long_polls() -> None:
    with RelayWorld(RecordingServer(answer=never)) as world, world.connect() as client:
        client.send(WAIT)
        until(lambda: world.upstream.busy == 1)
        world.run(world.listener.stop())

        assert client.read_to_end() == b""
        assert world.upstream.busy == 0


def test_stopped_relay_ends_requests_without_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """Its server does not answer. uvicorn would log a traceback for each of them."""
    with RelayWorld(RecordingServer(answer=never)) as world, ExitStack() as stack:
        for request in (POLL, APPROVAL):
            client = stack.enter_context(world.connect())
            client.send(request)
        until(lambda: len(world.servers[0].requests) == 2)
        world.run(world.listener.stop())

        assert client.read_to_end() == b""
        until(lambda: not world.listener.state.tasks)
        assert world.upstream.busy == 0
    assert caplog.messages == []


def test_response_for_a_connection_that_is_closing_is_dropped_without_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guests could fill the log: uvicorn logs an application that sends nothing."""

    async def answer(_: bytes) -> bytes:
        (connection,) = world.listener.state.connections
        world.ports.on_lookup = connection.transport.abort  # right before the response is sent
        return response()

    with RelayWorld(RecordingServer(answer=answer)) as world:
        with world.connect() as client:
            client.send(POLL)
            assert client.read_to_end() == b""
        until(lambda: not world.listener.state.tasks)
    assert caplog.messages == []


def test_guest_with_too_many_connections_keeps_others_in() -> None:
    limits = Limits(connections_max=100, connections_per_address_max=2)
    with RelayWorld(RecordingServer(response()), limits=limits) as world, ExitStack() as stack:
        clients = [stack.enter_context(world.connect()) for _ in range(3)]
        assert clients[2].read_to_end().startswith(b"HTTP/1.1 503 ")
        assert world.ask(POLL, "127.0.0.2").status == 200


def test_last_document_is_served_for_a_minute_without_a_server() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL)
        world.stop_servers()
        last = world.ask(POLL)
        assert (last.status, last.body, last.headers["etag"]) == (200, DOCUMENT, '"7"')
        assert last.headers["age"] == "0"

        world.ahead_seconds = 59.0
        assert world.ask(POLL).status == 200
        world.ahead_seconds = 61.0
        refused = world.ask(POLL)
        assert (refused.status, refused.body) == (503, UNAVAILABLE)
        assert refused.headers["retry-after"] == "1"


def test_minute_counts_from_the_last_confirmation() -> None:
    known = with_header('If-None-Match: "7"')
    with RelayWorld(RecordingServer(response(), response("304 Not Modified"))) as world:
        world.ask(POLL)
        world.ahead_seconds = 50.0
        assert world.ask(known).status == 304
        world.stop_servers()
        world.ahead_seconds = 100.0

        assert world.ask(POLL).body == DOCUMENT


@pytest.mark.parametrize("tag", ['"7"', "7", 'W/"7"', "*", '"1", "7"'])
def test_last_document_that_the_guest_has_is_not_sent_again(tag: str) -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL)
        world.stop_servers()
        with world.connect() as client:
            client.send(with_header(f"If-None-Match: {tag}"))
            unchanged = client.response()

        assert (unchanged.status, unchanged.headers["etag"]) == (304, '"7"')
        assert "content-length" not in unchanged.headers


@pytest.mark.parametrize(
    ("other", "address"),
    [
        (POLL, "127.0.0.2"),
        (POLL.replace(b"2020-07-01", b"2019-08-01"), "127.0.0.1"),
        (POLL.replace(b"Metadata: true\r\n", b""), "127.0.0.1"),
        (with_header("Origin: http://page"), "127.0.0.1"),
        (POLL.replace(b"GET", b"HEAD"), "127.0.0.1"),
        (POLL.replace(b"scheduledevents", b"instance"), "127.0.0.1"),
        (APPROVAL, "127.0.0.1"),
    ],
)
def test_last_document_is_only_for_the_same_request(other: bytes, address: str) -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL)
        world.stop_servers()
        with world.connect(address) as client:
            client.send(other)
            refused = client.response(has_body=not other.startswith(b"HEAD"))

        assert (refused.status, refused.headers["retry-after"]) == (503, "1")


def test_last_document_is_served_while_all_servers_are_unavailable() -> None:
    with RelayWorld(RecordingServer(response(), response("503 Unavailable", b"{}"))) as world:
        world.ask(POLL)

        assert world.ask(POLL).body == DOCUMENT


def test_error_of_a_server_is_passed_on_without_a_last_document() -> None:
    refusal = response("503 Service Unavailable", b'{"error":"x"}', b"retry-after: 7")
    with RelayWorld(RecordingServer(refusal)) as world:
        assert world.ask(POLL).raw == refusal


def test_waiting_guest_gets_the_last_document_without_a_server() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL)
        world.stop_servers()

        assert world.ask(WAIT).status == 304


def test_poll_after_a_server_died_goes_to_another() -> None:
    with RelayWorld(RecordingServer(response()), RecordingServer(response())) as world:
        world.ask(POLL)
        world.run(world.servers[0].stop())

        assert "age" not in world.ask(POLL).headers
        assert world.ask(APPROVAL).status == 200


def test_http_1_0_client_may_keep_its_connection() -> None:
    old = POLL.replace(b"HTTP/1.1", b"HTTP/1.0").replace(
        b"Host: h\r\n", b"Connection: keep-alive\r\n"
    )
    with RelayWorld(RecordingServer(response())) as world, world.connect() as client:
        for _ in range(2):
            client.send(old)
            kept = client.response()
            assert (kept.status, kept.headers["connection"]) == (200, "keep-alive")


def test_pipelined_requests_are_answered_in_order() -> None:
    async def answer(request: bytes) -> bytes:
        return response(body=request.split(b" ")[1])

    requests = [b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in range(20)]
    with RelayWorld(RecordingServer(answer=answer)) as world, world.connect() as client:
        client.send(b"".join(requests))
        assert [client.response().body for _ in requests] == [
            b"/%d" % number for number in range(20)
        ]


async def waits_if_preferred(request: bytes) -> bytes:
    return await never(request) if b"prefer" in request else response()


def test_long_poll_ends_when_its_vm_begins_to_move() -> None:
    """On its new host, the guest would wait for a response that only this host can send."""
    with (
        RelayWorld(RecordingServer(answer=waits_if_preferred)) as world,
        world.connect() as moved,
        world.connect("127.0.0.2") as other,
    ):
        for client in (moved, other):
            client.send(WAIT)
        until(lambda: world.upstream.busy == 2)
        with world.moving("id-1"):
            assert moved.response().status == 200
            assert b"prefer" not in world.servers[0].requests[-1].lower()
            until(lambda: world.upstream.busy == 1)


def test_long_poll_does_not_wait_while_its_vm_moves() -> None:
    with RelayWorld(RecordingServer(answer=waits_if_preferred)) as world:
        with world.moving("id-1"):
            assert world.ask(WAIT).status == 200
        with world.connect() as client:
            client.send(WAIT)
            until(lambda: world.upstream.busy == 1)
