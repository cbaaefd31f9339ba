"""How an answer of the service becomes a problem, and a problem an exit code."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from forewarn.cli.api import Client
from forewarn.cli.exit_codes import Exit, Usage, exit_of
from forewarn.config import ClientConfig
from forewarn.errors import (
    Conflict,
    Error,
    EventEnded,
    Invalid,
    StoreDenied,
    StoreLost,
    Unavailable,
    UnknownVm,
    VmDown,
)

TOKEN = "hunter2"


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers everything alike, and remembers what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            asked.append(
                (
                    self.command,
                    self.path,
                    self.headers.get("Authorization"),
                    self.rfile.read(length),
                )
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        yield url, asked


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def refusal(status: int, body: bytes) -> Error:
    with answering(status, body) as (url, _), pytest.raises(Error) as raised:
        Client(ClientConfig(control_url=url)).get("vms")
    return raised.value


def test_an_error_is_the_problem_that_the_service_raised() -> None:
    """The code is the same on both sides, so `except UnknownVm` works across the wire."""
    problem = refusal(
        404,
        json.dumps({"error": "unknown_vm", "message": "no VM 'x'", "facts": {"vm": "x"}}).encode(),
    )

    assert type(problem) is UnknownVm
    assert (problem.message, problem.facts) == ("no VM 'x'", {"vm": "x"})


def test_a_code_of_a_newer_service_is_still_a_problem() -> None:
    """An old client must not crash on what it does not know."""
    assert (
        type(refusal(418, b'{"error": "teapot", "message": "short and stout", "facts": {}}'))
        is Error
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"error": "x"}',
        b'{"error": [], "message": "", "facts": {}}',
        b"\xff",
    ],
)
def test_what_is_no_answer_of_ours_is_told_as_such(body: bytes) -> None:
    """A wrong port is likelier than a broken service."""
    problem = refusal(500, body)

    assert isinstance(problem, Unavailable)
    assert "is no Forewarn control API (status 500)" in problem.message


def test_names_are_quoted_and_the_token_is_sent() -> None:
    """A name from a file may hold anything; it is one part of the path, never two."""
    with answering(200, b"{}") as (url, asked):
        client = Client(ClientConfig(control_url=f"{url}/prefix", token=TOKEN))
        client.post("vms", "a/b?c", "restart", said={"not_before": None})
        client.post("vms", "a", "restart", said={"not_before": "x"})

    assert asked == [
        ("POST", "/prefix/api/v1/vms/a%2Fb%3Fc/restart", "Bearer hunter2", b""),
        ("POST", "/prefix/api/v1/vms/a/restart", "Bearer hunter2", b'{"not_before": "x"}'),
    ]


def test_a_body_says_that_it_is_json_and_no_body_says_nothing() -> None:
    """The service refuses what a page of another site could send, and that is known by its type."""
    kinds: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kinds.append(self.headers.get("Content-Type"))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        Client(ClientConfig(control_url=url)).post("vms", "a", "restart", said={"not_before": "x"})
        Client(ClientConfig(control_url=url)).post("vms", "a", "restart")

    assert kinds == ["application/json", None]


@pytest.mark.parametrize(("limit", "pages"), [(1, 1), (1000, 1), (1001, 2), (2500, 3), (9999, 3)])
def test_a_list_is_read_page_by_page_up_to_its_limit(limit: int, pages: int) -> None:
    """A fleet may have more VMs than one answer holds."""
    names, asked = list(range(2500)), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            query = {
                name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()
            }
            first, size = int(query.get("cursor", 0)), int(query["limit"])
            after = str(first + size) if first + size < len(names) else None
            body = json.dumps(
                {"vms": names[first : first + size], "total": len(names), "next": after}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        answer = Client(ClientConfig(control_url=url)).list("vms", limit)

    assert answer["vms"] == names[:limit]
    assert answer["total"] == 2500
    assert (answer["next"] is None) == (limit >= 2500)
    assert len(asked) == pages


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Error, Exit.REFUSED),
        (Invalid, Exit.REFUSED),
        (VmDown, Exit.REFUSED),
        (UnknownVm, Exit.NOT_FOUND),
        (EventEnded, Exit.NOT_FOUND),
        (Conflict, Exit.UNREACHABLE),
        (StoreLost, Exit.UNREACHABLE),
        (StoreDenied, Exit.USAGE),
    ],
)
def test_an_exit_code_tells_what_kind_of_problem_it_was(problem: type[Error], code: Exit) -> None:
    """A script decides by it: give up, create it first, or try again."""
    assert exit_of(problem("")) is code


@pytest.mark.parametrize("token", ["fw_root_\u2013", "caf\u00e9", "fw_root\nX-Other: 1"])
def test_a_token_that_cannot_stand_in_a_header_is_told_without_showing_it(token: str) -> None:
    """A dash that a word processor made of a hyphen, say. The value is a secret all the same."""
    with pytest.raises(Usage, match="token: it holds a character that no token has") as raised:
        Client(ClientConfig(token=token))

    assert token not in raised.value.message
