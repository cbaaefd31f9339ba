"""Verdicts: each kind of expectation passes, and fails for the right reason."""

from typing import Any

import pytest

from tests.unit.lab.scenario.timeline_builder import TimelineBuilder


def approval(**more: Any) -> TimelineBuilder:
    return TimelineBuilder(expect="approval", of="patch", **more)


# --- approval


def test_approval_in_time_passes() -> None:
    verdict = (
        approval(by="web-0", within="60s")
        .scheduled(seconds=60)
        .approves("web-0", seconds=80)
        .ends()
    )

    assert (verdict.is_passed, verdict.reason) == (True, "after 20s")


def test_approval_one_second_late_fails() -> None:
    built = approval(within="60s").scheduled(seconds=60)

    assert built.approves("web-0", seconds=120).ends().is_passed
    late = approval(within="60s").scheduled(seconds=60).approves("web-0", seconds=121).ends()
    assert not late.is_passed
    assert (
        late.reason
        == "Reboot of web-0 (00000000), Scheduled at +1m, was approved by a VM after 1m1s"
    )


def test_approval_too_soon_fails() -> None:
    """Who approves before it can have drained has not drained."""
    assert (
        approval(after="10s").scheduled(seconds=60).approves("web-0", seconds=70).ends().is_passed
    )
    soon = approval(after="10s").scheduled(seconds=60).approves("web-0", seconds=69).ends()

    assert (
        soon.reason
        == "web-0 approved Reboot of web-0 (00000000) too soon: 9s after it was Scheduled, at +1m9s"
    )


def test_real_clock_accepts_an_approval_a_second_early() -> None:
    """As it may be a second late: reading the clock takes time."""
    assert (
        approval(rate=60, is_real=True, after="2m")
        .scheduled(seconds=60)
        .approves("web-0", seconds=61)
        .ends()
        .is_passed
    )
    soon = (
        approval(rate=60, is_real=True, after="2m")
        .scheduled(seconds=60)
        .approves("web-0", seconds=60.9)
        .ends()
    )

    assert "too soon" in soon.reason


def test_approval_by_another_vm_fails_and_names_it() -> None:
    verdict = (
        approval(by="web-0", within="60s")
        .scheduled(seconds=60)
        .approves("web-1", seconds=70)
        .ends()
    )

    assert not verdict.is_passed
    assert verdict.reason.endswith("was not approved by web-0 in time: web-1 approved it at +1m10s")


@pytest.mark.parametrize(("by", "first", "second"), [("own", True, True), ("leader", True, False)])
def test_own_is_any_named_vm_and_leader_the_first(by: str, first: bool, second: bool) -> None:
    def by_vm(name: str) -> bool:
        built = approval(by=by).scheduled(seconds=60, resources=("web-0", "web-1"))
        return built.approves(name, seconds=70).ends().is_passed

    assert (by_vm("web-0"), by_vm("web-1")) == (first, second)


def test_refused_approval_does_not_count() -> None:
    assert (
        not approval()
        .scheduled(seconds=60)
        .approves("web-0", seconds=70, status=500)
        .ends()
        .is_passed
    )


def test_reason_says_how_approvals_were_refused() -> None:
    """So a reader sees at once that the software did approve, and what was wrong with it."""
    error = '{"error": "StartRequests is missing"}'
    built = approval(by="web-0", within="4m").scheduled(seconds=60)
    for second in range(19):
        built.approves("web-0", seconds=61 + second, status=400, response_body=error)
    built.approves("web-1", seconds=90, status=500)

    assert built.approves("web-0", seconds=541).ends().reason == (
        "Reboot of web-0 (00000000), Scheduled at +1m, was approved by web-0 after 8m1s;"
        " 19 approvals were refused with 400: StartRequests is missing"
    )


