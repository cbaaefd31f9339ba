"""Three etcd members and three servers, each server in a network namespace of its own.

    hub     the harness and etcd, one address for each member, on a bridge
    s0..s2  a server, and the process with its clients, which talk over loopback

So the network between one server and etcd can be cut while its clients still reach it, and no
port is shared with another test. Needs root.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.chaos.connection import CONTROL_PORT, METADATA_PORT
from tests.chaos.fleet import RATE, SERVERS, fleet_file
from tests.chaos.history import IMPACTS_FILE, ImpactRun, Stage, read_impacts
from tests.etcd_cluster import EtcdCluster, Member

ROOT = Path(__file__).parents[2]
NETWORK = "10.97.0"
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
READY = re.compile(r"metadata http://\S+, control http://\S+")
READY_SECONDS_MAX = 180
RESTART_SECONDS = 0.5
"""A server that cannot start is started again after this time, as systemd does."""
REPLY_SECONDS_MAX = 120
IMPACT_SECONDS = 0.6
RETENTION_MINUTES = 1
"""So that a server that was cut off may have to load everything again."""
BUSY_SECONDS = 1.0
"""How long writes are counted, to see which member of etcd the servers use."""
WRITES = re.compile(rb'^grpc_server_started_total{grpc_method="Txn".*} (\S+)$', re.MULTILINE)
ETCD_FLAGS = ("--snapshot-count=5000",)
"""Operations come a hundred times faster than in a real fleet, and would be replayed at a start."""
IMPACT_COMMAND = f"""#!/bin/sh
# Time is the machine's, also when the server's is faked.
unset LD_PRELOAD
echo "begun $1 $2 $3 $(date +%s.%N)" >> "$4"
sleep {IMPACT_SECONDS}
echo "done $1 $2 $3 $(date +%s.%N)" >> "$4"
"""
"""What the exec platform runs: it reports what is done, whatever the servers say about it."""


def wait_until(is_true: Callable[[], bool], what: str, seconds_max: float) -> None:
    until = time.monotonic() + seconds_max
    while not is_true():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} took longer than {seconds_max:g} s")
        time.sleep(0.05)


# --- namespaces


@contextmanager
def namespaces() -> Iterator[dict[str, str]]:
    """The name of each namespace: `hub` and one for each server. Ends everything in them."""
    tag = uuid4().hex[:6]
    names = {role: f"fw{tag}{role}" for role in ("hub", *SERVERS)}
    with ExitStack() as stack:
        for name in names.values():
            run("ip", "netns", "add", name)
            stack.callback(delete_namespace, name)
            run_in(name, "ip link set lo up")
        hub = names["hub"]
        run_in(hub, "ip link add br0 type bridge")
        run_in(hub, "ip link set br0 up")
        for number, server in enumerate(SERVERS):
            run_in(hub, f"ip address add {NETWORK}.{number + 1}/24 dev br0")
            cable = f"v{number}"
            run_in(hub, f"ip link add {cable} type veth peer name eth0 netns {names[server]}")
            run_in(hub, f"ip link set {cable} master br0 up")
            run_in(names[server], f"ip address add {NETWORK}.{number + 11}/24 dev eth0")
            run_in(names[server], "ip link set eth0 up")
        yield names


def delete_namespace(name: str) -> None:
    """Only what this run started is in it."""
    for pid in run("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "delete", name)


def run_in(namespace: str, command: str) -> str:
    return run(*enter(namespace), *command.split())


def enter(namespace: str) -> tuple[str, ...]:
    """What goes before a command that runs in a namespace."""
    return ("ip", "netns", "exec", namespace)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


# --- servers


class Server:
    """One `forewarn serve`, kept running as systemd would, and the process with its clients.

    `program` is what runs: `forewarn`, or one with a planted fault.
    """

    def __init__(
        self, name: str, namespace: str, folder: Path, store: str, program: Sequence[str]
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.folder = folder
        self._store = store
        self._program = program
        self._log = folder / f"{name}.log"
        self._logged = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.clients: subprocess.Popen[str] | None = None
        self.environ: dict[str, str] = {}

    def launch(self) -> None:
        """Start the process, without waiting for it."""
        environ = {name: it for name, it in os.environ.items() if not name.startswith("FOREWARN_")}
        paths = (os.environ.get("PYTHONPATH"), str(ROOT))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        impact = shlex.join(
            [
                str(self.folder / "impact"),
                "{event_id}",
                "{vm}",
                self.name,
                str(self.folder / IMPACTS_FILE),
            ]
        )
        options = {
            "--store": self._store,
            "--fleet": str(self.folder / "fleet.yaml"),
            "--metadata": f"127.0.0.1:{METADATA_PORT}",
            "--control": f"127.0.0.1:{CONTROL_PORT}",
            "--identify": "path",
            "--rate": str(RATE),
            "--platform": "exec",
            "--exec-command": f"*={impact}",
            "--etcd-retention-minutes": str(RETENTION_MINUTES),
        }
        flags = [word for option in options.items() for word in option]
        self._logged = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*enter(self.namespace), sys.executable, *self._program, "serve", *flags],
                cwd=self.folder,
                env=environ | self.environ,
                stdout=log,
                stderr=log,
            )

    def wait_until_up(self) -> None:
        """Wait until it listens. If it ends, because the store is out of reach, start it again."""

        def is_up() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                time.sleep(RESTART_SECONDS)
                self.launch()
            with self._log.open("rb") as log:
                log.seek(self._logged)
                return READY.search(log.read().decode(errors="replace")) is not None

        wait_until(is_up, f"the start of {self.name} (see {self._log})", READY_SECONDS_MAX)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Like a power cut: its impact commands end with it. Harmless if it has ended."""
        if self.process is None:
            return
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with suppress(OSError):
            self.signal(signal.SIGSTOP)  # it starts no more
            pids = children.read_text().split()
            self.process.kill()
            for pid in map(int, pids):
                for end in (os.killpg, os.kill):  # one that has just been forked leads no group
                    with suppress(ProcessLookupError):
                        end(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.process = None

    def start_clients(self, seed: int) -> None:
        command = [sys.executable, "-m", "tests.chaos.load", self.name, str(self.folder), str(seed)]
        with (self.folder / f"{self.name}-clients.log").open("ab") as log:
            self.clients = subprocess.Popen(
                [*enter(self.namespace), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def request(self, what: str) -> str:
        """What the client process answers; see `load`."""
        assert self.clients is not None
        assert self.clients.stdin is not None
        assert self.clients.stdout is not None
        self.clients.stdin.write(f"{what}\n")
        self.clients.stdin.flush()
        answer = self.clients.stdout.readline()
        assert answer, f"the clients of {self.name} have ended; see {self.name}-clients.log"
        return answer

    def end_clients(self) -> None:
        if self.clients is not None:
            self.clients.communicate(timeout=REPLY_SECONDS_MAX)

    def is_ready(self) -> bool:
        """Whether it follows the store, by its own account."""
        return self.request("ready").strip() == "200"

    def cut(self) -> None:
        """Drop every packet between the server and etcd; loopback continues."""
        run_in(self.namespace, "nft add table inet cut")
        for hook, way in (("input", "iifname"), ("output", "oifname")):
            chain = f"{{ type filter hook {hook} priority 0 ; }}"
            run_in(self.namespace, f"nft add chain inet cut {hook} {chain}")
            run_in(self.namespace, f"nft add rule inet cut {hook} {way} eth0 drop")

    def mend(self) -> None:
        run_in(self.namespace, "nft delete table inet cut")

    def fake_clock(self, seconds: float) -> None:
        """From the next start on, its clock is this much ahead."""
        assert FAKETIME, "libfaketime is missing; on Debian: apt-get install faketime"
        self.environ = {
            "LD_PRELOAD": str(FAKETIME[0]),
            "FAKETIME": f"{seconds:+g}s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def count_writes(member: Member) -> float:
    """How many transactions servers have sent to a member of etcd since it started."""
    with urllib.request.urlopen(f"{member.health_url}/metrics", timeout=5) as response:
        return sum(map(float, WRITES.findall(response.read())))


class Cluster:
    """Everything that a fault may hit."""

    def __init__(self, folder: Path, names: dict[str, str], program: Sequence[str]) -> None:
        self.folder = folder
        hosts = [f"{NETWORK}.{number + 1}" for number in range(3)]
        self.etcd = EtcdCluster(folder / "etcd", size=len(hosts), hosts=hosts, flags=ETCD_FLAGS)
        url = self.etcd.url()
        self.servers = [Server(name, names[name], folder, url, program) for name in SERVERS]

    def start(self) -> None:
        (self.folder / "fleet.yaml").write_text(fleet_file())
        (self.folder / IMPACTS_FILE).touch()
        command = self.folder / "impact"
        command.write_text(IMPACT_COMMAND)
        command.chmod(0o755)
        self.etcd.start()
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait_until_up()

    def stop(self) -> None:
        for server in self.servers:
            if server.clients is not None:
                server.clients.kill()
                server.clients.wait()
            server.kill()
        self.etcd.stop()

    def find_leader(self) -> int:
        """The index of the member that leads, by the members that answer."""
        for index, status in self._statuses().items():
            if status["leader"] == status["header"]["member_id"]:
                return index
        raise TimeoutError("no etcd member leads")

    def let_busiest_lead(self) -> Member:
        """Make the member lead that servers write to, so that their writes are in its log at once.

        A server writes to one member as long as that answers.
        """
        before = [count_writes(member) for member in self.etcd.members]
        time.sleep(BUSY_SECONDS)
        busy = [count_writes(member) for member in self.etcd.members]
        grown = [after - count for after, count in zip(busy, before, strict=True)]
        index, leader = grown.index(max(grown)), self.find_leader()
        if index != leader:
            member_id = f"{self._statuses()[index]['header']['member_id']:x}"
            self._etcdctl(leader, "move-leader", member_id)
        return self.etcd.members[index]

    def _statuses(self) -> dict[int, Any]:
        """What each member that answers knows about the cluster, by its index."""
        urls = [member.client_url for member in self.etcd.members]
        found = json.loads(self._etcdctl(None, "endpoint", "status", "-w", "json"))
        return {urls.index(each["Endpoint"]): each["Status"] for each in found}

    def _etcdctl(self, index: int | None, *words: str) -> bytes:
        """The output of `etcdctl` with one member, or with all."""
        members = self.etcd.members if index is None else [self.etcd.members[index]]
        endpoints = ",".join(member.client_url for member in members)
        command = ["etcdctl", f"--endpoints={endpoints}", *words]
        environ = os.environ | {"ETCDCTL_API": "3"}
        done = subprocess.run(command, capture_output=True, env=environ, timeout=30, check=False)
        return done.stdout

    def running_impacts(self) -> list[ImpactRun]:
        """The impacts whose command has begun and not ended, oldest first."""
        begun: dict[tuple[str, str, str], ImpactRun] = {}
        for impact in read_impacts((self.folder / IMPACTS_FILE).read_text().splitlines()[-200:]):
            key = (impact.event, impact.vm, impact.server)
            if impact.stage is Stage.BEGUN:
                begun[key] = impact
            else:
                begun.pop(key, None)
        return list(begun.values())

    def has_recovered(self) -> bool:
        """Whether every member can commit, and every server follows them."""
        is_etcd_well = all(member.is_healthy() for member in self.etcd.members)
        return is_etcd_well and all(server.is_ready() for server in self.servers)
