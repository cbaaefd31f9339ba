"""The pytest plugin as its users meet it: their own suites, run by a pytest of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "python"
TIMEOUT_SECONDS = 120

REBOOT = "test_a_reboot_is_approved_when_the_job_in_hand_is_done"
NEIGHBOUR = "test_a_neighbours_reboot_is_the_neighbours_business"
EVICTION = "test_a_spot_eviction_finds_the_worker_drained"
CANCELLED = "test_a_cancelled_maintenance_changes_nothing_for_long"
UNHEARD = "test_an_approval_that_was_not_heard_is_given_again"


def run_pytest(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "HANDLER"))
    }
    return subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-rf", *arguments],
        check=False,
        cwd=folder,
        env={**environment, "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def run_tests(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A suite of one file, where a warning is an error."""
    (folder / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n"
    )
    (folder / "test_it.py").write_text(text)
    return run_pytest(folder, *arguments)


def failures(ran: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The tests that failed, with the first line of why."""
    return dict(re.findall(r"^FAILED \S+::(\S+) - (.*)$", ran.stdout, re.MULTILINE))


def test_a_right_handler_passes() -> None:
    ran = run_pytest(EXAMPLE)

    assert (ran.returncode, failures(ran)) == (0, {}), ran.stdout


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (
            "approves_for_others",
            {NEIGHBOUR: "AssertionError: approved what befalls another VM, which may not be ready"},
        ),
        (
            "never_approves",
            {
                REBOOT: "AssertionError: drained, but not approved: the VM waits for nothing",
                UNHEARD: "AssertionError: an approval was lost, and not given again",
            },
        ),
        (
            "approves_too_soon",
            {
                REBOOT: "AssertionError: approved with a job in hand: it is lost",
                CANCELLED: "AssertionError: approved with a job in hand: there is nothing left to cancel",
            },
        ),
        (
            "looks_too_seldom",
            {EVICTION: "AssertionError: not drained when the VM was taken away: <Preempt "},
        ),
    ],
)
def test_a_wrong_handler_fails_for_its_own_reason(handler: str, expected: dict[str, str]) -> None:
    """A suite that fails for any handler, or for another reason, proves nothing."""
    ran = run_pytest(EXAMPLE, HANDLER=handler)

    found = failures(ran)
    assert ran.returncode == 1
    assert found.keys() == expected.keys(), ran.stdout
    assert [
        (name, words) for name, words in expected.items() if not found[name].startswith(words)
    ] == [], found


def test_the_readme_names_the_test_that_notices_each_mistake() -> None:
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| .* \| `(\w+)` \|$", (EXAMPLE / "README.md").read_text(), re.MULTILINE
        )
    )

    assert rows == {
        "approves_for_others": NEIGHBOUR,
        "never_approves": REBOOT,
        "approves_too_soon": REBOOT,
        "looks_too_seldom": EVICTION,
    }
    assert sorted(rows) == sorted(path.stem for path in (EXAMPLE / "wrong").glob("*.py"))


def test_a_failed_assertion_shows_the_transcript_and_a_passed_one_does_not(tmp_path: Path) -> None:
    ran = run_tests(
        tmp_path,
        """
import urllib.request

PATH = "/metadata/scheduledevents?api-version=2020-07-01"

def test_fails(scheduled_events):
    vm = scheduled_events.vm("web-0")
    event = vm.reboot()
    urllib.request.build_opener().open(urllib.request.Request(vm.url + PATH, headers={"Metadata": "true"})).close()
    scheduled_events.advance(minutes=15)
    assert event.approved_by == "web-0"

def test_passes(scheduled_events):
    scheduled_events.vm("quiet-0").freeze()
""",
        "-rfP",
    )

    assert list(failures(ran)) == ["test_fails"]
    section = ran.stdout.partition("- scheduled events -")[2]
    order = [
        "web-0",
        "scheduled",
        "GET /metadata/scheduledevents?api-version=2020-07-01 -> 200 document 2: Reboot Scheduled of web-0",
    ]
    order += ["advance", "started"]
    places = [section.find(words) for words in order]
    assert -1 not in places, ran.stdout
    assert places[1:] == sorted(places[1:])
    assert "quiet-0" not in ran.stdout


def test_a_suite_runs_on_several_workers_at_once(tmp_path: Path) -> None:
    ran = run_tests(
        tmp_path,
        """
import pytest

@pytest.mark.parametrize("number", range(12))
def test_it(scheduled_events, number, worker_id):
    vm = scheduled_events.vm("web-0")
    event = vm.reboot()
    scheduled_events.advance(minutes=25)
    assert (event.status, worker_id[:2]) == ("Completed", "gw")
    assert vm.url != scheduled_events.url
""",
        "-n",
        "2",
    )

    assert "12 passed" in ran.stdout, ran.stdout


def test_any_client_and_asyncio_code_can_be_tested(tmp_path: Path) -> None:
    ran = run_tests(
        tmp_path,
        """
import asyncio
import http.client
import json
import urllib.request

import httpx
import pytest

from forewarn.client import AsyncClient, Client

PATH = "/metadata/scheduledevents?api-version=2020-07-01"
HEADERS = {"Metadata": "true"}

def test_urllib(scheduled_events):
    vm = scheduled_events.vm("web-0")
    event = vm.reboot()
    body = json.dumps({"StartRequests": [{"EventId": event.id}]}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(vm.url + PATH, data=body, headers=HEADERS)) as answer:
        assert answer.status == 200
    assert event.approved_by == "web-0"

def test_http_client(scheduled_events):
    vm = scheduled_events.vm("web-0")
    event = vm.reboot()
    connection = http.client.HTTPConnection(vm.url.removeprefix("http://"))
    connection.request("GET", PATH, headers=HEADERS)
    assert json.load(connection.getresponse())["Events"][0]["EventId"] == event.id
    connection.close()

def test_httpx(scheduled_events):
    vm = scheduled_events.vm("web-0")
    event = vm.reboot()
    with httpx.Client(base_url=vm.url, headers=HEADERS, trust_env=False) as client:
        assert client.get(PATH).json()["Events"][0]["EventId"] == event.id
        assert client.post(PATH, json={"StartRequests": [{"EventId": event.id}]}).status_code == 200
    assert event.approved_by == "web-0"

def test_a_client_that_is_told_where_by_the_shared_url(scheduled_events):
    event = scheduled_events.vm("web-0").reboot()
    with Client(scheduled_events.url) as client:
        assert (client.name(), client.document().events[0].id) == ("web-0", event.id)

async def handle(url):
    async with AsyncClient(url) as client:
        async for change in client.watch():
            if change.kind == "appeared" and change.event.concerns(await client.name()):
                await client.approve(change.event.id)

@pytest.mark.anyio
async def test_code_that_acts_by_itself_in_the_tests_own_loop(scheduled_events):
    vm = scheduled_events.vm("web-0")
    task = asyncio.create_task(handle(vm.url))
    event = vm.preempt()
    await asyncio.to_thread(event.wait_for, "Started")
    scheduled_events.advance(minutes=1)
    assert (event.approved_by, event.status) == ("web-0", "Completed")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

@pytest.fixture
def anyio_backend():
    return "asyncio"
""",
    )

    assert "5 passed" in ran.stdout, ran.stdout


def test_the_marker_chooses_the_lab(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "fleet.yaml").write_text("scopes: [{name: db, vms: [{name: db-0, host: host-a}]}]")
    (folder / "test_more.py").write_text(
        """
import os
from datetime import datetime, timezone

import pytest

NOON = datetime(2026, 3, 4, 12, tzinfo=timezone.utc)

@pytest.mark.scheduled_events("fleet.yaml", start=NOON, environment="db-0")
def test_a_fleet_beside_the_test_file(scheduled_events):
    assert (scheduled_events.host("host-a").maintain("Reboot")[0].resources, scheduled_events.now) == (("db-0",), NOON)
    assert "http://" + os.environ["SCHEDULEDEVENTSIP"] == scheduled_events.vm("db-0").url

@pytest.mark.scheduled_events(rate=900)
def test_the_real_clock_with_short_times(scheduled_events):
    event = scheduled_events.vm("web-0").reboot()
    event.wait_for("Started", seconds=10)
    assert "SCHEDULEDEVENTSIP" not in os.environ
"""
    )
    ran = run_tests(
        tmp_path,
        """
import pytest

@pytest.mark.scheduled_events(fleat="fleet.yaml")
def test_a_mistyped_option(scheduled_events): ...

@pytest.mark.scheduled_events("a.yaml", "b.yaml")
def test_two_fleets(scheduled_events): ...

@pytest.mark.scheduled_events(fleet="nowhere.yaml")
def test_no_such_fleet(scheduled_events): ...

@pytest.mark.scheduled_events(rate="60")
def test_a_rate_that_is_no_number(scheduled_events): ...
""",
        "-rE",
    )

    assert "2 passed, 4 errors" in ran.stdout, ran.stdout
    assert (
        "@pytest.mark.scheduled_events: rate is '60'; expected a number from 0.001 to 1000000"
        in ran.stdout
    )
    assert "During handling" not in ran.stdout
    assert "unexpected keyword argument 'fleat'" in ran.stdout
    assert "takes one fleet, and all else by name; got ('a.yaml', 'b.yaml')" in ran.stdout
    assert re.search(r"the fleet file \S+/nowhere.yaml cannot be read: No such file", ran.stdout)


def test_nothing_is_left_of_a_lab_when_its_test_is_over(tmp_path: Path) -> None:
    ran = run_tests(
        tmp_path,
        """
import threading
from pathlib import Path

def sockets():
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())

