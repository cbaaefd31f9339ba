"""A small cloud: a server, two hosts with libvirt and a host daemon, three guests with agents.

web-0   on host-a   192.168.122.10   scope web, update domain 0
web-1   on host-b   192.168.122.10   scope web, update domain 1
db-0    on host-a   192.168.122.20   scope db, with QEMU's guest agent

libvirt's network is the same on both hosts, behind NAT. db-0 is also plugged into `br0`, a LAN that
both hosts are on.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.service import call
from tests.vm.guest import BOOT_SECONDS_MAX, Guest, start_network
from tests.vm.guest_image import GuestImage
from tests.vm.network import Namespace
from tests.vm.real_libvirt import SERVERS_ADDRESS, RealHost, real_hosts, wait_for
from tests.vm.traffic import Traffic

FOREWARN = (sys.executable, "-m", "forewarn")
STOP_SECONDS_MAX = 30
EVENT_SECONDS_MAX = 120
WATCH_SECONDS_MAX = 0.5
RATE = 5
"""Of 30 seconds before an eviction, 6 are left: the guest's agent needs one or two."""
BACK_SECONDS_MAX = BOOT_SECONDS_MAX * RATE
OWN_GUEST = {"host-a": "web-0", "host-b": "web-1"}
"""The guest that stays on a host; its address is the same on both."""
METADATA, CONTROL = f"http://{SERVERS_ADDRESS}:8080", f"http://{SERVERS_ADDRESS}:8081"


class Process:
    """A program that can be killed and started again. Its output goes to a file."""

    def __init__(self, command: Callable[[], Sequence[str]], log: Path) -> None:
        self._command, self.log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._process is None
        clean = {name: value for name, value in os.environ.items() if "FOREWARN_" not in name}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Like a power cut. `nsenter` waits for the program; both are in one process group."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_SECONDS_MAX)
            self._process = None


