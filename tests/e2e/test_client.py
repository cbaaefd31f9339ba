"""The guest's client against a real server, and what a bare machine must be able to do with it."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import forewarn
from forewarn.client import (
    AsyncClient,
    Change,
    Client,
    ConnectionFailed,
    EndpointError,
    HttpError,
    ask_dhcp,
)
from tests.e2e.cli_service import soon
from tests.e2e.crooked import Crooked, Then, Turn, document, in_loop, in_thread
from tests.e2e.service import Service, call, running, steady_port

SOURCE = Path(forewarn.__file__).parent.parent
DOCS = SOURCE.parent / "docs" / "client.md"
QUICK = ("--simulate-duration", "Reboot=1s")
ALL = ("appeared", "started", "finished")
VERSIONS = [
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
]
BARE = {name: value for name, value in os.environ.items() if name in ("PATH", "SYSTEMROOT")}


def run(code: str, *given: str, flags: tuple[str, ...] = (), environ: dict[str, str]) -> str:
    """What a program prints in a Python of its own."""
    command = [sys.executable, *flags, "-c", code, *given]
    done = subprocess.run(
        command, env=environ, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_vm(service: Service, vm: str = "web-0") -> str:
    return f"{service.metadata}/as/{vm}"


def waits(service: Service) -> float:
    """How many polls the service holds until there is news."""
    _, text = call("GET", f"{service.control}/metrics", headers={})
    (line,) = (line for line in text.decode().splitlines() if line.startswith("forewarn_waits "))
    return float(line.split()[1])


def restart(service: Service) -> str:
    status, answer = service.ask("POST", "/vms/web-0/restart")
    assert status == 202
    return str(answer["event"]["id"])


class Watching:
    """A watch in a thread of its own, and what it has told."""

    def __init__(self, url: str, **watching: object) -> None:
        self.told: list[tuple[str, str]] = []
        self.problems: list[EndpointError] = []
        self.client = Client(url)
        self._thread = threading.Thread(target=self._watch, kwargs=watching, daemon=True)
        self._thread.start()

    def _watch(self, **watching: float) -> None:
        for change in self.client.watch(on_error=self.problems.append, **watching):  # type: ignore[arg-type]
            self.told.append((change.kind, change.event.id))

    def until(self, last: tuple[str, str]) -> list[tuple[str, str]]:
        """What it has told when it has told this."""
        deadline = time.monotonic() + 30
        while last not in self.told:
            assert time.monotonic() < deadline, (self.told, self.problems)
            time.sleep(0.01)
        return self.told

    def close(self) -> None:
        self.client.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_a_program_is_told_approves_and_is_told_of_the_end(tmp_path: Path) -> None:
    """The promise of the product, through the client that we ship."""
    with running(tmp_path, *QUICK) as service, Client(as_vm(service)) as client:
        assert (client.name(), client.document().incarnation) == ("web-0", 1)
        event_id = restart(service)
        told: list[Change] = []
        for change in client.watch(changes_max=3):
            told.append(change)
            if change.kind == "appeared":
                client.approve(event_id.lower())

        assert [(change.kind, change.event.id) for change in told] == [
            ("appeared", event_id),
            ("started", event_id),
            ("finished", event_id),
        ]
        assert (told[0].event.source, told[0].event.resources, told[1].event.not_before) == (
            "User",
            ("web-0",),
            None,
        )


def test_an_asyncio_program_too(tmp_path: Path) -> None:
    async def walk(url: str, service: Service) -> list[str]:
        async with AsyncClient(url) as client:
            assert (await client.name(), (await client.document()).incarnation) == ("web-1", 1)
            event_id = await asyncio.to_thread(restart, service)
            told = []
            async for change in client.watch(changes_max=3):
                told.append(str(change.kind))
                if change.kind == "appeared":
                    await client.approve(event_id)
            return told

    with running(tmp_path, *QUICK) as service:
        assert asyncio.run(walk(as_vm(service, "web-1"), service)) == [
            "appeared",
            "started",
            "finished",
        ]


def test_a_change_ends_a_wait(tmp_path: Path) -> None:
    """Thirty seconds are asked for; the news comes when it is news."""
    with running(tmp_path) as service:
        service.poll()
        watching = Watching(as_vm(service), wait_seconds=30)
        soon(lambda: waits(service) == 1)
        event_id = restart(service)

        assert watching.until(("appeared", event_id)) == [("appeared", event_id)]
        watching.close()
        assert watching.problems == []


def test_a_wait_without_news_is_as_long_as_was_asked(tmp_path: Path) -> None:
    with running(tmp_path) as service, Client(as_vm(service)) as client:
        before = client.document()
        began = time.monotonic()
        assert client.wait(1) == before
        assert 0.9 <= time.monotonic() - began < 10


@pytest.mark.parametrize("ask", [in_thread, in_loop])
def test_an_approval_of_an_unknown_event_is_refused_in_the_words_of_the_server(
    tmp_path: Path, ask: object
) -> None:
    assert callable(ask)
    with running(tmp_path) as service, pytest.raises(HttpError, match="400") as caught:
        ask(as_vm(service), "approve", "602D9444-D2CD-49C7-8624-8643E7171297")
    assert caught.value.status == 400


def test_every_api_version_is_understood(tmp_path: Path) -> None:
    """Names with the underscore of 2017, dates as documented, members that are not there yet."""
    with running(tmp_path, "--not-before-format", "documented") as service:
        service.poll()
        event_id = restart(service)
        shown = set()
        for version in VERSIONS:
            with Client(as_vm(service), api_version=version) as client:
                (event,) = client.document().events
            assert event.concerns("web-0")
            shown.add((event.id, event.type, event.status, event.not_before))

        assert len(shown) == 1
        assert shown.pop()[0] == event_id


def test_a_server_that_is_killed_and_comes_back_is_followed_and_nothing_is_told_twice(
    tmp_path: Path,
) -> None:
    with running(tmp_path, *QUICK, "--metadata", f"127.0.0.1:{steady_port()}") as service:
        service.poll()
        watching = Watching(as_vm(service))
        event_id = restart(service)
        watching.until(("appeared", event_id))
        service.kill()
        soon(lambda: watching.problems != [])
        service.start()
        watching.client.approve(event_id)
        told = watching.until(("finished", event_id))
        watching.close()

        assert told in (
            [(kind, event_id) for kind in kinds] for kinds in (ALL, (ALL[0], ALL[2]))
        )  # it may start unseen
        assert watching.problems
        assert all(isinstance(problem, ConnectionFailed) for problem in watching.problems)


def test_a_server_that_forgot_everything_is_believed_and_heard(tmp_path: Path) -> None:
    """Its incarnation begins again: a client that waits for a greater number would be deaf from
    then on.
    """
    with running(
        tmp_path, "--store", "memory", "--metadata", f"127.0.0.1:{steady_port()}"
    ) as service:
        service.poll()
        watching = Watching(as_vm(service))
        first = restart(service)
        watching.until(("appeared", first))
        service.kill()
        service.start()
        watching.until(("canceled", first))
        second = restart(service)

        assert watching.until(("appeared", second)) == [
            ("appeared", first),
            ("canceled", first),
            ("appeared", second),
        ]
        watching.close()


def test_no_proxy_of_the_environment_is_used(tmp_path: Path) -> None:
    """The endpoint knows a VM by its address; through a proxy it would be another."""
    code = (
        "import asyncio, sys; from forewarn.client import AsyncClient, Client\n"
        "async def ask():\n"
        "    async with AsyncClient(sys.argv[1]) as client: return await client.name()\n"
        "print(Client(sys.argv[1]).name(), asyncio.run(ask()))"
    )
    with running(tmp_path) as service, socket.create_server(("127.0.0.1", 0)) as proxy:
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        environ = BARE | dict.fromkeys(names, url) | {"no_proxy": "", "PYTHONPATH": str(SOURCE)}
        printed = run(code, as_vm(service), environ=environ)
        proxy.settimeout(0.2)
        with pytest.raises(TimeoutError):
            proxy.accept()

    assert printed == "web-0 web-0\n"


def test_the_client_needs_nothing_but_the_standard_library() -> None:
    """It is copied into VMs where nothing is installed."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        "import forewarn.client; from forewarn.client import *; forewarn.client.AsyncClient\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = json.loads(run(code, flags=("-I", "-S"), environ=BARE))
    ours = {name for name in loaded if name.split(".")[0] == "forewarn"}
    foreign = (
        {name.split(".")[0] for name in loaded if not name.startswith("_")}
        - sys.stdlib_module_names
        - {"forewarn"}
    )

    assert {name for name in ours if not name.startswith("forewarn.client")} == {
        "forewarn",
        "forewarn.errors",
    }
    assert foreign == set()


