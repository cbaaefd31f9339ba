"""Handles that a test uses: which call gives which event, and what can be learned of it and done
with it.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import get_args

import pytest

import forewarn.testing
from forewarn.core.event import Cause, EventType, Source, Status
from forewarn.errors import Error, Invalid, WrongStatus
from forewarn.lab.fault.kinds import KINDS
from forewarn.testing.lab import Lab
from forewarn.testing.ledger import ENDINGS
from forewarn.testing.literals import (
    EventKind,
    EventSource,
    EventStatus,
    FaultKind,
    MaintenanceCause,
    MaintenanceKind,
)
from forewarn.testing.objects import LabEvent, LabVm
from tests.builders import MINUTE, NOON, SECOND
from tests.unit.testing.http_vm import HttpVm

EVENTS = {
    "freeze": ("Freeze", "Platform", "Scheduled", 15 * MINUTE, 9),
    "live_migrate": ("Freeze", "Platform", "Scheduled", 15 * MINUTE, 5),
    "reboot": ("Reboot", "Platform", "Scheduled", 15 * MINUTE, -1),
    "redeploy": ("Redeploy", "Platform", "Scheduled", 10 * MINUTE, -1),
    "preempt": ("Preempt", "Platform", "Scheduled", 30 * SECOND, -1),
    "degrade": ("Redeploy", "Platform", "Scheduled", timedelta(days=7), -1),
    "fail": ("Reboot", "Platform", "Started", timedelta(0), -1),
    "terminate": ("Terminate", "User", "Scheduled", 5 * MINUTE, -1),
    "user_restart": ("Reboot", "User", "Scheduled", 15 * MINUTE, -1),
    "user_redeploy": ("Redeploy", "User", "Scheduled", 10 * MINUTE, -1),
}


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(start=NOON) as lab:
        yield lab


@pytest.fixture
def vm(lab: Lab) -> LabVm:
    return lab.vm("web-0")


@pytest.mark.parametrize("call", EVENTS)
def test_each_method_creates_its_event_with_its_notice(vm: LabVm, call: str) -> None:
    """PROTOCOL 6.2, and what the endpoint shows of it."""
    event = getattr(vm, call)()

    shown = HttpVm(vm.url).events()
    assert (
        event.type,
        event.source,
        event.status,
        event.not_before - NOON,
        shown[0]["DurationInSeconds"],
    ) == EVENTS[call]
    assert (shown[0]["EventId"], shown[0]["EventType"], shown[0]["EventSource"]) == (
        event.id,
        event.type,
        event.source,
    )
    assert (shown[0]["Resources"], shown[0]["Description"]) == (["web-0"], event.description)


def test_live_migration_has_its_own_description(vm: LabVm) -> None:
    descriptions = [event.description for event in (vm.freeze(), vm.live_migrate())]

    assert descriptions == [
        "Host server is undergoing maintenance.",
        "Virtual machine is being paused because of a memory-preserving Live Migration operation.",
    ]


@pytest.mark.parametrize("call", [name for name in EVENTS if name != "fail"])
def test_notice_can_be_longer(vm: LabVm, call: str) -> None:
    later = NOON + timedelta(days=9)

    assert getattr(vm, call)(not_before=later).not_before == later


def test_event_starts_at_not_before_and_completes(lab: Lab, vm: LabVm) -> None:
    event = vm.reboot()

    lab.advance(15 * MINUTE - SECOND)
    assert (event.status, event.is_over) == ("Scheduled", False)
    lab.advance(seconds=1)
    assert (event.status, event.is_over) == ("Started", False)
    lab.advance(minutes=10)
    assert (event.status, event.is_over) == ("Completed", True)
    assert (event.approved_by, event.approved_at, event.approvals) == (None, None, ())


def test_approval_has_its_vm_and_time(lab: Lab, vm: LabVm) -> None:
    event = vm.reboot()
    lab.advance(minutes=3)

    assert HttpVm(vm.url).approve(event.id) == 200
    assert HttpVm(vm.url).approve(event.id) == 200

    assert (event.status, event.approved_by, event.approved_at) == (
        "Started",
        "web-0",
        NOON + 3 * MINUTE,
    )
    assert [(one.at, one.by, one.event_id) for one in lab.approvals] == [
        (NOON + 3 * MINUTE, "web-0", event.id)
    ]


def test_approval_by_another_vm_names_that_vm(lab: Lab, vm: LabVm) -> None:
    """Any VM of a set may approve for all; a test wants to know which did."""
    event = vm.reboot()
    HttpVm(lab.vm("web-1").url).approve(event.id)

    assert event.approved_by == "web-1"


@pytest.mark.parametrize("name", ["operator", "policy"])
def test_vm_named_operator_or_policy_is_still_a_vm(lab: Lab, name: str) -> None:
    """Both are legal names of a VM, and the list of approvals holds names only."""
    vm = lab.vm(name)
    event = vm.reboot()
    lab.advance(minutes=3)
    HttpVm(vm.url).approve(event.id)

    assert (event.approved_by, event.approved_at, event.approvals) == (
        name,
        NOON + 3 * MINUTE,
        (name,),
    )
    assert [(one.by, one.vm) for one in lab.approvals] == [(name, name)]


def test_operator_is_not_a_vm_named_operator(lab: Lab) -> None:
    event = lab.vm("operator").reboot()
    event.approve()

    assert (event.approved_by, event.approved_at, event.approvals) == (None, None, ("operator",))
    assert [(one.by, one.vm) for one in lab.approvals] == [("operator", "")]


def test_approval_by_the_test_is_not_a_vms(vm: LabVm) -> None:
    event = vm.reboot()
    event.approve()

    assert (event.status, event.approved_by, event.approved_at, event.approvals) == (
        "Started",
        None,
        None,
        ("operator",),
    )


def test_event_can_be_approved_on_behalf_of_a_vm(vm: LabVm) -> None:
    event = vm.reboot()
    event.approve("web-0")

    assert event.approved_by == "web-0"


def test_cancelled_event_leaves_the_document(vm: LabVm) -> None:
    event = vm.freeze()
    event.cancel()

    assert (event.status, event.is_over) == ("Canceled", True)
    assert HttpVm(vm.url).events() == []


def test_only_a_started_event_can_be_completed(vm: LabVm) -> None:
    event = vm.freeze(duration_seconds=30)
    with pytest.raises(WrongStatus):
        event.complete()
    event.approve()
    event.complete()

    assert event.status == "Completed"
    with pytest.raises(Error, match="is over"):
        event.cancel()


def test_extended_event_starts_later(lab: Lab, vm: LabVm) -> None:
    event = vm.reboot()
    event.extend(minutes=30)
    lab.advance(minutes=44)

    assert (event.not_before, event.status) == (NOON + 45 * MINUTE, "Scheduled")
    lab.advance(minutes=1)
    assert event.status == "Started"


def waiting(event: LabEvent, status: EventStatus) -> threading.Thread:
    """Somebody who waits, for as long as it takes."""

    def wait() -> None:
        with suppress(AssertionError):
            event.wait_for(status, seconds=600)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    return waiter


def test_wait_for_returns_when_the_status_comes(vm: LabVm) -> None:
    event = vm.reboot()
    waiter = waiting(event, "Started")
    HttpVm(vm.url).approve(event.id)
    waiter.join(10)

    assert not waiter.is_alive()


def test_wait_for_fails_when_the_event_is_over(vm: LabVm) -> None:
    event = vm.reboot()
    waiter = waiting(event, "Started")
    event.cancel()
    waiter.join(10)

    assert not waiter.is_alive()


def test_wait_for_a_past_status_returns(lab: Lab, vm: LabVm) -> None:
    event = vm.reboot()
    event.wait_for("Scheduled")
    lab.advance(hours=1)

    event.wait_for("Scheduled", seconds=0)
    event.wait_for("Started", seconds=0)
    event.wait_for("Completed", seconds=0)


def test_wait_for_times_out_with_a_reason(vm: LabVm) -> None:
    event = vm.reboot()
    with pytest.raises(
        AssertionError,
        match=r"waited for Started, but <Reboot .*> did not get there within 0.01 s",
    ):
        event.wait_for("Started", seconds=0.01)
    event.cancel()
    with pytest.raises(
        AssertionError, match=r"waited for Started, but <Reboot .* of web-0: Canceled, .*> is over"
    ):
        event.wait_for("Started")
    with pytest.raises(
        Invalid, match="unknown status 'Done'; expected one of Scheduled, Started, Completed"
    ):
        event.wait_for("Done")  # type: ignore[arg-type]


def test_words_of_the_types_are_those_of_the_product() -> None:
    """A word that is missing here would be an error to an editor, but not to the lab."""
    assert set(get_args(EventKind)) == set(EventType)
    assert set(get_args(MaintenanceKind)) == {"Freeze", "Reboot", "Redeploy"}
    assert get_args(EventSource) == tuple(Source)
    assert get_args(EventStatus)[:2] == tuple(Status)
    assert set(get_args(EventStatus)[2:]) == {ending.capitalize() for ending in ENDINGS}
    tags = {kind.__struct_config__.tag for kind in KINDS}
    assert set(get_args(FaultKind)) == tags
    assert set(get_args(MaintenanceCause)) < set(Cause)


def test_lab_and_fault_have_a_readable_repr(lab: Lab, vm: LabVm) -> None:
    fault = lab.fault("status", code=500)
    assert repr(Lab()) == "<Lab, not open>"
    assert repr(lab) == f"<Lab at {lab.url}: 0 events, now {NOON:%Y-%m-%dT%H:%M:%SZ}>"
    assert (repr(vm), repr(vm.host)) == ("LabVm(name='web-0')", "LabHost(name='host-0')")
    assert repr(fault) == f"<fault {fault.id}: status>"
    fault.remove()
    assert repr(fault) == f"<fault {fault.id}: over>"


@pytest.mark.parametrize("name", forewarn.testing.__all__)
def test_types_of_annotations_are_public(name: str) -> None:
    assert getattr(forewarn.testing, name).__name__ == name


def test_event_has_a_readable_repr(lab: Lab, vm: LabVm) -> None:
    event = vm.reboot()
    assert repr(event) == f"<Reboot {event.id[:8]} of web-0: Scheduled, not approved>"
    assert ": 1 event, now " in repr(lab)
    event.approve("web-0")
    assert repr(event) == f"<Reboot {event.id[:8]} of web-0: Started, approved by web-0>"


def test_same_event_is_equal(lab: Lab, vm: LabVm) -> None:
    event = vm.reboot()

    assert vm.events == lab.events == [event]
    assert (lab.vm("web-0"), lab.host("host-0")) == (vm, vm.host)
