"""`forewarn store copy` and `store check` between two lives of a real service."""

import sqlite3
import subprocess
import urllib.request
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.e2e.cli_service import FOREWARN, environment, forewarn, forewarn_process
from tests.e2e.service import Service, running
from tests.e2e.test_webhooks import restart, settled, telling
from tests.e2e.waiting import eventually
from tests.e2e.webhook_receiver import WebhookReceiver
from tests.etcd_cluster import shared_etcd

VMS = ("web-0", "web-1", "db")
HISTORY_VALUES = 1500

Shown = tuple[list[tuple[str, bytes]], list[dict[str, Any]]]


def document(service: Service, vm: str) -> tuple[str, bytes]:
    """The ETag and the bytes of a VM's document."""
    url = f"{service.metadata}/as/{vm}/metadata/scheduledevents?api-version=2020-07-01"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Metadata": "true"})
    with opener.open(request, timeout=30) as response:
        return response.headers["ETag"], response.read()


def history(service: Service) -> list[dict[str, Any]]:
    """All entries without their numbers, which are positions in a store."""
    _, body = service.ask("GET", "/history?limit=1000")
    return [{**entry, "number": 0} for entry in body["history"]]


def serve_a_while(folder: Path, store: str, before: Shown | None = None) -> Shown:
    """Serve the same documents and history as before, and then one event more."""
    with running(folder, "--store", store) as service:
        if before is not None:
            assert ([document(service, vm) for vm in VMS], history(service)) == before
        for vm in VMS:
            service.poll(vm=vm)
        pending = service.ask("GET", "/events")[1]["events"]
        vm = next(vm for vm in VMS if vm not in [event["resources"][0] for event in pending])
        assert service.ask("POST", f"/vms/{vm}/restart")[0] == 202
        assert forewarn("store", "check", store).stdout.endswith("\nok\n")
        refused = forewarn("store", "copy", store, f"sqlite:///{folder}/refused.db")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "the source is in use (servers: 1); stop them first" in refused.stderr
        shown = [document(service, vm) for vm in VMS], history(service)
        service.stop()
    return shown


def move(folder: Path, *stores: str) -> None:
    """Serve on each store in turn."""
    shown = serve_a_while(folder, stores[0])
    for source, target in pairwise(stores):
        done = forewarn("store", "copy", source, target)
        assert done.returncode == 0, done.stderr
        in_source, in_target, last = done.stdout.splitlines()
        assert in_source.replace("source", "target") == in_target
        assert last == "the copy is complete; start the service on it, and not on the source"
        shown = serve_a_while(folder, target, shown)


def test_documents_and_history_survive_a_copy(tmp_path: Path) -> None:
    """The bytes and ETags are the same, so no guest notices, and new events follow."""
    move(tmp_path, *(f"sqlite:///{tmp_path}/{name}.db" for name in "ab"))


@pytest.mark.system
def test_documents_and_history_move_to_etcd_and_back(tmp_path: Path) -> None:
    etcd = shared_etcd().url(f"copy-{uuid4().hex}")
    move(tmp_path, f"sqlite:///{tmp_path}/a.db", etcd, f"sqlite:///{tmp_path}/b.db")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("copy", "memory", "sqlite:///b.db"), 2, "SOURCE: a memory store belongs to one process"),
        (("copy", "sqlite:///a.db", "memory"), 2, "TARGET: a memory store belongs to one process"),
        (("copy", "sqlite:///no.db", "sqlite:///b.db"), 2, "SOURCE: no such file: no.db; expected"),
        (("copy", "sqlite:///a.db", "sqlite:///a.db"), 1, "or both are the same"),
        (("copy", "sqlite:///a.db", "sqlite:///used.db"), 1, "the target has records or history"),
        (("copy", "sqlite:///empty.db", "sqlite:///b.db"), 1, "the source is empty; expected the"),
        (("copy", "sqlite:///a.db", "mysql://h/b"), 2, "'mysql:…' is not a store URL; expected"),
        (("check", "sqlite:///no.db"), 2, "URL: no such file: no.db; expected the store of a"),
        (("check", "memory"), 2, "URL: a memory store belongs to one process"),
        (("check", "sqlite:///old.db"), 4, "the file has schema 2; expected schema 3: start a"),
        (("copy", "sqlite:///old.db", "sqlite:///b.db"), 4, "the file has schema 2; expected"),
    ],
)
def test_wrong_store_is_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    for name in ("a", "used"):
        made = forewarn(
            "token", "create", "ann", "--role=admin", f"--store=sqlite:///{name}.db", cwd=tmp_path
        )
        assert made.returncode == 0
    sqlite3.connect(tmp_path / "empty.db").close()
    (tmp_path / "old.db").write_bytes(Path("tests/input/store-0.2.db").read_bytes())
    before = {name: (tmp_path / name).read_bytes() for name in ("a.db", "used.db", "old.db")}

    refused = forewarn("store", *arguments, cwd=tmp_path)

    assert (refused.returncode, refused.stdout) == (code, "")
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert forewarn("token", "list", "--store=sqlite:///used.db", cwd=tmp_path).returncode == 0
    assert (tmp_path / "old.db").read_bytes() == before["old.db"]


