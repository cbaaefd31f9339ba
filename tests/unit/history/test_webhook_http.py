"""One POST over a real socket: what is sent, how answers are read, and that nobody is waited for
beyond the limit.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from forewarn.errors import Unavailable
from forewarn.history.webhook_http import Postbox, _Answer

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def story(
    serve: Serve,
    tell: Callable[[Postbox], Awaitable[None]],
    *,
    seconds_max: float = 5.0,
    path: str = "/",
) -> None:
    async def run() -> None:
        async def serve_and_close(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            try:
                await serve(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        box = Postbox(f"http://127.0.0.1:{port}{path}", seconds_max=seconds_max)
        try:
            await tell(box)
        finally:
            box.close()
            server.close()

    asyncio.run(run())


async def request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(
        int(line.partition(":")[2])
        for line in head.splitlines()
        if line.startswith("content-length")
    )
    return head, await reader.readexactly(length)


def test_a_post_is_plain_http_to_the_path_and_query_that_was_configured() -> None:
    heard: list[tuple[str, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await request(reader))
        writer.write(OK)
        await writer.drain()

    async def tell(box: Postbox) -> None:
        assert await box.post(b"body", {"webhook-id": "1"}) == 200
        head = heard[0][0].splitlines()
        assert head[0] == "POST /hook?key=1 HTTP/1.1"
        assert {"content-length: 4", "webhook-id: 1", f"host: {box.url.netloc}"} <= set(head)
        assert heard[0][1] == b"body"
        assert box.name == f"http://{box.url.netloc}"

    story(serve, tell, path="/hook?key=1")


def test_a_connection_that_is_kept_is_used_again_and_one_that_was_closed_is_made_anew() -> None:
    """Most receivers keep it; one that was restarted must not cost a failed try."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(2):
            await request(reader)
            connections[-1] += 1
            writer.write(OK)
            await writer.drain()

    async def tell(box: Postbox) -> None:
        assert [await box.post(b"x", {}) for _ in range(5)] == [200] * 5
        assert connections == [2, 2, 1]

    story(serve, tell)


@pytest.mark.parametrize(
    ("answer", "status"),
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
    ],
    ids=["empty", "continued", "elsewhere", "in chunks", "until closed", "endless"],
)
def test_an_answer_is_its_status_and_no_redirect_is_followed(answer: bytes, status: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer)
        await writer.drain()

    async def tell(box: Postbox) -> None:
        assert await box.post(b"x", {}) == status

    story(serve, tell)


def test_what_is_only_on_the_way_is_no_answer() -> None:
    answer = _Answer()
    answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert not answer.is_complete
    answer.feed(OK)
    assert (answer.is_complete, answer.status) == (True, 200)


UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\n", b"what?\r\n\r\n", UPGRADE],
    ids=["none", "half", "no HTTP", "another protocol"],
)
def test_what_is_no_answer_is_a_problem_that_says_so(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer)
        await writer.drain()

    async def tell(box: Postbox) -> None:
        with pytest.raises(Unavailable, match="no answer"):
            await box.post(b"x", {})

    story(serve, tell)


def test_a_receiver_that_hangs_or_drips_is_left_at_the_limit() -> None:
    """Each byte of a slow answer would start any other clock anew."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():  # until it is left
            writer.write(b"x")
            await writer.drain()
            await reader.read(1)

    async def tell(box: Postbox) -> None:
        with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
            await box.post(b"x", {})

    story(serve, tell, seconds_max=0.2)


def test_a_status_that_is_there_counts_however_slow_or_broken_the_rest_is() -> None:
    """2xx is taken: to tell it again would tell it twice. The connection is not used again."""
    statuses = iter([b"200 OK", b"202 Accepted"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 " + next(statuses) + b"\r\ncontent-length: 1000\r\n\r\nx")
        await reader.read()  # until it is left

    async def tell(box: Postbox) -> None:
        assert [await box.post(b"x", {}), await box.post(b"x", {})] == [200, 202]

    story(serve, tell, seconds_max=0.2)


def test_a_name_that_is_looked_up_in_vain_keeps_nobody_from_stopping() -> None:
    """A resolver may take half a minute to give up, and a lookup cannot be broken off."""
    answered = threading.Event()

    def lookup(*_: object, **__: object) -> list[tuple[Any, ...]]:
        answered.wait(60)
        return []

    async def tell() -> None:
        box = Postbox("http://dead.example/", seconds_max=0.05, lookup=lookup)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"no answer within 0\.05 s"):
                await box.post(b"x", {})

    asyncio.run(tell())
    assert not answered.is_set()
    assert [
        thread
        for thread in threading.enumerate()
        if thread.name == "call-http://dead.example" and thread.daemon
    ]
    answered.set()


def test_the_addresses_of_a_name_are_tried_in_turn() -> None:
    """A host may have an address that does not answer, IPv6 above all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)
        await writer.drain()

    async def tell(box: Postbox) -> None:
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
            for address in ("127.0.0.2", "127.0.0.1")
        ]
        named = Postbox(
            f"http://two.example:{box.url.port}/", seconds_max=5, lookup=lambda *_, **__: found
        )
        assert await named.post(b"x", {}) == 200
        named.close()

    story(serve, tell)


def test_where_nobody_listens_the_reason_is_told() -> None:
    async def tell() -> None:
        box = Postbox("http://127.0.0.1:1/secret", seconds_max=5)
        with pytest.raises(Unavailable) as told:
            await box.post(b"x", {})
        assert "secret" not in str(told.value)
        assert "127.0.0.1" in str(told.value)

    asyncio.run(tell())
