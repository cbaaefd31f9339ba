"""How entries are printed, and how the stream is parsed."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from forewarn.cli.api import ControlClient
from forewarn.cli.history import (
    Message,
    What,
    follow,
    format_entry,
    parse_messages,
    table_row,
)
from forewarn.cli.options import ClientConfig
from forewarn.core.change import ChangeKind
from tests.unit.cli.test_api import serving

ENTRY = {
    "number": 7,
    "at": "2030-01-31T12:00:00.123Z",
    "by": "server-6fb313d3-3282-4687-85dc-4143b404a61c",
    "what": "scheduled",
    "scope": "web",
    "event": "0123456789",
    "resources": ["web-0", "web-1"],
    "vm": "",
    "host": "host-a",
    "detail": "Reboot of web-0",
}


def test_messages_end_at_empty_lines() -> None:
    """As in the specification of server-sent events: comments are ignored, and an id stays."""
    stream = (
        b"retry: 2000\nid: 6\n\n: still here\nid: 7\n\nid: 8\ndata: {}\r\n\r\n"
        b"event: gap\ndata: 1\n\ndata: cut off\n"
    )

    assert list(parse_messages(stream.splitlines(keepends=True))) == [
        Message("6", "", ""),
        Message("7", "", ""),
        Message("8", "", "{}"),
        Message("8", "gap", "1"),
    ]


def test_change_is_one_readable_line() -> None:
    assert format_entry(ENTRY) == "12:00:00  web         Scheduled: Reboot of web-0  (01234567)"


def test_unknown_change_is_printed_by_name() -> None:
    """Changes of a newer service are not hidden."""
    assert (
        format_entry(ENTRY | {"what": "claimed", "vm": "web-0", "event": "", "detail": "w1"})
        == "12:00:00  web         claimed web-0 w1"
    )


def test_detail_is_cut_to_one_printable_line() -> None:
    """A platform's output may contain anything, even control sequences."""
    line = format_entry(
        ENTRY | {"what": "impact-failed", "vm": "web-0", "detail": "no {host}\x1b[2J\nand more"}
    )

    assert line == "12:00:00  web         web-0: no {host}�[2J  (01234567)"
    assert table_row(ENTRY | {"detail": "one\ntwo"})["detail"] == "one"


def test_table_row_has_the_vm_or_the_resources() -> None:
    assert table_row(ENTRY)["about"] == ["web-0", "web-1"]
    assert table_row(ENTRY | {"vm": "web-0"})["about"] == "web-0"


def test_what_offers_every_change_of_the_service() -> None:
    """The command line has its own list, because it works without the service's modules."""
    assert [one.value for one in What] == [one.value for one in ChangeKind]


def streaming(body: bytes, *, missing: int = 0) -> type[BaseHTTPRequestHandler]:
    """A server whose streams have this body. They break before as many `missing` bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def message(entry: dict[str, Any]) -> bytes:
    return f"id: {entry['number']}\ndata: {json.dumps(entry)}\n\n".encode()


def test_stream_without_a_message_continues_at_the_next_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server of an older version that is cut off from its store sends one, with a 200."""
    with serving(streaming(b"")) as empty, serving(streaming(message(ENTRY))) as other:
        client = ControlClient(ClientConfig(control_url=(empty, other)))
        assert next(follow(client, {}, sleep=lambda seconds: None)) == ENTRY
    assert capsys.readouterr().err == "forewarn: the stream ended without a message; retrying\n"


def test_stream_that_breaks_continues_at_the_next_server() -> None:
    """The first one may hang: then it takes time to know that, each time."""
    first, second = ENTRY, ENTRY | {"number": 8}
    broken = streaming(message(first), missing=1)
    with serving(broken) as one, serving(streaming(message(second))) as other:
        client = ControlClient(ClientConfig(control_url=(one, other)))
        entries = follow(client, {}, sleep=lambda seconds: None)
        assert [next(entries), next(entries)] == [first, second]
