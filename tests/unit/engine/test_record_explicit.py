"""What a stored record says for itself, so that a later version that chooses other defaults does
not change what is stored.
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.auth.tokens import TOKEN, Role, Token
from forewarn.core import command as ask
from forewarn.core.event import Cause, Event, EventType, Impact, ImpactState, Source, Status
from forewarn.core.fleet import (
    Approval,
    AutoApprove,
    Budget,
    Instance,
    Policy,
    Power,
    Scope,
    ScopeKind,
    Vm,
)
from forewarn.engine.record import HOSTS, SCOPE, SEEN, Hosts, RecordCodec
from forewarn.errors import StoreUnusable
from forewarn.history.webhooks import CURSOR, Cursor
from forewarn.web.control.idempotency import CODEC, StoredResponse
from tests.builders import MINUTE, NOON, maintain, run, scope_of

# These bytes were written by the first version, which left every default out. They are on disks.
SCOPE_WRITTEN_BY_1 = (
    b'{"format":1,"value":{"name":"web","kind":"availability-set","policy":{},"vms":[{"name":"web-0","host":"host-a"},'
    b'{"name":"web-1","update_domain":1,"host":"host-b","instance":{"size":"m1"}}],"events":[{'
    b'"id":"00000000-0000-4000-8000-000000000001","type":"Reboot","status":"Started","source":"User","cause":"user-restart",'
    b'"resources":["web-0"],"update_domain":0,"not_before":"2026-03-04T12:15:00Z","duration_seconds":-1,'
    b'"description":"Virtual machine is going to be restarted as requested by authorized user.",'
    b'"created_at":"2026-03-04T12:00:00Z","started_at":"2026-03-04T12:00:00Z","approvals":["web-1"],"is_approved":true}],'
    b'"impacts":[{"event_id":"00000000-0000-4000-8000-000000000001","vm":"web-0","type":"Reboot","cause":"user-restart",'
    b'"due_at":"2026-03-04T12:00:15Z","state":"claimed","claimed_by":"w1","tries":1}],"incarnation":3,'
    b'"seen_at":"2026-03-04T11:59:00Z"}}'
)
PLAIN_SCOPE_WRITTEN_BY_1 = (
    b'{"format":1,"value":{"name":"db","vms":[{"name":"db","host":"host-a"}]}}'
)
BUDGET_WRITTEN_BY_1 = (
    b'{"format":1,"value":{"name":"db","policy":{"approval":"all","max_unavailable":{"number":2}}}}'
)
POLICY = Policy(
    approval=Approval.ANY,
    auto_approve=(AutoApprove.ALL_INSTANCES_DOWN,),
    terminate_notice=timedelta(minutes=5),
    couple_terminates=False,
    user_operations_max=100,
    max_unavailable=None,
    failed_hardware=EventType.REBOOT,
)
"""What the first version meant by a policy that says nothing.

