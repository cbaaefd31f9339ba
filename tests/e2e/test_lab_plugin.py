"""The pytest plugin in suites of its users. Most of them run inside this process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forewarn.testing.lab  # noqa: F401 - loaded before pytester takes its snapshot of sys.modules

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "python"
TIMEOUT_SECONDS = 120
INI = "[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n"
FLAGS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rf")

REBOOT = "test_reboot_is_approved_when_the_job_is_done"
OTHER_VM = "test_reboot_of_another_vm_is_ignored"
EVICTION = "test_worker_is_drained_before_a_spot_eviction"
CANCELLED = "test_worker_accepts_jobs_again_after_a_cancellation"
UNHEARD = "test_failed_approval_is_sent_again"


def run_tests(pytester: pytest.Pytester, text: str, *arguments: str) -> str:
    """Run a suite of one file in this process, with warnings as errors. Returns its output."""
    pytester.makefile(".ini", pytest=INI)
    pytester.makepyfile(test_it=text)
    return pytester.runpytest_inprocess(*FLAGS, *arguments).stdout.str()


def run_process(folder: Path, text: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    """Run a suite of one file in a process of its own."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_it.py").write_text(text)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*prefix, sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        check=False,
        cwd=folder,
        env={**environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return done.stdout


def run_example(pytester: pytest.Pytester) -> dict[str, str]:
    """Run the example's suite. Returns the failed tests with the first line of the reason."""
    ini = str(EXAMPLE / "pytest.ini")
    done = pytester.runpytest_inprocess(*FLAGS, "-c", ini, str(EXAMPLE))
    failed = re.findall(r"^FAILED \S+::(\S+) - (.*)$", done.stdout.str(), re.MULTILINE)
    assert done.parseoutcomes().get("failed", 0) == len(failed)
    assert "passed" in done.parseoutcomes()
    return dict(failed)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HANDLER", raising=False)


def test_example_handler_passes_its_suite(pytester: pytest.Pytester) -> None:
    assert run_example(pytester) == {}


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (
            "approves_for_others",
            {OTHER_VM: "AssertionError: approved an event of another VM, which may not be ready"},
        ),
        (
            "never_approves",
            {
                REBOOT: "AssertionError: drained, but not approved",
                UNHEARD: "AssertionError: an approval was lost and not sent again",
            },
        ),
        (
            "approves_too_soon",
            {
                REBOOT: "AssertionError: approved during a job: the job is lost",
                CANCELLED: "AssertionError: approved during a job: nothing is left",
            },
        ),
        (
            "polls_too_rarely",
            {EVICTION: "AssertionError: not drained when the VM was evicted: <Preempt "},
        ),
    ],
)
def test_wrong_handler_fails_for_its_own_reason(
    handler: str,
    expected: dict[str, str],
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A suite that fails for any handler, or for another reason, proves nothing."""
    monkeypatch.setenv("HANDLER", handler)
    failed = run_example(pytester)

    assert failed.keys() == expected.keys()
    for name, reason in expected.items():
        assert failed[name].startswith(reason)


def test_readme_names_the_test_that_finds_each_bug() -> None:
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| .* \| `(\w+)` \|$", (EXAMPLE / "README.md").read_text(), re.MULTILINE
        )
    )

    assert rows == {
        "approves_for_others": OTHER_VM,
        "never_approves": REBOOT,
        "approves_too_soon": REBOOT,
        "polls_too_rarely": EVICTION,
    }
    assert sorted(rows) == sorted(path.stem for path in (EXAMPLE / "wrong").glob("*.py"))


def test_only_failed_tests_show_the_transcript(
    pytester: pytest.Pytester,
) -> None:
    output = run_tests(
        pytester,
        """
import urllib.request

PATH = "/metadata/scheduledevents?api-version=2020-07-01"

def test_fails(scheduled_events):
    vm = scheduled_events.vm("web-0")
    event = vm.reboot()
    request = urllib.request.Request(vm.url + PATH, headers={"Metadata": "true"})
    urllib.request.build_opener().open(request).close()
    scheduled_events.advance(minutes=15)
    assert event.approved_by == "web-0"

def test_passes(scheduled_events):
    scheduled_events.vm("quiet-0").freeze()
""",
        "-rfP",
    )

    assert re.findall(r"^FAILED \S+::(\S+)", output, re.MULTILINE) == ["test_fails"]
    section = output.partition("- scheduled events -")[2]
    order = [
        "web-0",
        "scheduled",
        (
            "GET /metadata/scheduledevents?api-version=2020-07-01 -> 200 document 2: Reboot"
            " Scheduled of web-0"
        ),
    ]
    order += ["advance", "started"]
    places = [section.find(words) for words in order]
    assert -1 not in places, output
    assert places[1:] == sorted(places[1:])
    assert "quiet-0" not in output


def test_suite_runs_on_several_workers(tmp_path: Path) -> None:
    output = run_process(
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

    assert "12 passed" in output, output


def test_any_client_and_asyncio_code_work(pytester: pytest.Pytester) -> None:
    output = run_tests(
        pytester,
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

    assert "5 passed" in output, output


def test_marker_sets_the_options_of_the_lab(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("inner")
    (folder / "fleet.yaml").write_text("scopes: [{name: db, vms: [{name: db-0, host: host-a}]}]")
    (folder / "test_more.py").write_text(
        """
import os
from datetime import datetime, timezone

import pytest

NOON = datetime(2026, 3, 4, 12, tzinfo=timezone.utc)

@pytest.mark.scheduled_events("fleet.yaml", start=NOON, environment="db-0")
def test_a_fleet_beside_the_test_file(scheduled_events):
    assert scheduled_events.host("host-a").maintain("Reboot")[0].resources == ("db-0",)
    assert scheduled_events.now == NOON
    assert "http://" + os.environ["SCHEDULEDEVENTSIP"] == scheduled_events.vm("db-0").url

@pytest.mark.scheduled_events(rate=900)
def test_the_real_clock_with_short_times(scheduled_events):
    event = scheduled_events.vm("web-0").reboot()
    event.wait_for("Started", seconds=10)
    assert "SCHEDULEDEVENTSIP" not in os.environ
"""
    )
    output = run_tests(
        pytester,
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

    assert "2 passed, 4 errors" in output, output
    assert (
        "@pytest.mark.scheduled_events: rate is '60'; expected a number from 0.001 to 1000000"
        in output
    )
    assert "During handling" not in output
    assert "unexpected keyword argument 'fleat'" in output
    assert "takes one fleet, and the rest by name; got ('a.yaml', 'b.yaml')" in output
    assert re.search(r"cannot read the fleet file \S+/nowhere.yaml: No such file", output)


def test_suite_that_does_not_use_the_fixture_does_not_load_the_lab(tmp_path: Path) -> None:
    """pytest loads the plugin at every start. And a lab leaves no thread and no socket behind."""
    output = run_process(
        tmp_path,
        """
import sys
import threading
from pathlib import Path

PACKAGES = ("forewarn", "msgspec", "uvicorn", "litestar")

def sockets():
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())

