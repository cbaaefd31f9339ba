"""The limits of a connection. Time passes because the test says so."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest

from forewarn.config import Config, Identify
from forewarn.core.command import Maintain
from forewarn.core.event import EventType
from forewarn.core.fleet import Vm
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import Connection
from forewarn.web.http.message import Message, Receive, Send
from tests.e2e.metadata_world import EVENT_ID, POLL, TARGET, Client, World

APPROVE = f"POST {TARGET} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n".encode()
LARGE_BYTES = 50_000_000
IDLE = timedelta(seconds=76)
STALL = timedelta(seconds=11)


def warm(world: World, client: Client) -> None:
    """Let polls be known, and the connection have carried one."""
    for _ in range(2):
        client.send(POLL)
        client.response()
    assert world.ask(POLL).status == 200


def test_idle_connection_is_closed_silently() -> None:
    with World() as world, world.connect() as fresh, world.connect() as used:
        warm(world, used)
        world.pass_time(IDLE - timedelta(seconds=10))
        used.send(POLL)
        used.response()
        world.pass_time(IDLE + timedelta(seconds=1))
        assert fresh.read_to_end() == b""
        world.pass_time(2 * IDLE + timedelta(seconds=1))
        assert used.read_to_end() == b""


def test_fast_path_connection_is_closed_only_when_idle() -> None:
    with World() as world, world.connect() as client:
        warm(world, client)
        with world.connect() as quick:
            for seconds in (0, 60, 120):
                world.pass_time(timedelta(seconds=seconds))
                quick.send(POLL)
                assert quick.response().status == 200
            world.pass_time(timedelta(seconds=120) + IDLE)
            assert quick.read_to_end() == b""


@contextmanager
def stalled(world: World) -> Iterator[Client]:
    """A client that sends known polls and reads nothing.

    One poll at a time, so that only the fast path responds.
    """
    vms = tuple(Vm(name=f"{number:0100}", host="host-a") for number in range(500))
    world.enrol("web", Vm(name="web-0", address="127.0.0.1"), *vms)
    world.submit(Maintain(host="host-a", operation_id=EVENT_ID, type=EventType.FREEZE))
    with world.connect() as client:
        warm(world, client)
    with world.connect() as quick:
        for _ in range(200):
            quick.send(POLL)
            world.run(
                asyncio.sleep(0.001)
            )  # the server has had its turn before the next one is sent
        [connection] = world.listener.state.connections
        assert 0 < connection.transport.get_write_buffer_size() < 200_000
        yield quick


def test_fast_path_client_that_does_not_read_is_dropped() -> None:
    with World() as world, stalled(world) as client:
        world.pass_time(STALL)
        assert not client.is_open()


def test_stop_drops_a_client_that_does_not_read() -> None:
    """One guest that does not read must neither delay a restart nor break it."""
    with World(stop_seconds_max=0.1) as world, stalled(world) as client:
        world.stop()
        assert not client.is_open()
        assert world.listener.state.connections == set()


@pytest.mark.parametrize("begun", [b"G", POLL[:-2], APPROVE + b"Content-Length: 10\r\n\r\n123"])
def test_a_request_that_does_not_arrive_in_time_is_dropped(begun: bytes) -> None:
    """Else a few slow clients could hold every connection there is."""
    with World() as world, world.connect() as client:
        client.send(begun)
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(STALL)
        response = client.response()
        assert (response.status, response.headers["connection"]) == (408, "close")
        assert client.read_to_end() == b""
        world.until(lambda: not world.listener.state.tasks)


def test_slow_bytes_do_not_extend_the_header_timeout() -> None:
    with World() as world, world.connect() as client:
        client.send(b"GET / HT")
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(STALL - timedelta(seconds=2))
        client.send(b"TP")
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(STALL)
        assert client.response().status == 408


def test_long_poll_is_not_idle() -> None:
    with World() as world, world.connect() as client:
        client.send(POLL.replace(b"Host: h", b'Host: h\r\nPrefer: wait=60\r\nIf-None-Match: "1"'))
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(10 * IDLE)
        world.restart()
        assert client.response().status == 200


def test_client_that_does_not_read_is_paused_then_dropped() -> None:
    """Its answers are not kept in memory without end."""
    with World() as world, world.connect() as client:
        warm(world, client)
        large = POLL.replace(b"Host: h", b"Host: h\r\nA: " + b"a" * 400)
        sent = client.send_until_stuck(large * 50)
        assert sent > 1_000_000
        [connection] = [
            one for one in world.listener.state.connections if one.transport.get_write_buffer_size()
        ]
        assert connection.transport.get_write_buffer_size() < 200_000
        world.pass_time(STALL)
        assert world.ask(POLL).status == 200
        assert not client.is_open()


async def large(scope: Message, receive: Receive, send: Send) -> None:
    """Answers more than all buffers on the way can hold."""
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % LARGE_BYTES)],
        }
    )
    await send({"type": "http.response.body", "body": b"a" * LARGE_BYTES})


def test_slow_client_gets_the_whole_response() -> None:
    """As an operator behind a slow line does; what counts is that something is taken."""
    with World(application=large) as world, world.connect() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        for turn in range(1, 5):
            assert client.take(8_000_000) == 8_000_000
            world.pass_time(turn * STALL)
        assert client.take(LARGE_BYTES - 32_000_000) == LARGE_BYTES - 32_000_000


def test_client_that_stops_reading_a_response_is_dropped() -> None:
    with World(application=large) as world, world.connect() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert client.take(8_000_000) == 8_000_000
        for turn in range(1, 4):
            world.pass_time(turn * STALL)
        assert not client.is_open()
        world.until(lambda: not world.listener.state.tasks)


def test_connections_per_address_are_limited() -> None:
    with World(limits=Limits(connections_per_address_max=2)) as world:
        with world.connect() as first, world.connect() as second:
            for client in (first, second):
                client.send(POLL)
                assert client.response().status == 200
            with world.connect() as third:
                response = third.response()
                assert (response.status, response.headers["connection"]) == (503, "close")
                assert third.read_to_end() == b""
        world.until(lambda: not world.polls.counts)
        assert world.ask(POLL).status == 200


@contextmanager
def crowded(connections_max: int, connections_per_address_max: int) -> Iterator[World]:
    """VMs at 127.0.0.1 to 127.0.0.5, known by their addresses alone."""
    limits = Limits(
        connections_max=connections_max, connections_per_address_max=connections_per_address_max
    )
    with World(Config(identify=(Identify.ADDRESS,)), limits) as world:
        world.enrol(
            "web",
            *(Vm(name=f"web-{number}", address=f"127.0.0.{number}") for number in range(1, 6)),
        )
        world.ask(POLL)
        world.until(lambda: not world.polls.connections_count)
        yield world


def hold(world: World, stack: ExitStack, source: str, count: int) -> list[Client]:
    """Connections from an address on which nothing happens. Some may be refused or closed."""
    clients = [stack.enter_context(world.connect(source)) for _ in range(count)]
    take_turns(world)
    return clients


def take_turns(world: World) -> None:
    """Let the event loop do what there is to do: it accepts one connection in an iteration, and
    ends one in a few.
    """

    async def turn() -> None:
        for _ in range(200):
            await asyncio.sleep(0)

    world.run(turn())


def status_from(world: World, source: str) -> int:
    with world.connect(source) as client:
        client.send(POLL)
        return client.response().status


def test_idle_connections_of_one_vm_do_not_block_others() -> None:
    with crowded(16, 2) as world, ExitStack() as stack:
        hold(world, stack, "127.0.0.2", 40)
        assert world.polls.connections_count == 2
        assert [status_from(world, f"127.0.0.{number}") for number in (1, 3, 4, 5)] == [200] * 4
        assert status_from(world, "127.0.0.2") == 503


def test_oldest_idle_connection_is_closed_for_a_new_one() -> None:
    """As in nginx: an idle connection can be opened again, a VM that is not let in hears of
    nothing.
    """
    with crowded(8, 4) as world, ExitStack() as stack:
        first, *_ = hold(world, stack, "127.0.0.2", 4)
        last, *_ = hold(world, stack, "127.0.0.3", 4)
        assert world.polls.connections_count == 8
        with world.connect("127.0.0.1") as client:
            client.send(POLL)
            assert client.response().status == 200
            assert first.read_to_end() == b""
            last.send(POLL)
            assert last.response().status == 200
            assert world.polls.connections_count == 8


def test_active_connection_is_not_closed_for_a_new_one() -> None:
    """Neither a poll that waits nor half a request; when nothing is idle, the new connection is
    refused.
    """
    waiting = POLL.replace(b"Host: h", b'Host: h\r\nPrefer: wait=60\r\nIf-None-Match: "%d"')
    with (
        crowded(2, 2) as world,
        world.connect("127.0.0.1") as waits,
        world.connect("127.0.0.2") as sends,
    ):
        waits.send(waiting % world.scope().incarnation)
        sends.send(POLL[:-2])
        take_turns(world)
        with world.connect("127.0.0.3") as third:
            response = third.response()
            assert (response.status, response.headers["connection"]) == (503, "close")
            assert third.read_to_end() == b""
        sends.send(POLL[-2:])
        assert sends.response().status == 200
        assert status_from(world, "127.0.0.3") == 200


def test_unknown_clients_never_displace_a_vm() -> None:
    """They have an eighth of all connections together, and are the first to be closed."""
    with crowded(16, 16) as world, ExitStack() as stack:
        for number in range(90, 100):
            hold(world, stack, f"127.0.0.{number}", 4)
        assert world.polls.connections_count == 2
        hold(world, stack, "127.0.0.2", 14)
        assert world.polls.connections_count == 16
        strangers = hold(world, stack, "127.0.0.90", 1)
        vms = [world.connect(f"127.0.0.{number}") for number in (1, 3)]
        for vm in vms:
            stack.enter_context(vm)
            vm.send(POLL)
            assert vm.response().status == 200
        assert strangers[0].read_to_end() == b""
        assert world.polls.connections_count == 16


def test_unknown_client_gets_403_under_idle_connections() -> None:
    """A VM that was forgotten in the fleet file must be told 403, not be left in the dark by
    somebody else's flood.
    """
    with crowded(16, 16) as world, ExitStack() as stack:
        hold(world, stack, "127.0.0.90", 40)
        assert status_from(world, "127.0.0.91") == 403


def test_proxy_mode_has_no_limit_for_unknown_addresses() -> None:
    config = Config(identify=(Identify.PROXY, Identify.ADDRESS))
    with World(config, Limits(connections_max=16)) as world, ExitStack() as stack:
        hold(world, stack, "127.0.0.99", 16)
        assert world.polls.connections_count == 16


def test_reached_limit_is_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients must not fill the log, but an operator must learn that a limit is too low."""
    with crowded(8, 4) as world, ExitStack() as stack:
        hold(world, stack, "127.0.0.2", 6)
        hold(world, stack, "127.0.0.99", 3)
        hold(world, stack, "127.0.0.3", 4)
        assert world.polls.limits_reached == {"address": 2, "unknown": 2, "total": 1}
        records = [
            (record.getMessage(), vars(record)["facts"])
            for record in caplog.records
            if record.name == "forewarn"
        ]
        assert sorted(text for text, _ in records) == [
            f"connection limit reached: {limit}" for limit in ("address", "total", "unknown")
        ]
        assert (
            "connection limit reached: address",
            {"limit_max": 4, "connections": 4, "address": "127.0.0.2"},
        ) in records


