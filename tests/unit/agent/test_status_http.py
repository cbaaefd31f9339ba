"""The local port, over real sockets."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from forewarn.agent.status import View
from forewarn.agent.status_http import CALLERS_MAX, HEAD_BYTES_MAX, Port, answer
from forewarn.errors import Unavailable
from tests.unit.agent.view_of import handling, view_of


@contextmanager
def listening(look: Callable[[], View] = view_of) -> Iterator[tuple[str, int]]:
    port = Port("127.0.0.1:0", look)
    try:
        host, _, number = port.address.rpartition(":")
        yield host, int(number)
    finally:
        port.close()


def call(address: tuple[str, int], request: bytes) -> str:
    """All that comes back until the end."""
    with socket.create_connection(address, timeout=20) as caller:
        caller.sendall(request)
        with caller.makefile("rb") as answer:
            return answer.read().decode()


def get(address: tuple[str, int], path: str, method: str = "GET") -> str:
    return call(address, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("path", "view", "status"),
    [
        ("/healthz", view_of(heard_seconds=None), 200),
        ("/readyz", view_of(), 200),
        ("/readyz", view_of(heard_seconds=None), 503),
        ("/readyz", view_of(settings_problem="wrong"), 503),
        ("/drainz", view_of(), 200),
        ("/drainz", view_of(handling()), 503),
        ("/metrics", view_of(), 200),
        ("/", view_of(), 404),
        ("/healthz/", view_of(), 404),
    ],
)
def test_each_path_says_one_thing(path: str, view: View, status: int) -> None:
    """Probes look at nothing but the status."""
    assert answer(path, lambda: view).status == status


def test_why_the_agent_is_not_ready_stands_in_the_answer() -> None:
    assert (
        answer("/readyz", lambda: view_of(heard_seconds=None, last_problem="nobody is there")).body
        == "nobody is there\n"
    )


def test_an_answer_is_whole_http_and_ends_the_connection() -> None:
    with listening() as address:
        head, _, body = get(address, "/readyz?full=1").partition("\r\n\r\n")

    assert head.splitlines()[0] == "HTTP/1.1 200 OK"
    assert "Content-Length: 6" in head
    assert "Connection: close" in head
    assert body == "ready\n"


def test_head_is_answered_without_a_body() -> None:
    with listening() as address:
        said = get(address, "/readyz", "HEAD")

    assert said.startswith("HTTP/1.1 200 OK")
    assert said.endswith("\r\n\r\n")


def test_nothing_can_be_changed_here() -> None:
    with listening() as address:
        said = get(address, "/metrics", "POST")

    assert said.startswith("HTTP/1.1 405 Method Not Allowed")
    assert "Allow: GET, HEAD" in said


@pytest.mark.parametrize(
    "request_", [b"\r\n\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n", b"G" * (HEAD_BYTES_MAX + 1)]
)
def test_what_is_no_http_is_refused(request_: bytes) -> None:
    """A head without end is not collected."""
    with listening() as address:
        assert call(address, request_).startswith("HTTP/1.1 400 Bad Request")


def test_a_bug_while_looking_costs_one_answer_and_not_the_port() -> None:
    views = iter([view_of()])
    with listening(lambda: next(views)) as address:
        assert get(address, "/readyz").startswith("HTTP/1.1 200")
        assert get(address, "/readyz") == ""
        assert get(address, "/healthz").startswith("HTTP/1.1 200")


def test_callers_beyond_the_limit_are_sent_away_and_the_others_are_served() -> None:
    """Whoever opens connections and says nothing must not use up the machine's threads."""
    with listening() as address, ExitStack() as callers:
        silent = [
            callers.enter_context(socket.create_connection(address, timeout=20))
            for _ in range(CALLERS_MAX)
        ]
        late = callers.enter_context(socket.create_connection(address, timeout=20))

        assert late.recv(100) == b""
        silent[0].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert silent[0].recv(100).startswith(b"HTTP/1.1 200 OK")


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with (
        listening() as (host, number),
        pytest.raises(Unavailable, match=f"listen is {host}:{number}, which cannot be had"),
    ):
        Port(f"{host}:{number}", view_of)


def test_a_place_is_given_back_when_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the port would be closed for good after a while without memory."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with listening() as address:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            for _ in range(CALLERS_MAX):
                assert get(address, "/healthz") == ""

        assert get(address, "/healthz").startswith("HTTP/1.1 200")


def test_a_reason_that_cannot_be_encoded_is_answered_all_the_same() -> None:
    with listening(lambda: view_of(heard_seconds=None, last_problem="\ud800 is odd")) as address:
        assert get(address, "/readyz").endswith("\r\n\r\n? is odd\n")
