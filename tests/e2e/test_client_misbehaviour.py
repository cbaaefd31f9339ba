"""Both clients against a faulty endpoint: they report what they got, and conclude nothing."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pytest

from forewarn.client import (
    AsyncClient,
    Change,
    Client,
    ClientClock,
    ConnectionFailed,
    Document,
    EndpointError,
    HttpError,
    InvalidDocument,
    InvalidResponse,
    RedirectRefused,
    RetryableError,
    Watcher,
)
from tests.e2e.faulty_endpoint import (
    NO_EVENTS,
    AfterResponse,
    AsyncInstantStop,
    FaultyEndpoint,
    InstantStop,
    ScriptedResponse,
    Unreachable,
    document,
    in_loop,
    in_thread,
    response,
    watch_in_loop,
    watch_in_thread,
)

Send = Callable[..., Any]
Watch = Callable[..., list[Change]]

either = pytest.mark.parametrize("send", [in_thread, in_loop])
either_watch = pytest.mark.parametrize("watch", [watch_in_thread, watch_in_loop])

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TRUNCATED = ScriptedResponse(response().sent[:-5], AfterResponse.CLOSE)
UNTIMED = ClientClock(lambda: datetime(2026, 3, 1, tzinfo=UTC), lambda: 0.0, lambda: 0.0)
"""Time stands still, so the pauses of a watch are exactly those of its schedule."""


def wait_until_closed(client: Client) -> None:
    with pytest.raises(ConnectionFailed):
        client.wait(30)


@either
@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (response(b""), Document(0, (), is_blank=True)),
        (response(Content_Type="text/plain"), Document(1, ())),
        (response(then=AfterResponse.CLOSE, Connection="close"), Document(1, ())),
        (
            ScriptedResponse(b"HTTP/1.0 200 OK\r\n\r\n" + NO_EVENTS, AfterResponse.CLOSE),
            Document(1, ()),
        ),
        (
            ScriptedResponse(
                CHUNKED
                + b"5\r\n"
                + NO_EVENTS[:5]
                + b"\r\n20\r\n"
                + NO_EVENTS[5:]
                + b"\r\n0\r\n\r\n"
            ),
            Document(1, ()),
        ),
        (ScriptedResponse(response().sent, drip_seconds=0.001), Document(1, ())),
    ],
    ids=["empty", "text", "close", "no length", "chunked", "byte by byte"],
)
def test_unusual_but_valid_response_is_read(
    send: Send, turn: ScriptedResponse, expected: Document
) -> None:
    with FaultyEndpoint(turn) as endpoint:
        assert send(endpoint.url, "document") == expected


@either
@pytest.mark.parametrize(
    ("turn", "kind", "words"),
    [
        (TRUNCATED, InvalidResponse, "cut off after"),
        (
            ScriptedResponse(response().sent[:20], AfterResponse.CLOSE),
            InvalidResponse,
            "cut off in its head",
        ),
        (ScriptedResponse(response().sent[:-5], AfterResponse.RESET), ConnectionFailed, "reset"),
        (ScriptedResponse(CHUNKED + b"5\r\nabc", AfterResponse.CLOSE), InvalidResponse, "cut off"),
        (ScriptedResponse(b"", AfterResponse.CLOSE), ConnectionFailed, "without a response"),
        (ScriptedResponse(b"", AfterResponse.RESET), ConnectionFailed, "reset"),
        (ScriptedResponse(b"", AfterResponse.STAY_SILENT), ConnectionFailed, "in time"),
        (
            ScriptedResponse(response().sent[:-5], AfterResponse.STAY_SILENT),
            ConnectionFailed,
            "in time",
        ),
        (
            ScriptedResponse(
                b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n", AfterResponse.STAY_SILENT
            ),
            InvalidResponse,
            "9999999999 bytes",
        ),
        (
            ScriptedResponse(CHUNKED + b"100000\r\n" + b"x" * 0x100000 + b"\r\n1\r\nx\r\n"),
            InvalidResponse,
            "1048577 bytes",
        ),
        (
            ScriptedResponse(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2_000_000, AfterResponse.CLOSE),
            InvalidResponse,
            "1048576",
        ),
        (ScriptedResponse(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000), InvalidResponse, "headers"),
        (ScriptedResponse(b"220 mail.example ESMTP\r\n"), InvalidResponse, "not an HTTP"),
        (
            response(b"<html>captive portal</html>", Content_Type="text/html"),
            InvalidDocument,
            "text/html.*captive portal",
        ),
        (response(b'{"DocumentIncarnation":1,"Events":'), InvalidDocument, "not JSON"),
        (response(b'{"DocumentIncarnation":1,"Events":{}}'), InvalidDocument, "list of Events"),
        (response(b'{"DocumentIncarnation":1}'), InvalidDocument, "list of Events"),
        (
            response(b'{"DocumentIncarnation":1,"Events":[{"EventId":5}]}'),
            InvalidDocument,
            "EventId is 5",
        ),
        (response(b"", 302, Location="http://elsewhere/"), RedirectRefused, "elsewhere"),
        (response(b"", 301), RedirectRefused, "301"),
        (response(b"", 304), InvalidResponse, "304"),
        (response(b'{"error":"Bad request"}', 400), HttpError, "Bad request"),
        (response(b'{"error":"Forbidden"}', 403), HttpError, "403"),
        (response(b"", 404), RetryableError, "404"),
        (response(b"", 410), RetryableError, "410"),
        (response(b"", 429), RetryableError, "429"),
        (response(b"oops", 500), RetryableError, "oops"),
        (response(b"", 503), RetryableError, "503"),
    ],
)
def test_wrong_response_is_an_error_with_what_was_received(
    send: Send, turn: ScriptedResponse, kind: type[EndpointError], words: str
) -> None:
    with FaultyEndpoint(turn) as endpoint, pytest.raises(kind, match=f"(?i){words}") as caught:
        send(
            endpoint.url,
            "document",
            timeout_seconds=0.5 if turn.then is AfterResponse.STAY_SILENT else 10,
        )
    assert len(caught.value.message) < 500


@either
def test_slow_response_times_out_as_a_whole(send: Send) -> None:
    """A limit for each byte is not enough: this endpoint sends one in time, forever."""
    began = time.monotonic()
    with FaultyEndpoint(
        ScriptedResponse(response(NO_EVENTS + b" " * 1000).sent, drip_seconds=0.05)
    ) as endpoint:
        with pytest.raises(ConnectionFailed, match="in time"):
            send(endpoint.url, "document", timeout_seconds=0.5)
        took = time.monotonic() - began

    assert 0.5 <= took < 5


@either
def test_refused_connection_is_an_error_with_the_address(send: Send) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port}"):
        send(f"http://127.0.0.1:{port}", "document")


@either
@pytest.mark.parametrize(
    "turn",
    [
        response(b"", 400),
        response(b"", 500),
        response(b"", 302),
        TRUNCATED,
        ScriptedResponse(b"", AfterResponse.CLOSE),
        ScriptedResponse(b"", AfterResponse.RESET),
    ],
)
def test_failed_approval_is_an_error_and_is_sent_once(send: Send, turn: ScriptedResponse) -> None:
    """Whether to approve again is for the caller to decide."""
    with FaultyEndpoint(turn) as endpoint:
        with pytest.raises(EndpointError):
            send(endpoint.url, "approve", "E1")
        assert len(endpoint.asked) == 1


def test_connection_is_kept_and_an_approval_has_its_own() -> None:
    with FaultyEndpoint(document(1)) as endpoint:
        with Client(endpoint.url) as client:
            client.document()
            client.wait(1)
            client.approve("E1")
            client.document()
        assert endpoint.connections == [0, 0, 1, 0]

    async def same(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.document()
            await client.wait(1)
            await client.approve("E1")
            await client.document()

    with FaultyEndpoint(document(1)) as endpoint:
        asyncio.run(same(endpoint.url))
        assert endpoint.connections == [0, 0, 1, 0]


@pytest.mark.parametrize("then", [AfterResponse.CLOSE, AfterResponse.RESET])
def test_request_on_a_closed_idle_connection_is_repeated(
    then: AfterResponse,
) -> None:
    """Any server closes idle connections; that is not an error."""
    with FaultyEndpoint(response(), ScriptedResponse(b"", then), document(2)) as endpoint:
        with Client(endpoint.url) as client:
            client.document()
            assert client.document().incarnation == 2
        assert endpoint.connections == [0, 0, 1]

    async def same(url: str) -> int:
        async with AsyncClient(url) as client:
            await client.document()
            return (await client.document()).incarnation

    with FaultyEndpoint(response(), ScriptedResponse(b"", then), document(2)) as endpoint:
        assert asyncio.run(same(endpoint.url)) == 2
        assert endpoint.connections == [0, 0, 1]


def test_request_is_repeated_only_once() -> None:
    with FaultyEndpoint(response(), ScriptedResponse(b"", AfterResponse.CLOSE)) as endpoint:
        with Client(endpoint.url) as client:
            client.document()
            with pytest.raises(ConnectionFailed):
                client.document()
        assert len(endpoint.asked) == 3


def test_next_request_after_a_broken_response_has_a_new_connection() -> None:
    """The rest of the old response may still arrive, and is not for the new request."""
    late = ScriptedResponse(
        response(b"x" * 100).sent + response(b'{"DocumentIncarnation":666,"Events":[]}').sent
    )
    with FaultyEndpoint(late, document(2)) as endpoint, Client(endpoint.url) as client:
        with pytest.raises(InvalidDocument):
            client.document()
        assert client.document().incarnation == 2
        assert endpoint.connections == [0, 1]


def test_cancelled_call_leaves_no_response_for_the_next() -> None:
    async def cancel_and_ask(url: str) -> int:
        async with AsyncClient(url) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.document(), 0.3)
            return (await client.document()).incarnation

    with FaultyEndpoint(ScriptedResponse(b"", AfterResponse.STAY_SILENT), document(2)) as endpoint:
        assert asyncio.run(cancel_and_ask(endpoint.url)) == 2
        assert endpoint.connections == [0, 1]


@either_watch
def test_watch_continues_through_every_error_and_reports_each(watch: Watch) -> None:
    """An agent must never stop."""
    failures = [response(b"", status) for status in (404, 410, 429, 500, 503, 400, 302)]
    failures += [
        response(b"<html>"),
        TRUNCATED,
        ScriptedResponse(b"", AfterResponse.CLOSE),
        ScriptedResponse(b"", AfterResponse.RESET),
        ScriptedResponse(b"nonsense\r\n"),
    ]
    errors: list[EndpointError] = []
    with FaultyEndpoint(document(1), *failures, document(2, ("E1", "Scheduled"))) as endpoint:
        changes = watch(
            endpoint.url,
            watching={"changes_max": 1, "on_error": errors.append},
            clock=UNTIMED,
        )

    assert [change.kind for change in changes] == ["appeared"]
    assert [type(error).__name__ for error in errors[:7]] == ["RetryableError"] * 5 + [
        "HttpError",
        "RedirectRefused",
    ]
    assert len(errors) == len(failures)


def test_watch_pauses_longer_after_each_error() -> None:
    pauses: list[float] = []
    with FaultyEndpoint(*[response(b"", 503)] * 6, document(2, ("E1", "Scheduled"))) as endpoint:
        watch_in_thread(
            endpoint.url, watching={"changes_max": 1, "stop": InstantStop(pauses)}, clock=UNTIMED
        )

    assert pauses == [1, 2, 4, 8, 10, 10]


def test_documents_gives_each_document_and_error() -> None:
    """A program with its own Watcher uses it instead of a watch."""
    turns = (document(1), response(b"", 503), document(2))
    pauses: list[float] = []
    with FaultyEndpoint(*turns) as endpoint, Client(endpoint.url, clock=UNTIMED) as client:
        results = list(islice(client.documents(period_seconds=5, stop=InstantStop(pauses)), 3))

    async def read(url: str) -> list[Document | EndpointError]:
        async with AsyncClient(url, clock=UNTIMED) as client:
            documents = client.documents(stop=AsyncInstantStop())
            return [await anext(documents) for _ in range(3)]

    with FaultyEndpoint(*turns) as endpoint:
        for first, error, last in (results, asyncio.run(read(endpoint.url))):
            assert (first, last) == (Document(1, (), '"1"'), Document(2, (), '"2"'))
            assert isinstance(error, RetryableError)
    assert pauses == [5, 5]


def test_watch_honours_retry_after() -> None:
    pauses: list[float] = []
    with FaultyEndpoint(
        response(b"", 429, Retry_After="7"), document(2, ("E1", "Scheduled"))
    ) as endpoint:
        watch_in_thread(
            endpoint.url, watching={"changes_max": 1, "stop": InstantStop(pauses)}, clock=UNTIMED
        )

    assert pauses == [7]


def test_endpoint_without_long_polls_is_polled_once_a_second() -> None:
    """As Azure: it ignores the preference and responds immediately."""
    pauses: list[float] = []
    with FaultyEndpoint(
        document(1), document(1), document(1), document(2, ("E1", "Scheduled"))
    ) as endpoint:
        watch_in_thread(
            endpoint.url, watching={"changes_max": 1, "stop": InstantStop(pauses)}, clock=UNTIMED
        )
        assert [
            b'If-None-Match: "1"\r\nPrefer: wait=30\r\n' in request for request in endpoint.requests
        ] == [
            False,
            True,
            True,
            True,
        ]

    assert pauses == [1, 1, 1]


def test_asyncio_watch_pauses_too() -> None:
    """By the same schedule, for which both clients share the code."""

    async def watch(url: str) -> float:
        async with AsyncClient(url) as client:
            began = time.monotonic()
            async for _ in client.watch(changes_max=1):
                pass
            return time.monotonic() - began

    with FaultyEndpoint(document(1), document(2, ("E1", "Scheduled"))) as endpoint:
        assert asyncio.run(watch(endpoint.url)) > 0.9


@either_watch
def test_invalid_document_ends_no_event(watch: Watch) -> None:
    """Nor does an error or an empty body; only a document without it does."""
    scheduled, gone = document(2, ("E1", "Scheduled")), document(3)
    failures = [
        response(b'{"DocumentIncarnation":9,"Events":[{}]}'),
        response(b""),
        response(b'{"Events":null}'),
        response(b"", 404),
    ]
    with FaultyEndpoint(scheduled, *failures, scheduled, gone) as endpoint:
        changes = watch(endpoint.url, watching={"changes_max": 2}, clock=UNTIMED)
        assert len(endpoint.asked) == 7

    assert [change.kind for change in changes] == ["appeared", "canceled"]


@either_watch
def test_empty_bodies_for_some_seconds_end_no_event(watch: Watch) -> None:
    """The ETag of an empty body is never sent: a 304 for it would mean nothing."""
    empty = response(b"", ETag='"2"')
    turns = (
        document(2, ("E1", "Scheduled")),
        *[empty] * 10,
        document(3, ("E1", "Started")),
        document(4),
    )
    with FaultyEndpoint(*turns) as endpoint:
        changes = watch(endpoint.url, watching={"changes_max": 3}, clock=UNTIMED)
        assert [b"If-None-Match" in request for request in endpoint.requests[2:12]] == [False] * 10

    assert [change.kind for change in changes] == ["appeared", "started", "finished"]


@either_watch
def test_poll_after_an_error_is_unconditional(watch: Watch) -> None:
    """A new server may have reached the incarnation that we know, with other events."""
    with FaultyEndpoint(
        document(2), response(b"", 503), document(2, ("E1", "Scheduled"))
    ) as endpoint:
        watch(endpoint.url, watching={"changes_max": 1}, clock=UNTIMED)
        assert [b"If-None-Match" in request for request in endpoint.requests] == [
            False,
            True,
            False,
        ]


def test_watch_ends_when_stop_is_set() -> None:
    stop = threading.Event()
    with FaultyEndpoint(document(1)) as endpoint, Client(endpoint.url) as client:
        threading.Timer(0.1, stop.set).start()
        assert list(client.watch(stop=stop)) == []

    async def same(url: str) -> list[Change]:
        ended = asyncio.Event()
        async with AsyncClient(url) as client:
            asyncio.get_running_loop().call_later(0.1, ended.set)
            return [change async for change in client.watch(stop=ended)]

    with FaultyEndpoint(document(1)) as endpoint:
        assert asyncio.run(same(endpoint.url)) == []


def test_closing_the_client_ends_a_watch_in_another_thread() -> None:
    """A service must stop in time although its endpoint holds the response."""
    with FaultyEndpoint(document(1), ScriptedResponse(b"", AfterResponse.STAY_SILENT)) as endpoint:
        client = Client(endpoint.url)
        changes: list[object] = []
        errors: list[EndpointError] = []
        watching = threading.Thread(
            target=lambda: changes.extend(client.watch(on_error=errors.append)), daemon=True
        )
        watching.start()
        while len(endpoint.asked) < 2:
            time.sleep(0.01)
        client.close()
        watching.join(5)

        assert not watching.is_alive()
        assert (changes, errors) == ([], [])


def test_closed_client_raises_an_error() -> None:
    with FaultyEndpoint(document(1)) as endpoint:
        client = Client(endpoint.url)
        client.close()
        with pytest.raises(ConnectionFailed, match="closed"):
            client.document()
        assert list(client.watch()) == []
        assert endpoint.asked == []


@either
def test_approval_may_have_its_own_timeout(send: Send) -> None:
    """An event that is about to start cannot wait as long as other requests."""
    with (
        FaultyEndpoint(ScriptedResponse(b"", AfterResponse.STAY_SILENT)) as endpoint,
        pytest.raises(ConnectionFailed, match="in time"),
    ):
        send(
            endpoint.url,
            "approve",
            "E1",
            asking={"timeout_seconds": 0.1},
            timeout_seconds=NEVER_SECONDS,
        )


def test_approval_does_not_wait_behind_a_long_poll() -> None:
    """One thread waits for half a minute; the other has half a minute to approve."""
    with FaultyEndpoint(
        document(1), ScriptedResponse(b"", AfterResponse.STAY_SILENT), response(b"")
    ) as endpoint:
        client = Client(endpoint.url)
        client.document()
        waiting = threading.Thread(target=wait_until_closed, args=(client,), daemon=True)
        waiting.start()
        while len(endpoint.asked) < 2:
            time.sleep(0.01)
        client.approve("E1")
        client.close()
        waiting.join(5)

        assert not waiting.is_alive()
        assert endpoint.connections == [0, 0, 1]


def test_closing_ends_every_wait() -> None:
    """The wait of the second thread has its own connection."""
    with FaultyEndpoint(document(1), ScriptedResponse(b"", AfterResponse.STAY_SILENT)) as endpoint:
        client = Client(endpoint.url)
        client.document()
        waiting = [
            threading.Thread(target=wait_until_closed, args=(client,), daemon=True)
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        while len(endpoint.asked) < 3:
            time.sleep(0.01)
        client.close()
        for thread in waiting:
            thread.join(5)

        assert [thread.is_alive() for thread in waiting] == [False, False]
        assert sorted(endpoint.connections) == [0, 0, 1]


def test_closing_ends_every_wait_of_tasks() -> None:
    async def close_while_waiting(url: str) -> list[bool]:
        client = AsyncClient(url)
        await client.document()
        waiting = [asyncio.create_task(client.wait(30)) for _ in range(2)]
        while len(endpoint.asked) < 3:
            await asyncio.sleep(0.01)
        await client.close()
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        return [isinstance(error, ConnectionFailed) for error in ended]

    with FaultyEndpoint(document(1), ScriptedResponse(b"", AfterResponse.STAY_SILENT)) as endpoint:
        assert asyncio.run(close_while_waiting(endpoint.url)) == [True, True]
        assert sorted(endpoint.connections) == [0, 0, 1]


NEVER_SECONDS = 600


def test_closing_ends_a_pending_connect() -> None:
    """Behind a firewall that drops packets a connect lasts for its whole timeout."""
    ended: list[str] = []

    def read(client: Client) -> None:
        with pytest.raises(ConnectionFailed) as caught:
            client.document()
        ended.append(caught.value.message)

    with Unreachable() as endpoint:
        client = Client(endpoint.url, timeout_seconds=NEVER_SECONDS)
        threads = [threading.Thread(target=read, args=(client,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        while endpoint.attempts() < 2:
            time.sleep(0.01)
        client.close()
        for thread in threads:
            thread.join(5)

    assert ended == ["this client is closed"] * 2


def test_timeout_bounds_a_connect() -> None:
    """`timeout_seconds` bounds the connect too."""
    with (
        Unreachable() as endpoint,
        pytest.raises(ConnectionFailed, match="did not respond in time"),
    ):
        in_thread(endpoint.url, "document", timeout_seconds=0.1)


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"])
def test_connection_refused_is_reported_immediately(url: str) -> None:
    """With the operating system's reason. A name is tried at each of its addresses."""
    with pytest.raises(
        ConnectionFailed,
        match=r"(Connection refused|Cannot assign requested address|Address family not supported)",
    ):
        in_thread(url, "document", timeout_seconds=NEVER_SECONDS)