class Cloud:
    """`traffic` has, by host, what db-0 sent to the metadata address and got: it is the one that
    moves.
    """

    def __init__(
        self, folder: Path, hosts: dict[str, RealHost], servers: Namespace, image: GuestImage
    ) -> None:
        self._folder, self.hosts, self._servers = folder, hosts, servers
        store = f"sqlite:///{folder}/forewarn.db"
        self._token = self._forewarn("token", "create", "root", "--role", "admin", "--store", store)
        (folder / "fleet.yaml").write_text("scopes: []\n")
        options = f"--store {store} --fleet {folder}/fleet.yaml --rate {RATE}"
        options += f" --metadata {METADATA[7:]} --control {CONTROL[7:]}"
        options += f" --back-seconds-max {BACK_SECONDS_MAX}"
        serve = ("ip", "netns", "exec", servers.name, *FOREWARN, "serve", *options.split())
        self.server = Process(lambda: serve, folder / "server.log")
        self.daemons = {name: self._daemon(host, store) for name, host in hosts.items()}
        self.traffic: dict[str, Traffic] = {}
        web = "scope='web' update-domain='{}'"
        self.guests = {
            guest.name: guest
            for guest in (
                Guest(image, folder, "web-0", address="192.168.122.10", metadata=web.format(0)),
                Guest(image, folder, "web-1", address="192.168.122.10", metadata=web.format(1)),
                Guest(
                    image,
                    folder,
                    "db-0",
                    address="192.168.122.20",
                    metadata="scope='db' kind='vm'",
                    has_guest_agent=True,
                    is_on_lan=True,
                ),
            )
        }

    def _forewarn(self, *arguments: str) -> str:
        done = subprocess.run(
            [*FOREWARN, *arguments], check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    def _daemon(self, host: RealHost, store: str) -> Process:
        name = host.name
        token = self._forewarn(
            "token", "create", name, "--role", "host", "--host", name, "--store", store
        )
        (self._folder / f"{name}.token").write_text(token)
        (self._folder / f"{name}.toml").write_text(f"""
host = "{name}"
server = ["{CONTROL}"]
metadata_server = ["{METADATA}"]
token_file = "{self._folder}/{name}.token"
bridge = ["virbr0", "br0"]
libvirt_uri = ["qemu:///system", "qemu+tcp://{{host}}/system"]
libvirt_grace_seconds = 60
inventory_seconds = 2
""")
        options = ("hostd", "--config", f"{self._folder}/{name}.toml")
        return Process(lambda: host.inside(*FOREWARN, *options), self._folder / f"{name}.log")

    def start(self, stack: ExitStack) -> None:
        """Everything, until each guest has polled."""
        stack.callback(self.server.kill)
        self.server.start()
        places = {"web-0": "host-a", "db-0": "host-a", "web-1": "host-b"}
        self._servers.run("ip link add guests type bridge")
        self._servers.run("ip link set guests up")
        for name, host in self.hosts.items():
            add_lan(host)
            traffic = Traffic(host.namespace, self.guests["db-0"].mac)
            self.traffic[name] = stack.enter_context(traffic)
            start_network(host, [self.guests["db-0"], self.guests[OWN_GUEST[name]]])
            stack.callback(self.daemons[name].kill)
            self.daemons[name].start()
        for name, host_name in places.items():
            stack.enter_context(self.guests[name].with_disk())
            self.hosts[host_name].run_domain(self.guests[name].xml)
        self.wait_for(
            lambda: [scope["is_enabled"] for scope in self.ask("/scopes")["scopes"]] == [True, True]
        )
        for name, host_name in places.items():
            guest, host = self.guests[name], self.hosts[host_name]
            wait_for(functools.partial(guest.polls, host), BOOT_SECONDS_MAX, self.report)

    def ask(self, path: str, body: object = None, *, method: str = "") -> Any:
        """A request to the control API: GET, or POST if there is a body."""
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        method = method or ("GET" if body is None else "POST")
        with self._servers.entered():
            _, response = call(method, f"{CONTROL}/api/v1{path}", sent, headers=headers)
        return json.loads(response)

    def schedule(self, path: str, **body: object) -> list[Any]:
        """Ask for an operation and return its events."""
        response = self.ask(path, body)
        return response["events"] if "events" in response else [response["event"]]

    def changes(self, event: str) -> list[str]:
        """What the history says about an event, oldest first."""
        entries = self.ask(f"/history?event={event}&limit=1000")["history"]
        return [entry["what"] for entry in reversed(entries)]

    def wait_until_over(self, event: str) -> None:
        """Wait until the event has left the document, with everything done."""
        self.wait_for(
            lambda: {"completed", "failed", "canceled"} & set(self.changes(event)),
            EVENT_SECONDS_MAX,
        )
        assert self.changes(event)[-1] == "completed", self.ask(f"/history?event={event}")

    def wait_for(self, is_so: Any, seconds_max: float = BOOT_SECONDS_MAX) -> None:
        def is_so_now() -> bool:
            try:
                return bool(is_so())
            except OSError:  # the server is not up
                return False

        wait_for(is_so_now, seconds_max, self.report)

    def report(self) -> str:
        """What helps when a story does not end well."""
        logs = [self.server.log, *(daemon.log for daemon in self.daemons.values())]
        texts = [f"--- {log.name}\n{log.read_text()[-5000:]}" for log in logs if log.exists()]
        texts += [
            f"--- console of {guest.name}\n{guest.console[-3000:]}"
            for guest in self.guests.values()
        ]
        return "\n".join(texts)


@contextmanager
def cloud_of_two_hosts(folder: Path, image: GuestImage) -> Iterator[Cloud]:
    with ExitStack() as stack:
        hosts = stack.enter_context(real_hosts("host-a", "host-b"))
        servers = hosts["host-a"].servers
        cloud = Cloud(folder, hosts, servers, image)
        cloud.start(stack)
        yield cloud


def add_lan(host: RealHost) -> None:
    """A bridge with a port to the LAN of the guests. Its MAC is its own on each host."""
    host.namespace.run("ip link add br0 type bridge")
    host.namespace.run(
        f"ip link add uplink type veth peer name g-{host.name} netns {host.servers.name}"
    )
    host.servers.run(f"ip link set g-{host.name} master guests up")
    host.namespace.run("ip link set uplink master br0 up")
    host.namespace.run("ip link set br0 up")


class Answer(NamedTuple):
    """A request that was answered, and how often the guest had booted then."""

    began: float
    ended: float
    boots: int


class Watch:
    """Calls a guest's web server again and again, and records when it answered.

    A call is short: the guest is seen again soon after it is back, and not when TCP tries again.
    """

    def __init__(self, guest: Guest, host: RealHost) -> None:
        self._guest, self._host = guest, host
        self._answers: list[Answer] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._has_ended.wait(0.1):
            began = time.monotonic()
            if self._guest.answers(self._host, WATCH_SECONDS_MAX):
                self._answers.append(Answer(began, time.monotonic(), self._guest.boots))

    def __enter__(self) -> "Watch":
        """Watch from its first answer on."""
        self._thread.start()
        wait_for(lambda: bool(self._answers), BOOT_SECONDS_MAX)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def wait_for_boot(self) -> None:
        """Wait until it has answered after a boot."""
        wait_for(lambda: self.outages, BOOT_SECONDS_MAX)

    @property
    def outages(self) -> list[tuple[float, float]]:
        """From the last answer before each boot to the first one after it."""
        return [
            (before.ended, after.began)
            for before, after in pairwise(list(self._answers))
            if after.boots > before.boots
        ]
