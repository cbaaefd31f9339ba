"""The control API client: requests, errors and exit codes."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from forewarn.cli.api import ControlClient
from forewarn.cli.exit_codes import Exit, Usage, exit_of
from forewarn.cli.options import ClientConfig
from forewarn.errors import (
    Conflict,
    Error,
    EventEnded,
    Invalid,
    Refused,
    StoreDenied,
    StoreLost,
    Unavailable,
    UnknownVm,
    VmDown,
)

TOKEN = "hunter2"


@contextmanager
def recording(status: int, body: bytes) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every request alike and records it."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            requests.append(
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

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        yield url, requests


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def refusal(status: int, body: bytes) -> Error:
    with recording(status, body) as (url, _), pytest.raises(Error) as raised:
        ControlClient(ClientConfig(control_url=(url,))).get("vms")
    return raised.value


def test_error_response_is_raised_as_the_same_error() -> None:
    """The code is the same on both sides, so `except UnknownVm` works across the wire."""
    error = refusal(
        404,
        json.dumps({"error": "unknown_vm", "message": "no VM 'x'", "facts": {"vm": "x"}}).encode(),
    )

    assert type(error) is UnknownVm
    assert (error.message, error.facts) == ("no VM 'x'", {"vm": "x"})


def test_unknown_error_code_is_still_an_error() -> None:
    """An old client must not crash on what it does not know."""
    assert (
        type(refusal(418, b'{"error": "teapot", "message": "short and stout", "facts": {}}'))
        is Error
    )


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (408, "request_timeout"),
        (429, "too_many_requests"),
        (500, "problem"),
        (503, "too_many_connections"),
    ],
)
def test_error_that_passes_is_one_to_retry_whatever_its_code(status: int, code: str) -> None:
    """A watch of hours must not end because a server had too many connections for a second."""
    error = refusal(status, json.dumps({"error": code, "message": "m", "facts": {}}).encode())

    assert type(error) is Unavailable
    assert (error.message, exit_of(error)) == ("m", 4)


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
def test_response_of_another_service_is_reported(body: bytes) -> None:
    """A wrong port is likelier than a broken service."""
    error = refusal(500, body)

    assert isinstance(error, Unavailable)
    assert "is not a Forewarn control API (status 500)" in error.message


def test_names_are_quoted_and_the_token_is_sent() -> None:
    """A name may contain anything; it is one part of the path, never two."""
    with recording(200, b"{}") as (url, requests):
        client = ControlClient(ClientConfig(control_url=(f"{url}/prefix",), token=TOKEN))
        client.post("vms", "a/b?c", "restart", body={"not_before": None})
        client.post("vms", "a", "restart", body={"not_before": "x"})

    assert requests == [
        ("POST", "/prefix/api/v1/vms/a%2Fb%3Fc/restart", "Bearer hunter2", b""),
        ("POST", "/prefix/api/v1/vms/a/restart", "Bearer hunter2", b'{"not_before": "x"}'),
    ]


def test_only_a_body_has_a_content_type() -> None:
    """The service refuses the content types that a web page of another site could send."""
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
        ControlClient(ClientConfig(control_url=(url,))).post(
            "vms", "a", "restart", body={"not_before": "x"}
        )
        ControlClient(ClientConfig(control_url=(url,))).post("vms", "a", "restart")

    assert kinds == ["application/json", None]


@pytest.mark.parametrize(("limit", "pages"), [(1, 1), (1000, 1), (1001, 2), (2500, 3), (9999, 3)])
def test_list_is_fetched_in_pages_up_to_its_limit(limit: int, pages: int) -> None:
    """A fleet may have more VMs than fit into one response."""
    names, requests = list(range(2500)), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
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
        response = ControlClient(ClientConfig(control_url=(url,))).list("vms", limit)

    assert response["vms"] == names[:limit]
    assert response["total"] == 2500
    assert (response["next"] is None) == (limit >= 2500)
    assert len(requests) == pages


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Error, Exit.REFUSED),
        (Invalid, Exit.USAGE),
        (VmDown, Exit.REFUSED),
        (UnknownVm, Exit.NOT_FOUND),
        (EventEnded, Exit.NOT_FOUND),
        (Conflict, Exit.UNREACHABLE),
        (StoreLost, Exit.UNREACHABLE),
        (StoreDenied, Exit.USAGE),
    ],
)
def test_exit_code_depends_on_the_kind_of_error(error: type[Error], code: Exit) -> None:
    """A script decides by it: give up, create it first, or retry."""
    assert exit_of(error("")) is code


@pytest.mark.parametrize("token", ["fw_root_\u2013", "caf\u00e9", "fw_root\nX-Other: 1"])
def test_token_with_invalid_characters_is_not_repeated(token: str) -> None:
    """A word processor may have replaced a hyphen. The value is still a secret."""
    with pytest.raises(
        Usage, match="token: contains a character that tokens do not have"
    ) as raised:
        ControlClient(ClientConfig(token=token))

    assert token not in raised.value.message


@pytest.mark.parametrize(
    ("path", "got"),
    [
        (("vms", ""), "expected the name of a VM, got ''"),
        (("vms", "", "restart"), "expected the name of a VM, got ''"),
        (("hosts", "."), "expected the name of a host, got '.'"),
        (("scopes", ".."), "expected the name of a scope, got '..'"),
        (("vms", "\udcff"), "expected a name in UTF-8, got '\\udcff'"),
    ],
)
def test_name_that_cannot_be_sent_is_refused(path: tuple[str, ...], got: str) -> None:
    """`forewarn vm restart "$VM"` with an unset variable would be about all VMs."""
    with recording(200, b"{}") as (url, requests):
        client = ControlClient(ClientConfig(control_url=(url,)))
        with pytest.raises(Usage) as refused:
            client.get(*path)

    assert (refused.value.message, requests) == (got, [])


def test_filter_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(Usage, match=r"^expected a name in UTF-8, got '\\udcff'$"):
        ControlClient(ClientConfig()).list("vms", 10, {"host": "\udcff"})


def test_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(Usage, match="cannot request a URL of 70025 characters: URL too long"):
        ControlClient(ClientConfig(control_url=("http://h:8081",))).get("vms", "a" * 70_000)


@pytest.mark.parametrize("host", ["a..b", "xn--a", "a" * 300])
def test_host_that_no_name_server_could_know_is_refused(host: str) -> None:
    with pytest.raises(Usage) as refused:
        ControlClient(ClientConfig(control_url=(f"http://{host}",)))

    message = refused.value.message
    assert message.startswith(f"control_url: the host in {f'http://{host}'[:80]!r} is not a valid")
    assert message.endswith("; expected http://HOST:PORT")


DEAD = "http://127.0.0.1:9"
REFUSED = b'{"error": "store_lost", "message": "the store is lost", "facts": {}}'


class Servers:
    """Servers of one service, each with a script: a status, None to hang up after the request, or
    the Age of what it shows, such as "30".

    `requests` has the server, the method and the Idempotency-Key of each request.
    """

    def __init__(self, *scripts: int | str | None) -> None:
        self.scripts, self.urls = scripts, list[str]()
        self.requests: list[tuple[int, str, str | None]] = []

    def __enter__(self) -> "Servers":
        self._stack = ExitStack()
        for number, script in enumerate(self.scripts):
            self.urls.append(self._stack.enter_context(serving(self._handler(number, script))))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def client(self, *before: str) -> ControlClient:
        return ControlClient(ClientConfig(control_url=(*before, *self.urls)))

    def _handler(self, number: int, script: int | str | None) -> type[BaseHTTPRequestHandler]:
        requests = self.requests
        status, age = (200, script) if isinstance(script, str) else (script, "")

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append((number, self.command, self.headers.get("Idempotency-Key")))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if status is None:
                    return
                body = REFUSED if status >= 500 else json.dumps({"server": number}).encode()
                self.send_response(status)
                if age:
                    self.send_header("Age", age)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.mark.parametrize("away", [503, 502, None])
def test_next_server_is_used_when_one_does_not_answer_and_stays_in_use(away: int | None) -> None:
    """A server that has lost its store, or is behind a broken proxy, is as good as gone."""
    with Servers(away, 200) as servers:
        client = servers.client(DEAD)

        assert client.get("vms") == {"server": 1}
        assert client.get("vms") == {"server": 1}
        assert [number for number, _, _ in servers.requests] == [0, 1, 1]


@pytest.mark.parametrize("away", [503, None])
def test_post_is_repeated_with_the_same_key(away: int | None) -> None:
    """The first server may have carried it out before it died. A VM must not restart twice."""
    with Servers(away, 200) as servers:
        assert servers.client().post("vms", "a", "restart") == {"server": 1}
        (_, _, first), (_, _, second) = servers.requests

    assert first == second
    assert first is not None


def test_each_post_has_its_own_key() -> None:
    with Servers(200, 200) as servers:
        client = servers.client()
        client.post("vms", "a", "restart")
        client.post("vms", "a", "restart")

    assert len({key for _, _, key in servers.requests}) == 2


def test_one_server_gets_no_key() -> None:
    """The service would store a response that is never asked for again."""
    with Servers(200) as servers:
        servers.client().post("vms", "a", "restart")

    assert servers.requests == [(0, "POST", None)]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST without a key"])
def test_other_changes_are_not_repeated_after_they_were_sent(method: str) -> None:
    """A second deletion would report that there is nothing to delete."""
    with Servers(None, 200) as servers:
        client = servers.client(DEAD)
        with pytest.raises(Unavailable, match=r"the request may have been carried out$"):
            change(client, method)

        assert [number for number, _, _ in servers.requests] == [0]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST without a key"])
def test_any_change_is_sent_to_the_next_server_if_the_first_is_away(method: str) -> None:
    with Servers(200) as servers:
        assert change(servers.client(DEAD), method) == {"server": 0}


def change(client: ControlClient, method: str) -> object:
    if method == "PUT":
        return client.put("fleet", body=b"{}")
    if method == "DELETE":
        return client.delete("tokens", "a")
    return client.post("tokens", may_repeat=False)


def test_refusal_is_not_asked_of_another_server() -> None:
    """All servers of a service give the same response."""
    with Servers(404, 200) as servers, pytest.raises(Error):
        servers.client().get("vms")

    assert len(servers.requests) == 1


def test_error_of_a_server_that_answered_is_shown() -> None:
    """A refused connection to the next one explains less."""
    with Servers(503) as servers, pytest.raises(StoreLost, match="the store is lost"):
        ControlClient(ClientConfig(control_url=(*servers.urls, DEAD))).get("vms")


def test_message_names_all_servers() -> None:
    other = "http://127.0.0.1:19"
    with pytest.raises(Unavailable, match=f"no service is reachable at {other} or {DEAD}: "):
        ControlClient(ClientConfig(control_url=(DEAD, other))).get("vms")


def test_server_that_accepts_a_request_and_does_not_respond_is_named() -> None:
    """It is there, so the advice to start one would mislead."""
    with Servers(None) as servers:
        expected = f"^{servers.urls[0]} did not respond: [^;]+$"
        with pytest.raises(Unavailable, match=expected):
            servers.client().get("vms")


def test_parameter_in_a_message_is_shown_as_its_flag() -> None:
    """What the service calls `fail_impacts` is typed as --fail-impacts."""
    body = json.dumps(
        {"error": "refused", "message": "forget it with `fail_impacts` or `other`", "facts": {}}
    )
    with recording(409, body.encode()) as (url, _):
        client = ControlClient(ClientConfig(control_url=(url,)))
        client.options = {"fail_impacts": "--fail-impacts"}
        with pytest.raises(Refused, match=r"^forget it with --fail-impacts or `other`$"):
            client.delete("hosts", "a", "daemon")


def test_stream_begins_at_the_next_server() -> None:
    with Servers(503, 200) as servers:
        assert list(servers.client(DEAD).lines("stream")) == []
        assert [number for number, _, _ in servers.requests] == [0, 1]


@contextmanager
def hanging() -> Iterator[str]:
    """A server that accepts connections and never responds, such as one that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_server_that_hangs_is_left_soon_for_the_next_one() -> None:
    """The test would take a minute. A POST is repeated with its key."""
    with hanging() as first, Servers(200) as servers:
        config = ClientConfig(control_url=(first, *servers.urls))
        assert ControlClient(config, next_seconds=0.05).get("vms") == {"server": 0}
        client = ControlClient(config, next_seconds=0.05)
        assert client.post("vms", "a", "restart") == {"server": 0}
        assert list(ControlClient(config, next_seconds=0.05).lines("stream")) == []


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST without a key"])
def test_change_that_may_not_be_repeated_gets_the_whole_time(method: str) -> None:
    """A large fleet takes long to apply, and no other server is asked to do it again."""

    class Slow(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_waited_for.wait(0.2)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_DELETE = do_PUT

        def log_message(self, *_: object) -> None:
            pass

    is_waited_for = Event()
    with serving(Slow) as url, Servers(200) as servers:
        config = ClientConfig(control_url=(url, *servers.urls))
        assert change(ControlClient(config, next_seconds=0.05), method) == {}
        assert servers.requests == []


def test_server_that_is_cut_off_from_its_store_is_left_for_the_next_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It shows the past. `vm restart` worked on another server, and its event would be missing."""
    with Servers("30", 200) as servers:
        client = servers.client()

        assert client.get("events") == {"server": 1}
        assert client.get("events") == {"server": 1}
        assert [number for number, _, _ in servers.requests] == [0, 1, 1]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("after", [(), (DEAD,), (DEAD, "http://127.0.0.1:19")])
def test_what_may_be_old_is_shown_with_a_warning_if_there_is_nothing_newer(
    after: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, not with each page or each second of a watch."""
    with Servers("30") as servers:
        url = servers.urls[0]
        client = ControlClient(ClientConfig(control_url=(DEAD, url, *after)))

        assert client.get("events") == {"server": 0}
        assert client.get("events") == {"server": 0}
    assert capsys.readouterr().err == (
        f"forewarn: {url} has had no contact with its store for up to 30s;"
        " what it shows may be old\n"
    )


def test_server_that_is_cut_off_from_its_store_is_better_than_an_error() -> None:
    with Servers("30", 503, None) as servers:
        assert servers.client().get("events") == {"server": 0}
