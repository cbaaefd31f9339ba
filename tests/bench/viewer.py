"""What one viewer's token costs the polls of VMs. `python -m tests.bench.viewer`: a table; exits 1
where the limit is exceeded.

A real `forewarn serve` runs on one core, with 6,000 VMs, two thirds of them on large hosts and in
large scopes, and a history of tens of thousands of entries. From the other core a VM polls at a
steady pace, while another process reads streams and lists with a viewer's token as fast as it can.
Rounds with and without it take turns.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from tests.bench.attack import POLL_SECONDS_MAX, VICTIM
from tests.bench.load import LOAD_CORE, SERVER_CORE
from tests.bench.rounds import PROCESS_SECONDS_MAX, Result, observe_service, take_rounds
from tests.e2e.service import Service

SMALL_VMS, VMS_PER_SCOPE, HOSTS = 2000, 10, 40
LARGE_HOSTS, VMS_PER_LARGE_HOST = 4, 1000
VMS = SMALL_VMS + LARGE_HOSTS * VMS_PER_LARGE_HOST
ENTRIES = 60_000
EVENT_HOSTS = 10
"""Hosts with an event: their VMs are in the list of events."""
STREAMS = 9
PATHS = (
    "/fleet",
    "/vms?limit=10000",
    "/vms?limit=10000",
    "/hosts?limit=10000",
    "/hosts?limit=10000",
    "/scopes?limit=10000",
    "/events?limit=10000",
    "/history?limit=1000&vm=vm-0000007",
    "/history?limit=1000&what=canceled",
)
"""A filter that matches little reads most."""
RECEIVE_BYTES = 1 << 18


def measure() -> Result:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as service:
        token = create_viewer(service)
        name = f"one viewer, {STREAMS} streams and {len(PATHS)} lists"
        command = (sys.executable, "-m", "tests.bench.viewer", service.control, token)
        return take_rounds(name, lambda: observe_service(service), *command)


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    """A server with a fleet, events, and a history."""
    service = Service(folder, fleet=json.dumps(fleet(0))).start()
    try:
        for number in range(1, ENTRIES // VMS):
            status, answer = service.ask("PUT", "/fleet", fleet(number))
            assert status == 200, answer
        for host in range(EVENT_HOSTS):
            maintain = {"type": "Freeze", "duration_seconds": 5}
            status, answer = service.ask("POST", f"/hosts/host-{host:02}/maintain", maintain)
            assert status == 202, answer
        assert service.process is not None
        os.sched_setaffinity(service.process.pid, {int(SERVER_CORE)})
        yield service
    finally:
        service.kill()


def fleet(number: int) -> dict[str, Any]:
    """Each number differs from the one before it in all VMs: an entry of the history for each."""

    def vm(index: int, host: str) -> dict[str, Any]:
        return {
            "name": f"vm-{index:07}",
            "address": VICTIM if index == 0 else f"10.0.{index >> 8}.{index & 255}",
            "host": host,
            "instance": {"size": f"size-{number}"},
        }

    def scope(first: int, size: int, *hosts: str) -> dict[str, Any]:
        vms = [vm(index, hosts[index % len(hosts)]) for index in range(first, first + size)]
        return {"name": f"scope-{first:05}", "kind": "scale-set", "vms": vms}

    small = [f"host-{host:02}" for host in range(HOSTS)]
    return {
        "scopes": [
            *(scope(first, VMS_PER_SCOPE, *small) for first in range(0, SMALL_VMS, VMS_PER_SCOPE)),
            *(
                scope(first, VMS_PER_LARGE_HOST, f"large-{first}")
                for first in range(SMALL_VMS, VMS, VMS_PER_LARGE_HOST)
            ),
        ]
    }


def create_viewer(service: Service) -> str:
    """The first token of a service is an admin's."""
    for role in ("admin", "viewer"):
        status, created = service.ask("POST", "/tokens", {"name": role, "role": role})
        assert status == 201, created
        service.token = service.token or created["text"]
    text: str = created["text"]
    return text


class Viewer:
    """Reads as much as it can, on a thread for each stream and each list; counts what it got."""

    def __init__(self, control: str, token: str) -> None:
        host, _, port = control.rpartition("//")[2].rpartition(":")
        self._address = host, int(port)
        self._token = token
        self.read = Counter[str]()

    def run(self) -> None:
        last = self._last_number()
        for _ in range(STREAMS):
            threading.Thread(target=self._follow, args=(last,), daemon=True).start()
        for path in PATHS:
            threading.Thread(target=self._list, args=(path,), daemon=True).start()
        print("ready", flush=True)
        threading.Event().wait()  # ends with the process

    def _list(self, path: str) -> None:
        while True:  # ends with the process
            with suppress(OSError), self._connect() as client:
                while True:  # ends with the connection
                    self._send(client, path)
                    head, body = self._head(client)
                    size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                    size -= len(body)
                    while size:
                        size -= len(self._receive(client, size))
                    self.read["lists"] += 1

    def _follow(self, last: int) -> None:
        """Read the whole history as a stream, and again from its start."""
        end = b"id: %d\n" % last
        while True:  # ends with the process
            with suppress(OSError), self._connect() as client:
                self._send(client, "/stream?after=0")
                _, tail = self._head(client)
                while end not in tail:
                    received = self._receive(client, RECEIVE_BYTES)
                    self.read["entries"] += received.count(b"id: ")
                    tail = tail[-len(end) :] + received
                self.read["streams"] += 1

    def _last_number(self) -> int:
        with self._connect() as client:
            self._send(client, "/history?limit=1", close=True)
            _, body = self._head(client)
            with suppress(ConnectionError):
                for _ in count():
                    body += self._receive(client, RECEIVE_BYTES)
            number: int = json.loads(body)["history"][0]["number"]
            return number

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, POLL_SECONDS_MAX)

    def _send(self, client: socket.socket, path: str, *, close: bool = False) -> None:
        lines = [f"GET /api/v1{path} HTTP/1.1", "Host: localhost"]
        lines += [f"Authorization: Bearer {self._token}", *["Connection: close"] * close]
        client.sendall("\r\n".join([*lines, "", ""]).encode())

    def _head(self, client: socket.socket) -> tuple[bytes, bytes]:
        head, blank, body = b"", b"", b""
        while not blank:
            head, blank, body = (head + self._receive(client, 4096)).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            self.read[head[:12].decode()] += 1
            raise ConnectionError(head)
        return head, body

    def _receive(self, client: socket.socket, size: int) -> bytes:
        received = client.recv(min(size, RECEIVE_BYTES))
        if not received:
            raise ConnectionError("the server closed the connection")
        self.read["bytes"] += len(received)
        return received


def attack(control: str, token: str) -> None:
    """Until it is ended; then print what was read."""
    viewer = Viewer(control, token)

    def stop(*_: object) -> None:
        print(json.dumps(viewer.read), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    viewer.run()


def main() -> int:
    result = measure()
    print(*result.lines(), sep="\n")
    return 0 if result.is_met else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        signal.alarm(PROCESS_SECONDS_MAX)
        attack(*sys.argv[1:])
    else:
        os.sched_setaffinity(0, {int(LOAD_CORE)})
        sys.exit(main())
