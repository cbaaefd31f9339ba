"""Errors of a watch that nobody handles are in the log."""

import logging
import socket
from collections.abc import Iterator

import pytest

from forewarn.client import Client, EndpointError


class StopAfter:
    """Ends a watch after so many polls, and lets no time pass between them."""

    def __init__(self, polls: int) -> None:
        self.left = polls

    def is_set(self) -> bool:
        return self.left == 0

    def wait(self, timeout: float) -> None:
        self.left -= 1


@pytest.fixture
def client() -> Iterator[Client]:
    """Of an endpoint that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with Client(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
            yield client


def test_unhandled_error_is_logged_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A watch that fails in silence looks like a quiet day. One line is enough."""
    with caplog.at_level(logging.WARNING, "forewarn"):
        assert list(client.watch(stop=StopAfter(3))) == []
    (record,) = caplog.records
    assert record.getMessage() == "no scheduled events"
    assert "Connection refused" in record.__dict__["facts"]["reason"]


def test_handled_error_is_not_logged(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    errors: list[EndpointError] = []
    assert list(client.watch(stop=StopAfter(3), on_error=errors.append)) == []
    assert (len(errors), caplog.records) == (3, [])
