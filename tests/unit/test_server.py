"""The parts put together: how the listeners end."""

import asyncio

import pytest

from forewarn.config import Address
from forewarn.server import listening
from forewarn.web.connection import Guard, Limits
from forewarn.web.listener import ABORT_SECONDS_MAX, SERVER_METADATA, STOP_SECONDS_MAX, Listener
from forewarn.web.problems import metadata_body
from tests.unit.web.test_listener import hello


class BrokenListener(Listener):
    """It stops, and then finds that something is wrong."""

    async def stop(self) -> None:
        await super().stop()
        raise KeyError("ours")


def make(kind: type[Listener]) -> Listener:
    return kind(hello, Address("127.0.0.1", 0), Guard(Limits(), metadata_body), server_name=SERVER_METADATA)


def test_a_listener_that_does_not_stop_cleanly_is_logged_and_the_other_stops(caplog: pytest.LogCaptureFixture) -> None:
    """An exception that nobody sees hides that the rest of the stop was skipped."""

    async def story() -> None:
        broken, good = make(BrokenListener), make(Listener)
        async with listening(broken, good):
            pass
        await good.wait()

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records] == ["listener did not stop cleanly"]
    assert "KeyError: 'ours'" in caplog.text


def test_a_stalled_client_delays_the_stop_by_less_than_three_seconds() -> None:
    """What is in flight is waited for, then cut off; after both the listener is gone."""
    assert STOP_SECONDS_MAX + ABORT_SECONDS_MAX < 3