BEFORE = sockets()

def test_one(scheduled_events):
    assert scheduled_events.vm("web-0").url
    assert len(threading.enumerate()) == 2
    assert sockets() > BEFORE

def test_afterwards():
    assert threading.enumerate() == [threading.main_thread()]
    assert sockets() == BEFORE
""",
    )

    assert "2 passed" in ran.stdout, ran.stdout


def test_a_suite_that_does_not_use_it_does_not_load_it(tmp_path: Path) -> None:
    """The plugin is loaded at every start of pytest, also where nobody needs it."""
    ran = run_tests(
        tmp_path,
        """
import sys

def test_it():
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("forewarn", "msgspec", "uvicorn", "litestar")}
    assert loaded == {"forewarn", "forewarn.lab", "forewarn.testing.plugin"}

def test_the_framework_of_the_control_api_comes_when_it_is_asked_for(scheduled_events):
    assert scheduled_events.vm("web-0").url
    assert "litestar" not in sys.modules
    assert scheduled_events.control_url
    assert "litestar" in sys.modules
""",
    )

    assert "2 passed" in ran.stdout, ran.stdout


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("msgspec", ": pip install 'forewarn[server]'"),
        ("sqlite3", f", which Python lacks on {sys.platform}"),
    ],
)
def test_where_a_module_is_missing_the_fixture_says_what_to_do(
    tmp_path: Path, missing: str, remedy: str
) -> None:
    """A module of the standard library cannot be installed, so pip is no advice there."""
    ran = run_tests(
        tmp_path,
        f"""
import sys

sys.modules["{missing}"] = None  # what an import finds where it is missing

def test_it(scheduled_events): ...
""",
        "-rE",
    )

    assert f"the fixture `scheduled_events` needs {missing}{remedy}" in ran.stdout, ran.stdout


def test_what_the_page_shows_works(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "pytest.md").read_text(), re.DOTALL
    )
    for number, block in enumerate(blocks[1:]):
        (tmp_path / f"test_page_{number}.py").write_text(block)
    ran = run_tests(tmp_path, blocks[0])

    assert f"{len(blocks)} passed" in ran.stdout, ran.stdout
