"""The client against a real server, and on a machine with nothing but Python."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tests.e2e.faulty_endpoint import (
    AfterResponse,
    FaultyEndpoint,
    ScriptedResponse,
    document,
    in_loop,
    in_thread,
)
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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For tests that end the events they create."""
    with running(tmp_path_factory.mktemp("service"), *QUICK) as started:
        started.poll()
        yield started


def run(code: str, *arguments: str, flags: tuple[str, ...] = (), environ: dict[str, str]) -> str:
    """What a program prints in a separate Python."""
    command = [sys.executable, *flags, "-c", code, *arguments]
    done = subprocess.run(
        command, env=environ, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_vm(service: Service, vm: str = "web-0") -> str:
    return f"{service.metadata}/as/{vm}"


def waits(service: Service) -> float:
    """How many long polls the service holds."""
    _, text = call("GET", f"{service.control}/metrics", headers={})
    (line,) = (line for line in text.decode().splitlines() if line.startswith("forewarn_waits "))
    return float(line.split()[1])


def restart(service: Service, vm: str = "web-0") -> str:
    status, response = service.ask("POST", f"/vms/{vm}/restart")
    assert status == 202
    return str(response["event"]["id"])


def cancel(service: Service, event_id: str) -> None:
    assert service.ask("POST", f"/events/{event_id}/cancel")[0] == 200


class Watch:
    """A watch in a thread, and what it has reported."""

    def __init__(self, url: str, **options: object) -> None:
        self.changes: list[tuple[str, str]] = []
        self.errors: list[EndpointError] = []
        self.client = Client(url)
        self._thread = threading.Thread(target=self._watch, kwargs=options, daemon=True)
        self._thread.start()

    def _watch(self, **options: float) -> None:
        for change in self.client.watch(on_error=self.errors.append, **options):  # type: ignore[arg-type]
            self.changes.append((change.kind, change.event.id))

    def until(self, last: tuple[str, str]) -> list[tuple[str, str]]:
        """All changes, once this one has been reported."""
        deadline = time.monotonic() + 30
        while last not in self.changes:
            assert time.monotonic() < deadline, (self.changes, self.errors)
            time.sleep(0.01)
        return self.changes

    def close(self) -> None:
        self.client.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_program_learns_of_an_event_approves_it_and_sees_it_end(service: Service) -> None:
    """The promise of the product, through the client that we ship."""
    with Client(as_vm(service)) as client:
        assert client.name() == "web-0"
        event_id = restart(service)
        changes: list[Change] = []
        for change in client.watch(changes_max=3):
            changes.append(change)
            if change.kind == "appeared":
                client.approve(event_id.lower())
    appeared, started, _ = changes

    assert [(change.kind, change.event.id) for change in changes] == [
        (kind, event_id) for kind in ALL
    ]
    assert (appeared.event.source, appeared.event.resources) == ("User", ("web-0",))
    assert started.event.not_before is None


def test_asyncio_program_too(service: Service) -> None:
    async def main(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            assert await client.name() == "web-1"
            event_id = await asyncio.to_thread(restart, service, "web-1")
            kinds = []
            async for change in client.watch(changes_max=3):
                kinds.append(str(change.kind))
                if change.kind == "appeared":
                    await client.approve(event_id)
            return kinds

    assert asyncio.run(main(as_vm(service, "web-1"))) == list(ALL)


def test_change_ends_a_long_poll(service: Service) -> None:
    """The client waits for thirty seconds, but learns of a change immediately."""
    watch = Watch(as_vm(service), wait_seconds=30)
    soon(lambda: waits(service) == 1)
    event_id = restart(service)

    assert watch.until(("appeared", event_id)) == [("appeared", event_id)]
    watch.close()
    cancel(service, event_id)
    assert watch.errors == []


@pytest.mark.parametrize("send", [in_thread, in_loop])
def test_rejected_approval_has_the_message_of_the_server(
    service: Service, send: Callable[..., Any]
) -> None:
    with pytest.raises(HttpError, match="400") as caught:
        send(as_vm(service), "approve", "602D9444-D2CD-49C7-8624-8643E7171297")
    assert caught.value.status == 400


def test_every_api_version_is_understood(tmp_path: Path) -> None:
    """Names with the underscore of 2017, dates as documented, members that are missing."""
    with running(tmp_path, "--not-before-format", "documented") as service:
        service.poll()
        event_id = restart(service)
        seen = set()
        for version in VERSIONS:
            with Client(as_vm(service), api_version=version) as client:
                (event,) = client.document().events
            assert event.concerns("web-0")
            seen.add((event.id, event.type, event.status, event.not_before))

    assert len(seen) == 1
    assert seen.pop()[0] == event_id


def test_killed_server_that_comes_back_is_followed_without_duplicates(tmp_path: Path) -> None:
    with running(tmp_path, *QUICK, "--metadata", f"127.0.0.1:{steady_port()}") as service:
        service.poll()
        watch = Watch(as_vm(service))
        event_id = restart(service)
        watch.until(("appeared", event_id))
        service.kill()
        soon(lambda: watch.errors != [])
        service.start()
        watch.client.approve(event_id)
        kinds = [kind for kind, _ in watch.until(("finished", event_id))]
        watch.close()

    assert kinds in (list(ALL), [ALL[0], ALL[2]])  # it may start between two polls
    assert watch.errors
    assert all(isinstance(error, ConnectionFailed) for error in watch.errors)


def test_server_that_lost_its_state_is_trusted_again(tmp_path: Path) -> None:
    """Its incarnation starts again: a client that waits for a greater one would miss all events."""
    address = f"127.0.0.1:{steady_port()}"
    with running(tmp_path, "--store", "memory", "--metadata", address) as service:
        service.poll()
        watch = Watch(as_vm(service))
        first = restart(service)
        watch.until(("appeared", first))
        service.kill()
        service.start()
        watch.until(("canceled", first))
        second = restart(service)
        changes = watch.until(("appeared", second))
        watch.close()

    assert changes == [("appeared", first), ("canceled", first), ("appeared", second)]


def test_proxies_of_the_environment_are_ignored(service: Service) -> None:
    """The endpoint knows a VM by its address; a proxy would hide it."""
    code = (
        "import asyncio, sys; from forewarn.client import AsyncClient, Client\n"
        "async def name():\n"
        "    async with AsyncClient(sys.argv[1]) as client: return await client.name()\n"
        "print(Client(sys.argv[1]).name(), asyncio.run(name()))"
    )
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        environ = BARE | dict.fromkeys(names, url) | {"no_proxy": "", "PYTHONPATH": str(SOURCE)}
        printed = run(code, as_vm(service), environ=environ)
        proxy.settimeout(0.2)
        with pytest.raises(TimeoutError):
            proxy.accept()

    assert printed == "web-0 web-0\n"


def test_client_needs_only_the_standard_library() -> None:
    """It runs in VMs where nothing else is installed."""
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


def test_client_loads_without_modules_of_unix() -> None:
    """As on Windows. Nor does it load asyncio, TLS or `http`, which cost a guest memory."""
    missing = ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "asyncio", "ssl", "http")
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        f"for name in {missing}:\n"
        "    sys.modules[name] = None\n"
        "import forewarn.client; forewarn.client.Client('http://127.0.0.1'); print('loaded')"
    )
    assert run(code, flags=("-I", "-S"), environ=BARE) == "loaded\n"


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no such signals")
def test_signal_handler_may_close_the_client() -> None:
    """A service that must stop cannot wait for half a minute."""
    code = (
        "import signal, sys; from forewarn.client import Client; client = Client(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: client.close())\n"
        "sys.exit(len(list(client.watch())))"
    )
    with FaultyEndpoint(document(1), ScriptedResponse(b"", AfterResponse.STAY_SILENT)) as endpoint:
        program = subprocess.Popen(
            [sys.executable, "-c", code, endpoint.url], env=BARE | {"PYTHONPATH": str(SOURCE)}
        )
        deadline = time.monotonic() + 30
        while len(endpoint.asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        program.send_signal(signal.SIGTERM)

        assert program.wait(10) == 0


def test_unknown_name_raises_an_import_error() -> None:
    """One name is imported on first use; others must still fail as usual."""
    with pytest.raises(ImportError):
        from forewarn.client import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_examples_in_the_docs_run(tmp_path: Path) -> None:
    """Unchanged, against a real server, found by the variable of the published samples."""
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


def test_dhcp_offer_for_another_machine_is_skipped() -> None:
    """On loopback: other machines would receive a broadcast."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)

        def offer() -> None:
            request, client = server.recvfrom(1024)
            ours = b"\x02" + request[1:240] + bytes((245, 4, 168, 63, 129, 16, 255))
            server.sendto(ours[:4] + bytes(4) + ours[8:], client)
            server.sendto(ours, client)

        thread = threading.Thread(target=offer)
        thread.start()
        address = ask_dhcp(timeout_seconds=10, server=server.getsockname(), own=("127.0.0.1", 0))
        thread.join()

    assert address == "168.63.129.16"


def test_dhcp_without_an_offer_gives_no_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))

        assert (
            ask_dhcp(timeout_seconds=0.05, server=silent.getsockname(), own=("127.0.0.1", 0)) == ""
        )


def test_dhcp_without_permission_is_an_error() -> None:
    with pytest.raises(ConnectionFailed, match="cannot send a DHCP request"):
        ask_dhcp(own=("192.0.2.1", 68), server=("127.0.0.1", 67))