def test_refused_approvals_are_mentioned_even_if_it_passes() -> None:
    built = approval(by="web-0").scheduled(seconds=60)
    built.approves("web-0", seconds=61, status=429, faults=("status",))
    built.approves("web-0", seconds=62, status=0)

    assert built.approves("web-0", seconds=63).ends().reason == (
        "after 3s; 1 approval got 429 from the fault `status`; 1 approval got no response"
    )


def test_approval_with_a_lost_response_counts() -> None:
    """The VM cannot know, but the event has heard it."""
    built = approval(by="web-0").scheduled(seconds=60)

    assert built.change("approved", seconds=70, by="vm web-0", detail="web-0").ends().is_passed


def test_approval_on_behalf_of_a_vm_is_not_the_vms() -> None:
    built = approval(by="web-0").scheduled(seconds=60)

    assert not built.change("approved", seconds=70, by="scenario", detail="web-0").ends().is_passed


def test_start_without_approval_fails() -> None:
    built = approval().scheduled(seconds=60).change("started", seconds=960)

    assert (
        built.ends().reason
        == "Reboot of web-0 (00000000) was Started at +16m without approval by a VM"
    )


def test_cancelled_event_needs_no_approval() -> None:
    built = approval(within="60s").scheduled(1, seconds=60).change("canceled", 1, seconds=90)

    assert built.scheduled(2, seconds=200).approves("web-0", 2, seconds=210).ends().is_passed
    nothing = (
        approval(within="60s").scheduled(1, seconds=60).change("canceled", 1, seconds=90).ends()
    )
    assert (
        nothing.reason
        == "nothing named patch was approved by a VM: no event came, or all were cancelled"
    )


def test_each_event_of_a_name_must_be_approved() -> None:
    built = (
        approval()
        .scheduled(1, seconds=60)
        .scheduled(2, seconds=120)
        .approves("web-0", 1, seconds=130)
    )

    assert (
        built.ends().reason
        == "Reboot of web-0 (00000000), Scheduled at +2m, was never approved by a VM"
    )


def test_event_of_another_scope_does_not_concern_the_vm() -> None:
    verdict = approval(by="db-0").scheduled(seconds=60).ends()

    assert "no event came" in verdict.reason


def test_operation_without_an_event_fails_with_a_reason() -> None:
    verdict = (
        approval().change("executed-silently", seconds=60, by="scenario: patch", vm="web-0").ends()
    )

    assert verdict.reason == "patch ran at +1m without an event: its scope was not polled"


def test_real_clock_gives_a_second_of_grace_and_says_so() -> None:
    """At a rate of 60, one real second is a minute of the scenario: without the grace, the verdict
    would look wrong.
    """
    fast = TimelineBuilder(
        expect="approval", of="patch", within="60s", rate=60.0, is_real=True
    ).scheduled(seconds=1)

    assert fast.approves("web-0", seconds=3).ends().reason == (
        "after 2m (limit 60s, and 1m of grace at rate 60)"
    )
    slow = TimelineBuilder(
        expect="approval", of="patch", within="60s", rate=60.0, is_real=True
    ).scheduled(seconds=1)
    assert not slow.approves("web-0", seconds=3.1).ends().is_passed


def test_polling_every_second_passes_on_the_real_clock() -> None:
    """Each poll comes a little more than a second after the last one: the request itself takes
    time.
    """
    real = TimelineBuilder(expect="polls", vm="web-0", every="1s", is_real=True)
    for number in range(1, 5):
        real.polls("web-0", seconds=number * 1.02)
    assert real.ends(5).is_passed

    late = (
        TimelineBuilder(expect="polls", vm="web-0", every="1s", is_real=True)
        .polls("web-0", seconds=1)
        .polls("web-0", seconds=3.1)
    )
    assert not late.ends(4).is_passed
    virtual = (
        TimelineBuilder(expect="polls", vm="web-0", every="1s")
        .polls("web-0", seconds=1)
        .polls("web-0", seconds=2.02)
    )
    assert not virtual.ends(3).is_passed, "in virtual time nothing is late by chance"


# --- what must not be


