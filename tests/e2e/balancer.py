"""HAProxy in front of an echo server that keeps its sessions open."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.waiting import eventually

CONFIG = """
global
    stats socket {folder}/admin.sock mode 600 level admin
    stats socket {folder}/user.sock mode 600 level user
    stats socket ipv4@127.0.0.1:{admin} level admin
defaults
    mode tcp
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{port}
    default_backend web
backend web
    server web-0 127.0.0.1:{server}
    server web-1 127.0.0.1:{server}
"""


@dataclass(frozen=True, slots=True)
class Balancer:
    folder: Path
    port: int
    admin: int

    @property
    def path(self) -> str:
        """The path of its runtime socket."""
        return str(self.folder / "admin.sock")

    def ask(self, command: str) -> str:
        with socket.create_connection(("127.0.0.1", self.admin), 5) as connection:
            connection.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def state(self, server: str) -> str:
        """UP, DRAIN or MAINT; `no check` without health checks."""
        rows = [line.split(",") for line in self.ask("show stat -1 4 -1").splitlines()]
        return next(row[rows[0].index("status")] for row in rows if row[:2] == ["web", server])

    def session(self) -> socket.socket:
        """A session that has reached a server."""
        connection = socket.create_connection(("127.0.0.1", self.port), 5)
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        return connection


@contextmanager
def balancing(folder: Path) -> Iterator[Balancer]:
    haproxy = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    assert haproxy, "haproxy is missing: apt-get install haproxy"
    with echoing() as server:
        balancer = Balancer(folder, free_port(), free_port())
        config = folder / "haproxy.cfg"
        config.write_text(
            CONFIG.format(folder=folder, admin=balancer.admin, port=balancer.port, server=server)
        )
        with (
            (folder / "haproxy.log").open("wb") as log,
            subprocess.Popen([haproxy, "-db", "-f", config], stderr=log) as process,
        ):
            try:
                eventually(lambda: is_ready(balancer, process))
                yield balancer
            finally:
                process.kill()


def is_ready(balancer: Balancer, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, (balancer.folder / "haproxy.log").read_text()
    try:
        balancer.ask("show info")
    except OSError:
        return False
    return True


@contextmanager
def echoing() -> Iterator[int]:
    """An echo server. It ends a session when the client does."""

    def echo(connection: socket.socket) -> None:
        with connection:
            while part := connection.recv(100):  # ends with the client
                connection.sendall(part)

    def accept() -> None:
        while True:  # ends when the listener is closed
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
