"""What we rely on in uvicorn and httptools beyond their promised interfaces.

If one of these fails, read `web/metadata/fast_path.py` again.
"""

import inspect
import tomllib
from pathlib import Path

import httptools
import pytest
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

REPOSITORY = Path(__file__).parents[3]
LIFE = [
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "pause_writing",
    "resume_writing",
    "shutdown",
]
PARSING = [
    "on_message_begin",
    "on_url",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
]
ANSWERING = ["on_response_complete"]


class Recorder:
    """A parser's callbacks, in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_message_begin(self) -> None:
        self.seen.append("begin")

    def on_headers_complete(self) -> None:
        self.seen.append("head")

    def on_message_complete(self) -> None:
        self.seen.append("end")


class Refusing(Recorder):
    def on_headers_complete(self) -> None:
        raise KeyError("ours")


def test_make_tests_the_oldest_supported_uvicorn() -> None:
    """Its protocol class is not a promised interface: a version that is allowed is tested."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "uvicorn>=0.22,<1" in extras["lab"]
    assert "uvicorn>=0.22,<1" in extras["hostd"]
    assert "UVICORN_OLDEST := 0.22.0" in (REPOSITORY / "Makefile").read_text()


@pytest.mark.parametrize("name", LIFE + PARSING + ANSWERING)
def test_protocol_has_the_methods_we_override_or_call(name: str) -> None:
    """A renamed method would leave a limit unenforced without any error."""
    assert callable(getattr(HttpToolsProtocol, name))


def test_protocol_takes_the_arguments_we_pass() -> None:
    assert list(inspect.signature(HttpToolsProtocol.__init__).parameters) == [
        "self",
        "config",
        "server_state",
        "app_state",
        "_loop",
    ]


@pytest.mark.parametrize(
    ("holder", "names"),
    [
        (
            HttpToolsProtocol,
            ("parser transport flow client cycle headers url server_state scope"),
        ),
        (
            RequestResponseCycle,
            (
                "keep_alive disconnected response_started response_complete chunked_encoding"
                " message_event default_headers body"
            ),
        ),
        (FlowControl, "write_paused"),
        (ServerState, "connections tasks default_headers"),
    ],
)
def test_uvicorn_objects_have_the_attributes_we_use(holder: type, names: str) -> None:
    """Setting an attribute that is no longer read would fail silently."""
    source = inspect.getsource(holder)
    assert [name for name in names.split() if f"self.{name}" not in source] == []


def test_uvicorn_writes_headers_as_the_fast_path_does() -> None:
    """Lower-case names, a colon and a space; the quick and the careful way must give the same
    bytes.
    """
    assert 'content.extend([name, b": ", value, b"\\r\\n"])' in inspect.getsource(
        RequestResponseCycle.send
    )
    assert httptools_impl.STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
    assert httptools_impl.STATUS_LINE[304] == b"HTTP/1.1 304 Not Modified\r\n"


def test_parser_reports_start_and_end_of_a_request() -> None:
    """Remembering a request depends on this: one start, one end, and nothing after it."""
    recorder = Recorder()
    parser = httptools.HttpRequestParser(recorder)
    parser.feed_data(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert recorder.seen == ["begin", "head", "end"]
    parser.feed_data(b"G")
    assert recorder.seen == ["begin", "head", "end", "begin"]


def test_parser_exposes_what_a_callback_raised() -> None:
    """Limits are raised inside callbacks, and bugs must not pass for bad requests."""
    parser = httptools.HttpRequestParser(Refusing())
    with pytest.raises(httptools.HttpParserCallbackError) as raised:
        parser.feed_data(b"GET / HTTP/1.1\r\n\r\n")
    assert isinstance(raised.value.__context__, KeyError)


def test_parser_continues_after_an_upgrade() -> None:
    """An offer of HTTP/2 must not cost a Java client its connection."""
    recorder = Recorder()
    parser = httptools.HttpRequestParser(recorder)
    offer = b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with pytest.raises(httptools.HttpParserUpgrade) as raised:
        parser.feed_data(offer + b"GET / HTTP/1.1\r\n\r\n")
    assert raised.value.args == (len(offer),)
    parser.feed_data(b"GET / HTTP/1.1\r\n\r\n")
    assert recorder.seen == ["begin", "head", "end", "begin", "head", "end"]
