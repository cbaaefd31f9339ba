"""Model guests: they look when there is something to see, and approve as they are told."""

from typing import Any

import pytest

from tests.unit.lab.scenario.stage import WEB, changes, play, requests, scene, seconds

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


def test_a_quiet_day_has_a_poll_an_hour_and_no_more() -> None:
    """86,400 polls would say nothing that these do not; and the scope stays enabled."""
    result = play(scene(until="1d"))

    assert len(requests(result, "web-0")) == 24


def test_a_change_is_seen_at_the_next_poll_moment() -> None:
    result = play(scene(RESTART, **guest(poll="7s", approve="never")))
    moments = [seconds(entry) for entry in requests(result, "web-0")]

    phase = moments[0]
    assert 0 <= phase < 7
    assert all(round((moment - phase) % 7, 3) in (0, 7) for moment in moments)
    assert any(600 < moment <= 607 for moment in moments)


def test_an_approval_comes_its_time_after_the_event_was_seen() -> None:
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
def test_a_guest_approves_those_events_that_it_is_told_to(of: str, approvers: list[str]) -> None:
    policy = {
        "policy": {"approval": "all"}
    }  # else the first approval would start it before the others are asked
    result = play(scene(MAINTAIN, scopes=[{**BOTH, **policy}], **guest(approve="5s", of=of)))

    assert [vm for vm in ("web-0", "web-1", "web-2") if requests(result, vm, "POST")] == approvers


def test_a_guest_may_care_for_some_types_only() -> None:
    result = play(
        scene(RESTART, {**MAINTAIN, "type": "Freeze"}, scopes=[WEB], **guest(types=["Freeze"]))
    )

    assert [entry.split()[1:] for entry in changes(result, "approved")] == [["approved", "web-0"]]
    assert len(requests(result, "web-0", "POST")) == 1


def test_a_guest_that_never_approves_lets_the_time_run_out() -> None:
    result = play(scene(RESTART, **guest(approve="never")))

    assert changes(result, "approved", "started") == ["1500 started"]


def test_while_the_endpoint_errs_a_guest_asks_again_at_every_moment() -> None:
    fault = {"fault": "status", "code": 500, "vms": ["web-0"], "from": "10m", "for": "30s"}
    result = play(scene(RESTART, faults=[fault], **guest(approve="0s")))

    assert [entry.status for entry in requests(result, "web-0")].count(500) == 30
    assert 630 < seconds(requests(result, "web-0", "POST")[0]) < 632


def test_an_approval_that_was_not_heard_is_repeated() -> None:
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


def test_nothing_is_concluded_from_an_answer_that_cannot_be_read() -> None:
    fault = {"fault": "truncate", "mode": "whole", "vms": ["web-0"], "from": "10m", "for": "10s"}
    result = play(scene(RESTART, faults=[fault], **guest(approve="0s")))

    assert 610 < seconds(requests(result, "web-0", "POST")[0]) < 612


def test_while_a_fault_is_in_force_good_answers_are_not_trusted_either() -> None:
    """An event that is hidden until a minute before its time comes with no change that could wake
    anybody.
    """
    fault = {"fault": "short-notice", "seconds": 60, "vms": ["web-0"], "from": "10m"}
    result = play(scene(RESTART, faults=[fault], scopes=[WEB], **guest(approve="0s")))

    assert [round(1500 - seconds(entry)) for entry in requests(result, "web-0", "POST")] in (
        [59],
        [60],
    )


def test_nobody_polls_in_a_vm_that_is_evicted() -> None:
    result = play(scene({"at": "10m", "do": "evict", "vm": "web-0"}, until="5h"))

    assert max(seconds(entry) for entry in requests(result, "web-0")) < 700
    assert max(seconds(entry) for entry in requests(result, "web-1")) > 4 * 3600


def test_where_nobody_polls_there_is_no_guest() -> None:
    result = play(scene(RESTART, scopes=[WEB], **guest(poll="never")))

    assert requests(result, "web-0") == []
    assert changes(result, "executed_silently", "scheduled") == ["600 executed_silently web-0"]
