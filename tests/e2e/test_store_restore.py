"""`forewarn store restore` between two lives of a real service."""

import json
import os
import re
import sqlite3
import subprocess
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

from tests.e2e.cli_service import forewarn
from tests.e2e.service import Service, running

TOKEN = re.compile(r"fw_[a-z0-9-]+_[0-9a-f]{64}")


def back_up(store: Path, copy: Path) -> None:
    with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


def poll(service: Service, tag: str = "") -> tuple[int, str, bytes]:
    """Status, ETag and body of a poll that is conditional if a tag is given."""
    url = f"{service.metadata}/as/web-0/metadata/scheduledevents?api-version=2020-07-01"
    request = urllib.request.Request(
        url, headers={"Metadata": "true"} | ({"If-None-Match": tag} if tag else {})
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as response:
            return response.status, response.headers["ETag"], response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["ETag"], error.read()


def result(service: Service, token: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return forewarn(*arguments, FOREWARN_CONTROL=service.control, FOREWARN_TOKEN=token)


def test_restore_invalidates_old_etags_and_tokens(tmp_path: Path) -> None:
    """The numbers and tokens of a backup are older than what guests and operators have."""
    store, backup = tmp_path / "forewarn.db", tmp_path / "backup.db"
    with running(tmp_path) as service:
        poll(service)
        boss = result(service, "", "token", "create", "boss", "--role", "admin").stdout.strip()
        lost = result(service, boss, "token", "create", "lost", "--role", "operator").stdout.strip()
        back_up(store, backup)
        assert result(service, boss, "vm", "restart", "web-0").returncode == 0
        assert result(service, boss, "token", "revoke", "lost").returncode == 0
        _, tag, _ = poll(service)
        assert poll(service, tag)[0] == 304

        refused = forewarn("store", "restore", str(backup), f"sqlite:///{store}", "--force")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "is in use; expected that no service has it open" in refused.stderr
        service.stop()
        refused = forewarn("store", "restore", str(backup), f"sqlite:///{store}")
        assert (refused.returncode, "exists; expected --force" in refused.stderr) == (1, True)

        done = forewarn("store", "restore", str(backup), f"sqlite:///{store}", "--force")
        assert done.returncode == 0, done.stderr
        service.start()
        found = TOKEN.search(done.stdout)
        assert found
        new = found[0]

        status, _, body = poll(service, tag)
        assert (status, json.loads(body)) == (200, {"DocumentIncarnation": 1_000_002, "Events": []})
        assert [result(service, token, "vm", "list").returncode for token in (boss, lost, new)] == [
            1,
            1,
            0,
        ]
        assert result(service, new, "vm", "restart", "web-0").returncode == 0
        assert poll(service, '"2"')[0] == 200
        shown = result(service, new, "history", "--what", "restored", "--json").stdout
        assert [entry["detail"] for entry in json.loads(shown)["history"]] == [
            f"from {backup}; document numbers continue at 1000002"
        ]

    (kept,) = tmp_path.glob("forewarn.db.replaced-*")
    assert kept.name in done.stdout
    assert os.stat(store).st_mode & 0o777 == 0o600
