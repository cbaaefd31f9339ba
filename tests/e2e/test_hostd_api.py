"""A host daemon against real servers: plain HTTP calls, as `forewarn hostd` makes them."""

import hashlib
import hmac
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.e2e.service import Service, call
from tests.e2e.waiting import eventually
from tests.etcd_cluster import shared_etcd

WEB_0 = "6f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f10"
VM = {"name": "web-0", "id": WEB_0, "scope": "web", "addresses": ["10.0.0.1"], "power": "running"}
EMPTY = "scopes: []\n"


class Host:
    """A daemon on `kvm-1`, with `web-0`. `server` is the one that it talks to."""

    def __init__(self, server: Service) -> None:
        """The first token makes tokens required, so an admin's comes first."""
        self.server = server
        _, root = server.ask("POST", "/tokens", {"name": "root", "role": "admin"})
        self.root = root["text"]
        body = {"name": "kvm-1", "role": "host", "host": "kvm-1"}
        _, token = server.ask("POST", "/tokens", body, token=self.root)
        self.token = token["text"]
        self.session = "s1"
        self.running: list[dict[str, Any]] = []

    def send(self, **body: Any) -> tuple[int, Any]:
        content = {"session": self.session, "machine": "m1", "running": self.running} | body
        return self.server.ask("POST", "/hosts/kvm-1/work", content, token=self.token)

    def work(self, **body: Any) -> Any:
        status, answer = self.send(**{"wait": True} | body)
        assert status == 200, answer
        return answer

    def report(self, *vms: dict[str, Any]) -> Any:
        work = self.work(wait=False, inventory={"vms": vms, "memory_bytes": 1 << 36})
        assert work["is_merged"]
        return work["problems"]

    def finish(self, impact: dict[str, Any]) -> Any:
        """Send a result; what the daemon may drop then."""
        running = {"event_id": impact["event_id"], "vm": impact["vm"]["name"]}
        running |= {"tries": impact["tries"]}
        self.running = [{**running, "result": {"detail": "done by the daemon"}}]
        return self.work()["cancel"]

    def poll(self) -> tuple[int, bytes]:
        """A poll of `web-0` that the daemon relays."""
        key = hashlib.sha256(self.token.rpartition("_")[2].encode()).hexdigest().encode()
        now = int(time.time())
        headers = {
            "Metadata": "true",
            "X-Forewarn-Host": "kvm-1",
            "X-Instance-ID": WEB_0,
            "X-Forewarn-Time": str(now),
            "X-Instance-ID-Signature": hmac.digest(key, f"{WEB_0} {now}".encode(), "sha256").hex(),
        }
        url = f"{self.server.metadata}/metadata/scheduledevents?api-version=2020-07-01"
        return call("GET", url, headers=headers)

    def state(self) -> str:
        _, shown = self.server.ask("GET", "/hosts/kvm-1", token=self.root)
        state: str = shown["state"]
        return state


def test_daemon_relays_polls_and_carries_out_what_was_announced(tmp_path: Path) -> None:
    """The whole way over two listeners: report, poll, announce, approve, work, result."""
    service = Service(tmp_path, fleet=EMPTY).start()
    try:
        host = Host(service)
        assert host.poll()[0] == 403  # not reported yet
        assert host.report(VM) == []
        status, document = host.poll()
        assert (status, json.loads(document)["Events"]) == (200, [])
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(host.work)
            _, placed = service.ask("POST", "/vms/web-0/restart", token=host.root)
            event = placed["event"]["id"]
            assert json.loads(host.poll()[1])["Events"][0]["EventId"] == event
            service.ask("POST", f"/events/{event}/approve", {}, token=host.root)
            (impact,) = waiting.result()["impacts"]
        assert (impact["event_id"], impact["vm"]["id"]) == (event, WEB_0)
        assert [each["vm"] for each in host.finish(impact)] == ["web-0"]
        _, history = service.ask("GET", f"/history?event={event}", token=host.root)
        done = [entry for entry in history["history"] if entry["what"] == "impacted"]
        assert [entry["detail"] for entry in done] == ["done by the daemon"]
        host.work(is_leaving=True)
        assert host.state() == "unreachable"
        assert service.stop() == 0
    finally:
        service.kill()


def test_host_is_unreachable_soon_after_its_daemon_was_killed(tmp_path: Path) -> None:
    """Another machine is refused before and after; the next daemon of this one is accepted."""
    service = Service(tmp_path, fleet=EMPTY).start()
    try:
        host = Host(service)
        host.report(VM)
        body = json.dumps({"session": "s1", "machine": "m1", "wait": True})
        address = urlsplit(service.control)
        with socket.create_connection((address.hostname or "", address.port or 0)) as client:
            client.sendall(
                f"POST /api/v1/hosts/kvm-1/work HTTP/1.1\r\nHost: {address.netloc}\r\n"
                f"Authorization: Bearer {host.token}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(1)
        host.session = "s2"
        assert host.send(machine="m2")[0] == 409
        assert host.state() == "connected"
        eventually(host.state, lambda state: state == "unreachable")
        assert host.send(machine="m2")[0] == 409
        assert host.work(wait=False)["impacts"] == []
        assert host.state() == "connected"
    finally:
        service.kill()


@pytest.mark.system
def test_daemon_goes_on_at_another_server_when_its_own_is_killed(tmp_path: Path) -> None:
    """Its impact is neither lost nor begun again: the daemon keeps its result until it counts."""
    store = shared_etcd().url(uuid4().hex)
    servers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        servers.append(Service(tmp_path / name, "--store", store, fleet=EMPTY).start())
    first, second = servers
    try:
        host = Host(first)
        host.report(VM)
        restarted = first.ask("POST", "/vms/web-0/restart", token=host.root)[1]
        assert restarted["reason"]["code"] == "not-polled"
        (impact,) = host.work()["impacts"]
        host.running = [{"event_id": impact["event_id"], "vm": "web-0", "tries": 1}]
        eventually(lambda: second.ask("GET", "/vms")[0], lambda status: status == 401)
        first.kill()

        host.server = second
        host.report(VM)
        assert host.finish(impact) == []
        again = eventually(host.work, lambda work: work["impacts"] or work["cancel"])
        assert again["cancel"] == []
        (repeated,) = again["impacts"]
        assert (repeated["event_id"], repeated["tries"]) == (impact["event_id"], 2)
        assert [each["tries"] for each in host.finish(repeated)] == [2]
        assert host.state() == "connected"
        _, history = second.ask("GET", f"/history?event={impact['event_id']}", token=host.root)
        kinds = sorted(entry["what"] for entry in history["history"])
        assert kinds == ["claimed", "claimed", "completed", "executed-silently", "impacted"]
    finally:
        for server in servers:
            server.kill()
