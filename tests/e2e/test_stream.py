"""The stream of a real service, and the commands that follow it."""

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from tests.e2e.cli_service import FOREWARN, environment, interruptible, soon
from tests.e2e.service import Service, call, running, steady_port

SECONDS_MAX = 20
SCOPES, VMS_PER_SCOPE = 40, 600


@contextmanager
def stream(service: Service, query: str = "") -> Iterator[HTTPResponse]:
    host, _, port = service.control.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port), timeout=SECONDS_MAX)
    connection.request("GET", f"/api/v1/stream{query}")
    response = connection.getresponse()
    assert response.status == 200, response.read()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def entries(response: HTTPResponse, count: int) -> list[dict[str, Any]]:
    """The next so many changes."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        line = response.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    return found


def began(response: HTTPResponse) -> None:
    while response.readline() != b"\n":
        pass


@contextmanager
def command(service: Service, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A command that goes on until it is ended."""
    with (
        interruptible(),
        subprocess.Popen(
            [FOREWARN, *arguments],
            env=environment(FOREWARN_CONTROL=service.control, PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_stream_has_the_changes_of_every_server(tmp_path: Path) -> None:
    with running(tmp_path, "--simulate-duration", "Reboot=10ms") as one:
        two = Service(tmp_path, *one.flags).start()
        try:
            with stream(one) as response:
                began(response)
                two.ask("POST", "/vms/web-0/restart")
                sent = entries(response, 4)

            assert [entry["what"] for entry in sent] == [
                "executed-silently",
                "claimed",
                "impacted",
                "completed",
            ]
            assert sent[0]["resources"] == ["web-0"]
            with stream(two, f"?after={sent[0]['number']}") as response:
                assert entries(response, 3) == sent[1:]
        finally:
            two.kill()


def test_stopping_server_ends_its_streams(tmp_path: Path) -> None:
    """A deploy must not wait for consoles."""
    with running(tmp_path) as service, stream(service) as response:
        began(response)
        assert service.stop() == 0

        assert response.read() == b"", (
            "ended as a stream ends, not cut off when the time for the stop was up"
        )
        assert "Traceback" not in (tmp_path / "log.txt").read_text()


def test_stalled_stream_client_is_disconnected_alone(tmp_path: Path) -> None:
    """What it does not take is not kept for it: at most one piece, and what the system keeps of a
    connection (megabytes).
    """
    scopes = "".join(
        f"  - name: scope-{scope}\n    kind: scale-set\n    vms:\n"
        + "".join(
            f"      - {{name: vm-{scope}-{number}, host: host-{'x' * 110}}}\n"
            for number in range(VMS_PER_SCOPE)
        )
        for scope in range(SCOPES)
    )
    with (
        running(tmp_path, "--store", "memory", fleet=f"scopes:\n{scopes}") as service,
        socket.socket() as lazy,
    ):
        host, _, port = service.control.removeprefix("http://").partition(":")
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(SECONDS_MAX)
        lazy.connect((host, int(port)))
        lazy.sendall(b"GET /api/v1/stream?after=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        with stream(service, "?after=0") as response:
            numbers = [entry["number"] for entry in entries(response, SCOPES * VMS_PER_SCOPE)]
        assert numbers == sorted(set(numbers))
        soon(lambda: followers(service) == 0)

        taken = b""
        with suppress(ConnectionError):
            while piece := lazy.recv(1 << 20):  # ends: it was cut off
                taken = piece
        assert f'"number":{numbers[-1]},'.encode() not in taken


def test_watch_prints_sentences_and_reconnects(tmp_path: Path) -> None:
    with (
        running(
            tmp_path,
            "--simulate-duration",
            "Reboot=10ms",
            "--control",
            f"127.0.0.1:{steady_port()}",
        ) as service,
        command(service, "watch", "--vm", "web-0") as watching,
    ):
        assert watching.stdout
        assert watching.stderr
        soon(lambda: followers(service) == 1)
        service.ask("POST", "/vms/web-0/restart")
        first = [watching.stdout.readline() for _ in range(4)]
        service.stop()
        assert "retrying" in watching.stderr.readline()
        service.start()
        service.ask("POST", "/vms/web-0/restart")
        second = watching.stdout.readline()
        watching.send_signal(signal.SIGINT)

        assert "web-0: Reboot now, without notice" in first[0]
        assert "Completed" in first[3]
        assert "web-0: Reboot now, without notice" in second
        assert watching.wait(SECONDS_MAX) == 130


def test_history_follow_continues_with_new_entries(tmp_path: Path) -> None:
    with running(tmp_path, "--simulate-duration", "Reboot=10ms") as service:
        service.ask("POST", "/vms/web-0/restart")
        soon(lambda: service.ask("GET", "/history?what=completed")[1]["history"] != [])
        command_line = ("history", "--host", "host-a", "--scope", "web")
        shown = subprocess.run(
            [FOREWARN, *command_line, "--since", "1h"],
            env=environment(FOREWARN_CONTROL=service.control),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()

        assert shown[0].split() == ["AT", "WHAT", "EVENT", "ABOUT", "DETAIL", "BY", "SCOPE", "HOST"]
        assert [line.split()[1] for line in shown[1:]] == [
            "completed",
            "impacted",
            "claimed",
            "executed-silently",
            "joined",
        ]
        with command(
            service, *command_line, "--follow", "--json", "--what", "executed-silently"
        ) as following:
            assert following.stdout
            first = json.loads(following.stdout.readline())
            service.ask("POST", "/vms/web-0/restart")
            second = json.loads(following.stdout.readline())
            assert (first["what"], second["what"]) == ("executed-silently", "executed-silently")
            assert second["number"] > first["number"]


def followers(service: Service) -> int:
    """How many streams the server counts. Each sends everything that happens from then on."""
    _, metrics = call("GET", f"{service.control}/metrics", headers={})
    (count,) = re.findall(rb"^forewarn_streams (\d+)", metrics, re.MULTILINE)
    return int(count)
