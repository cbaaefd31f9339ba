"""What the worker owes its VM, tested in a moment: events on demand, and a clock that the test
moves.

`scheduled_events` comes with `pip install 'forewarn[server]'`. HANDLER names the module to test, as
in HANDLER=never_approves.
"""

import importlib
import os

import pytest
from handler import Handler, Worker

from forewarn.lab import Lab

NAME = "web-0"


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def handler(scheduled_events: Lab, worker: Worker) -> Handler:
    chosen: type[Handler] = importlib.import_module(os.environ.get("HANDLER", "handler")).Handler
    return chosen(worker, NAME, endpoint=scheduled_events.vm(NAME).url)


def watch(scheduled_events: Lab, handler: Handler, seconds: int) -> None:
    """Let the time pass, with a look as often as the handler wants one."""
    for _ in range(0, seconds, handler.period_seconds):
        scheduled_events.advance(seconds=handler.period_seconds)
        handler.look()


def test_a_reboot_is_approved_when_the_job_in_hand_is_done(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    worker.take("invoice 7")
    event = scheduled_events.vm(NAME).reboot()

    handler.look()
    assert event.approved_by is None, "approved with a job in hand: it is lost"

    worker.finish()
    handler.look()
    assert event.approved_by == NAME, "drained, but not approved: the VM waits for nothing"
    assert event.status == "Started"


def test_a_neighbours_reboot_is_the_neighbours_business(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    event = scheduled_events.vm("web-1").reboot()

    handler.look()
    handler.look()

    assert event.approved_by is None, "approved what befalls another VM, which may not be ready"
    assert worker.is_open


def test_a_spot_eviction_finds_the_worker_drained(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    """It gives 30 seconds."""
    event = scheduled_events.vm(NAME).preempt()

    watch(scheduled_events, handler, seconds=30)

    assert worker.is_drained, f"not drained when the VM was taken away: {event}"


def test_the_worker_takes_jobs_again_when_it_is_over(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    event = scheduled_events.vm(NAME).freeze()
    handler.look()
    assert not worker.is_open

    scheduled_events.advance(minutes=20)
    handler.look()

    assert event.status == "Completed"
    assert worker.is_open


def test_a_cancelled_maintenance_changes_nothing_for_long(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    worker.take("invoice 7")
    event = scheduled_events.vm(NAME).redeploy()
    handler.look()
    assert event.status == "Scheduled", (
        "approved with a job in hand: there is nothing left to cancel"
    )
    event.cancel()

    handler.look()

    assert worker.is_open


@pytest.mark.parametrize("kind", ["empty", "no-events", "truncate"])
def test_an_answer_that_makes_no_sense_is_no_all_clear(
    scheduled_events: Lab, handler: Handler, worker: Worker, kind: str
) -> None:
    worker.take("invoice 7")
    scheduled_events.vm(NAME).reboot()
    handler.look()

    with scheduled_events.fault(kind, vm=NAME):
        handler.look()

    assert not worker.is_open


def test_an_approval_that_was_not_heard_is_given_again(
    scheduled_events: Lab, handler: Handler
) -> None:
    event = scheduled_events.vm(NAME).reboot()
    scheduled_events.fault("status", vm=NAME, code=503, method="POST", requests=2)

    for _ in range(3):
        handler.look()

    assert event.approved_by == NAME, "an approval was lost, and not given again"