def test_copy_that_was_killed_is_not_served_and_continues(tmp_path: Path) -> None:
    """Half a store must not look like a whole one."""
    made = forewarn(
        "token", "create", "ann", "--role=admin", "--store=sqlite:///a.db", cwd=tmp_path
    )
    assert made.returncode == 0
    with closing(sqlite3.connect(tmp_path / "a.db")) as source, source:
        value = source.execute("SELECT value FROM history").fetchone()
        source.executemany(
            "INSERT INTO history VALUES (?, ?)",
            [(number, *value) for number in range(100, 100 + HISTORY_VALUES)],
        )
        source.execute("UPDATE counter SET revision = ?", (100 + HISTORY_VALUES,))

    def copied() -> int:
        with closing(sqlite3.connect(f"file:{tmp_path}/b.db?mode=ro", uri=True)) as target:
            return int(target.execute("SELECT count(*) FROM history").fetchone()[0])

    def has_begun() -> bool:
        try:
            return copied() > 50
        except sqlite3.OperationalError:  # no file, or no tables
            return False

    command = ("store", "copy", "sqlite:///a.db", "sqlite:///b.db")
    process = subprocess.Popen([FOREWARN, *command], cwd=tmp_path, env=environment())
    try:
        eventually(has_begun)
    finally:
        process.kill()
        process.wait()
    assert copied() < HISTORY_VALUES

    ports = ("--metadata=127.0.0.1:0", "--control=127.0.0.1:0")
    refusals = [forewarn_process("serve", "--store=sqlite:///b.db", *ports, cwd=tmp_path)]
    for arguments in (
        ("store", "check", "sqlite:///b.db"),
        ("token", "list", "--store=sqlite:///b.db"),
    ):
        refusals.append(forewarn(*arguments, cwd=tmp_path))
    for refused in refusals:
        assert (refused.returncode, refused.stdout) == (4, "")
        assert "the store is an incomplete copy; run `forewarn store copy`" in refused.stderr
    eventually(lambda: forewarn(*command, cwd=tmp_path).returncode == 0)
    checked = forewarn("store", "check", "sqlite:///b.db", cwd=tmp_path)
    assert checked.stdout == f"history: {HISTORY_VALUES + 1}\ntoken: 1\nok\n", checked.stderr


def told(receiver: WebhookReceiver) -> dict[str, str]:
    """The events that the receiver knows, by message id: a slow response is sent again."""
    return {event["id"]: event["data"]["event"] for event in receiver.events}


def undelivered_after(folder: Path, store: str, receiver: WebhookReceiver) -> None:
    """Deliver what happens, then let something happen that the receiver does not get."""
    with telling(folder, receiver.url, more=("--store", store)) as service:
        assert restart(service) == 202
        receiver.wait_for(2)
        settled(service)
        receiver.status = 500
        assert restart(service) == 202
        settled(service)
        eventually(lambda: len(receiver.requests) > 2)
        service.stop()


@pytest.mark.system
def test_webhook_gets_each_change_once_although_the_store_moves(tmp_path: Path) -> None:
    """The numbers of the entries are other ones in etcd."""
    source, target = f"sqlite:///{tmp_path}/a.db", shared_etcd().url(f"copy-{uuid4().hex}")
    with WebhookReceiver() as receiver:
        undelivered_after(tmp_path, source, receiver)
        assert forewarn("store", "copy", source, target).returncode == 0
        receiver.status = 204
        with telling(tmp_path, receiver.url, more=("--store", target)) as service:
            eventually(lambda: len(told(receiver)), lambda count: count == 4)
            assert restart(service) == 202
            settled(service)
            eventually(lambda: len(told(receiver)), lambda count: count == 6)
            expected = [
                entry["event"]
                for entry in reversed(service.ask("GET", "/history?limit=1000")[1]["history"])
                if entry["what"] in ("executed-silently", "completed")
            ]
        assert list(told(receiver).values()) == expected
        first, *_, last = (event["source"] for event in receiver.events)
        assert first != last


def test_check_lists_what_is_wrong(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.poll()
        service.stop()
    with closing(sqlite3.connect(tmp_path / "forewarn.db")) as store, store:
        store.execute(
            "INSERT INTO record VALUES ('token/x/', x'7b', 1), ('scope/new/', (SELECT"
            ' CAST(replace(CAST(value AS TEXT), \'name":"db","kind\', \'name":"new","kind\')'
            " AS BLOB) FROM record WHERE key = 'scope/db/'), 1)"
        )
    found = forewarn("store", "check", f"sqlite:///{tmp_path}/forewarn.db")
    assert found.returncode == 1
    assert found.stderr == "forewarn: 3 problems found; expected none\n"
    *_, token, vm, address = found.stdout.splitlines()
    assert token.startswith("token x: The stored token record is damaged: ")
    assert vm == "VM db is in db/db and new/db; expected one"
    assert address == "address 127.0.0.3 is in db/db and new/db; expected one"