def test_each_address_of_a_host_is_tried() -> None:
    """`localhost` often has two, and the endpoint listens on one of them."""
    with FaultyEndpoint(response()) as endpoint:
        assert in_thread(endpoint.url.replace("127.0.0.1", "localhost"), "document") == Document(
            1, ()
        )


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_closing_or_cancelling_ends_a_pending_connect_of_a_task(how: str) -> None:
    """And leaves no socket open."""

    async def end_while_connecting(endpoint: Unreachable) -> BaseException:
        client = AsyncClient(endpoint.url, timeout_seconds=NEVER_SECONDS)
        call = asyncio.create_task(client.document())
        while endpoint.attempts() < 1:
            await asyncio.sleep(0.01)
        if how == "close":
            await client.close()
        else:
            call.cancel()
        (error,) = await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), 5)
        assert isinstance(error, BaseException)
        assert endpoint.attempts() == 0
        return error

    with Unreachable() as endpoint:
        error = asyncio.run(end_while_connecting(endpoint))

    assert isinstance(error, ConnectionFailed if how == "close" else asyncio.CancelledError)


@either_watch
def test_watch_reports_events_that_another_call_has_read(watch: Watch) -> None:
    """Both may share a client; a 304 relative to the other's document would hide them."""
    with FaultyEndpoint(document(2, ("E1", "Scheduled"))) as endpoint:
        watch(endpoint.url, watching={"changes_max": 1}, before="document", clock=UNTIMED)
        assert [b"If-None-Match" in request for request in endpoint.requests] == [False, False]


def test_watch_continues_from_known_events() -> None:
    """After the reboot the end of the event is reported, not its beginning."""
    with (
        FaultyEndpoint(document(2, ("E1", "Started")), document(5)) as endpoint,
        Client(endpoint.url) as client,
    ):
        known = client.document().events
        changes = list(client.watch(watcher=Watcher(known), changes_max=1))
    assert [(change.kind, change.event.id) for change in changes] == [("finished", "E1")]
