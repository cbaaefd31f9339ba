"""The limits of a connection. Time passes because the test says so."""

from datetime import timedelta

import pytest

from forewarn.web.connection import Limits
from tests.e2e.metadata_world import POLL, Client, World

APPROVE = b"POST /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n"
IDLE = timedelta(seconds=76)
STALL = timedelta(seconds=11)


def warm(world: World, client: Client) -> None:
    """Let polls be known, and the connection have carried one."""
    for _ in range(2):
        client.send(POLL)
        client.answer()
    assert world.ask(POLL).status == 200


def test_an_idle_connection_is_closed_without_a_word() -> None:
    with World() as world, world.connect() as fresh, world.connect() as used:
        warm(world, used)
        world.pass_time(IDLE - timedelta(seconds=10))
        used.send(POLL)
        used.answer()
        world.pass_time(IDLE + timedelta(seconds=1))
        assert fresh.rest() == b""
        world.pass_time(2 * IDLE + timedelta(seconds=1))
        assert used.rest() == b""


def test_a_connection_on_which_only_known_polls_came_is_closed_when_idle() -> None:
    with World() as world, world.connect() as client:
        warm(world, client)
        with world.connect() as quick:
            quick.send(POLL)
            quick.answer()
            world.pass_time(2 * IDLE)
            assert quick.rest() == b""


@pytest.mark.parametrize("begun", [b"G", POLL[:-2], APPROVE + b"Content-Length: 10\r\n\r\n123"])
def test_a_request_that_does_not_arrive_in_time_is_dropped(begun: bytes) -> None:
    """Else a few slow clients could hold every connection there is."""
    with World() as world, world.connect() as client:
        client.send(begun)
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(STALL)
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert client.rest() == b""


def test_one_more_byte_now_and_then_buys_no_time() -> None:
    with World() as world, world.connect() as client:
        client.send(b"GET / HT")
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(STALL - timedelta(seconds=2))
        client.send(b"TP")
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(STALL)
        assert client.answer().status == 408


def test_a_poll_that_waits_is_not_taken_for_idle() -> None:
    with World() as world, world.connect() as client:
        client.send(POLL.replace(b"Host: h", b'Host: h\r\nPrefer: wait=60\r\nIf-None-Match: "1"'))
        assert client.is_silent(timedelta(seconds=0.1))
        world.pass_time(10 * IDLE)
        world.restart()
        assert client.answer().status == 200


def test_a_client_that_does_not_take_its_answers_is_held_back_and_then_dropped() -> None:
    """Its answers are not kept in memory without end."""
    with World() as world, world.connect() as client:
        warm(world, client)
        large = POLL.replace(b"Host: h", b"Host: h\r\nA: " + b"a" * 400)
        sent = client.send_until_stuck(large * 50)
        assert sent > 1_000_000
        [connection] = [one for one in world.listener.state.connections if one.transport.get_write_buffer_size()]
        assert connection.transport.get_write_buffer_size() < 200_000
        world.pass_time(STALL)
        assert world.ask(POLL).status == 200
        assert not client.is_open()


def test_connections_of_one_address_have_a_limit() -> None:
    with World(limits=Limits(connections_per_address_max=2)) as world:
        with world.connect() as first, world.connect() as second:
            for client in (first, second):
                client.send(POLL)
                assert client.answer().status == 200
            with world.connect() as third:
                answer = third.answer()
                assert (answer.status, answer.headers["connection"]) == (503, "close")
                assert third.rest() == b""
        world.until(lambda: not world.polls.counts)
        assert world.ask(POLL).status == 200


def test_nothing_is_kept_of_connections_that_have_ended() -> None:
    with World() as world:
        for _ in range(20):
            world.ask(POLL)
        world.until(lambda: not world.polls.counts and not world.listener.state.connections)


def test_a_head_of_just_the_limit_is_read_and_one_byte_more_is_refused() -> None:
    limit = 4096
    head = [b"/metadata/scheduledevents?api-version=2020-07-01", b"hosth", b"metadatatrue", b"a"]
    room = limit - sum(map(len, head)) - 3 * 4
    with World(limits=Limits(head_bytes_max=limit)) as world:
        fitting = POLL.replace(b"Host: h", b"Host: h\r\nA: " + b"a" * room)
        assert world.ask(fitting).status == 200
        assert world.ask(fitting.replace(b"A: ", b"A: a")).status == 431


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_head_without_end_is_refused(pieces: int) -> None:
    """Before it is whole, so that nobody can make the server hold it."""
    with World() as world, world.connect() as client:
        for _ in range(pieces):
            client.send(b"GET / HTTP/1.1\r\nA: " + b"a" * (80_000 // pieces))
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (431, "close")


def test_a_body_of_just_the_limit_is_read_and_one_byte_more_is_refused() -> None:
    with World() as world:
        for size, status in ((65536, 400), (65537, 413)):
            assert world.ask(APPROVE + b"Content-Length: %d\r\n\r\n" % size + b" " * min(size, 65536)).status == status


def test_a_body_in_chunks_has_the_same_limit() -> None:
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    with World() as world:
        for chunks, status in ((16, 400), (17, 413)):
            assert world.ask(APPROVE + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * chunks + b"0\r\n\r\n").status == status


def test_trailers_without_end_are_refused() -> None:
    """They belong to no body and to no head, and are still memory."""
    trailers = b"".join(b"T%d: %s\r\n" % (number, b"t" * 1000) for number in range(600))
    with World() as world:
        assert world.ask(APPROVE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + trailers).status == 413


def test_thousands_of_requests_at_once_are_all_answered_in_their_order() -> None:
    """They are taken in as fast as they are answered, never all at once."""
    numbers = range(3000)
    with World() as world, world.connect() as client:
        client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in numbers) + POLL)
        assert [client.answer().status for _ in numbers] == [404] * 3000
        assert client.answer().status == 200
        assert [call for call in world.called if call != "GET /metadata/scheduledevents"] == [
            f"GET /{number}" for number in numbers
        ]
