"""A rolling upgrade: what a newer server has written into etcd is read-only for an older one."""

import asyncio
import json
from pathlib import Path
from uuid import uuid4

import pytest

from forewarn.store.base import Write
from forewarn.store.open import open_store
from tests.e2e.service import Service, call, running
from tests.e2e.waiting import eventually
from tests.etcd_cluster import shared_etcd

pytestmark = pytest.mark.system
WEB = "scope/web/"


def replace_record(url: str, **fields: object) -> bytes:
    """Change the record of a scope as another server does, and return what is stored."""

    async def work() -> bytes:
        store = await open_store(url)
        try:
            record = await store.get(WEB)
            value = json.dumps(json.loads(record.value or b"") | fields).encode()
            await store.commit([Write(WEB, value, record.revision)])
            return value
        finally:
            await store.close()

    return asyncio.run(work())


def read_record(url: str) -> bytes | None:
    async def work() -> bytes | None:
        store = await open_store(url)
        try:
            return (await store.get(WEB)).value
        finally:
            await store.close()

    return asyncio.run(work())


def unreadable(service: Service) -> str:
    _, metrics = call("GET", f"{service.control}/metrics", headers={})
    lines = metrics.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("forewarn_records_unreadable ")]
    return line.split()[1]


def test_older_server_shows_a_newer_record_as_it_was_and_does_not_write_it(tmp_path: Path) -> None:
    """It would undo what the newer server did. Other scopes are not affected."""
    url = shared_etcd().url(f"upgrade-{uuid4().hex}")
    with running(tmp_path, "--store", url) as service:
        before = service.poll()
        service.poll(vm="db")
        newer = replace_record(url, format=2, added="by a newer version")
        eventually(lambda: unreadable(service), lambda count: count == "1.0")

        assert service.poll() == before
        status, body = service.ask("POST", "/vms/web-0/restart")
        assert (status, body["error"]) == (503, "record_unreadable")
        assert service.ask("POST", "/vms/db/restart")[0] == 202
        assert read_record(url) == newer


def test_upgraded_server_reads_what_the_older_one_could_not(tmp_path: Path) -> None:
    """Here the newer server writes the old format again, as a downgrade would."""
    url = shared_etcd().url(f"upgrade-{uuid4().hex}")
    with running(tmp_path, "--store", url) as service:
        service.poll()
        readable = read_record(url)
        replace_record(url, format=2)
        eventually(lambda: unreadable(service), lambda count: count == "1.0")
        replace_record(url, **json.loads(readable or b""))
        eventually(lambda: unreadable(service), lambda count: count == "0.0")
        assert service.ask("POST", "/vms/web-0/restart")[0] == 202
