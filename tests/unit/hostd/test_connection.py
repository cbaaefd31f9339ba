"""A kept connection to a server: responses, and the ways in which it ends."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forewarn.errors import Invalid
from forewarn.hostd.upstream import BODY_BYTES_MAX, HttpConnection, Server, ServerLost
from tests.unit.hostd.http_server import Request, in_loop, serving

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[HttpConnection]:
    """A connection to a server that sends these bytes for each request, then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = await Server(f"http://127.0.0.1:{port}").connect()
        yield connection
        connection.close()


@in_loop
async def test_one_connection_carries_many_requests() -> None:
    async def answer(request: Request) -> tuple[int, object]:
        return 200, request.path.encode()

    async with serving(answer) as server:
        connection = await Server(server.url).connect()
        for path in ("/a", "/b"):
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            response = await connection.send(request)
            assert (response.status, response.body) == (200, path.encode())
            assert response.headers == [(b"Content-Length", b"2")]
        assert server.connections == 1
        connection.close()


@in_loop
async def test_chunks_and_interim_responses_are_understood() -> None:
    reply = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    )
    async with answering(reply) as connection:
        assert (await connection.send(GET)).body == b"abc"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"", "was closed by the server"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "was closed by the server"),
        (b"hello\r\n\r\n", "had a malformed response"),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + bytes(BODY_BYTES_MAX + 1),
            "had a response of more than 16777216 bytes",
        ),
    ],
)
@in_loop
async def test_a_broken_response_is_an_error(reply: bytes, problem: str) -> None:
    async with answering(reply) as connection:
        with pytest.raises(ServerLost, match=problem):
            await connection.send(GET)
        assert not connection.is_open
        with pytest.raises(ServerLost, match="is closed"):
            await connection.send(GET)


@in_loop
async def test_a_response_that_closes_ends_the_connection() -> None:
    reply = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    async with answering(reply) as connection:
        assert (await connection.send(GET)).status == 200
        assert not connection.is_open


@in_loop
async def test_a_cancelled_request_closes_the_connection() -> None:
    """Its response would be taken for that of the next request."""
    async with answering(b"HTTP/1.1 200 OK\r\n", b"") as connection:
        pending = asyncio.ensure_future(connection.send(GET))
        await asyncio.sleep(0)
        pending.cancel()
        await asyncio.wait([pending])
        await asyncio.sleep(0)
        assert not connection.is_open


@in_loop
async def test_a_refused_connection_names_the_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerLost, match=f"cannot connect to {url}: "):
            await Server(url).connect()


def test_servers_are_parsed_with_their_ports_and_paths() -> None:
    plain, tls = Server("http://a/"), Server("https://[::1]/x")

    assert (plain.host, plain.port, plain.path, plain.tls) == ("a", 80, "", None)
    assert (tls.host, tls.port, tls.path, tls.tls is None) == ("::1", 443, "/x", False)


def test_an_unreadable_ca_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="ca_file: cannot read certificates from"):
        Server("https://a", tmp_path / "absent.pem")
