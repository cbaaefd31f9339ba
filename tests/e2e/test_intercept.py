"""Code with Azure's address built in, under test unchanged."""

import re
from pathlib import Path

# Loaded before pytester takes its snapshot of sys.modules. httpx loads httpcore when it is used
# first, and keeps its exceptions.
import aiohttp  # noqa: F401
import httpcore  # noqa: F401
import httpx  # noqa: F401
import pytest
import requests  # noqa: F401
import uvloop  # noqa: F401

import forewarn.testing.lab  # noqa: F401
from tests.e2e.test_lab_plugin import run_process, run_tests

pytest_plugins = ["pytester"]

URL = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"

APPROVERS = {
    "urllib": """
import json
import urllib.request

def approve():
    with urllib.request.urlopen(urllib.request.Request(URL, headers=HEADERS)) as response:
        body = approval_of(json.load(response))
    data = json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(URL, data=data, headers=HEADERS)).close()
""",
    "requests": """
import requests

def approve():
    body = approval_of(requests.get(URL, headers=HEADERS, timeout=5).json())
    requests.post(URL, json=body, headers=HEADERS, timeout=5).raise_for_status()
""",
    "httpx": """
import httpx

def approve():
    with httpx.Client(headers=HEADERS) as client:
        client.post(URL, json=approval_of(client.get(URL).json())).raise_for_status()
""",
    "httpx_async": """
import asyncio
import httpx

async def work():
    async with httpx.AsyncClient(headers=HEADERS) as client:
        body = approval_of((await client.get(URL)).json())
        (await client.post(URL, json=body)).raise_for_status()

def approve():
    asyncio.run(work())
""",
    "aiohttp": """
import asyncio
import aiohttp

async def work():
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        async with session.get(URL) as response:
            body = approval_of(await response.json())
        async with session.post(URL, json=body) as response:
            response.raise_for_status()

def approve():
    asyncio.run(work())
""",
    "aiohttp_uvloop": """
import aiohttp
import uvloop

async def work():
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        async with session.get(URL) as response:
            body = approval_of(await response.json())
        async with session.post(URL, json=body) as response:
            response.raise_for_status()

def approve():
    uvloop.run(work())
""",
    "httpx_uvloop": """
import httpx
import uvloop

async def work():
    async with httpx.AsyncClient(headers=HEADERS) as client:
        body = approval_of((await client.get(URL)).json())
        (await client.post(URL, json=body)).raise_for_status()

def approve():
    uvloop.run(work())
""",
    "forewarn": """
from forewarn.client import Client

def approve():
    with Client() as client:
        client.approve(*(event.id for event in client.document().events))
""",
    "forewarn_async": """
import asyncio
from forewarn.client import AsyncClient

async def work():
    async with AsyncClient() as client:
        await client.approve(*(event.id for event in (await client.document()).events))

def approve():
    asyncio.run(work())
""",
    "sock_connect": """
import asyncio
import json
import socket

async def send(head, body=b""):
    with socket.socket() as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("169.254.169.254", 80))
        target = URL.removeprefix("http://169.254.169.254")
        lines = f"{head} {target} HTTP/1.1\\r\\nHost: h\\r\\nMetadata: true\\r\\n"
        lines += f"Connection: close\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
        await loop.sock_sendall(connection, lines.encode() + body)
        received = b""
        while data := await loop.sock_recv(connection, 65536):
            received += data
        return received.partition(b"\\r\\n\\r\\n")[2]

async def work():
    body = approval_of(json.loads(await send("GET")))
    await send("POST", json.dumps(body).encode())

def approve():
    asyncio.run(work())
""",
}

SUITE = f'''
import threading
import pytest

URL = "{URL}"
HEADERS = {{"Metadata": "true"}}

def approval_of(document):
    return {{"StartRequests": [{{"EventId": each["EventId"]}} for each in document["Events"]]}}

%s

@pytest.mark.scheduled_events(intercept="web-1")
def test_in_the_thread_of_the_test(scheduled_events):
    scheduled_events.vm("web-0")
    event = scheduled_events.vm("web-1").reboot()
    approve()
    assert event.approved_by == "web-1"

@pytest.mark.scheduled_events(intercept="web-1")
def test_in_a_thread_that_the_test_starts(scheduled_events):
    event = scheduled_events.vm("web-1").reboot()
    thread = threading.Thread(target=approve)
    thread.start()
    thread.join()
    assert event.approved_by == "web-1"
'''


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_intercept_reaches_every_common_client(pytester: pytest.Pytester) -> None:
    """Half of all handlers have the address written into them."""
    suites = {name: SUITE % text for name, text in APPROVERS.items() if "uvloop" not in name}
    pytester.makepyfile(**{f"test_{name}": suite for name, suite in suites.items()})

    output = run_tests(pytester, "")

    assert f"{2 * len(suites)} passed" in output, output