def test_closed_connections_leave_no_state() -> None:
    with World() as world:
        for _ in range(20):
            world.ask(POLL)
        world.until(lambda: not world.polls.counts and not world.listener.state.connections)


def test_head_one_byte_over_the_limit_is_rejected() -> None:
    limit = 4096
    with World(limits=Limits(head_bytes_max=limit)) as world:
        fitting = POLL.replace(b"Host: h", b"Host: h\r\nA: ".ljust(limit - len(POLL) + 7, b"a"))
        assert len(fitting) == limit
        assert world.ask(fitting).status == 200
        assert world.ask(fitting.replace(b"A: ", b"A: a")).status == 431


@pytest.mark.parametrize("pieces", [1, 4])
def test_endless_request_head_is_rejected(pieces: int) -> None:
    """Before it is whole, so that nobody can make the server hold it."""
    with World() as world, world.connect() as client:
        for _ in range(pieces):
            client.send(b"GET / HTTP/1.1\r\nA: " + b"a" * (80_000 // pieces))
        response = client.response()
        assert (response.status, response.headers["connection"]) == (431, "close")


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.99"])
def test_60_kb_of_etags_are_parsed_quickly(source: str) -> None:
    """They are parsed on the event loop, before it is known who sent them: it took minutes, and
    nobody else was answered.
    """
    request = POLL.replace(b"Host: h", b"Host: h\r\nIf-None-Match: " + b'"1",' * 15_000 + b'"2"')
    with World() as world:
        world.ask(POLL)
        with world.connect(source) as client:
            client.send(request)
            assert client.response().status == (304 if source == "127.0.0.1" else 403)
            client.send(request.replace(b'"1",', b'"3",').replace(b'"2"', b'"4"'))
            assert client.response().status == (200 if source == "127.0.0.1" else 403)


def test_101st_header_line_is_rejected() -> None:
    """Each line costs memory and time of its own, however short it is; no client is known to send
    more than 30.
    """
    with World() as world:
        for lines, status in ((100, 200), (101, 431)):
            more = b"".join(b"A: b\r\n" for _ in range(lines - 2))
            assert world.ask(POLL.replace(b"Host: h\r\n", b"Host: h\r\n" + more)).status == status


def test_body_one_byte_over_the_limit_is_rejected() -> None:
    with World() as world:
        for size, status in ((65536, 400), (65537, 413)):
            assert (
                world.ask(
                    APPROVE + b"Content-Length: %d\r\n\r\n" % size + b" " * min(size, 65536)
                ).status
                == status
            )


def test_chunked_body_has_the_same_limit() -> None:
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    with World() as world:
        for chunks, status in ((16, 400), (17, 413)):
            assert (
                world.ask(
                    APPROVE + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * chunks + b"0\r\n\r\n"
                ).status
                == status
            )


def test_too_large_unread_chunked_body_is_rejected() -> None:
    """The limit is the connection's own, whatever the application does."""
    chunk = b"1f4\r\n" + b" " * 500 + b"\r\n"
    with World(limits=Limits(body_bytes_max=1000)) as world:
        for chunks, status in ((2, 400), (3, 413)):
            assert (
                world.ask(
                    APPROVE + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * chunks + b"0\r\n\r\n"
                ).status
                == status
            )


def test_endless_trailers_are_rejected() -> None:
    """They belong to no body and to no head, and are still memory."""
    trailers = b"".join(b"T%d: %s\r\n" % (number, b"t" * 1000) for number in range(600))
    with World() as world:
        assert (
            world.ask(APPROVE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + trailers).status == 413
        )


def test_thousands_of_pipelined_requests_keep_their_order() -> None:
    """One is parsed when the one before has its response, so uvicorn never queues any."""

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        queued.extend(
            len(one.pipeline)
            for one in world.listener.state.connections
            if isinstance(one, Connection)
        )
        await world.metadata(scope, receive, send)

    numbers, queued = range(3000), [0]
    with World(application=application) as world, world.connect() as client:
        client.send(
            b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in numbers) + POLL
        )
        assert [client.response().status for _ in numbers] == [404] * 3000
        assert client.response().status == 200
        assert world.called[:3000] == [f"GET /{number}" for number in numbers]
        assert set(queued) == {0}


@pytest.mark.parametrize("connections", [1, 8])
def test_pipelining_client_does_not_starve_others(connections: int) -> None:
    """A few requests per iteration of the event loop, on however many connections: other VMs are
    answered in between.
    """

    async def count_turns() -> int:
        """In the event loop, so that all has been sent before the first turn."""
        for client in clients:
            client.send(POLL * polls_each)
        turns = responses = 0
        while responses < polls_each * connections:
            await asyncio.sleep(0)
            before, responses = responses, sum(client.count_responses() for client in clients)
            turns += responses > before
        return turns

    polls_each, polls_per_turn_max = 400, 20
    with World() as world, ExitStack() as stack:
        clients = [stack.enter_context(world.connect()) for _ in range(connections)]
        for client in clients:
            warm(world, client)
        assert world.run(count_turns()) > polls_each * connections / polls_per_turn_max


def test_input_after_the_last_request_is_dropped() -> None:
    """If it were queued again and again, one packet would occupy the server until its end."""
    last = POLL.replace(b"Host: h", b"Host: h\r\nConnection: close")
    with World() as world, world.connect() as client:
        assert world.ask(POLL).status == 200  # the next polls are answered by the fast path
        client.send(last + POLL)
        assert client.response().status == 200
        assert client.read_to_end() == b""
        before = world.polls.turns
        for _ in range(10):
            world.run(asyncio.sleep(0))
        assert world.polls.turns == before


def test_body_of_blank_lines_is_parsed_in_many_turns() -> None:
    """Each blank line may be the end of the request, so it is parsed by itself."""
    lines = 5000
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (5 * lines, b"a\r\n\r\n" * lines)
    with World() as world, world.connect() as client:
        client.send(APPROVE + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        assert client.response().status == 400
        assert world.polls.turns > lines / 100


def test_client_that_reads_may_pipeline_forever() -> None:
    with World() as world, world.connect() as client, ThreadPoolExecutor(1) as threads:
        warm(world, client)
        sending = threads.submit(client.send, POLL * 20_000)
        for number in range(20_000):
            if number % 2_000 == 0:
                world.pass_time(number / 2_000 * STALL)
            assert client.response().status == 200
        sending.result()
