"""The composition root: connection limits, options it validates, stopping, the store's mode."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from forewarn.config import Address, Config, Identify
from forewarn.errors import Invalid
from forewarn.server import (
    connection_limits,
    parse_event_type,
    run_listeners,
    warn_if_store_is_readable,
)
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import ConnectionPolicy
from forewarn.web.http.listener import (
    ABORT_SECONDS_MAX,
    SERVER_METADATA,
    STOP_SECONDS_MAX,
    Listener,
)
from forewarn.web.http_status import metadata_body
from tests.unit.web.http.test_listener import hello


def shares(descriptors: int, config: Config = Config()) -> tuple[int, int, int, int]:  # noqa: B008, frozen
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
def test_vms_leave_descriptors_for_operators_and_the_store(
    descriptors: int, expected: tuple[int, int, int, int]
) -> None:
    """Without any, nobody could look, nothing could be stored, and impacts would fail."""
    assert shares(descriptors) == expected


@pytest.mark.parametrize(
    "identify", [(Identify.PROXY,), (Identify.ADDRESS, Identify.PROXY), (Identify.PATH,)]
)
def test_address_of_a_proxy_may_hold_all_connections(
    identify: tuple[Identify, ...],
) -> None:
    """A metadata proxy has one address for all VMs behind it."""
    assert shares(1024, Config(identify=identify))[:2] == (640, 640)


def test_configured_limit_per_address_applies_if_lower() -> None:
    assert shares(1024, Config(connections_per_address_max=7)) == (640, 7, 128, 7)


class BrokenListener(Listener):
    """It stops, and then fails."""

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


def test_failing_stop_of_a_listener_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hidden exception would hide that the rest of the stop was skipped. The other one stops."""

    async def story() -> None:
        broken, good = make(BrokenListener), make(Listener)
        async with run_listeners(broken, good):
            pass
        await good.wait()

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records] == ["listener did not stop cleanly"]
    assert "KeyError: 'ours'" in caplog.text


def test_stalled_client_delays_the_stop_at_most_three_seconds() -> None:
    """Open requests are waited for, then aborted."""
    assert STOP_SECONDS_MAX + ABORT_SECONDS_MAX < 3


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_readable_store_is_a_warning_with_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Earlier versions created it like that. The mode is not changed: it may be intended."""
    path = tmp_path / "store.db"
    path.touch()
    path.chmod(mode)

    warn_if_store_is_readable(f"sqlite:///{path}")

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.facts == {"file": str(path), "mode": f"{mode:04o}", "fix": f"chmod 600 {path}"}  # type: ignore[attr-defined]
    assert os.stat(path).st_mode & 0o777 == mode


def test_private_store_is_not_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store.db"
    path.touch(0o600)

    warn_if_store_is_readable(f"sqlite:///{path}")
    warn_if_store_is_readable("memory")

    assert caplog.records == []


@pytest.mark.parametrize("option", ["simulate_duration", "exec_command"])
def test_unknown_event_type_in_an_option_is_rejected(option: str) -> None:
    """A typing error would silently leave the type without its command or duration."""
    with pytest.raises(Invalid, match=f"^{option}: unknown event type 'Restart'; expected one of"):
        parse_event_type(option, "Restart")
