"""sd_notify messages, over real sockets."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.systemd import Notifier, Pulse


@pytest.fixture
def systemd() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """systemd's end of the socket, and the environment of the service."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
    ):
        receiver.settimeout(20)
        receiver.bind(str(Path(folder, "notify")))
        yield receiver, {"NOTIFY_SOCKET": str(Path(folder, "notify"))}


def test_each_message_has_the_format_of_systemd(
    systemd: tuple[socket.socket, dict[str, str]],
) -> None:
    """The names are systemd's (sd_notify(3))."""
    receiver, environ = systemd
    notifier = Notifier(environ, pid=7, monotonic=lambda: 12.5)
    notifier.ready("watching")
    notifier.status("web-0:\nREADY=0")
    notifier.reloading()
    notifier.feed()
    notifier.stopping("ending")

    assert [receiver.recv(1000).decode() for _ in range(5)] == [
        "READY=1\nSTATUS=watching",
        "STATUS=web-0: READY=0",
        "RELOADING=1\nMONOTONIC_USEC=12500000",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=ending",
    ]


def test_abstract_sockets_work() -> None:
    """Containers get them, written with an @."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.settimeout(20)
        receiver.bind("")  # the kernel chooses an abstract name
        name: bytes = receiver.getsockname()
        Notifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}, pid=7).feed()

        assert receiver.recv(1000) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    "environ",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:9"}, {"NOTIFY_SOCKET": "/nobody"}],
)
def test_missing_or_broken_socket_is_ignored(environ: dict[str, str]) -> None:
    """The agent also runs without systemd, and while systemd is broken."""
    Notifier(environ, pid=7).ready("watching")


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_is_fed_at_half_its_timeout(
    environ: dict[str, str], seconds: float | None
) -> None:
    """A child that inherits the variables must not feed it for a parent that hangs."""
    assert Notifier(environ, pid=7).feed_seconds == seconds


def test_loop_that_does_not_advance_has_no_pulse() -> None:
    """A watchdog that a timer feeds would guard nothing."""
    pulse = Pulse(100.0, now=0.0)

    assert pulse.is_there("a", 50)
    assert pulse.is_there("a", 150)
    assert not pulse.is_there("a", 151)
    assert pulse.is_there("b", 152)


def test_text_that_cannot_be_encoded_is_replaced(
    systemd: tuple[socket.socket, dict[str, str]],
) -> None:
    """JSON may contain half a surrogate pair; it must not crash the agent."""
    receiver, environ = systemd
    Notifier(environ, pid=7).status("web-0: Re\ud800boot")

    assert receiver.recv(1000) == b"STATUS=web-0: Re?boot"
