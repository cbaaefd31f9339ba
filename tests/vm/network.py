"""Network namespaces: made and removed by a test, entered by a thread of it."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x4000_0000
RUN_SECONDS_MAX = 30
libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Namespace:
    name: str

    @classmethod
    @contextmanager
    def made(cls, name: str) -> Iterator["Namespace"]:
        """A new one, gone afterwards. Our process id in its name keeps runs apart."""
        namespace = cls(f"fw-vm-{os.getpid()}-{name}")
        subprocess.run(["ip", "netns", "add", namespace.name], check=True)
        try:
            namespace.run("ip link set lo up")
            yield namespace
        finally:
            subprocess.run(["ip", "netns", "delete", namespace.name], check=True)

    def run(self, command: str) -> str:
        arguments = ["ip", "netns", "exec", self.name, *command.split()]
        done = subprocess.run(
            arguments, check=False, capture_output=True, text=True, timeout=RUN_SECONDS_MAX
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def connect(self, other: "Namespace", bridge: str, address: str) -> None:
        """A cable from `lan` here to a bridge there."""
        cable = f"to-{self.name.rsplit('-', 2)[-2]}-{self.name.rsplit('-', 1)[-1]}"[:15]
        self.run(f"ip link add lan type veth peer name {cable} netns {other.name}")
        other.run(f"ip link set {cable} master {bridge} up")
        self.run(f"ip address add {address} dev lan")
        self.run("ip link set lan up")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile belong to the namespace, also afterwards."""
        with (
            Path("/proc/thread-self/ns/net").open() as outside,
            Path(f"/run/netns/{self.name}").open() as inside,
        ):
            enter(inside.fileno())
            try:
                yield
            finally:
                enter(outside.fileno())


def enter(namespace: int) -> None:
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