def test_no_approval_fails_with_vm_and_time() -> None:
    silent = (
        TimelineBuilder(expect="no-approval", of="patch", by="web-1")
        .scheduled(seconds=60)
        .approves("web-0", seconds=70)
    )
    assert silent.ends().is_passed

    loud = silent.approves("web-1", seconds=80).ends()
    assert (loud.is_passed, loud.reason) == (
        False,
        "web-1 approved Reboot of web-0 (00000000) at +1m20s",
    )


def test_no_approval_needs_an_event() -> None:
    assert (
        TimelineBuilder(expect="no-approval", of="patch").ends().reason
        == "there was no event named patch"
    )


def test_foreign_approval_fails() -> None:
    built = (
        TimelineBuilder(expect="no-foreign-approval")
        .scheduled(seconds=60)
        .approves("web-0", seconds=70)
    )
    assert built.ends().is_passed

    verdict = built.approves("web-1", seconds=80).ends()
    assert (
        verdict.reason
        == "web-1 approved Reboot of web-0 (00000000) at +1m20s, which does not name it"
    )


def test_foreign_approvals_of_other_vms_are_ignored() -> None:
    built = (
        TimelineBuilder(expect="no-foreign-approval", vms=["web-0"])
        .scheduled(seconds=60)
        .approves("web-1", seconds=70)
    )

    assert built.ends().is_passed


# --- order, starts


def test_approvals_out_of_order_fail() -> None:
    both = TimelineBuilder(expect="order", vms=["web-0", "web-1"]).scheduled(seconds=60)
    assert (
        both.approves("web-0", seconds=70)
        .approves("web-1", seconds=71)
        .approves("web-0", seconds=72)
        .ends()
        .is_passed
    )

    wrong = (
        TimelineBuilder(expect="order", vms=["web-0", "web-1"])
        .scheduled(seconds=60)
        .approves("web-1", seconds=70)
        .ends()
    )
    assert wrong.reason == "web-1 approved Reboot of web-0 (00000000) at +1m10s, before web-0"
    half = (
        TimelineBuilder(expect="order", vms=["web-0", "web-1"])
        .scheduled(seconds=60)
        .approves("web-0", seconds=70)
        .ends()
    )
    assert half.reason == "web-1 never approved"


def two(kind: str) -> TimelineBuilder:
    return (
        TimelineBuilder(expect=kind, of="patch")
        .scheduled(1, seconds=60)
        .scheduled(2, seconds=60)
        .change("started", 1, seconds=70)
    )


def test_one_at_a_time_means_no_overlap() -> None:
    assert (
        two("one-at-a-time")
        .change("completed", 1, seconds=80)
        .change("started", 2, seconds=80)
        .ends()
        .is_passed
    )

    verdict = two("one-at-a-time").change("started", 2, seconds=75).ends()
    assert verdict.reason.startswith("Reboot of web-0 (00000000) was Started at +1m15s, while")


def test_together_means_at_the_same_time() -> None:
    assert two("together").change("started", 2, seconds=70).ends().is_passed

    assert (
        "was Started at +1m20s, but"
        in two("together").change("started", 2, seconds=80).ends().reason
    )
    assert "expected two or more" in two("together").ends().reason


# --- documents, courses


def document(**shows: str) -> TimelineBuilder:
    return TimelineBuilder(expect="document", vm="web-0", shows=shows, within="60s")


def test_document_must_be_shown_to_that_vm_in_time() -> None:
    verdict = (
        document(event="patch", status="Scheduled")
        .scheduled(seconds=60)
        .polls("web-0", (1, "Scheduled"), seconds=62)
    )
    assert verdict.ends().reason == "after 2s"

    other = (
        document(event="patch")
        .scheduled(seconds=60)
        .polls("web-1", (1, "Scheduled"), seconds=62)
        .ends()
    )
    assert "was not shown like this in time" in other.reason


