"""Scheduled Events as Azure Event Grid delivers them."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Instance, Scope, ScopeKind, Vm
from forewarn.engine.entry import Entry
from forewarn.history.event_grid import encode, is_event

AT = datetime(2030, 1, 31, 12, tzinfo=UTC)
EVENT = "4CAEA225-A741-474D-A72E-428C86FCD853"
GROUP = "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/shop"
SCALE_SET = f"{GROUP}/providers/Microsoft.Compute/virtualMachineScaleSets/web"
UNDECLARED = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/forewarn"
SCOPE = Scope(
    name="web",
    kind=ScopeKind.SCALE_SET,
    vms=(
        Vm(
            "web_0",
            instance=Instance(
                location="rack-3",
                resource_group="shop",
                subscription="8d10da13-8125-4ba9-a717-bf7490507b3d",
            ),
        ),
    ),
)
SCHEDULED = Entry(
    number=42,
    at=AT,
    by="operator",
    what=ChangeKind.SCHEDULED,
    scope="web",
    event=EVENT,
    type=EventType.FREEZE,
    cause=Cause.LIVE_MIGRATION,
    resources=("web_0", "web_1"),
    not_before=datetime(2030, 1, 31, 12, 15, tzinfo=UTC),
    description="Paused.",
    duration_seconds=5,
)


def event_of(entry: Entry, scope: Scope | None = SCOPE) -> dict[str, Any]:
    (event,) = json.loads(encode("7b1c-42", entry, scope))
    return dict(event)


def properties_of(entry: Entry) -> dict[str, Any]:
    return dict(event_of(entry)["data"]["resourceInfo"]["properties"])


def test_event_has_the_published_schema() -> None:
    """Microsoft's article scheduled-events-event-grid has this example."""
    subject = f"{SCALE_SET}/providers/microsoft.maintenance/scheduledevents/{EVENT}"

    assert event_of(SCHEDULED) == {
        "id": "7b1c-42",
        "topic": "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d",
        "subject": subject,
        "data": {
            "resourceInfo": {
                "id": subject,
                "name": EVENT,
                "type": "microsoft.maintenance/scheduledevents",
                "location": "rack-3",
                "properties": {
                    "EventId": EVENT,
                    "EventStatus": "Scheduled",
                    "EventType": "Freeze",
                    "ResourceType": "VirtualMachine",
                    "Resources": ["web_0", "web_1"],
                    "NotBefore": "Thu, 31 Jan 2030 12:15:00 GMT",
                    "DurationInSeconds": 5,
                    "Description": "Paused.",
                    "EventSource": "Platform",
                    "ScheduledEventApiVersion": "2020-07-01",
                },
            },
            "apiVersion": "2024-07-01",
        },
        "eventType": "Microsoft.ResourceNotifications.MaintenanceResources.ScheduledEventEmitted",
        "dataVersion": "3.0",
        "metadataVersion": "1",
        "eventTime": "2030-01-31T12:00:00Z",
    }


@pytest.mark.parametrize(
    ("what", "status"),
    [
        (ChangeKind.EXTENDED, "Scheduled"),
        (ChangeKind.STARTED, "Started"),
        (ChangeKind.COMPLETED, "Completed"),
        (ChangeKind.FAILED, "Completed"),
        (ChangeKind.CANCELED, "Canceled"),
    ],
)
def test_each_step_of_an_event_has_a_status(what: ChangeKind, status: str) -> None:
    """In the document an event just disappears; here its end is reported."""
    assert properties_of(replace(SCHEDULED, what=what))["EventStatus"] == status


def test_started_event_has_an_empty_not_before() -> None:
    started = replace(SCHEDULED, what=ChangeKind.STARTED, not_before=None)

    assert properties_of(started)["NotBefore"] == ""


def test_operation_of_a_user_has_the_source_user() -> None:
    assert properties_of(replace(SCHEDULED, cause=Cause.RESTART))["EventSource"] == "User"


@pytest.mark.parametrize(
    ("kind", "resource"),
    [
        (ScopeKind.VM, "virtualMachines/web_0"),
        (ScopeKind.AVAILABILITY_SET, "availabilitySets/web"),
        (ScopeKind.SCALE_SET, "virtualMachineScaleSets/web"),
        (ScopeKind.CLOUD_SERVICE, "cloudServices/web"),
    ],
)
def test_subject_is_the_vm_or_its_set(kind: ScopeKind, resource: str) -> None:
    """Azure attaches an event to the whole set."""
    subject = event_of(SCHEDULED, Scope(name="web", kind=kind, vms=(Vm("web_0"),)))["subject"]

    assert subject == (
        f"{UNDECLARED}/providers/Microsoft.Compute/{resource}"
        f"/providers/microsoft.maintenance/scheduledevents/{EVENT}"
    )


def test_event_of_a_deleted_vm_keeps_the_subject_of_its_set() -> None:
    """The receiver finds the end of a Terminate by the subject of its announcement."""
    group = Instance(subscription="8d10da13", resource_group="shop", location="here")
    vms = tuple(Vm(name, instance=group) for name in ("web_0", "web_1"))
    before = Scope(name="web", kind=ScopeKind.SCALE_SET, vms=vms)
    completed = replace(SCHEDULED, what=ChangeKind.COMPLETED)

    first, last = event_of(SCHEDULED, before), event_of(completed, replace(before, vms=vms[1:]))

    assert "/subscriptions/8d10da13/resourceGroups/shop/" in first["subject"]
    assert last["subject"] == first["subject"]
    assert last["data"]["resourceInfo"]["location"] == "here"


def test_event_of_a_deleted_vm_is_still_reported() -> None:
    """The scope of a standalone VM is gone when its Terminate has completed."""
    gone = event_of(replace(SCHEDULED, what=ChangeKind.COMPLETED), None)

    assert "/virtualMachines/web_0/" in gone["subject"]
    assert gone["data"]["resourceInfo"]["location"] == ""


@pytest.mark.parametrize(
    ("entry", "is_sent"),
    [
        (SCHEDULED, True),
        (replace(SCHEDULED, duration_seconds=0), True),
        (replace(SCHEDULED, what=ChangeKind.COMPLETED, duration_seconds=None), False),
        (replace(SCHEDULED, what=ChangeKind.APPROVED), False),
        (replace(SCHEDULED, what=ChangeKind.IMPACTED), False),
        (replace(SCHEDULED, what=ChangeKind.EXECUTED_SILENTLY, duration_seconds=None), False),
    ],
)
def test_only_what_azure_reports_is_sent(entry: Entry, is_sent: bool) -> None:
    """An operation without an event has no duration; Azure says nothing about it."""
    assert is_event(entry) is is_sent
