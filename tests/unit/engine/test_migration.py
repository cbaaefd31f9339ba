"""What version 0.2 stored is read by this version."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.entry import decode_all
from forewarn.engine.migration import UPGRADE, upgrade_entry, upgrade_record
from forewarn.history.webhooks import Cursor
from forewarn.store.base import HistoryValue, Snapshot
from forewarn.store.sqlite import SqliteStore
from forewarn.web.service import build_service

OLD = Path(__file__).parents[2] / "input" / "store-0.2.db"
CAMPAIGN: dict[str, Any] = {
    "id": "c1",
    "wish": {"type": "Reboot", "patterns": ["h*"]},
    "started_at": "2026-11-16T18:25:24Z",
    "total": 2,
    "under_way": [
        {"host": "h1", "taken_at": "2026-11-16T18:25:24Z", "trouble": "lost", "checker": "server-1"}
    ],
    "troubles": [{"host": "h0", "why": "failed", "is_failed": True}],
    "is_braked": True,
    "why": "h0 failed",
    "asked_as": "A1",
}


class Upgraded(NamedTuple):
    snapshot: Snapshot
    history: tuple[HistoryValue, ...]


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Upgraded:
    """Records and history entries of the old file, after it was opened."""
    path = shutil.copy(OLD, tmp_path_factory.mktemp("old") / "store.db")

    async def read() -> Upgraded:
        store = await SqliteStore.open(str(path), upgrade=UPGRADE)
        try:
            return Upgraded(await store.load(), await store.history())
        finally:
            await store.close()

    return asyncio.run(read())


def value_of(snapshot: Snapshot, key: str) -> dict[str, Any]:
    (value,) = [record.value for record in snapshot.records if record.key == key]
    decoded: dict[str, Any] = json.loads(value or b"")["value"]
    return decoded


def test_every_old_entry_is_readable(upgraded: Upgraded) -> None:
    """Clients keep their position: number N of before is N * 4096 now."""
    entries = [entry for value in upgraded.history for entry in decode_all(value)]

    assert [entry.number for entry in entries] == [number * 4096 for number in range(1, 40)]
    entry = entries[13]
    assert (entry.what, entry.by, entry.scope) == ("scheduled", "token admin-1", "gone")
    assert entry.event == "078BA500-71E2-4385-B9D7-E67765667CCE"
    assert (entry.detail, entry.resources) == ("Terminate of gone", ("gone",))
    assert entry.not_before is not None


def test_a_service_reads_every_upgraded_record(tmp_path: Path) -> None:
    """Each record is decoded by the codec of its feature."""
    path = shutil.copy(OLD, tmp_path / "store.db")

    async def run() -> None:
        store = await SqliteStore.open(str(path), upgrade=UPGRADE)
        service = build_service(store, RealClock(), Timing(), lambda: "")
        try:
            await service.engine.load()
            assert service.engine.unreadable == {}
            assert sorted(service.engine.board.scopes) == ["db", "solo", "web"]
            assert [token.name for token in service.tokens.all()] == ["admin-1", "viewer-1"]
            (webhook,) = service.engine.records.values("webhook")
            assert webhook[1] == Cursor(39 * 4096)
            (campaign,) = service.engine.records.values("campaign")
            assert campaign[1].in_progress[0].host == "host-a"
        finally:
            await service.engine.close()

    asyncio.run(run())


def test_scopes_tokens_and_answers_are_kept(upgraded: Upgraded) -> None:
    """Announced events, tokens and answers to retries survive the upgrade."""
    snapshot = upgraded.snapshot

    kinds = sorted(record.key.partition("/")[0] for record in snapshot.records)
    assert kinds == [
        *("answer", "campaign", "campaign-hosts", "fleet", "floor", "identity"),
        *("scope", "scope", "scope", "token", "token", "webhook"),
    ]
    assert len(value_of(snapshot, "scope/web/")["events"]) == 2


def test_a_running_campaign_continues(upgraded: Upgraded) -> None:
    campaign = value_of(upgraded.snapshot, "campaign/c1/")

    assert campaign["spec"]["patterns"] == ["host-[ab]"]
    assert campaign["operation_id"] == "192E65A0-D7B4-47FF-A556-E3FFE8B42795"
    assert [run["host"] for run in campaign["in_progress"]] == ["host-a"]
    assert campaign["total"] == 2


def test_a_webhook_continues_after_what_it_delivered(
    upgraded: Upgraded,
) -> None:
    """The end of the old claim is not a pause after a failure."""
    cursor = value_of(upgraded.snapshot, "webhook/b3649b7a1fb46221253664b51fc48ca5/")

    assert cursor == {"number": 39 * 4096, "failures": 0, "rejections": 0}


def upgraded_campaign(**fields: Any) -> dict[str, Any]:
    old = json.dumps({"format": 1, "value": CAMPAIGN | fields}).encode()
    new: dict[str, Any] = json.loads(upgrade_record("campaign/c1/", old) or b"")
    assert new["format"] == 1
    campaign: dict[str, Any] = new["value"]
    return campaign


def test_campaign_fields_get_their_new_names() -> None:
    campaign = upgraded_campaign()

    assert campaign == {
        "id": "c1",
        "spec": {"type": "Reboot", "patterns": ["h*"]},
        "started_at": "2026-11-16T18:25:24Z",
        "total": 2,
        "in_progress": [{"host": "h1", "taken_at": "2026-11-16T18:25:24Z", "problem": "lost"}],
        "skipped_hosts": [{"host": "h0", "why": "failed", "is_failed": True}],
        "paused_by_failure": True,
        "pause_reason": "h0 failed",
        "operation_id": "A1",
    }


@pytest.mark.parametrize(
    ("fields", "total"),
    [
        ({"total": 5000}, 5000),
        ({"total": 8000, "cursor": 10}, 5000),
        ({"total": 8000, "cursor": 6000}, 6000),
        ({"total": 8000, "ended_at": "2026-11-16T18:25:24Z"}, 8000),
    ],
)
def test_a_live_campaign_is_limited_to_5000_hosts(fields: dict[str, Any], total: int) -> None:
    """Its list of hosts is one record now. Hosts that were considered already still count."""
    assert upgraded_campaign(**fields)["total"] == total
    assert upgrade_record("campaign-hosts/c1/0", b"[]") == b"[]"
    assert upgrade_record("campaign-hosts/c1/1", b"[]") is None


@pytest.mark.parametrize(("old", "new"), [("ordered", "executed-silently"), ("amended", "updated")])
def test_change_kinds_get_their_new_names(old: str, new: str) -> None:
    note = {"at": "2026-11-16T18:25:24Z", "by": "", "scope": "web", "change": {"what": old}}

    (entry,) = json.loads(upgrade_entry(json.dumps(note).encode()))

    assert entry == {"at": "2026-11-16T18:25:24Z", "by": "", "scope": "web", "what": new}


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"7", b"{}", b'{"format":9,"x":1}'])
def test_unreadable_values_are_kept_as_they_are(value: bytes) -> None:
    """A damaged record stays unreadable: guessing would hide the damage."""
    for key in ("campaign/c1/", "webhook/a/", "scope/web/", "identity"):
        assert upgrade_record(key, value) == value
    assert upgrade_entry(value) == value
    assert decode_all(HistoryValue(1, upgrade_entry(value))) == []