Written out: this must not follow a default of today.
"""


def test_scope_written_by_the_first_version_means_what_it_meant() -> None:
    """An upgrade must not change the policy, the owner's choices or a claim of anything that is
    stored.
    """
    scope = SCOPE.decode(SCOPE_WRITTEN_BY_1)
    untold = Instance(computer_name="", os_type="Linux", tags=())

    assert scope == Scope(
        name="web",
        kind=ScopeKind.AVAILABILITY_SET,
        policy=POLICY,
        vms=(
            Vm("web-0", "", 0, "host-a", Power.RUNNING, "", 0, untold),
            Vm(
                "web-1", "", 1, "host-b", Power.RUNNING, "", 0, Instance(size="m1", os_type="Linux")
            ),
        ),
        events=(
            Event(
                id="00000000-0000-4000-8000-000000000001",
                type=EventType.REBOOT,
                status=Status.STARTED,
                source=Source.USER,
                cause=Cause.RESTART,
                resources=("web-0",),
                update_domain=0,
                not_before=datetime(2026, 3, 4, 12, 15, tzinfo=UTC),
                duration_seconds=-1,
                description="Virtual machine is going to be restarted as requested by authorized"
                " user.",
                created_at=NOON,
                host="",
                started_at=NOON,
                approvals=("web-1",),
                is_approved=True,
                is_timed=False,
            ),
        ),
        impacts=(
            Impact(
                event_id="00000000-0000-4000-8000-000000000001",
                vm="web-0",
                type=EventType.REBOOT,
                cause=Cause.RESTART,
                due_at=datetime(2026, 3, 4, 12, 0, 15, tzinfo=UTC),
                state=ImpactState.CLAIMED,
                claimed_by="w1",
                tries=1,
                failures=0,
                detail="",
            ),
        ),
        ended=(),
        incarnation=3,
        seen_at=NOON - MINUTE,
    )
    plain = SCOPE.decode(PLAIN_SCOPE_WRITTEN_BY_1)
    assert (plain.kind, plain.policy, plain.incarnation, plain.seen_at) == (
        ScopeKind.VM,
        POLICY,
        1,
        None,
    )
    assert SCOPE.decode(BUDGET_WRITTEN_BY_1).policy.max_unavailable == Budget(
        number=2, is_percent=False
    )


def stored(value: Any, form: Any) -> Any:
    return json.loads(form.encode(value))["value"]


def test_record_contains_default_policy_and_kind() -> None:
    """A version with other defaults must read what this one meant."""
    written = stored(SCOPE.decode(PLAIN_SCOPE_WRITTEN_BY_1), SCOPE)

    assert written["kind"] == "vm"
    assert written["policy"] == {
        "approval": "any",
        "auto_approve": ["all-instances-down"],
        "terminate_notice": "PT300S",
        "couple_terminates": False,
        "user_operations_max": 100,
        "max_unavailable": None,
        "failed_hardware": "Reboot",
        "redeploy": "live",
    }
    budget = stored(SCOPE.decode(BUDGET_WRITTEN_BY_1), SCOPE)["policy"]["max_unavailable"]
    assert budget == {"number": 2, "is_percent": False}


def test_record_contains_the_operating_system_of_a_vm() -> None:
    """Guests read it; what is not known of a VM at all stays out of its record."""
    vms = stored(SCOPE.decode(SCOPE_WRITTEN_BY_1), SCOPE)["vms"]

    assert vms[0] == {"name": "web-0", "host": "host-a"}
    assert vms[1]["instance"] == {"size": "m1", "os_type": "Linux"}


def test_large_scope_under_event_stays_about_as_small_as_it_was() -> None:
    """It is written whole at every step of its event: 248,731 bytes in the first version."""
    vms = tuple(
        Vm(
            f"web_{n}",
            f"10.0.{n // 250}.{n % 250}",
            host="host-a",
            id=f"7d0f3a51-5f0c-4d0e-9a53-{n:012x}",
        )
        for n in range(1000)
    )
    scope = run(scope_of(*vms, kind=ScopeKind.SCALE_SET), maintain("host-a"))
    scope = run(scope, ask.Tick(), at=NOON + 16 * MINUTE)

    assert len(scope.impacts) == 1000
    assert len(SCOPE.encode(scope)) < 1.2 * 248_731


NEWER = [
    (SCOPE, b'{"format":1,"value":{"name":"web","colour":"red"}}'),
    (SCOPE, b'{"format":1,"value":{"name":"web"},"colour":"red"}'),
    (SCOPE, b'{"format":1,"value":{"name":"web","policy":{"colour":"red"}}}'),
    (
        SCOPE,
        b'{"format":1,"value":{"name":"web","policy":{"max_unavailable":{"number":2,"colour":"red"}}}}',
    ),
    (SCOPE, b'{"format":1,"value":{"name":"web","vms":[{"name":"web-0","colour":"red"}]}}'),
    (
        SCOPE,
        b'{"format":1,"value":{"name":"web","vms":[{"name":"web-0","instance":{"colour":"red"}}]}}',
    ),
    (
        SCOPE,
        SCOPE_WRITTEN_BY_1.replace(b'"is_approved":true', b'"is_approved":true,"colour":"red"'),
    ),
    (SCOPE, SCOPE_WRITTEN_BY_1.replace(b'"tries":1', b'"tries":1,"colour":"red"')),
    (
        SCOPE,
        b'{"format":1,"value":{"name":"web","ended":[{"id":"E","how":"failed","at":"2026-03-04T12:00:00Z","colour":"red"}]}}',
    ),
    (HOSTS, b'{"format":1,"value":{"names":[],"colour":"red"}}'),
]


@pytest.mark.parametrize(("form", "record"), NEWER)
def test_record_with_an_unknown_field_is_rejected(form: Any, record: bytes) -> None:
    """Read and written back it would lose that member, and nobody would notice."""
    with pytest.raises(StoreUnusable, match="unknown field `colour`"):
        form.decode(record)


FEATURES: list[tuple[RecordCodec[Any], object]] = [
    (TOKEN, Token(name="ann", role=Role.VIEWER, digest="", created_at=NOON)),
    (CURSOR, Cursor(1)),
    (CODEC, StoredResponse(request="", at=NOON)),
]


@pytest.mark.parametrize(("codec", "value"), FEATURES)
def test_records_of_features_reject_unknown_fields_too(
    codec: RecordCodec[Any], value: object
) -> None:
    """A token that a newer version restricts must not be good for more on an older server."""
    newer = codec.encode(value).replace(b'"value":{', b'"value":{"colour":"red",')
    with pytest.raises(StoreUnusable, match="unknown field `colour`"):
        codec.decode(newer)


def test_what_is_written_today_is_read_back_as_it_was() -> None:
    """The new form of a record of the first version means the same as the old one."""
    for record in (SCOPE_WRITTEN_BY_1, PLAIN_SCOPE_WRITTEN_BY_1, BUDGET_WRITTEN_BY_1):
        scope = SCOPE.decode(record)
        assert SCOPE.decode(SCOPE.encode(scope)) == replace(scope, seen_at=None)
        assert scope.seen_at is None or SEEN.decode(SEEN.encode(scope.seen_at)) == scope.seen_at
    assert HOSTS.decode(b'{"format":1,"value":{"names":["a"],"digest":"d"}}') == Hosts(
        ("a",), "d", 0
    )
