"""Several servers on one etcd are one service."""

import re
from pathlib import Path
from uuid import uuid4

import pytest

from tests.e2e.service import Service
from tests.e2e.waiting import eventually
from tests.etcd_cluster import shared_etcd

pytestmark = pytest.mark.system
OUR_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z  \w+ ")


def wait_for_events(server: Service, ids: list[str]) -> None:
    eventually(lambda: [each["EventId"] for each in server.poll()["Events"]] == ids)


def test_a_vm_may_poll_one_server_approve_at_another_and_the_impact_runs_once(
    tmp_path: Path,
) -> None:
    """A load balancer may send each request anywhere. The log has only lines of ours."""
    done = tmp_path / "done"
    command = f"*=/bin/sh -c 'echo {{vm}} {{event_id}} >> {done}'"
    flags = ("--store", shared_etcd().url(uuid4().hex), "--identify", "path")
    platform = ("--platform", "exec", "--exec-command", command)
    servers = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        servers.append(Service(tmp_path / name, *flags, *platform).start())
    first, second, third = servers
    try:
        assert first.poll()["Events"] == []
        status, answer = second.ask("POST", "/vms/web-0/restart")
        assert status == 202
        event = answer["event"]["id"]
        for server in servers:
            wait_for_events(server, [event])
        assert third.approve(event) == 200
        for server in servers:
            wait_for_events(server, [])
        assert done.read_text().split() == ["web-0", event]
        status, history = first.ask("GET", f"/history?event={event}")
        kinds = [entry["what"] for entry in history["history"]]
        assert sorted(kinds) == sorted({*kinds})
        assert {"scheduled", "approved", "started", "impacted", "completed"} <= {*kinds}
        documents = {str(server.poll()) for server in servers}
        assert len(documents) == 1
    finally:
        for server in servers:
            assert server.stop() == 0
    for name in ("a", "b", "c"):
        for line in (tmp_path / name / "log.txt").read_text().splitlines():
            assert OUR_LINE.match(line), line
