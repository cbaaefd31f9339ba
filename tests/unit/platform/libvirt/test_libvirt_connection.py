"""Connections to libvirt: which one a call uses, and where one is closed.

Closing one waits for the host. In the event loop, a silent host would stop the server.
"""

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from forewarn.errors import ImpactFailed
from forewarn.platform.libvirt.connection import LibvirtHosts, closing, open_connection, prepare
from tests.unit.platform.libvirt.libvirt_world import URIS, Host, LibvirtWorld

WAIT_SECONDS_MAX = 30


@pytest.fixture
def world(tmp_path: Path) -> LibvirtWorld:
    return LibvirtWorld(tmp_path)


def test_late_timeout_drops_only_the_connection_that_hung(world: LibvirtWorld) -> None:
    """The calls after the first timeout have a new connection, which works."""
    opened = list[Any]()
    go = threading.Event()

    def connect(uri: str) -> Any:
        opened.append(Host(world.on("host-a")))
        return opened[-1]

    async def hang(libvirts: LibvirtHosts, seconds: float) -> asyncio.Task[None]:
        """A call with this limit that uses the connection of now."""
        asked = threading.Event()
        libvirts.call_seconds_max = seconds

        def wait(connection: Any) -> None:
            asked.set()
            go.wait(WAIT_SECONDS_MAX)

        call = asyncio.create_task(libvirts.ask("host-a", wait))
        assert await asyncio.to_thread(asked.wait, WAIT_SECONDS_MAX)
        return call

    async def main() -> None:
        libvirts = LibvirtHosts(URIS, call_seconds_max=WAIT_SECONDS_MAX, connect=connect)
        calls = [await hang(libvirts, 1.0), await hang(libvirts, 0.1)]
        with pytest.raises(ImpactFailed, match=r"within 0.1 seconds"):
            await calls[1]
        libvirts.call_seconds_max = WAIT_SECONDS_MAX
        second = await libvirts.ask("host-a", lambda connection: connection)
        with pytest.raises(ImpactFailed, match="within 1 seconds"):
            await calls[0]

        assert await libvirts.ask("host-a", lambda connection: connection) is second
        assert len(opened) == 2
        go.set()

    asyncio.run(main())


def test_connection_is_closed_in_the_background_whatever_kept_it_open() -> None:
    """The last to use one may be a domain that an impact has acted on, in the event loop."""
    prepare()
    closed_in, is_closed = list[str](), threading.Event()

    def note() -> None:
        closed_in.append(threading.current_thread().name)
        is_closed.set()

    connection = open_connection("test:///default")
    weakref.finalize(connection, note)
    (domain,) = connection.listAllDomains()
    del connection
    assert domain.connect().isAlive()
    del domain

    assert is_closed.wait(WAIT_SECONDS_MAX)
    assert closed_in == ["libvirt-close"]


def test_connection_that_cannot_be_closed_does_not_keep_others_open() -> None:
    def fail() -> None:
        raise KeyError("no such callback")

    prepare()
    is_closed = threading.Event()
    closing.put(fail)
    closing.put(is_closed.set)

    assert is_closed.wait(WAIT_SECONDS_MAX)
