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
from uuid import uuid4

import pytest

from tests.e2e.cli_service import forewarn
from tests.e2e.service import Service, running
from tests.etcd_cluster import shared_etcd

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

        target = f"sqlite:///{store}"
        refused = forewarn("store", "restore", str(backup), target)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "expected an empty store: move an SQLite file away" in refused.stderr
        service.stop()
        store.rename(tmp_path / "old.db")
        before = backup.read_bytes()
        done = forewarn("store", "restore", str(backup), target)
        assert backup.read_bytes() == before
        assert done.returncode == 0, done.stderr
        service.start()
        found = TOKEN.search(done.stdout)
        assert found
        new = found[0]

        status, _, body = poll(service, tag)
        assert (status, json.loads(body)) == (200, {"DocumentIncarnation": 1_000_001, "Events": []})
        assert [result(service, token, "vm", "list").returncode for token in (boss, lost, new)] == [
            1,
            1,
            0,
        ]
        assert result(service, new, "vm", "restart", "web-0").returncode == 0
        assert poll(service, '"2"')[0] == 200
        shown = result(service, new, "history", "--what", "restored", "--json").stdout
        assert [entry["detail"] for entry in json.loads(shown)["history"]] == [
            f"from sqlite:///{backup}; document numbers continue at 1000001"
        ]

    assert os.stat(store).st_mode & 0o777 == 0o600


def test_a_backup_of_an_earlier_version_is_restored_and_stays_as_it_is(tmp_path: Path) -> None:
    """It may be needed again, with the version that wrote it."""
    backup = tmp_path / "backup.db"
    backup.write_bytes(Path("tests/input/store-0.2.db").read_bytes())
    before = backup.read_bytes()

    done = forewarn("store", "restore", str(backup), f"sqlite:///{tmp_path}/new.db")

    assert done.returncode == 0, done.stderr
    assert backup.read_bytes() == before
    checked = forewarn("store", "check", f"sqlite:///{tmp_path}/new.db")
    assert checked.stdout.endswith("ok\n"), checked.stdout + checked.stderr


@pytest.mark.parametrize("name", ["missing.db", "text.db", "cut.db"])
def test_what_is_not_a_whole_backup_is_refused_and_no_store_is_created(
    tmp_path: Path, name: str
) -> None:
    """A service must not start on half a backup."""
    (tmp_path / "text.db").write_text("not a database")
    whole = Path("tests/input/store-0.2.db").read_bytes()
    (tmp_path / "cut.db").write_bytes(whole[: len(whole) // 2])

    refused = forewarn("store", "restore", str(tmp_path / name), f"sqlite:///{tmp_path}/new.db")

    assert refused.returncode != 0
    assert name in refused.stderr
    assert not (tmp_path / "new.db").exists()


@pytest.mark.system
def test_a_backup_of_sqlite_is_restored_into_etcd(tmp_path: Path) -> None:
    """After the loss of an etcd cluster the copy in a file is what is left."""
    backup, target = tmp_path / "backup.db", shared_etcd().url(uuid4().hex)
    with running(tmp_path) as service:
        poll(service)
        back_up(tmp_path / "forewarn.db", backup)

    done = forewarn("store", "restore", str(backup), target)

    assert done.returncode == 0, done.stderr
    assert "document numbers continue at 1000001" in done.stdout
    with running(tmp_path, "--store", target) as service:
        assert json.loads(poll(service)[2])["DocumentIncarnation"] == 1_000_001


@pytest.mark.system
def test_files_that_root_makes_belong_to_the_owner_of_their_folder(tmp_path: Path) -> None:
    """A restored store that root owns would keep the service from starting."""
    store, state = tmp_path / "forewarn.db", tmp_path / "state"
    with running(tmp_path):
        state.mkdir()
        os.chown(state, 12345, 23456)
        saved = forewarn("store", "backup", f"sqlite:///{store}", str(state / "backup.db"))
        assert (saved.returncode, saved.stderr) == (0, "")
    target = state / "forewarn.db"
    done = forewarn("store", "restore", str(state / "backup.db"), f"sqlite:///{target}")
    assert (done.returncode, done.stderr) == (0, "")

    files = {file.name: file.stat() for file in state.iterdir()}
    assert {"backup.db", "forewarn.db"} <= files.keys()
    for name, status in files.items():
        assert (status.st_uid, status.st_gid, oct(status.st_mode & 0o777)) == (
            12345,
            23456,
            "0o600",
        ), name


def test_backup_refuses_an_existing_file_and_other_stores(tmp_path: Path) -> None:
    taken = tmp_path / "taken.db"
    taken.write_bytes(b"precious")
    with running(tmp_path):
        refused = forewarn("store", "backup", f"sqlite:///{tmp_path}/forewarn.db", str(taken))
    assert refused.returncode == 2
    assert refused.stderr == (
        f"forewarn: FILE: cannot create {taken}: File exists; expected a new file\n"
    )
    assert taken.read_bytes() == b"precious"
    other = forewarn("store", "backup", "etcd://h1/forewarn", str(tmp_path / "new.db"))
    assert other.returncode == 2
    assert "expected sqlite:///PATH, got etcd://h1/forewarn; for etcd: etcdctl" in other.stderr
