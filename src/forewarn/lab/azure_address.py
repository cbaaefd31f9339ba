"""Runs a program where 169.254.169.254:80 is an endpoint of the lab: Linux only, without root.

    python -m forewarn.lab.azure_address URL COMMAND...

This process moves into a network namespace, and a user namespace where that needs one, and becomes
the command. So exit code, signals and terminal are the command's own. What is bound in a namespace
stays there: the socket that listens on the address inside goes to a relay, a process that stays
outside, passes connections on to URL, and ends with the command.

    this process ---- unshare, bind, hand over ------------------> the command
           `-- fork -- fork -- relay: accept inside, connect outside --> ends with the command
"""

import asyncio
import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from forewarn.error_report import run_command
from forewarn.errors import Invalid, Unavailable

ADDRESS = ("169.254.169.254", 80)
URL = f"http://{ADDRESS[0]}"
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
SET_FLAGS, SET_ADDRESS, SET_MASK = 0x8914, 0x8916, 0x891C  # of an interface, linux/sockios.h
UP_AND_RUNNING = 0x41
READ_BYTES = 65536
NOT_RUN = 127
LIMIT_REACHED = "the sysctl user.max_user_namespaces or user.max_net_namespaces is too low"
RESET = struct.pack("ii", 1, 0)


def wrap(url: str, command: Sequence[str]) -> list[str]:
    """The command that runs this one at Azure's address."""
    if sys.platform != "linux":
        raise Unavailable(f"Azure's address needs network namespaces, not there on {sys.platform}")
    return [sys.executable, "-m", __name__, url, *command]


def check_allowed() -> None:
    """Unavailable, with the reason, if no program can run at Azure's address here."""
    command = wrap("http://127.0.0.1", [sys.executable, "-c", ""])
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise Unavailable(done.stderr.strip().removeprefix("forewarn: "))


def become(url: str, command: list[str]) -> NoReturn:
    """Start the relay, move into the namespace, and become the command."""
    ours, relays = socket.socketpair()
    process = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        os.setsid()  # the signals of the command's process group are not for the relay
        if os.fork() == 0:
            ours.close()
            _run_relay(relays, process, url)
        os._exit(0)
    os.wait()  # so that the command has no child that it did not start
    relays.close()
    try:
        with ours, _listen_in_namespace() as listening:
            socket.send_fds(ours, [b"."], [listening.fileno()])
            ours.recv(1)
    except OSError as error:
        reason = LIMIT_REACHED if error.errno == errno.ENOSPC else error.strerror or error
        raise Unavailable(
            f"network namespaces are not allowed here ({reason}); run as root,"
            ' or see "A program at Azure\'s address" in docs/lab.md'
        ) from error
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        raise Invalid(f"{command[0]!r} cannot be started: {error.strerror or error}") from error


def _listen_in_namespace() -> socket.socket:
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(NEW_NETWORK)  # as root everything else stays as it is
    except PermissionError:
        _unshare(NEW_USER | NEW_NETWORK)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        ioctl(control, SET_FLAGS, struct.pack("16sh14x", b"lo", UP_AND_RUNNING))
        for request, value in ((SET_ADDRESS, ADDRESS[0]), (SET_MASK, "255.255.255.255")):
            address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            ioctl(control, request, struct.pack("16s16s", b"lo:azure", address))
    return socket.create_server(ADDRESS)


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run_relay(handed_over: socket.socket, process: int, url: str) -> NoReturn:
    """Relay until the process has ended, or ended before it handed a socket over."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # the command's output must end with the command
        os.dup2(nowhere, number)
    with suppress(OSError):
        _, (number,), _, _ = socket.recv_fds(handed_over, 1, 1)
        handed_over.sendall(b".")
        handed_over.close()
        asyncio.run(_relay(socket.socket(fileno=number), process, url))
    os._exit(0)


async def _relay(listening: socket.socket, process: int, url: str) -> None:
    asyncio.get_running_loop().add_reader(process, os._exit, 0)
    target = urlsplit(url)
    async with await asyncio.start_server(
        partial(_pass_on, target.hostname or "", target.port or 80), sock=listening
    ) as server:
        await server.serve_forever()


async def _pass_on(
    host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        far_reader, far_writer = await asyncio.open_connection(host, port)
    except OSError:  # the lab is gone
        return _reset(writer)
    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    far_writer.close()
    return writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes, the end and a reset on: a fault of the endpoint must reach the command."""
    try:
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


if __name__ == "__main__":
    run = partial(become, sys.argv[1], sys.argv[2:])
    sys.exit(run_command("forewarn", run, lambda error: NOT_RUN))
