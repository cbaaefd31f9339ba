"""The load: wrk on a core of its own, against our server and against nginx on another.

Every answer must be a 200.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SERVER_CORE, LOAD_CORE = "0", "1"
CONNECTIONS = 64
PATHS = 1000
QUERY = "api-version=2020-07-01"
BODY = '{"DocumentIncarnation":1,"Events":[]}'
TICKS = os.sysconf("SC_CLK_TCK")

SCRIPT = """
wrk.headers["Metadata"] = "true"
%(lines)s
done = function(summary, latency, requests)
  local bad = summary.errors
  local failed = bad.connect + bad.read + bad.write + bad.status + bad.timeout
  io.write(string.format(
    "RESULT %%d %%d %%d %%d\\n",
    summary.requests, summary.duration, latency:percentile(99), failed))
end
"""
CLOSING = 'wrk.headers["Connection"] = "close"'
MANY = f"""
local number, count, requests = 0, {PATHS}, {{}}
init = function(args)
  for i = 0, count - 1 do
    requests[i] = wrk.format("GET", "/as/vm-" .. i .. "/metadata/scheduledevents?{QUERY}")
  end
end
request = function()
  number = (number + 1) % count
  return requests[number]
end
"""

NGINX = """
worker_processes 1; daemon off; pid %(folder)s/pid; error_log %(folder)s/error.log;
events { worker_connections 20000; }
http {
  access_log off; keepalive_requests 1000000000; sendfile on; tcp_nodelay on;
  open_file_cache max=100;
  default_type "application/json; charset=utf-8";
  client_body_temp_path %(folder)s/1; proxy_temp_path %(folder)s/2; fastcgi_temp_path %(folder)s/3;
  uwsgi_temp_path %(folder)s/4; scgi_temp_path %(folder)s/5;
  server {
    listen 127.0.0.1:%(port)d backlog=4096;
    location /file { alias %(folder)s/page; }
    location / { return 200 '%(body)s'; }
  }
}
"""


class Measured(NamedTuple):
    """`cpu_microseconds`: what one poll took of the server's core."""

    polls_per_second: float
    p99_milliseconds: float
    cpu_microseconds: float


class Target(NamedTuple):
    """What is polled: the process that is measured, and where."""

    pid: int
    port: int


class Load(NamedTuple):
    """What wrk counted."""

    polls: int
    seconds: float
    p99_milliseconds: float


def measure(target: Target, path: str, seconds: int, lines: str = "") -> Measured:
    before = cpu_seconds(target.pid)
    url = f"http://127.0.0.1:{target.port}{path}"
    load = run_wrk(url, seconds, lines)
    spent = cpu_seconds(target.pid) - before
    return Measured(load.polls / load.seconds, load.p99_milliseconds, spent / load.polls * 1e6)


def run_wrk(
    url: str,
    seconds: int,
    lines: str = "",
    *,
    cores: str = LOAD_CORE,
    threads: int = 1,
) -> Load:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT % {"lines": lines})
        script.flush()
        amount = [f"-t{threads}", f"-c{CONNECTIONS}", f"-d{seconds}s"]
        output = subprocess.run(
            ["taskset", "-c", cores, "wrk", *amount, "-s", script.name, url],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    polls, microseconds, p99, failed = map(int, output[output.index("RESULT") :].split()[1:5])
    if failed or not polls:
        raise RuntimeError(f"{url}: {failed} of {polls} polls failed")
    return Load(polls, microseconds / 1e6, p99 / 1000)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Server:
    """Our server, and the line it printed when it was ready."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.ready = self._hear()
        self.target = Target(process.pid, self.ready["port"])

    def memory(self) -> dict[str, int]:
        self._say("rss")
        return self._hear()

    def change(self) -> None:
        self._say("change")

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def _hear(self) -> dict[str, int]:
        assert self._process.stdout is not None
        output: dict[str, int] = json.loads(self._process.stdout.readline())
        return output


@contextmanager
def ours(**options: int) -> Iterator[Server]:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = ["taskset", "-c", SERVER_CORE, sys.executable, "-m", "tests.bench.server", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Server(process)
    finally:
        process.communicate(timeout=30)


@contextmanager
def nginx() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        Path(folder, "page").write_text(BODY)
        Path(folder).chmod(0o755)
        config = Path(folder, "nginx.conf")
        config.write_text(NGINX % {"folder": folder, "port": port, "body": BODY})
        command = [
            "taskset",
            "-c",
            SERVER_CORE,
            "nginx",
            "-c",
            str(config),
            "-e",
            f"{folder}/error.log",
        ]
        process = subprocess.Popen(command)
        try:
            yield Target(worker_of(process.pid), port)
        finally:
            process.terminate()
            process.wait(30)


def worker_of(pid: int) -> int:
    """The one worker of an nginx; it has children as soon as it listens."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for _ in range(500):
        if found := children.read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise RuntimeError("nginx did not start")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def raise_limits() -> None:
    """As many open files as we may have, here and in all that is started from here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_apart(module: str) -> dict[str, Any]:
    """What a module says that measures by itself, in a process of its own."""
    command = ["taskset", "-c", SERVER_CORE, sys.executable, "-m", module]
    output: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return output
