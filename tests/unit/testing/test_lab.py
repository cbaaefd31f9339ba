"""The lab inside a test: VMs, time, faults, and what is left when it is over."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.client import Client, discover
from forewarn.errors import Error, Invalid, Refused, UnknownHost, UnknownVm
from forewarn.testing.lab import Lab
from forewarn.testing.thread import THREAD_NAME
from tests.builders import MINUTE, NOON
from tests.unit.testing.http_vm import EVENTS, HttpVm

FLEET = {
    "scopes": [
        {
            "name": "web",
            "kind": "availability-set",
            "vms": [
                {"name": "web-0", "host": "host-a", "update_domain": 0, "address": "127.0.0.1"},
                {"name": "web-1", "host": "host-b", "update_domain": 1},
            ],
        },
        {"name": "db", "vms": [{"name": "db-0", "host": "host-a"}]},
        {"name": "loose", "vms": [{"name": "loose-0"}]},
    ]
}


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(start=NOON, timeout_seconds=60) as lab:  # a busy machine may be slow
        yield lab


def test_vm_is_created_on_demand_with_its_own_url(lab: Lab) -> None:
    names = ["web-0", "web-1", "other"]

    assert [HttpVm(lab.vm(name).url).name() for name in names] == names
    assert lab.vm("web-1").url == lab.vm("web-1").url


def test_shared_url_is_the_first_vm_or_the_one_in_the_path(lab: Lab) -> None:
    """A test with one VM need not know that there could be more."""
    lab.vm("web-0")
    lab.vm("web-1")

    assert HttpVm(lab.url).name() == "web-0"
    assert HttpVm(lab.url, "/as/web-1").name() == "web-1"


def test_created_vms_share_only_a_document(lab: Lab) -> None:
    first, second = lab.vm("web-0"), lab.vm("web-1")
    event = first.reboot()

    assert [one["EventId"] for one in HttpVm(second.url).events()] == [event.id]
    assert event.resources == ("web-0",)
    assert first.host != second.host
    assert second.events == []


def test_vm_moves_to_its_own_spare_host(lab: Lab) -> None:
    """Later events of its host must not concern another VM."""
    first, second = lab.vm("web-0"), lab.vm("web-1")
    first.redeploy()
    lab.advance(hours=1)

    assert first.host.name == "host-0-spare"
    assert second.host.name == "host-1"


def test_invalid_vm_name_is_refused(lab: Lab) -> None:
    with pytest.raises(Invalid, match="a name of 1 to 128 letters"):
        lab.vm("web 0")


def test_deleted_vm_is_created_again_on_demand(lab: Lab) -> None:
    vm, other = lab.vm("web-0"), lab.vm("web-1")
    event = vm.terminate()
    lab.advance(minutes=6)

    assert event is not None
    assert event.status == "Completed"
    with pytest.raises(UnknownVm):
        vm.preempt()

    again = lab.vm("web-0")
    assert HttpVm(lab.url).name() == HttpVm(again.url).name() == "web-0"
    assert again.preempt().resources == ("web-0",)
    assert (again.host.name, other.host.name) == ("host-0", "host-1")


def test_deleted_vm_of_a_fleet_stays_deleted() -> None:
    with Lab(FLEET) as lab:
        lab.vm("web-1").terminate()
        lab.advance(minutes=6)
        with pytest.raises(UnknownVm, match="no VM 'web-1' in this fleet"):
            lab.vm("web-1")


def test_users_operation_without_polls_has_no_event(lab: Lab) -> None:
    """As on the real platform: the feature sleeps until the first poll."""
    vm = lab.vm("web-0", enabled=False)

    assert vm.user_restart() is None
    assert HttpVm(vm.url).events() == []
    assert vm.user_redeploy() is not None


def test_disabled_vm_stays_disabled(lab: Lab) -> None:
    """A test that asks for the same VM again, or for its environment, must not enable what it left
    disabled.
    """
    lab.vm("web-0", enabled=False)
    lab.environment("web-0")

    assert lab.vm("web-0").user_restart() is None
    assert lab.vm("web-1").user_restart() is None, "it is in the same scope"


def test_disabled_vm_can_be_enabled_later(lab: Lab) -> None:
    lab.vm("web-0", enabled=False)

    assert lab.vm("web-0", enabled=True).user_restart() is not None


def test_second_call_for_a_vm_is_not_a_poll(lab: Lab) -> None:
    """The feature lapses after a day without polls; only a poll enables it again."""
    lab.vm("web-0")
    lab.advance(hours=26)

    assert lab.vm("web-0").user_restart() is None
    assert lab.vm("web-0", enabled=True).user_redeploy() is not None


def test_threads_share_one_control_api(lab: Lab) -> None:
    """A second listener would be left unused, and each thread would hold another address."""
    with ThreadPoolExecutor(4) as threads:
        urls = list(threads.map(lambda _: lab.control_url, range(4)))

    assert len(set(urls)) == 1


def test_get_lists_listeners_and_post_opens_them() -> None:
    """A GET has no effects: reading the list must not open 256 sockets."""
    with Lab(FLEET, timeout_seconds=60) as lab:
        control = HttpVm(lab.control_url)
        opened = {"web-0": lab.vm("web-0").url}

        for _ in range(2):
            assert list_listeners(control, "GET") == opened
        all_opened = list_listeners(control, "POST")
        assert sorted(all_opened) == ["db-0", "loose-0", "web-0", "web-1"]
        assert all_opened["web-0"] == opened["web-0"]
        assert list_listeners(control, "POST") == list_listeners(control, "GET") == all_opened
        assert [HttpVm(url).name() for url in all_opened.values()] == list(all_opened)


def list_listeners(control: HttpVm, method: str) -> dict[str, str]:
    status, body = control.request(method, "/api/v1/listeners")
    page = json.loads(body)
    assert (status, page["total"]) == (200, 4)
    listeners: dict[str, str] = page["listeners"]
    return listeners


@pytest.mark.parametrize("kind", ["mapping", "json", "yaml"])
def test_fleet_is_a_mapping_or_a_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"fleet.{kind}"
    file.write_text(json.dumps(FLEET))  # JSON is YAML too

    with Lab(FLEET if kind == "mapping" else file) as lab:
        assert HttpVm(lab.vm("db-0").url).name() == "db-0"
        assert HttpVm(lab.url).name() == "web-0"


def test_host_event_concerns_every_scope_on_it() -> None:
    with Lab(FLEET) as lab:
        events = lab.host("host-a").maintain("Reboot", description="New kernel.")
        own = lab.vm("web-1").reboot()

        assert [(event.type, event.resources, event.description) for event in events] == [
            ("Reboot", ("db-0",), "New kernel."),
            ("Reboot", ("web-0",), "New kernel."),
        ]
        assert lab.events == [*events, own]
        assert lab.vm("web-0").host.name == "host-a"


def test_vm_returns_its_own_event_of_the_host() -> None:
    with Lab(FLEET) as lab:
        first, neighbour = lab.vm("web-0"), lab.vm("db-0")

        assert first.reboot().resources == ("web-0",)
        assert [event.resources for event in neighbour.events] == [("db-0",)]
        first.preempt()
        lab.advance(minutes=1)
        with pytest.raises(Refused, match="web-0 already has this event, or is deallocated"):
            first.freeze()


def test_second_event_of_the_same_kind_is_refused() -> None:
    with Lab(FLEET) as lab:
        first = lab.vm("web-1").host.maintain("Freeze")
        with pytest.raises(Refused, match="web-1 has a Freeze pending already"):
            lab.vm("web-1").freeze()
        assert lab.events == first


@pytest.mark.parametrize(
    ("ask", "expected", "words"),
    [
        (
            lambda lab: lab.vm("web-9"),
            UnknownVm,
            "'web-9' in this fleet; it has db-0, loose-0, web-0, web-1",
        ),
        (lambda lab: lab.host("host-z"), UnknownHost, "'host-z'"),
        (lambda lab: lab.vm("loose-0").reboot(), Refused, "loose-0 has no host"),
        (
            lambda lab: lab.host("host-a").maintain("Nap"),
            Invalid,
            "unknown EventType 'Nap'; expected one of Freeze",
        ),
        (
            lambda lab: lab.host("host-a").maintain("Preempt"),
            Invalid,
            "type is one of Freeze, Reboot, Redeploy",
        ),
        (lambda lab: lab.host("host-a").maintain(cause="whim"), Invalid, "unknown Cause 'whim'"),
        (lambda lab: lab.advance(), Invalid, "expected a duration above 0 s"),
        (lambda lab: lab.advance(minutes=-1), Invalid, "expected a duration above 0 s"),
        (lambda lab: lab.advance(seconds=-1), Invalid, "got -1 s"),
        (lambda lab: lab.advance(15), Invalid, "numbers as in minutes=15; got 15"),
        (
            lambda lab: lab.advance(seconds=float("nan")),
            Invalid,
            "expected numbers, as in minutes=15; got .* seconds=nan",
        ),
        (lambda lab: lab.advance(seconds=1e300), Invalid, "expected numbers"),
        (lambda lab: lab.advance(minutes="5"), Invalid, "got hours=0, minutes='5'"),
        (lambda lab: lab.jump(NOON), Invalid, "is in the past; expected a time from"),
        (lambda lab: lab.jump("x"), Invalid, "time is 'x'; expected a datetime with a time zone"),
        (lambda lab: lab.fault("status", vm="web-O", code=500), UnknownVm, "web-O"),
        (lambda lab: lab.fault("nonsense"), Invalid, "nonsense"),
        (lambda lab: lab.fault("status", vm="web-0", code=200), Invalid, "code"),
    ],
)
def test_invalid_call_is_refused_with_a_reason(
    ask: object, expected: type[Error], words: str
) -> None:
    assert callable(ask)
    with Lab(FLEET) as lab, pytest.raises(expected, match=words):
        ask(lab)


def test_invalid_options_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="expected one of them"):
        Lab(rate=60, start=NOON)
    with pytest.raises(Invalid, match="a datetime with a time zone"):
        Lab(start=NOON.replace(tzinfo=None))
    with pytest.raises(
        Invalid, match="start is '2030-01-01'; expected a datetime with a time zone"
    ):
        Lab(start="2030-01-01")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"rate is 0; expected a number from 0\.001 to 1000000$"):
        Lab(rate=0)
    with pytest.raises(Invalid, match="rate is '60'; expected a number"):
        Lab(rate="60")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="timeout_seconds is 0; expected a number from"):
        Lab(timeout_seconds=0)
    with pytest.raises(Invalid, match="scopes"):
        Lab({"scopes": 7})
    with pytest.raises(Invalid, match=r"cannot read the fleet file .*"):
        Lab(tmp_path / "nowhere.yaml")


def test_time_moves_only_on_demand(lab: Lab) -> None:
    assert lab.now == NOON
    lab.advance(hours=1, minutes=2, seconds=3)
    lab.advance(timedelta(seconds=7))
    assert lab.now == NOON + timedelta(hours=1, minutes=2, seconds=10)
    lab.jump(NOON + 90 * MINUTE)
    assert lab.now == NOON + 90 * MINUTE


def test_resumed_clock_runs_until_it_is_paused(lab: Lab) -> None:
    event = lab.vm("web-0").preempt()
    lab.advance(seconds=29.9)
    lab.resume()
    event.wait_for("Started")
    lab.pause()

    paused_at = lab.now
    lab.vm("web-1")
    assert lab.now == paused_at >= event.not_before


def test_rate_uses_the_real_clock_with_shorter_notices() -> None:
    """For software that compares NotBefore with its own clock."""
    with Lab(rate=3600) as lab:
        event = lab.vm("web-0").reboot()
        assert event.not_before - lab.now <= timedelta(seconds=2)
        with pytest.raises(Refused, match="this lab has the real clock"):
            lab.advance(minutes=1)


def test_fault_ends_with_its_with_block(lab: Lab) -> None:
    first, second = HttpVm(lab.vm("web-0").url), HttpVm(lab.vm("web-1").url)

    with lab.fault("status", vm="web-0", code=500):
        assert [one.request("GET", EVENTS)[0] for one in (first, second)] == [500, 200]
    assert first.request("GET", EVENTS)[0] == 200


def test_refuse_resets_connections_until_it_is_removed(lab: Lab) -> None:
    caller = HttpVm(lab.vm("web-0").url)
    for _ in range(3):
        with lab.fault("refuse", vm="web-0"), pytest.raises(ConnectionResetError):
            caller.request("GET", EVENTS)
        assert caller.request("GET", EVENTS)[0] == 200


def test_fault_ends_after_its_requests_and_can_be_removed_twice(lab: Lab) -> None:
    caller = HttpVm(lab.vm("web-0").url)
    fault = lab.fault("status", code=503, requests=2)

    assert [caller.request("GET", EVENTS)[0] for _ in range(3)] == [503, 503, 200]
    fault.remove()
    fault.remove()


def test_transcript_has_requests_changes_and_clock(lab: Lab) -> None:
    vm = lab.vm("web-0")
    event = vm.reboot()
    HttpVm(vm.url).approve(event.id)
    lab.advance(minutes=15)

    entries = [
        (entry.kind, entry.vm or entry.by, entry.what or entry.method)
        for entry in lab.transcript.entries
    ]
    assert ("change", "test", "scheduled") in entries
    assert ("request", "web-0", "POST") in entries
    assert ("change", "web-0", "approved") in entries
    assert ("clock", "", "advance") in entries
    assert f"POST {EVENTS}" in str(lab.transcript)
    assert "joined" not in str(lab.transcript), "the test's own preparation is left out"


def test_environment_leads_clients_to_the_vm(lab: Lab) -> None:
    variables = lab.environment("web-7")
    with Client(discover(variables)) as client:
        assert client.name() == "web-7"
    url = variables["AZURE_SCHEDULEDEVENTS_URL"]
    assert url.startswith(lab.vm("web-7").url + "/metadata/scheduledevents?api-version=")
    for name in ("AZURE_SCHEDULEDEVENTS_URL", "AZURE_METADATAINSTANCE_URL"):
        path = variables[name].removeprefix(lab.vm("web-7").url)
        assert HttpVm(lab.vm("web-7").url).request("GET", path)[0] == 200


def test_control_api_starts_on_first_use(lab: Lab) -> None:
    event = lab.vm("web-0").reboot()

    status, body = HttpVm(lab.control_url).request("GET", "/api/v1/events")

    assert status == 200
    assert [one["id"] for one in json.loads(body)["events"]] == [event.id]
    assert lab.control_url == lab.control_url


def test_lab_can_be_used_from_any_thread(lab: Lab) -> None:
    with ThreadPoolExecutor(8) as pool:
        events = list(pool.map(lambda number: lab.vm(f"web-{number}").reboot(), range(16)))

    assert sorted(event.resources[0] for event in events) == sorted(
        f"web-{number}" for number in range(16)
    )
    assert len({lab.vm(f"web-{number}").host.name for number in range(16)}) == 16


def test_seed_determines_the_ids() -> None:
    def ids(seed: int) -> list[str]:
        with Lab(seed=seed) as lab:
            return [lab.vm(name).reboot().id for name in ("web-0", "web-1")]

    assert ids(1) == ids(1) != ids(2)


def test_closed_lab_stays_readable() -> None:
    with Lab() as lab:
        vm = lab.vm("web-0")
        event = vm.reboot()
        HttpVm(vm.url).approve(event.id)

    assert (event.status, event.approved_by) == ("Started", "web-0")
    assert [one.by for one in lab.approvals] == ["web-0"]
    assert "approved" in str(lab.transcript)
    with pytest.raises(Refused, match="this lab is closed"):
        vm.freeze()
    with pytest.raises(Refused, match="this lab is closed"):
        lab.advance(minutes=1)


def test_lab_must_be_entered_once() -> None:
    with pytest.raises(Refused, match="this lab is not open; expected a call inside `with Lab"):
        Lab().vm("web-0")
    with Lab() as lab, pytest.raises(Refused, match="this lab was used before"), lab:
        pass


def test_closed_lab_leaves_nothing_behind() -> None:
    """An idle connection and a poll that waits are both let go of; warnings about the rest would be
    errors here.
    """
    with Lab() as lab:
        address = lab.vm("web-0").url.removeprefix("http://").split(":")
        idle = socket.create_connection((address[0], int(address[1])))
        waiting = socket.create_connection((address[0], int(address[1])))
        request = f"GET {EVENTS} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n"
        waiting.sendall(f'{request}If-None-Match: "1"\r\nPrefer: wait=60\r\n\r\n'.encode())
        idle.sendall(f"{request}\r\n".encode())
        answered = b""
        while not answered.endswith(b"}"):  # ends with the document
            answered += idle.recv(4096)
        assert THREAD_NAME in {thread.name for thread in threading.enumerate()}

    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}
    with idle, waiting:
        assert idle.recv(4096) == b""
        assert waiting.recv(4096).startswith(b"HTTP/1.1 304"), "who waits is answered, not cut off"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address[0], int(address[1])))


WITHOUT_POSIX = """
import asyncio, subprocess, sys  # these need some of them on this machine

for name in ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "uvloop"):
    sys.modules[name] = None

from http.client import HTTPConnection
from forewarn.lab import Lab

with Lab() as lab:
    vm = lab.vm("web-0")
    event = vm.reboot()
    with lab.fault("reset", vm="web-0"):
        connection = HTTPConnection(vm.url.removeprefix("http://"), timeout=10)
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        connection.request("GET", path, headers={"Metadata": "true"})
        try:
            connection.getresponse().read()
        except ConnectionResetError:
            print("reset")
        connection.close()
    event.approve("web-0")
    print(event.status)
"""


def test_lab_works_without_posix_modules() -> None:
    """Developers for Azure work on Windows, where Python has no fcntl, resource or termios."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ran.stdout.split(), ran.stderr) == (["reset", "Started"], "")
