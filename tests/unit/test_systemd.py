"""What systemd is told, over the sockets that it really uses."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.systemd import Notifier, Pulse


@pytest.fixture
def systemd() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """The manager's end, and the environment that it gives."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening,
    ):
        listening.settimeout(20)
        listening.bind(str(Path(folder, "notify")))
        yield listening, {"NOTIFY_SOCKET": str(Path(folder, "notify"))}


def test_systemd_hears_each_word(systemd: tuple[socket.socket, dict[str, str]]) -> None:
    """The names are systemd's (sd_notify(3))."""
    listening, environ = systemd
    notifier = Notifier(environ, pid=7, monotonic=lambda: 12.5)
    notifier.ready("watching")
    notifier.status("web-0:\nREADY=0")
    notifier.reloading()
    notifier.feed()
    notifier.stopping("ending")

    assert [listening.recv(1000).decode() for _ in range(5)] == [
        "READY=1\nSTATUS=watching",
        "STATUS=web-0: READY=0",
        "RELOADING=1\nMONOTONIC_USEC=12500000",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=ending",
    ]


def test_a_socket_without_a_file_is_reached_too() -> None:
    """Containers get abstract ones, written with an @."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(20)
        listening.bind("")  # the kernel chooses an abstract name
        name: bytes = listening.getsockname()
        Notifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}, pid=7).feed()

        assert listening.recv(1000) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    "environ",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:9"}, {"NOTIFY_SOCKET": "/nobody"}],
)
def test_nobody_to_tell_is_no_trouble(environ: dict[str, str]) -> None:
    """The agent runs without systemd, and when systemd is in trouble."""
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
def test_the_watchdog_is_fed_at_half_its_time_if_it_is_ours(
    environ: dict[str, str], seconds: float | None
) -> None:
    """A child that inherits the variables must not feed for a parent that hangs."""
    assert Notifier(environ, pid=7).feed_seconds == seconds


def test_a_loop_that_stands_still_too_long_has_no_pulse() -> None:
    """A watchdog that is fed by a clock guards nothing."""
    pulse = Pulse(100.0, now=0.0)

    assert pulse.is_there("a", 50)
    assert pulse.is_there("a", 150)
    assert not pulse.is_there("a", 151)
    assert pulse.is_there("b", 152)


def test_text_that_cannot_be_encoded_is_said_all_the_same(
    systemd: tuple[socket.socket, dict[str, str]],
) -> None:
    """JSON may hold half a character; the words with it must not end the agent."""
    listening, environ = systemd
    Notifier(environ, pid=7).status("web-0: Re\ud800boot")

    assert listening.recv(1000) == b"STATUS=web-0: Re?boot"