def test_document_failure_names_what_was_shown() -> None:
    built = (
        document(event="patch", status="Started")
        .scheduled(seconds=60)
        .polls("web-0", (1, "Scheduled"), seconds=62)
    )

    assert built.ends().reason.endswith(
        "was not shown like this in time: shown as Scheduled Reboot since +1m2s"
    )


def test_unnamed_document_counts_from_the_start() -> None:
    assert (
        document(type="Reboot")
        .scheduled(seconds=20)
        .polls("web-0", (1, "Scheduled"), seconds=50)
        .ends()
        .is_passed
    )

    late = (
        document(type="Reboot")
        .scheduled(seconds=50)
        .polls("web-0", (1, "Scheduled"), seconds=70)
        .ends()
    )
    assert late.reason == "the first one was shown at +1m10s"
    assert (
        document(type="Freeze")
        .polls("web-0", (1, "Scheduled"), seconds=5)
        .ends()
        .reason.startswith("no document of web-0")
    )


def test_event_reaches_its_state_or_another_ending() -> None:
    built = TimelineBuilder(
        expect="event", of="patch", becomes="completed", within="30m"
    ).scheduled(seconds=60)
    assert (
        built.change("started", seconds=70).change("completed", seconds=670).ends().reason
        == "after 10m10s"
    )

    other = (
        TimelineBuilder(expect="event", of="patch", becomes="completed")
        .scheduled(seconds=60)
        .change("canceled", seconds=90)
        .ends()
    )
    assert other.reason == "Reboot of web-0 (00000000) was canceled at +1m30s instead"


def test_unfinished_event_is_described_by_its_last_change() -> None:
    built = (
        TimelineBuilder(expect="event", of="patch", becomes="completed")
        .scheduled(seconds=60)
        .change("started", seconds=70)
    )

    assert built.ends().reason.endswith("was never completed: started at +1m10s")


@pytest.mark.parametrize(
    ("shows", "words"),
    [
        ({}, "web-0 is shown an event"),
        ({"event": "patch"}, "web-0 is shown an event patch"),
        ({"event": "patch", "status": "Started"}, "web-0 is shown a Started event patch"),
    ],
)
def test_document_expectation_is_described(shows: dict[str, str], words: str) -> None:
    assert TimelineBuilder(expect="document", vm="web-0", shows=shows).ends().expected == words


# --- polls, recovery


def test_gap_between_polls_counts_up_to_the_end() -> None:
    polling = TimelineBuilder(expect="polls", vm="web-0", every="30s")
    for seconds in range(0, 120, 30):
        polling.polls("web-0", seconds=seconds)
    assert polling.ends(120).reason == "4 polls"

    assert polling.ends(121).reason == "it did not poll from +1m30s to +2m1s"


def test_deleted_vm_need_not_poll() -> None:
    built = TimelineBuilder(expect="polls", vm="web-0", every="30s").change(
        "left", seconds=10, vm="web-0"
    )

    assert built.ends().is_passed


def recovery() -> TimelineBuilder:
    return TimelineBuilder(expect="recovery", vm="web-0", within="10s").polls(
        "web-0", seconds=60, status=500
    )


def test_recovery_means_retrying_until_a_good_response() -> None:
    assert (
        recovery()
        .polls("web-0", seconds=70, status=500)
        .polls("web-0", seconds=80)
        .ends()
        .is_passed
    )

    assert (
        "it did not retry after the response 500 at +1m until +1m11s"
        in recovery().polls("web-0", seconds=71).ends().reason
    )
    assert recovery().ends(65).reason == "it did not retry after the response 500 at +1m"


def test_faulty_response_is_bad_but_a_late_one_is_not() -> None:
    stale = TimelineBuilder(expect="recovery", vm="web-0", within="10s").polls(
        "web-0", seconds=60, faults=("stale",)
    )
    assert stale.ends(65).reason == "it did not retry after the response 200 (stale) at +1m"

    late = TimelineBuilder(expect="recovery", vm="web-0", within="10s").polls(
        "web-0", seconds=60, faults=("latency",)
    )
    assert late.ends().reason == "web-0 never got a bad response"
