"""`forewarn serve` as a process that can be killed and started again."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

READY = re.compile(r"metadata (http://\S+?), control (https?://\S+?), store ")
START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 20

FLEET = """
scopes:
  - name: web
    kind: availability-set
    vms:
      - {name: web-0, address: 127.0.0.1, update_domain: 0, host: host-a}
      - {name: web-1, address: 127.0.0.2, update_domain: 1, host: host-b}
  - name: db
    kind: vm
    vms:
      - {name: db, address: 127.0.0.3, host: host-a}
"""


def steady_port() -> int:
    """A free port for a service that is restarted on it.

    It is below the ephemeral range, so no other process gets it while the service is down.
    """
    ephemeral_min = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, ephemeral_min), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port found in 100 tries")


class Service:
    """One `forewarn serve` in a folder, whose files survive a kill."""

    def __init__(
        self, folder: Path, *flags: str, fleet: str = FLEET, descriptors_max: int = 0
    ) -> None:
        (folder / "fleet.yaml").write_text(fleet)
        self.folder = folder
        self.flags = flags
        self.descriptors_max = descriptors_max
        self.process: subprocess.Popen[str] | None = None
        self.metadata = self.control = self.token = ""

    def start(self) -> "Service":
        ports = ("--metadata", "127.0.0.1:0", "--control", "127.0.0.1:0")
        store = (
            () if "--store" in self.flags else ("--store", f"sqlite:///{self.folder}/forewarn.db")
        )
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("FOREWARN_")
        }
        limited = ("prlimit", f"--nofile={self.descriptors_max}") if self.descriptors_max else ()
        with (self.folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(
                [
                    *limited,
                    sys.executable,
                    "-m",
                    "forewarn",
                    "serve",
                    "--fleet",
                    "fleet.yaml",
                    *ports,
                    *store,
                    *self.flags,
                ],
                cwd=self.folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = READY.search(line)
        assert match, f"not ready: {line!r} {(self.folder / 'log.txt').read_text()}"
        self.metadata, self.control = match.groups()
        return self

    def kill(self) -> None:
        """Like a power cut."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        code = process.wait(STOP_SECONDS_MAX)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def poll(self, *, vm: str = "web-0", version: str = "2020-07-01") -> dict[str, Any]:
        """The document that the VM sees, by `/as/{vm}`."""
        url = f"{self.metadata}/as/{vm}/metadata/scheduledevents?api-version={version}"
        document: dict[str, Any] = json.loads(call("GET", url, headers={"Metadata": "true"})[1])
        return document

    def approve(self, *event_ids: str, vm: str = "web-0") -> int:
        url = f"{self.metadata}/as/{vm}/metadata/scheduledevents?api-version=2020-07-01"
        body = json.dumps(
            {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        ).encode()
        return call("POST", url, body, headers={"Metadata": "true"})[0]

    def ask(
        self, method: str, path: str, body: object = None, *, token: str = ""
    ) -> tuple[int, Any]:
        """A request to the control API."""
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if token or self.token:
            headers["Authorization"] = f"Bearer {token or self.token}"
        status, response = call(method, f"{self.control}/api/v1{path}", sent, headers=headers)
        return status, json.loads(response) if response else None


def call(
    method: str, url: str, body: bytes | None = None, *, headers: dict[str, str]
) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextmanager
def running(folder: Path, *flags: str, fleet: str = FLEET) -> Iterator[Service]:
    service = Service(folder, "--identify", "path", *flags, fleet=fleet).start()
    try:
        yield service
    finally:
        service.kill()
