"""The composition root: stopping, claims, the store's mode."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from forewarn.config import Config
from forewarn.fleetfile.parser import parse
from forewarn.option_kind import Address, ExecCommand
from forewarn.platform.exec import ExecPlatform
from forewarn.server import make_listeners, run_listeners, warn_if_store_is_readable
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import ConnectionPolicy
from forewarn.web.http.listener import (
    ABORT_SECONDS_MAX,
    SERVER_METADATA,
    STOP_SECONDS_MAX,
    Listener,
)
from forewarn.web.http_status import metadata_body
from tests.builders import SECOND
from tests.unit.engine.hostd_world import World, reported
from tests.unit.engine.hostd_world import run as run_world
from tests.unit.web.guest import Guest
from tests.unit.web.guest import run as run_guest
from tests.unit.web.http.test_listener import hello


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

    async def main() -> None:
        broken, good = make(BrokenListener), make(Listener)
        async with run_listeners(broken, good):
            pass
        await good.wait()

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["listener did not stop cleanly"]
    assert "KeyError: 'ours'" in caplog.text


def test_stalled_client_delays_the_stop_at_most_three_seconds() -> None:
    """Open requests are waited for, then aborted."""
    assert STOP_SECONDS_MAX + ABORT_SECONDS_MAX < 3


@pytest.mark.parametrize(("has_daemon", "stop_seconds"), [(False, 4.25), (True, 0.0)])
def test_claim_says_how_long_the_platform_of_its_server_may_act(
    *, has_daemon: bool, stop_seconds: float
) -> None:
    """After a lost lease the next try waits for that. A daemon carries its impact on, whatever
    happens to the server, so nothing is waited for.
    """
    sleep = ExecCommand("*", ("sleep", "60"))
    environ = dict(os.environ)
    platform = ExecPlatform([sleep], seconds_max=60, environ=environ, grace_seconds=0.25)

    async def test(world: World) -> None:
        server = world.servers[0]
        if has_daemon:
            daemon = await world.daemon("host-a", reported("web-0"))
        else:
            fleet = parse(b"scopes: [{name: web-0, vms: [{name: web-0, host: host-a}]}]", "fleet")
            await server.operations.apply(fleet, by="test")
        await world.restart("web-0")
        if has_daemon:
            await daemon.take()
        (impact,) = server.scope("web-0").impacts
        assert (impact.is_held, impact.stop_seconds) == (True, stop_seconds)

    run_world(test, platform=platform)


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


class HeldConnection:
    """One on which a request is being answered."""

    is_evictable = False
    due_at = 0.0

    def __init__(self, address: str) -> None:
        self.address = address

    def time_out(self) -> None: ...

    def abort(self) -> None: ...


def test_vm_whose_connections_are_refused_by_a_limit_is_shown() -> None:
    """It gets 503 before its request is read, so the application does not see it."""

    async def test(guest: Guest) -> None:
        config = Config(connections_per_address_max=1)
        listener, _ = make_listeners(config, guest.service, None, 4096)
        unserved = guest.service.hosts.unserved
        assert listener.policy.admit(HeldConnection("10.0.0.1"))
        for _ in range(14):
            assert not listener.policy.admit(HeldConnection("10.0.0.1"))
            await guest.clock.advance(5 * SECOND)
            await unserved.look()

        shown = unserved.find("web", "web-0")
        assert shown is not None
        assert shown.detail == "status 503, a limit of connections is reached"
        assert unserved.find("web", "web-1") is None

    run_guest(test)