BEFORE = sockets()

def test_nothing_is_loaded():
    loaded = {name for name in sys.modules if name.partition(".")[0] in PACKAGES}
    assert loaded == {"forewarn", "forewarn.testing", "forewarn.testing.plugin"}

def test_the_framework_of_the_control_api_is_loaded_on_use(scheduled_events):
    assert scheduled_events.vm("web-0").url
    assert len(threading.enumerate()) == 2
    assert sockets() > BEFORE
    assert "litestar" not in sys.modules
    assert scheduled_events.control_url
    assert "litestar" in sys.modules

def test_nothing_is_left():
    assert threading.enumerate() == [threading.main_thread()]
    assert sockets() == BEFORE
""",
    )

    assert "3 passed" in output, output


def test_fixture_names_the_remedy_for_a_missing_module(tmp_path: Path) -> None:
    """A module of the standard library cannot be installed, so pip does not help there."""
    output = run_process(
        tmp_path,
        """
import sys
import pytest

@pytest.fixture(params=["msgspec", "sqlite3"])
def missing(request, monkeypatch):
    monkeypatch.setitem(sys.modules, request.param, None)

def test_it(missing, scheduled_events): ...
""",
        "-rE",
    )

    needs = "the fixture `scheduled_events` needs"
    assert f"{needs} msgspec: pip install 'forewarn[lab]'" in output, output
    assert f"{needs} sqlite3, which Python lacks on {sys.platform}" in output, output


def test_examples_of_the_page_work(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "pytest.md").read_text()
    first, *rest = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(**{f"test_page_{number}": block for number, block in enumerate(rest)})

    assert f"{1 + len(rest)} passed" in run_tests(pytester, first)


def test_marker_is_enough_to_intercept(pytester: pytest.Pytester) -> None:
    """A test that needs no lab object must not send its requests to the real address."""
    output = run_tests(
        pytester,
        """
        import unittest
        import urllib.request

        import pytest

        URL = "http://169.254.169.254/metadata/instance/compute/name?api-version=2021-02-01&format=text"


        def read_name():
            request = urllib.request.Request(URL, headers={"Metadata": "true"})
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.read().decode()


        @pytest.mark.scheduled_events(intercept="web-0")
        def test_function():
            assert read_name() == "web-0"


        @pytest.mark.scheduled_events(intercept="web-1")
        class TestClass(unittest.TestCase):
            def test_method(self):
                self.assertEqual(read_name(), "web-1")
        """,
    )
    assert "2 passed" in output