def test_the_client_loads_where_nothing_of_unix_is_there() -> None:
    """As on Windows.

    Nor does the ordinary client load asyncio or TLS, for which a small guest would pay.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        "for name in ('fcntl', 'grp', 'pwd', 'resource', 'syslog', 'termios', 'asyncio', 'ssl', 'http'):\n"
        "    sys.modules[name] = None\n"
        "import forewarn.client; forewarn.client.Client('http://127.0.0.1'); print('loaded')"
    )
    assert run(code, flags=("-I", "-S"), environ=BARE) == "loaded\n"


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no such signals")
def test_a_signal_handler_may_close_the_client() -> None:
    """A service that is told to stop must not sit out a wait of half a minute."""
    code = (
        "import signal, sys; from forewarn.client import Client; client = Client(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: client.close())\n"
        "sys.exit(len(list(client.watch())))"
    )
    with Crooked(document(1), Turn(b"", Then.STAY_SILENT)) as endpoint:
        program = subprocess.Popen(
            [sys.executable, "-c", code, endpoint.url], env=BARE | {"PYTHONPATH": str(SOURCE)}
        )
        deadline = time.monotonic() + 30
        while len(endpoint.asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        program.send_signal(signal.SIGTERM)

        assert program.wait(10) == 0


def test_a_name_that_is_not_there_is_said_not_to_be_there() -> None:
    """One name is loaded late; the others must still be missed in the usual way."""
    with pytest.raises(ImportError):
        from forewarn.client import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_the_examples_in_the_documentation_run(tmp_path: Path) -> None:
    """As they stand, against a real server, told where it is as a published sample would be."""
    reading, watching, asynchronous = re.findall(
        r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL
    )
    with running(tmp_path, "--identify", "address", *QUICK) as service:
        environ = BARE | {
            "SCHEDULEDEVENTSIP": service.metadata.removeprefix("http://"),
            "PYTHONPATH": str(SOURCE),
        }
        service.poll()
        event_id = restart(service)

        assert run(reading, environ=environ).startswith("Reboot Scheduled 20")
        assert run(watching, environ=environ) == "".join(
            f"{kind} Reboot ('web-0',)\n" for kind in ALL
        )
        event_id = restart(service)
        assert run(asynchronous, environ=environ) == f"web-0 5\nappeared {event_id}\n"


def test_dhcp_is_asked_over_a_socket_and_offers_for_others_are_passed_over() -> None:
    """On loopback: a broadcast would be heard by others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)

        def offer() -> None:
            request, caller = server.recvfrom(1024)
            ours = b"\x02" + request[1:240] + bytes((245, 4, 168, 63, 129, 16, 255))
            server.sendto(ours[:4] + bytes(4) + ours[8:], caller)
            server.sendto(ours, caller)

        thread = threading.Thread(target=offer)
        thread.start()
        found = ask_dhcp(timeout_seconds=10, server=server.getsockname(), own=("127.0.0.1", 0))
        thread.join()

    assert found == "168.63.129.16"


def test_no_offer_in_time_tells_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))

        assert (
            ask_dhcp(timeout_seconds=0.05, server=silent.getsockname(), own=("127.0.0.1", 0)) == ""
        )


def test_a_port_that_may_not_be_used_is_a_problem_with_a_reason() -> None:
    with pytest.raises(ConnectionFailed, match="cannot send a DHCP request"):
        ask_dhcp(own=("192.0.2.1", 68), server=("127.0.0.1", 67))
