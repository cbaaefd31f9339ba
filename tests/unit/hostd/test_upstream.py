"""Fail-over between servers, over real connections on loopback."""

import asyncio

import pytest

from forewarn.errors import Unavailable
from forewarn.hostd.upstream import Request, ServerLost, Upstream
from tests.unit.hostd.recording_server import DOCUMENT, RecordingServer, response

GET = Request("GET", b"/metadata/scheduledevents", [(b"host", b"h")])
POST = Request("POST", b"/metadata/scheduledevents", [(b"host", b"h")], b"{}")
ONCE = GET._replace(may_repeat=False)
CLOSED = "http://127.0.0.1:1"


def test_requests_are_sent_over_one_kept_connection() -> None:
    async def run() -> None:
        async with RecordingServer(response()) as server:
            upstream = Upstream([server.url])
            for _ in range(5):
                answer = await upstream.send(GET)
                assert (answer.status, answer.body) == (200, DOCUMENT)
            assert server.connections == 1
            upstream.close()

    asyncio.run(run())


def test_response_is_what_the_server_sent_in_its_order() -> None:
    sent = response("200 OK", b"x", b"X-Odd: 1", b"x-odd: 2")

    async def run() -> None:
        async with RecordingServer(sent) as server:
            upstream = Upstream([server.url])
            names = [name for name, _ in (await upstream.send(GET)).headers]
            assert names == [b"date", b"server", b"etag", b"X-Odd", b"x-odd", b"content-length"]
            upstream.close()

    asyncio.run(run())


def test_request_goes_to_the_next_server_if_one_refuses_connections() -> None:
    async def run() -> None:
        async with RecordingServer(response()) as server:
            upstream = Upstream([CLOSED, server.url])
            assert (await upstream.send(GET)).status == 200
            assert (await upstream.send(ONCE)).status == 200
            upstream.close()

    asyncio.run(run())


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Unavailable", "504 Timeout"])
def test_get_goes_to_the_next_server_if_one_is_unavailable(status: str) -> None:
    async def run() -> None:
        async with RecordingServer(response(status)) as bad, RecordingServer(response()) as good:
            upstream = Upstream([bad.url, good.url])
            assert (await upstream.send(GET)).status == 200
            await upstream.send(GET)
            assert len(bad.requests) == 1  # the one that answered last comes first
            upstream.close()

    asyncio.run(run())


def test_all_unavailable_servers_give_the_last_response() -> None:
    async def run() -> None:
        refusal = response("503 Service Unavailable", b"{}")
        async with RecordingServer(refusal) as one, RecordingServer(refusal) as two:
            upstream = Upstream([one.url, two.url])
            assert (await upstream.send(GET)).status == 503
            assert len(one.requests) == len(two.requests) == 1
            upstream.close()

    asyncio.run(run())


@pytest.mark.parametrize("status", ["400 Bad Request", "403 Forbidden", "429 Too Many Requests"])
def test_other_errors_are_answers(status: str) -> None:
    async def run() -> None:
        async with RecordingServer(response(status)) as one, RecordingServer(response()) as two:
            upstream = Upstream([one.url, two.url])
            assert (await upstream.send(GET)).status == int(status[:3])
            assert two.requests == []
            upstream.close()

    asyncio.run(run())


@pytest.mark.parametrize("request_", [GET, POST])
def test_request_is_repeated_if_the_connection_breaks(request_: Request) -> None:
    """An approval that is received twice has the effect of one."""

    async def run() -> None:
        async with RecordingServer(b"") as broken, RecordingServer(response()) as good:
            upstream = Upstream([broken.url, good.url])
            assert (await upstream.send(request_)).status == 200
            assert broken.requests == good.requests
            upstream.close()

    asyncio.run(run())


def test_request_is_sent_once_if_it_may_not_be_repeated() -> None:
    """A guest with a long poll may have been reset meanwhile."""

    async def run() -> None:
        async with RecordingServer(b"") as broken, RecordingServer(response()) as good:
            upstream = Upstream([broken.url, good.url])
            with pytest.raises(ServerLost):
                await upstream.send(ONCE)
            assert len(broken.requests) == 1
            assert good.requests == []
            upstream.close()

    asyncio.run(run())


