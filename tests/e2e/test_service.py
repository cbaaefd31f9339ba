"""The whole service as real processes: the life of an event, crash and restart, two servers."""

import json
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.e2e import cli_service
from tests.e2e.service import FLEET, Service, call, running
from tests.e2e.waiting import eventually


def statuses(document: dict[str, Any]) -> list[str]:
    return [event["EventStatus"] for event in document["Events"]]


def poll_request(path: str) -> bytes:
    target = f"{path}?api-version=2020-07-01"
    return f"GET {target} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n\r\n".encode()


def connected(url: str, source: str = "") -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=10, source_address=(source, 0))


def test_vm_sees_approves_and_survives_an_event(tmp_path: Path) -> None:
    """The promise of the product, over real sockets."""
    with running(tmp_path, "--simulate-duration", "Reboot=500ms") as service:
        assert service.poll() == {"DocumentIncarnation": 1, "Events": []}
        status, response = service.ask("POST", "/vms/web-0/restart")
        event = response["event"]
        shown = service.poll(vm="web-1")

        assert (status, event["status"], statuses(shown)) == (202, "Scheduled", ["Scheduled"])
        assert shown["Events"][0]["EventId"] == event["id"]
        assert service.approve(event["id"].lower(), vm="web-1") == 200
        started = service.poll()
        assert (statuses(started), started["Events"][0]["NotBefore"]) == (["Started"], "")
        over = eventually(service.poll, lambda seen: not seen["Events"])
        assert over["DocumentIncarnation"] == 4
        assert service.stop() == 0


def test_event_without_approval_starts_at_not_before(tmp_path: Path) -> None:
    with running(tmp_path, "--rate", "300") as service:
        service.poll()
        _, response = service.ask("POST", "/vms/web-0/restart")
        due = (
            time.mktime(time.strptime(response["event"]["not_before"], "%Y-%m-%dT%H:%M:%SZ"))
            - time.timezone
        )
        eventually(service.poll, lambda seen: statuses(seen) == ["Started"])

        assert time.time() >= due


def test_killed_server_continues_after_a_restart(tmp_path: Path) -> None:
    """Events keep id, NotBefore and incarnation; nothing acknowledged is lost."""
    with running(tmp_path) as service:
        service.poll()
        service.ask("POST", "/vms/web-0/restart")
        service.ask("POST", "/hosts/host-b/maintain", {"type": "Freeze"})
        before = service.poll()
        service.kill()
        service.start()

        assert service.poll() == before
        assert before["DocumentIncarnation"] == 3


def test_event_whose_notice_passed_while_the_server_was_down_gets_it(tmp_path: Path) -> None:
    """At this rate a Preempt has 3 seconds, and no VM could read it in the last ones."""
    with running(tmp_path, "--rate", "10") as service:
        service.poll()
        service.ask("POST", "/vms/web-0/evict")
        service.kill()
        killed_at = time.time()
        eventually(time.time, lambda now: now > killed_at + 5)
        service.start()
        back_at = time.time()

        assert statuses(service.poll()) == ["Scheduled"]
        eventually(service.poll, lambda seen: statuses(seen) != ["Scheduled"])
        assert time.time() - back_at >= 1.5
        (delay,) = service.ask("GET", "/history?what=extended")[1]["history"]
        assert "it could not be read for" in delay["detail"]


def test_impact_of_a_killed_server_is_finished(tmp_path: Path) -> None:
    with running(tmp_path, "--simulate-duration", "Reboot=1s") as service:
        service.poll()
        _, response = service.ask("POST", "/vms/web-0/restart")
        service.approve(response["event"]["id"])
        path = f"/events/{response['event']['id']}"
        eventually(
            lambda: service.ask("GET", path)[1]["impacts"],
            lambda impacts: impacts[0]["state"] == "claimed",
        )
        service.kill()
        service.start()

        eventually(service.poll, lambda seen: not seen["Events"])


def test_same_fleet_file_at_the_next_start_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "--simulate-duration", "Terminate=10ms") as service:
        status, response = service.ask("POST", "/vms/web-1/delete")
        assert (status, response["reason"]["code"]) == (202, "not-polled")  # so it runs now
        eventually(lambda: service.ask("GET", "/vms/web-1")[0], lambda code: code == 404)
        service.stop()
        service.start()
        assert service.ask("GET", "/vms/web-1")[0] == 404

        service.stop()
        (tmp_path / "fleet.yaml").write_text(FLEET + "# edited\n")
        service.start()
        assert service.ask("GET", "/vms/web-1")[0] == 200


