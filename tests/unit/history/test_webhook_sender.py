"""One POST over a real socket: what is sent, how responses are read, and its limits."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forewarn.errors import Unavailable
from forewarn.history.webhook_sender import WebhookSender

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LIMIT_SECONDS = 60.0
"""Never reached. The first request of a process imports modules, which takes seconds on a busy
machine."""
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def with_receiver(
    serve: Serve,
    test: Callable[[WebhookSender, int], Awaitable[None]],
    *,
    timeout_seconds: float = LIMIT_SECONDS,
    path: str = "/",
) -> None:
    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def run() -> None:
        server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        sender = WebhookSender(f"http://127.0.0.1:{port}{path}", timeout_seconds=timeout_seconds)
        try:
            await test(sender, port)
        finally:
            await sender.close()
            server.close()

    asyncio.run(run())


async def read_request(reader: asyncio.StreamReader) -> tuple[list[str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
    (length,) = [int(line.partition(":")[2]) for line in head if line.startswith("content-length")]
    return head, await reader.readexactly(length)


def respond(*responses: bytes) -> Serve:
    """A receiver that responds to the first requests of a connection, then closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for response in responses:
            await read_request(reader)
            writer.write(response)
            await writer.drain()

    return serve


def test_a_post_goes_to_the_configured_path_and_query() -> None:
    requests: list[tuple[list[str], bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        writer.write(OK)
        await writer.drain()

    async def test(sender: WebhookSender, port: int) -> None:
        assert await sender.post(b"body", {"webhook-id": "1"}) == 200
        head, body = requests[0]
        assert head[0] == "post /hook?key=1 http/1.1"
        assert {"webhook-id: 1", f"host: 127.0.0.1:{port}"} <= set(head)
        assert body == b"body"
        assert sender.name == f"http://127.0.0.1:{port}"

    with_receiver(serve, test, path="/hook?key=1")


def test_an_open_connection_is_reused_and_a_closed_one_replaced() -> None:
    """Most receivers keep it open; one that was restarted must not cost a failed attempt."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(2):
            await read_request(reader)
            connections[-1] += 1
            writer.write(OK)
            await writer.drain()

    async def test(sender: WebhookSender, port: int) -> None:
        for _ in range(5):
            assert await sender.post(b"x", {}) == 200
            await asyncio.sleep(0.01)  # the receiver closes its side
        assert connections == [2, 2, 1]

    with_receiver(serve, test)


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200),
        (
            b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
            307,
        ),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200),
        (b"HTTP/1.0 503 No\r\n\r\nuntil it is closed", 503),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n" + b"x" * 200_000, 200),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok", 200),
    ],
    ids=["empty", "continued", "redirect", "chunked", "until closed", "endless", "not gzip"],
)
def test_only_the_status_counts_and_no_redirect_is_followed(response: bytes, status: int) -> None:
    async def test(sender: WebhookSender, port: int) -> None:
        assert await sender.post(b"x", {}) == status

    with_receiver(respond(response), test)


@pytest.mark.parametrize(
    "response",
    [b"", b"HTTP/1.1 200 OK\r\n", b"what?\r\n\r\n"],
    ids=["none", "half", "not HTTP"],
)
def test_an_invalid_response_is_an_error(response: bytes) -> None:
    async def test(sender: WebhookSender, port: int) -> None:
        with pytest.raises(Unavailable, match="no response"):
            await sender.post(b"x", {})

    with_receiver(respond(response), test)


def test_a_receiver_that_hangs_or_drips_is_cut_off() -> None:
    """A timeout per read would start again with each byte."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await reader.read(1)

    async def test(sender: WebhookSender, port: int) -> None:
        with pytest.raises(Unavailable, match=r"no response within 0\.2 s"):
            await sender.post(b"x", {})

    with_receiver(serve, test, timeout_seconds=0.2)


def test_a_status_counts_even_if_the_rest_is_missing() -> None:
    """2xx means accepted: sending again would duplicate it. The connection is not used again."""
    statuses = iter([b"200 OK", b"202 Accepted"])
    sent: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 " + next(statuses) + b"\r\ncontent-length: 1000\r\n\r\nx")
        await writer.drain()
        if sent:
            await reader.read()  # hangs, until the sender closes the connection

    async def test(sender: WebhookSender, port: int) -> None:
        sent.append(await sender.post(b"x", {}))

    with_receiver(serve, test)
    with_receiver(serve, test, timeout_seconds=1.0)
    assert sent == [200, 202]


def test_an_error_names_the_reason_and_no_secret() -> None:
    async def run() -> None:
        sender = WebhookSender("http://127.0.0.1:1/secret", timeout_seconds=LIMIT_SECONDS)
        with pytest.raises(Unavailable, match=r"no response: .+") as error:
            await sender.post(b"x", {})
        assert "secret" not in str(error.value)
        await sender.close()

    asyncio.run(run())
