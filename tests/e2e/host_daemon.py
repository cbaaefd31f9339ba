"""`forewarn hostd` as a process, with servers for it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.builders import guid
from tests.e2e.cli_service import environment, forewarn
from tests.e2e.service import Service, steady_port
from tests.e2e.waiting import eventually

STOP_SECONDS_MAX = 20


def vm(name: str, number: int, **more: Any) -> dict[str, Any]:
    shared = {"scope": "web", "kind": "availability-set", "update_domain": number}
    return {"name": name, "id": guid(number).lower(), **shared, **more}


class HostDaemon:
    """The daemon of a host. `vms` are what its inventory command prints."""

    def __init__(
        self, folder: Path, servers: Sequence[str], *flags: str, host: str = "host-a"
    ) -> None:
        self.folder = folder
        self.host = host
        self.command = [
            *(sys.executable, "-m", "forewarn", "hostd", "--config", "/dev/null"),
            *("--host", host, "--server", ",".join(servers)),
            *("--token-file", "token", "--inventory-seconds", "0.2", *flags),
        ]
        self.process: subprocess.Popen[str] | None = None

    def list_vms(self, *vms: dict[str, Any]) -> None:
        (self.folder / "new.json").write_text(json.dumps(vms))
        (self.folder / "new.json").rename(self.folder / "vms.json")

    def start(self) -> "HostDaemon":
        """Without waiting for a server."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(f"forewarn hostd is ready: host {self.host}"), self.log.read_text()
        return self

    @property
    def log(self) -> Path:
        return self.folder / "hostd.log"

    def kill(self) -> None:
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


class HostWorld:
    """Servers on one store, with an admin's token, and the token of host-a in the file `token`."""

    def __init__(self, folder: Path, servers: int, *flags: str) -> None:
        self.folder = folder
        store = f"sqlite:///{folder}/forewarn.db"
        admin = self._create_token(store, "boss", "--role", "admin")
        (folder / "token").write_text(
            self._create_token(store, "host-a", "--role", "host", "--host", "host-a")
        )
        self.servers = []
        for number in range(servers):
            home = folder / f"server-{number}"
            home.mkdir()
            address = f"127.0.0.1:{steady_port()}"  # it is the same after a restart
            server = Service(
                home,
                *("--identify", "path", "--store", store, "--control", address, *flags),
                fleet="scopes: []\n",
            )
            server.token = admin
            self.servers.append(server)

    def _create_token(self, store: str, name: str, *flags: str) -> str:
        made = forewarn("token", "create", name, *flags, "--store", store)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    @property
    def server(self) -> Service:
        """One that runs."""
        return next(server for server in self.servers if server.process is not None)

    def vms(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.server.ask("GET", "/vms")[1]["vms"]}

    def wait_for_vms(self, *names: str) -> None:
        eventually(lambda: sorted(self.vms()), lambda found: found == sorted(names))

    def changes(self) -> list[str]:
        entries = self.server.ask("GET", "/history?limit=1000")[1]["history"]
        return [entry["what"] for entry in entries]

    def restart(self, name: str = "web-0") -> str:
        """Restart a VM that polls, approve the event, and return its id."""
        self.server.poll(vm=name)
        status, answer = self.server.ask("POST", f"/vms/{name}/restart")
        assert status == 202, answer
        event_id: str = answer["event"]["id"]
        assert self.server.approve(event_id, vm=name) == 200
        return event_id

    def wait_until_completed(self, name: str = "web-0") -> None:
        """The guest is back when it polls. A second server may learn of its VM a little later."""
        eventually(lambda: self.server.poll(vm=name), lambda document: document.get("Events") == [])


@contextmanager
def hosting(folder: Path, servers: int = 1, *flags: str) -> Iterator[HostWorld]:
    world = HostWorld(folder, servers, *flags)
    with ExitStack() as stack:
        for server in world.servers:
            stack.callback(server.kill)
            server.start()
        yield world


@contextmanager
def daemon_of(
    world: HostWorld, *flags: str, folder: Path | None = None, host: str = "host-a"
) -> Iterator[HostDaemon]:
    """A running daemon whose VMs come from a command."""
    urls = [server.control for server in world.servers]
    command = ("--inventory-command", "cat vms.json")
    made = HostDaemon(folder or world.folder, urls, *command, *flags, host=host)
    made.list_vms(vm("web-0", 1), vm("web-1", 2))
    try:
        yield made.start()
    finally:
        made.kill()


def memory_of(process: "subprocess.Popen[str]") -> float:
    """Its resident memory in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def cpu_seconds_of(process: "subprocess.Popen[str]") -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
