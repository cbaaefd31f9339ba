"""The parts put together: how many connections there may be, how the listeners end, and who can
read the store.
"""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from forewarn.config import Address, Config, Identify
from forewarn.server import connection_limits, listening, warn_of_readable_store
from forewarn.web.http.connection import ConnectionPolicy, Limits
from forewarn.web.http.listener import (
    ABORT_SECONDS_MAX,
    SERVER_METADATA,
    STOP_SECONDS_MAX,
    Listener,
)
from forewarn.web.http_status import metadata_body
from tests.unit.web.http.test_listener import hello


def shares(descriptors: int, config: Config = Config()) -> tuple[int, int, int, int]:
    """Connections of VMs, of one VM's address, of operators, and of one operator's address."""
    vms, operators = connection_limits(config, descriptors)
    return (
        vms.connections_max,
        vms.connections_per_address_max,
        operators.connections_max,
        operators.connections_per_address_max,
    )


@pytest.mark.parametrize(
    ("descriptors", "expected"),
    [
        (256, (160, 20, 32, 32)),
        (1024, (640, 80, 128, 128)),
        (20_000, (14_880, 1860, 1024, 1024)),
        (524_288, (519_168, 4096, 1024, 1024)),
    ],
)
def test_vms_never_take_the_descriptors_that_operators_store_and_platform_need(
    descriptors: int, expected: tuple[int, int, int, int]
) -> None:
    """Without one left, nobody could look, nothing could be stored, and impacts would fail for
    good.
    """
    assert shares(descriptors) == expected


@pytest.mark.parametrize(
    "identify", [(Identify.PROXY,), (Identify.ADDRESS, Identify.PROXY), (Identify.PATH,)]
)
def test_an_address_that_may_speak_for_many_vms_may_hold_all_their_connections(
    identify: tuple[Identify, ...],
) -> None:
    """A metadata proxy has one address for all VMs behind it."""
    assert shares(1024, Config(identify=identify))[:2] == (640, 640)


def test_the_limit_for_one_address_that_is_configured_is_kept_where_it_is_lower() -> None:
    assert shares(1024, Config(connections_per_address_max=7)) == (640, 7, 128, 7)


class BrokenListener(Listener):
    """It stops, and then finds that something is wrong."""

    async def stop(self) -> None:
        await super().stop()
        raise KeyError("ours")


def make(kind: type[Listener]) -> Listener:
    return kind(
        hello,
        Address("127.0.0.1", 0),
        ConnectionPolicy(Limits(), metadata_body),
        server_name=SERVER_METADATA,
    )


def test_a_listener_that_does_not_stop_cleanly_is_logged_and_the_other_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_store_that_others_can_read_is_a_warning_with_the_command_that_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Earlier versions made it so. Its owner may want it like this, so it is not changed."""
    path = tmp_path / "store.db"
    path.touch()
    path.chmod(mode)

    warn_of_readable_store(f"sqlite:///{path}")

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.facts == {"file": str(path), "mode": f"{mode:04o}", "fix": f"chmod 600 {path}"}  # type: ignore[attr-defined]
    assert os.stat(path).st_mode & 0o777 == mode


def test_a_store_that_nobody_else_can_read_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.db"
    path.touch(0o600)

    warn_of_readable_store(f"sqlite:///{path}")
    warn_of_readable_store("memory")

    assert caplog.records == []
