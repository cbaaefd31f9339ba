"""Faults on real sockets, and that our own client survives each of them."""

import re
import socket
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from forewarn.client import Change, Client, EndpointError
from forewarn.core.command import Cancel
from forewarn.lab.fault.filter import FaultFilter
from forewarn.web.http.message import Message, Receive, Send
from tests.e2e.lab_world import FaultyWorld
from tests.e2e.metadata_world import EVENT_ID, POLL, World

NO_EVENTS = b'{"DocumentIncarnation":1,"Events":[]}'


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Iterator[FaultyWorld]:
    """Broken connections are expected here, so they must not be logged."""
    with FaultyWorld() as world:
        yield world
    assert [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.name.startswith("uvicorn")
    ] == []


def receive_all(world: World, request: bytes = POLL) -> tuple[bytes, bool]:
    """All that comes until the server ends the connection, and whether it ended it by a reset."""
    with socket.create_connection(("127.0.0.1", world.port), timeout=10) as connection:
        connection.sendall(request)
        whole = b""
        while True:  # ends when the server ends it, or with a timeout
            try:
                piece = connection.recv(65536)
            except ConnectionResetError:
                return whole, True
            if not piece:
                return whole, False
            whole += piece


def test_bytes_without_faults_are_the_services(world: FaultyWorld) -> None:
    with World() as plain:
        for request in (
            POLL,
            POLL.replace(b"Host", b'If-None-Match: "1"\r\nHost'),
            POLL.replace(b"Metadata: true\r\n", b""),
        ):
            assert world.ask(request).undated == plain.ask(request).undated


def test_every_poll_is_seen_by_the_filter(world: FaultyWorld) -> None:
    """The fast path would bypass the faults."""
    with world.connect() as client:
        for _ in range(5):
            client.send(POLL)
            client.response()
    assert len(world.transcript.entries) == 5


def test_refused_connection_is_reset_without_a_byte(world: FaultyWorld) -> None:
    world.add("refuse")
    assert receive_all(world) == (b"", True)


def test_reset_comes_in_the_middle_of_the_body(world: FaultyWorld) -> None:
    world.add("reset", bytes=10)
    whole, is_reset = receive_all(world)
    head, _, body = whole.partition(b"\r\n\r\n")
    assert (body, is_reset) == (NO_EVENTS[:10], True)
    assert b"content-length: 37" in head


def test_truncate_close_sends_less_than_content_length(
    world: FaultyWorld,
) -> None:
    world.add("truncate", bytes=10)
    whole, is_reset = receive_all(world)
    head, _, body = whole.partition(b"\r\n\r\n")
    assert (body, is_reset) == (NO_EVENTS[:10], False)
    assert b"content-length: 37" in head


def test_truncate_whole_keeps_the_connection(world: FaultyWorld) -> None:
    world.add("truncate", bytes=10, mode="whole", requests=1)
    with world.connect() as client:
        client.send(POLL)
        assert client.response().body == NO_EVENTS[:10]
        client.send(POLL)
        assert client.response().body == NO_EVENTS


def test_pipelined_requests_behind_a_refusal_are_dropped(world: FaultyWorld) -> None:
    world.add("refuse", requests=1)
    assert receive_all(world, POLL + POLL) == (b"", True)
    assert world.ask(POLL).body == NO_EVENTS


def test_bytes_before_a_reset_arrive(world: FaultyWorld) -> None:
    """A reset must not discard what is still in our buffer."""
    large = b"x" * 40_000

    async def scripted(scope: Message, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % len(large))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": large})

    world.application = FaultFilter(
        scripted, world.faults, world.transcript, world.engine.clock, Random(1), world.get_vm
    )
    world.add("reset", bytes=30_000)
    whole, is_reset = receive_all(world, POLL.replace(b"scheduledevents", b"versions"))
    assert (len(whole.partition(b"\r\n\r\n")[2]), is_reset) == (30_000, True)


SURVIVED: list[tuple[str, dict[str, Any]]] = [
    ("first-call", {"seconds": 0.3}),
    ("latency", {"distribution": "uniform", "seconds": 0.05, "spread_seconds": 0.05}),
    ("refuse", {"requests": 2}),
    ("reset", {"requests": 2}),
    ("truncate", {"requests": 2}),
    ("truncate", {"requests": 2, "mode": "whole"}),
    ("empty", {"requests": 2}),
    ("status", {"code": 404, "requests": 2}),
    ("status", {"code": 410, "requests": 2}),
    ("status", {"code": 429, "requests": 2, "retry_after": 1}),
    ("status", {"code": 500, "chance": 0.5}),
    ("status", {"code": 503, "requests": 2}),
    ("stale", {"requests": 2}),
    ("stale", {"by": 1, "requests": 2}),
    ("incarnation-reset", {}),
    ("no-events", {"requests": 2}),
    ("text-plain", {}),
    ("stale", {"by": 1, "chance": 0.5}),
    ("skew", {"seconds": 3600}),
    ("short-notice", {"seconds": 899}),
    ("no-started", {}),
    ("lapse", {}),
]


class Hurried(threading.Event):
    """A stop whose pauses are a twentieth as long."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout and timeout / 20)


class Watch:
    """A watch in a thread, with pauses a twentieth as long."""

    def __init__(self, world: World) -> None:
        self.changes: list[Change] = []
        self.problems: list[EndpointError] = []
        self._client = Client(f"{world.url}/as/web-0")
        self._is_over = Hurried()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        for change in self._client.watch(stop=self._is_over, on_error=self.problems.append):
            self.changes.append(change)

    def kinds(self) -> list[tuple[str, str]]:
        return [
            (str(change.kind), change.event.id)
            for change in self.changes
            if change.kind != "changed"
        ]

    def close(self) -> None:
        self._is_over.set()
        self._client.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "members"), SURVIVED, ids=[re.sub(r"[^a-z0-9]+", "-", str(one)) for one in SURVIVED]
)
def test_client_survives_the_fault(world: FaultyWorld, kind: str, members: dict[str, Any]) -> None:
    """Every event is reported once, although the endpoint misbehaves."""
    earlier, second = EVENT_ID.replace("602D", "502D"), EVENT_ID.replace("602D", "702D")
    world.ask(POLL)
    world.restart("web-1", earlier)
    world.submit(Cancel(event_id=earlier))
    watch = Watch(world)
    try:
        world.until(lambda: len(world.transcript.entries) >= 2)
        world.add(kind, **members)
        world.restart("web-0")
        world.until(lambda: ("appeared", EVENT_ID) in watch.kinds())
        world.restart("web-1", second)
        world.until(lambda: ("appeared", second) in watch.kinds())
        world.submit(Cancel(event_id=EVENT_ID))
        world.until(lambda: ("canceled", EVENT_ID) in watch.kinds())
        world.clear()
        world.submit(Cancel(event_id=second))
        world.until(lambda: ("canceled", second) in watch.kinds())
    finally:
        watch.close()
    once = [
        ("appeared", EVENT_ID),
        ("appeared", second),
        ("canceled", EVENT_ID),
        ("canceled", second),
    ]
    assert watch.kinds() == once
    touched = [entry for entry in world.transcript.entries if kind in entry.faults]
    assert bool(touched) is (kind != "lapse")
