"""A host with bridges in a network namespace, guests in others, and the relay between them.

Needs root. Guests are plugged in as virtual machines are: one end of the cable is a port of the
bridge.
"""

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

from tests.e2e.metadata_world import Client, RawResponse
from tests.e2e.service import READY
from tests.e2e.waiting import eventually

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
COMMAND_SECONDS_MAX = 30
RESPONSE_SECONDS_MAX = 20.0
BRIDGE_MAC = "02:00:00:00:00:01"
ALIAS, ALIAS_V6 = "169.254.169.254", "fe80::a9fe:a9fe"
TARGET = "/metadata/scheduledevents?api-version=2020-07-01"
POLL = f"GET {TARGET} HTTP/1.1\r\nHost: {ALIAS}\r\nMetadata: true\r\n\r\n".encode()


class Guest(NamedTuple):
    """A virtual machine: its namespace, and the port where its `eth0` is plugged in."""

    namespace: str
    bridge: str
    port: str


class GuestClient(Client):
    """A connection of a guest to the metadata address, or to another one."""

    def __init__(
        self,
        namespace: str,
        host: str = ALIAS,
        source: str = "",
        port: int = 80,
        seconds_max: float = RESPONSE_SECONDS_MAX,
    ) -> None:
        connect = partial(_connect, host, port, source, seconds_max)
        self._socket = in_namespace(namespace, connect)
        self._buffer = b""

    def reset(self) -> None:
        """Close the connection with a reset, as a client does that crashes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def wait_at_most(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def ask(self, request: bytes = POLL) -> RawResponse:
        self.send(request)
        return self.response()


def _connect(host: str, port: int, source: str, seconds_max: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connected = socket.socket(family, socket.SOCK_STREAM)
    connected.settimeout(seconds_max)
    if source:
        connected.bind((source, 0))
    scope = (0, socket.if_nametoindex("eth0")) if family is socket.AF_INET6 else ()
    try:
        connected.connect((host, port, *scope))
    except OSError:
        connected.close()
        raise
    return connected


def in_namespace(namespace: str, act: Callable[[], T]) -> T:
    """Do it in a thread of that namespace; sockets that are made there stay there."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
            results.append(act())
        except BaseException as error:
            errors.append(error)
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class BridgeWorld:
    """`host` is the namespace of the host; `ports` is what the relay knows of the guests."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.folder = folder
        self.host = self.add_namespace()
        self.ports: dict[str, str] = {}
        self.admin = ""
        self.servers: list[subprocess.Popen[str]] = []
        self._relay: subprocess.Popen[str] | None = None

    def add_namespace(self) -> str:
        name = f"fw-relay-{uuid4().hex[:8]}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        self._stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        self.run(name, "ip link set lo up")
        return name

    def run(self, namespace: str, command: str) -> str:
        arguments = ["ip", "netns", "exec", namespace, *command.split()]
        done = subprocess.run(
            arguments, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def add_bridge(self, name: str, address: str = "", mac: str = BRIDGE_MAC) -> None:
        """With a MAC of its own, as libvirt's have. Else it takes the lowest one of its ports, and
        a guest that knows it is not heard any more when another is plugged in.
        """
        self.run(self.host, f"ip link add {name} address {mac} type bridge")
        if address:
            self.run(self.host, f"ip address add {address} dev {name}")
        self.run(self.host, f"ip link set {name} up")

    def add_guest(self, bridge: str, address: str, vm: str | None = None, mac: str = "") -> Guest:
        """With `vm` the relay knows its port as the one of this VM; with "", as one without."""
        guest = Guest(self.add_namespace(), bridge, f"v{uuid4().hex[:8]}")
        self.plug(guest, vm=vm, mac=mac)
        self.run(guest.namespace, f"ip address add {address} dev eth0")
        self.run(guest.namespace, f"ip route add {ALIAS} dev eth0")
        if not mac and vm is not None:
            self.settle(guest)
        return guest

    def settle(self, guest: Guest) -> None:
        """Wait until the guest's MAC has been at its port for long enough to be served."""
        if self._relay is not None:
            eventually(lambda: self.poll(guest).status, lambda status: status != 503)

    def plug(self, guest: Guest, vm: str | None = None, mac: str = "") -> None:
        mac = f"address {mac} " if mac else ""
        cable = f"ip link add {guest.port} type veth peer name eth0 {mac}netns {guest.namespace}"
        self.run(self.host, cable)
        self.run(self.host, f"ip link set {guest.port} master {guest.bridge} up")
        self.run(guest.namespace, "ip link set eth0 up")
        if vm is not None:
            self.tell_ports({guest.port: vm})

    def unplug(self, guest: Guest, to: "BridgeWorld") -> None:
        """Let the guest move to another host, as a live migration does: it notices nothing."""
        self.run(self.host, f"ip link set {guest.port} netns {to.host}")
        to.run(to.host, f"ip link set {guest.port} master {guest.bridge} up")

    def tell_ports(self, more: dict[str, str]) -> None:
        self.ports.update(more)
        if self._relay is not None:
            assert self._relay.stdin is not None
            assert self._relay.stdout is not None
            print(json.dumps(self.ports), file=self._relay.stdin, flush=True)
            assert self._relay.stdout.readline() == "changed\n"

    def popen(
        self, namespace: str, *arguments: str, log: str = "log.txt"
    ) -> "subprocess.Popen[str]":
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("FOREWARN_")
        }
        environ["FOREWARN_TOKEN"] = self.admin
        with (self.folder / log).open("a") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environ,
                cwd=Path(__file__).parents[2],
            )
        self._stack.callback(self.end, process)
        return process

    def end(self, process: "subprocess.Popen[str]") -> None:
        """The end of its input ends a relay; a server is killed."""
        if process.poll() is None and process is not self._relay:
            process.kill()
        process.communicate(timeout=COMMAND_SECONDS_MAX)

    def start_relay(self, *servers: str, token: str, bridges: tuple[str, ...] = ("br0",)) -> str:
        """Its first line: `ready`, or why it cannot start."""
        settings = {"bridges": bridges, "servers": servers, "token": token, "ports": self.ports}
        process = self._relay = self.popen(self.host, "tests.e2e.relay_process", log="relay.txt")
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(settings), file=process.stdin, flush=True)
        return process.stdout.readline()

    @property
    def relay_pid(self) -> int:
        assert self._relay is not None
        return self._relay.pid

    @property
    def relay_descriptors(self) -> int:
        """How many files and sockets the relay has open."""
        return len(os.listdir(f"/proc/{self.relay_pid}/fd"))

    def start_server(self, number: int, *flags: str) -> "subprocess.Popen[str]":
        """A server in the host's namespace; those of one world share a store."""
        process = self.popen(
            self.host,
            "forewarn",
            "serve",
            "--store",
            f"sqlite:///{self.folder}/forewarn.db",
            "--metadata",
            f"0.0.0.0:808{number}",
            "--control",
            f"127.0.0.1:908{number}",
            *flags,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert READY.search(line), line + (self.folder / "log.txt").read_text()
        return process

    def create_host_token(self, host: str) -> str:
        """The text of a token for a daemon of this host."""
        if not self.admin:
            created = self.forewarn("token", "create", "admin", "--role", "admin", "--json")
            self.admin = json.loads(created)["text"]
        flags = ("--role", "host", "--host", host, "--json")
        text: str = json.loads(self.forewarn("token", "create", host, *flags))["text"]
        return text

    def forewarn(self, *arguments: str) -> str:
        """A command of an operator on the host."""
        command = ("forewarn", "--control-url", "http://127.0.0.1:9080", *arguments)
        process = self.popen(self.host, *command)
        output, _ = process.communicate(timeout=COMMAND_SECONDS_MAX)
        assert process.returncode == 0, (self.folder / "log.txt").read_text()
        return output

    def connect(
        self, guest: Guest, host: str = ALIAS, source: str = "", port: int = 80
    ) -> GuestClient:
        """Once the port forwards: a bridge takes a moment after it was plugged in."""
        clients: list[GuestClient] = []

        def is_connected() -> bool:
            with suppress(OSError):
                clients.append(GuestClient(guest.namespace, host, source, port))
            return bool(clients)

        eventually(is_connected)
        return clients[0]

    def poll(self, guest: Guest, host: str = ALIAS) -> RawResponse:
        with self.connect(guest, host) as client:
            return client.ask()
