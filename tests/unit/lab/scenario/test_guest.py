"""Model guests: when they poll, and what they approve."""

from typing import Any

import pytest

from tests.unit.lab.scenario.small_scenarios import WEB, changes, play, requests, scene, seconds

RESTART = {"at": "10m", "do": "restart", "vm": "web-0"}
MAINTAIN = {"at": "10m", "do": "maintain", "host": "host-a", "type": "Reboot"}
BOTH = {
    "name": "web",
    "kind": "availability-set",
    "vms": [
        {"name": "web-0", "host": "host-a"},
        {"name": "web-1", "host": "host-a"},
        {"name": "web-2", "host": "host-b"},
    ],
}


def guest(**entry: Any) -> dict[str, Any]:
    return {"guests": [entry]}


def test_idle_guest_polls_once_an_hour() -> None:
    """86,400 polls would say nothing that these do not; and the scope stays enabled."""
    result = play(scene(until="1d"))

    assert len(requests(result, "web-0")) == 24


def test_change_is_seen_at_the_next_poll() -> None:
    result = play(scene(RESTART, **guest(poll="7s", approve="never")))
    times = [seconds(entry) for entry in requests(result, "web-0")]

    phase = times[0]
    assert 0 <= phase < 7
    assert all(round((time - phase) % 7, 3) in (0, 7) for time in times)
    assert any(600 < time <= 607 for time in times)


def test_guest_approves_after_its_delay() -> None:
    result = play(scene(RESTART, **guest(approve="20s")))
    seen = next(
        seconds(entry) for entry in requests(result, "web-0") if "EventId" in entry.response_body
    )

    assert [round(seconds(entry) - seen, 3) for entry in requests(result, "web-0", "POST")] == [20]


@pytest.mark.parametrize(
    ("of", "approvers"),
    [
        ("own", ["web-0", "web-1"]),
        ("leader", ["web-0"]),
        ("any", ["web-0", "web-1", "web-2"]),
        ("foreign", ["web-2"]),
    ],
)
def test_guest_approves_the_events_of_its_entry(of: str, approvers: list[str]) -> None:
    policy = {"policy": {"approval": "all"}}  # else the first approval would start it
    result = play(scene(MAINTAIN, scopes=[{**BOTH, **policy}], **guest(approve="5s", of=of)))

    assert [vm for vm in ("web-0", "web-1", "web-2") if requests(result, vm, "POST")] == approvers


def test_guest_approves_only_its_types() -> None:
    result = play(
        scene(RESTART, {**MAINTAIN, "type": "Freeze"}, scopes=[WEB], **guest(types=["Freeze"]))
    )

    assert [entry.split()[1:] for entry in changes(result, "approved")] == [["approved", "web-0"]]
    assert len(requests(result, "web-0", "POST")) == 1


def test_guest_that_never_approves_waits_for_not_before() -> None:
    result = play(scene(RESTART, **guest(approve="never")))

    assert changes(result, "approved", "started") == ["1500 started"]


def test_guest_keeps_polling_while_responses_are_bad() -> None:
    fault = {"fault": "status", "code": 500, "vms": ["web-0"], "from": "10m", "for": "30s"}
    result = play(scene(RESTART, faults=[fault], **guest(approve="0s")))

    assert [entry.status for entry in requests(result, "web-0")].count(500) == 30
    assert 630 < seconds(requests(result, "web-0", "POST")[0]) < 632


def test_guest_retries_a_failed_approval() -> None:
    fault = {
        "fault": "status",
        "code": 429,
        "method": "POST",
        "vms": ["web-0"],
        "requests": 3,
        "from": "10m",
    }
    result = play(scene(RESTART, faults=[fault], **guest(approve="0s")))

    assert [entry.status for entry in requests(result, "web-0", "POST")] == [429, 429, 429, 200]


def test_guest_ignores_unreadable_responses() -> None:
    fault = {"fault": "truncate", "mode": "whole", "vms": ["web-0"], "from": "10m", "for": "10s"}
    result = play(scene(RESTART, faults=[fault], **guest(approve="0s")))

    assert 610 < seconds(requests(result, "web-0", "POST")[0]) < 612


def test_guest_keeps_polling_while_a_fault_is_active() -> None:
    """An event that is hidden until a minute before its time comes with no change that could wake
    anybody.
    """
    fault = {"fault": "short-notice", "seconds": 60, "vms": ["web-0"], "from": "10m"}
    result = play(scene(RESTART, faults=[fault], scopes=[WEB], **guest(approve="0s")))

    assert [round(1500 - seconds(entry)) for entry in requests(result, "web-0", "POST")] in (
        [59],
        [60],
    )


def test_evicted_vm_does_not_poll() -> None:
    result = play(scene({"at": "10m", "do": "evict", "vm": "web-0"}, until="5h"))

    assert max(seconds(entry) for entry in requests(result, "web-0")) < 700
    assert max(seconds(entry) for entry in requests(result, "web-1")) > 4 * 3600


def test_vm_that_never_polls_has_no_guest() -> None:
    result = play(scene(RESTART, scopes=[WEB], **guest(poll="never")))

    assert requests(result, "web-0") == []
    assert changes(result, "executed-silently", "scheduled") == ["600 executed-silently web-0"]