def test_503_is_passed_on_if_the_request_may_not_be_repeated() -> None:
    async def run() -> None:
        refusal = response("503 Service Unavailable")
        async with RecordingServer(refusal) as one, RecordingServer(response()) as two:
            upstream = Upstream([one.url, two.url])
            assert (await upstream.send(ONCE)).status == 503
            assert two.requests == []
            upstream.close()

    asyncio.run(run())


def test_restarted_server_gets_the_request_on_a_new_connection() -> None:
    async def run() -> None:
        server = RecordingServer(response())
        async with server:
            upstream = Upstream([server.url])
            await upstream.send(GET)
        async with server:
            assert (await upstream.send(GET)).status == 200
            upstream.close()

    asyncio.run(run())


def test_server_that_does_not_answer_is_lost_after_the_limit() -> None:
    async def never(_: bytes) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def run() -> None:
        async with RecordingServer(answer=never) as hung, RecordingServer(response()) as good:
            upstream = Upstream([hung.url, good.url])
            assert (await upstream.send(GET._replace(seconds_max=0.1))).status == 200
            assert len(hung.requests) == 1
            upstream.close()

    asyncio.run(run())


def test_lost_server_costs_the_next_request_no_attempt() -> None:
    """Otherwise each request would wait for a server whose network is gone."""

    async def run() -> None:
        server = RecordingServer(response())
        async with server:
            upstream = Upstream([server.url])
            await upstream.send(GET)
        with pytest.raises(ServerLost):
            await upstream.send(GET)
        async with server:
            with pytest.raises(ServerLost, match="no server can be reached"):
                await upstream.send(GET)
            assert await answers_again(upstream)
            upstream.close()

    asyncio.run(run())


async def answers_again(upstream: Upstream) -> bool:
    async with asyncio.timeout(20):
        while True:
            try:
                return (await upstream.send(GET)).status == 200
            except ServerLost:
                await asyncio.sleep(0.02)


def test_number_of_connections_is_limited_and_long_polls_leave_some() -> None:
    release = asyncio.Event()

    async def wait(_: bytes) -> bytes:
        await release.wait()
        return response()

    async def run() -> None:
        async with RecordingServer(answer=wait) as server:
            upstream = Upstream([server.url], connections_max=4)
            busy = [asyncio.create_task(upstream.send(GET)) for _ in range(3)]
            await asyncio.sleep(0)
            assert not upstream.has_room
            busy.append(asyncio.create_task(upstream.send(GET)))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="4 requests"):
                await upstream.send(GET)
            release.set()
            assert [each.status for each in await asyncio.gather(*busy)] == [200] * 4
            assert upstream.has_room
            upstream.close()

    asyncio.run(run())


def test_cancelled_request_closes_its_connection() -> None:
    """Its late response would be the answer to the next request."""
    release = asyncio.Event()

    async def wait(_: bytes) -> bytes:
        await release.wait()
        return response()

    async def run() -> None:
        async with RecordingServer(answer=wait) as server:
            upstream = Upstream([server.url])
            task = asyncio.create_task(upstream.send(GET))
            while not server.requests:
                await asyncio.sleep(0.001)
            task.cancel()
            release.set()
            assert (await upstream.send(GET)).status == 200
            assert server.connections == 2
            upstream.close()

    asyncio.run(run())


def test_head_has_no_body_whatever_its_content_length() -> None:
    head = response().partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    async def run() -> None:
        async with RecordingServer(head, head, response()) as server:
            upstream = Upstream([server.url])
            for _ in range(2):
                answer = await upstream.send(GET._replace(method="HEAD"))
                assert (answer.status, answer.body) == (200, b"")
            assert (await upstream.send(GET)).body == DOCUMENT
            assert server.connections == 1
            upstream.close()

    asyncio.run(run())


def test_request_without_host_gets_the_servers_own() -> None:
    async def run() -> None:
        async with RecordingServer(response()) as server:
            upstream = Upstream([server.url])
            await upstream.send(Request("POST", b"/x", [(b"a", b"b")], b"{}"))
            host = f"host: 127.0.0.1:{server.port}".encode()
            expected = [b"POST /x HTTP/1.1", b"a: b", host, b"content-length: 2", b"", b"{}"]
            assert server.requests == [b"\r\n".join(expected)]
            upstream.close()

    asyncio.run(run())
