"""Scopes and hosts as stored bytes."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from forewarn.core.event import Cause, Ended, EndReason, EventType, Impact, ImpactState
from forewarn.core.fleet import Instance, Policy, Power, Scope, ScopeKind, Vm
from forewarn.engine.record import HOSTS, SCOPE, SEEN, Hosts
from forewarn.errors import StoreUnusable
from tests.unit.wire.build import NOT_BEFORE, reboot

FULL = Scope(
    name="web",
    kind=ScopeKind.SCALE_SET,
    policy=Policy(terminate_notice=None, auto_approve=()),
    vms=(
        Vm(
            "web_0",
            address="10.0.0.1",
            power=Power.DEALLOCATED,
            instance=Instance(tags=(("a", "b"), ("c", "d"))),
        ),
    ),
    events=(replace(reboot(), started_at=NOT_BEFORE, approvals=("web_0",), is_approved=True),),
    impacts=(
        Impact(
            event_id="E1",
            vm="web_0",
            type=EventType.REBOOT,
            cause=Cause.RESTART,
            due_at=NOT_BEFORE,
            state=ImpactState.CLAIMED,
            claimed_by="w1",
            tries=2,
            detail="slow",
        ),
    ),
    ended=(Ended("E0", EndReason.FAILED, datetime(2026, 3, 4, 12, 0, 0, 123456, tzinfo=UTC)),),
    incarnation=279,
    seen_at=NOT_BEFORE + timedelta(microseconds=1),
)


def test_a_scope_comes_back_from_its_record_as_it_was() -> None:
    """The record is all that survives a restart: to the microsecond, with every claim. Polls have
    their own.
    """
    assert SCOPE.decode(SCOPE.encode(FULL)) == replace(FULL, seen_at=None)
    assert FULL.seen_at is not None
    assert SEEN.decode(SEEN.encode(FULL.seen_at)) == FULL.seen_at


def test_a_record_is_json_with_its_format_first() -> None:
    """An operator may read the store by hand, and the next version must be able to tell what it
    finds.
    """
    assert SCOPE.encode(Scope(name="web")).startswith(b'{"format":1,"value":{"name":"web",')


def test_a_record_written_today_can_be_read_for_ever() -> None:
    """These bytes are on disks: if this test must change, the format number must too."""
    stored = (
        b'{"format":1,"value":{"name":"web","kind":"scale-set","policy":{"terminate_notice":null,"approval":"all"},"vms":[{"name":"web_0",'
        b'"update_domain":3}],"events":[{"id":"E1","type":"Reboot","status":"Scheduled","source":"User","cause":"user-restart",'
        b'"resources":["web_0"],"update_domain":3,"not_before":"2021-07-22T04:50:17Z","duration_seconds":-1,"description":"",'
        b'"created_at":"2021-07-22T04:50:17Z"}],"incarnation":5,"seen_at":"2021-07-22T04:50:17Z"}}'
    )

    scope = SCOPE.decode(stored)

    assert (
        scope.name,
        scope.incarnation,
        scope.policy.terminate_notice,
        scope.vms[0].update_domain,
    ) == ("web", 5, None, 3)
    assert scope.events == (replace(reboot(resources=("web_0",)), id="E1", update_domain=3),)


def test_record_of_a_newer_format_is_rejected() -> None:
    """Guessing at a newer format would write back less than was there."""
    with pytest.raises(StoreUnusable, match="has format 2; this version reads format 1") as refused:
        SCOPE.decode(b'{"format":2,"something":"else"}')

    assert refused.value.facts == {"record": "scope", "format": 2, "format_read": 1}


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b"null",
        b"{}",
        b'{"format":"1","value":{"name":"web"}}',
        b'{"format":1}',
        b'{"format":1,"value":{}}',
        b'{"format":1,"value":{"name":"web","incarnation":"5"}}',
        b'{"format":1,"value":{"name":"\xff"}}',
        b'{"format":1,"value":' + b"[" * 100_000,
        SCOPE.encode(FULL)[:-1],
    ],
)
def test_a_damaged_record_stops_the_reader(record: bytes) -> None:
    """Half a scope must not be served as a whole one."""
    with pytest.raises(StoreUnusable, match=r"^The stored scope record is damaged: ") as refused:
        SCOPE.decode(record)

    assert refused.value.facts["record"] == "scope"


def test_hosts_come_back_from_their_record() -> None:
    """Declared hosts outlive the fleet file, and the digest tells whether the file was applied
    already.
    """
    hosts = Hosts(names=("host-a", "host-b"), digest="9f86d081")

    assert json.loads(HOSTS.encode(hosts)) == {
        "format": 1,
        "value": {"names": ["host-a", "host-b"], "digest": "9f86d081", "incarnation_floor": 0},
    }
    assert HOSTS.decode(HOSTS.encode(hosts)) == hosts


def test_scope_record_is_rejected_as_a_hosts_record() -> None:
    """The same stamp guards both kinds."""
    with pytest.raises(StoreUnusable, match="The stored hosts record has format 7"):
        HOSTS.decode(b'{"format":7}')
    with pytest.raises(StoreUnusable, match="The stored hosts record is damaged"):
        HOSTS.decode(b'{"format":1,"value":{"names":"host-a"}}')