@pytest.mark.system
@pytest.mark.parametrize("client", ["aiohttp_uvloop", "httpx_uvloop"])
def test_intercept_reaches_clients_on_uvloop(client: str, tmp_path: Path) -> None:
    """In a network of its own: libuv's connections cannot be refused by `azure_guard`."""
    network = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"')
    output = run_process(tmp_path, SUITE % APPROVERS[client], prefix=(*network, "sh"))

    assert "2 passed" in output, output


def test_intercept_is_undone_after_the_test(pytester: pytest.Pytester) -> None:
    """What the classes had before, they have again, whether the test passed or failed."""
    output = run_tests(
        pytester,
        """
import socket
import pytest
import uvloop

def methods():
    names = "connect", "connect_ex", "create_connection", "sock_connect"
    owners = socket.socket, uvloop.Loop
    return {(owner, name): vars(owner).get(name) for owner in owners for name in names}

BEFORE = methods()

@pytest.mark.scheduled_events(intercept="web-0")
@pytest.mark.parametrize("outcome", ["passes", "fails"])
def test_during(outcome, scheduled_events):
    assert methods() != BEFORE
    assert outcome == "passes"

def test_after():
    assert methods() == BEFORE
""",
    )

    assert "1 failed, 2 passed" in output, output


def test_other_addresses_are_not_intercepted(pytester: pytest.Pytester) -> None:
    output = run_tests(
        pytester,
        """
import socket
import pytest

@pytest.mark.scheduled_events(intercept="web-0")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_it(address, scheduled_events):
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection((address, server.getsockname()[1])) as connection:
            assert connection.getpeername() == server.getsockname()
""",
    )

    assert "2 passed" in output, output


def test_misuse_of_intercept_is_one_clear_line(pytester: pytest.Pytester) -> None:
    """No traceback through the plugin: the message is about the user's marker."""
    output = run_tests(
        pytester,
        """
import pytest

FLEET = {"scopes": [{"name": "db", "vms": [{"name": "db-0", "host": "host-a"}]}]}

@pytest.mark.scheduled_events(FLEET, intercept="web-9")
def test_unknown(scheduled_events): ...

@pytest.mark.scheduled_events(intercept=["web-0", "web-1"])
def test_two(scheduled_events): ...

@pytest.mark.scheduled_events(intercept="web-0")
def test_nested(scheduled_events):
    with scheduled_events.intercept("web-1"):
        ...
""",
        "-rfE",
    )

    mark = "@pytest.mark.scheduled_events"
    assert f"test_unknown - Failed: {mark}: there is no VM 'web-9' in this fleet; it has db-0" in (
        output
    )
    assert (
        f"test_two - Failed: {mark}: intercept is ['web-0', 'web-1']; expected the name of one VM"
    ) in output
    assert (
        "test_nested - forewarn.errors.Refused: connections to 169.254.169.254 are intercepted"
        " already; expected one intercept at a time"
    ) in output
    assert "plugin.py" not in output


def test_misuse_shows_the_line_of_the_test_only(pytester: pytest.Pytester) -> None:
    """The way through the lab's threads does not help to correct a word."""
    output = run_tests(
        pytester,
        """
def test_status(scheduled_events):
    scheduled_events.vm("web-0").reboot().wait_for("Strated")

def test_late(scheduled_events):
    scheduled_events.vm("web-0").reboot().wait_for("Started", seconds=0.01)

def test_fault(scheduled_events):
    scheduled_events.fault("stauts", code=500)

def test_refused(scheduled_events):
    scheduled_events.vm("web-0").reboot().complete()
""",
        "-rf",
    )

    assert "4 failed" in output, output
    places = re.findall(r"^(\S+\.py):\d+: ", output, re.MULTILINE)
    assert places == ["test_it.py"] * 4, output
    assert "unknown status 'Strated'; expected one of Scheduled, Started" in output
