"""Real etcd members as processes, for tests, on loopback or on addresses of a test's own."""

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.e2e.service import steady_port

START_SECONDS_MAX = 30
STOP_SECONDS_MAX = 10


class Member:
    """One etcd process. Its data survives a kill."""

    def __init__(self, name: str, folder: Path, host: str, scheme: str) -> None:
        self.name = name
        self.folder = folder
        self.client = f"{host}:{steady_port()}"
        self.peer_url = f"http://{host}:{steady_port()}"
        self.health_url = f"http://127.0.0.1:{steady_port()}"
        self.client_url = f"{scheme}://{self.client}"
        self.process: subprocess.Popen[bytes] | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. After SIGSTOP, wait until all threads have stopped: on a busy machine they
        go on for milliseconds, which is enough for a commit.
        """
        assert self.process is not None
        self.process.send_signal(number)
        if number is not signal.SIGSTOP:
            return
        deadline = time.monotonic() + STOP_SECONDS_MAX
        while os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is None:
            assert time.monotonic() < deadline, f"etcd member {self.name} does not stop"
            time.sleep(0.001)

    def kill(self) -> None:
        """End it without notice, also if it is stopped. Harmless if it has ended."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def is_healthy(self) -> bool:
        """Whether it has a leader and can commit."""
        with (
            suppress(OSError),
            urllib.request.urlopen(f"{self.health_url}/health", timeout=2) as it,
        ):
            return b'"true"' in it.read()
        return False


class EtcdCluster:
    """Some members that form one cluster.

    `flags` are added to the command of each member; `wraps` has for each what goes before it (such
    as `ip netns exec NAME`).
    """

    def __init__(
        self,
        folder: Path,
        *,
        size: int = 1,
        hosts: Sequence[str] = (),
        flags: Sequence[str] = (),
        wraps: Sequence[Sequence[str]] = (),
        scheme: str = "http",
    ) -> None:
        program = shutil.which("etcd")
        assert program, "etcd is missing; on Debian: apt-get install etcd-server"
        self._program = program
        self._flags = flags
        self._wraps = wraps or [()] * size
        self.members = [
            Member(f"m{number}", folder / f"m{number}", host, scheme)
            for number, host in enumerate(hosts or ["127.0.0.1"] * size)
        ]

    def url(self, prefix: str = "forewarn") -> str:
        """The cluster as `--store` takes it."""
        return f"etcd://{','.join(member.client for member in self.members)}/{prefix}"

    def start(self) -> None:
        for member in self.members:
            self.launch(member)
        self.wait_until_healthy()

    def launch(self, member: Member) -> None:
        """Start one member, new or with the data it had, without waiting for it."""
        member.folder.mkdir(parents=True, exist_ok=True)
        cluster = ",".join(f"{each.name}={each.peer_url}" for each in self.members)
        command = [
            *self._wraps[self.members.index(member)],
            self._program,
            f"--name={member.name}",
            f"--data-dir={member.folder / 'data'}",
            f"--listen-client-urls={member.client_url}",
            f"--advertise-client-urls={member.client_url}",
            f"--listen-metrics-urls={member.health_url}",
            f"--listen-peer-urls={member.peer_url}",
            f"--initial-advertise-peer-urls={member.peer_url}",
            f"--initial-cluster={cluster}",
            "--logger=zap",
            "--log-level=warn",
            *self._flags,
        ]
        with (member.folder / "log").open("ab") as log:
            member.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_until_healthy(self) -> None:
        """Wait until every member that runs can commit."""
        until = time.monotonic() + START_SECONDS_MAX
        for member in self.members:
            while member.process is not None and not member.is_healthy():
                log = (member.folder / "log").read_text()[-2000:]
                assert member.process.poll() is None, log
                assert time.monotonic() < until, log
                time.sleep(0.05)

    def stop(self) -> None:
        for member in self.members:
            member.kill()


@cache
def shared_etcd() -> EtcdCluster:
    """One member for all tests of this process; each test uses a prefix of its own.

    Its data is in memory: a test of the store's contract need not wait for the disk.
    """
    in_memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="etcd-", dir=in_memory if in_memory.is_dir() else None)
    cluster = EtcdCluster(Path(folder))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(cluster.stop)
    cluster.start()
    return cluster