def test_edited_fleet_file_does_not_move_a_vm_back(tmp_path: Path) -> None:
    """An edit of the file must not undo the Redeploys since it was written."""

    def vm(name: str) -> dict[str, Any]:
        view: dict[str, Any] = service.ask("GET", f"/vms/{name}")[1]
        return view

    with running(tmp_path, "--simulate-duration", "Redeploy=10ms") as service:
        status, response = service.ask("POST", "/vms/web-0/redeploy")
        assert (status, response["reason"]["code"]) == (202, "not-polled")  # so it runs now
        eventually(lambda: vm("web-0")["host"], lambda host: host == "host-b")
        service.stop()
        (tmp_path / "fleet.yaml").write_text(FLEET.replace("127.0.0.2", "127.0.0.9"))
        service.start()

        assert vm("web-1")["address"] == "127.0.0.9"
        assert vm("web-0")["host"] == "host-b"


def test_two_servers_on_one_file_show_the_same_document(tmp_path: Path) -> None:
    """No leader: both accept commands and approvals, and both show the result."""
    with running(tmp_path) as first:
        second = Service(tmp_path, "--identify", "path").start()
        try:
            first.poll()
            _, response = first.ask("POST", "/vms/web-0/restart")
            eventually(second.poll, lambda seen: statuses(seen) == ["Scheduled"])
            assert second.approve(response["event"]["id"], vm="web-1") == 200
            eventually(first.poll, lambda seen: statuses(seen) == ["Started"])
        finally:
            second.kill()


def test_client_that_disconnects_in_its_body_is_not_logged(tmp_path: Path) -> None:
    """A traceback because a user pressed Ctrl-C would look like a bug."""
    with running(tmp_path) as service:
        for path in ("PUT /api/v1/fleet", "POST /api/v1/vms/web-0/restart"):
            with connected(service.control) as connection:
                connection.sendall(
                    f"{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n{{".encode()
                )
                time.sleep(0.3)
        time.sleep(0.3)

        assert service.ask("GET", "/vms/web-0")[0] == 200
        assert "Traceback" not in (tmp_path / "log.txt").read_text()


def test_guest_that_opens_all_connections_blocks_nothing(tmp_path: Path) -> None:
    """Other VMs and operators get responses, and another VM's impact still runs its command."""
    request = poll_request("/metadata/scheduledevents")
    exec_flags = ("--platform", "exec", "--exec-command", f"Reboot=touch {tmp_path}/rebooted")
    service = Service(tmp_path, *exec_flags, descriptors_max=256)
    try:
        service.start()
        with ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(connected(service.metadata, "127.0.0.3"))
            for source in ("127.0.0.1", "127.0.0.2"):
                vm = stack.enter_context(connected(service.metadata, source))
                vm.sendall(request)
                assert vm.recv(65536).startswith(b"HTTP/1.1 200")
            _, response = service.ask("POST", "/vms/web-0/restart")
            assert service.ask("POST", f"/events/{response['event']['id']}/approve")[0] == 200
            eventually((tmp_path / "rebooted").exists, bool)
            assert "connection limit reached" in (tmp_path / "log.txt").read_text()
    finally:
        service.kill()


def test_half_closed_connection_still_gets_its_response(tmp_path: Path) -> None:
    """As when a request is piped into a socket: what was done must not look like a failure."""
    with running(tmp_path) as service:
        restarts = [("POST", f"/vms/{vm}/restart", b"202") for vm in ("web-0", "web-1", "db")]
        for method, path, status in [*restarts, *[("GET", "/vms/web-0", b"200")] * 5]:
            with connected(service.control) as connection:
                head = (
                    f"{method} /api/v1{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n"
                )
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{}}".encode())
                connection.shutdown(socket.SHUT_WR)
                response = b"".join(iter(lambda: connection.recv(65536), b""))
            assert response.startswith(b"HTTP/1.1 " + status)


def test_stalled_clients_do_not_delay_the_stop(
    tmp_path: Path,
) -> None:
    """The limit is 3 seconds; 6 leaves room for a slow machine."""
    poll = poll_request("/as/web-0/metadata/scheduledevents")
    with (
        running(tmp_path) as service,
        connected(service.metadata) as reads_nothing,
        connected(service.control) as sends_half,
    ):
        service.poll()
        reads_nothing.settimeout(0.5)
        with suppress(TimeoutError):
            for _ in range(1_000):  # far more than all buffers can hold
                reads_nothing.sendall(poll * 1_000)
        sends_half.sendall(
            b"PUT /api/v1/fleet HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n{"
        )
        assert service.ask("GET", "/vms/web-0")[0] == 200

        began = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - began < 6
        assert "Traceback" not in (tmp_path / "log.txt").read_text()


def test_unknown_paths_get_a_json_error(service: cli_service.Service) -> None:
    for path in ("/api/docs/more", "/api/openapi.json/more", "/api/v2", "/api", "/nothing"):
        status, body = call("GET", service.control + path, headers={})
        assert (status, json.loads(body)["error"]) == (404, "not_found")
    status, body = call("GET", f"{service.control}/api/openapi.json", headers={})
    assert (status, json.loads(body)["info"]["title"]) == (200, "Forewarn control API")
