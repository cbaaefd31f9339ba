"""Tests the worker with events on demand, and a clock that the test moves.

`scheduled_events` comes with `pip install 'forewarn[lab]'`. HANDLER names the module to test, as
in HANDLER=never_approves.
"""

import importlib
import os

import pytest
from handler import Handler, Worker

from forewarn.testing import Lab

NAME = "web-0"


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def handler(scheduled_events: Lab, worker: Worker) -> Handler:
    chosen: type[Handler] = importlib.import_module(os.environ.get("HANDLER", "handler")).Handler
    return chosen(worker, NAME, endpoint=scheduled_events.vm(NAME).url)


def watch(scheduled_events: Lab, handler: Handler, seconds: int) -> None:
    """Let time pass, with a poll as often as the handler wants one."""
    for _ in range(0, seconds, handler.period_seconds):
        scheduled_events.advance(seconds=handler.period_seconds)
        handler.poll()


def test_reboot_is_approved_when_the_job_is_done(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    worker.take("invoice 7")
    event = scheduled_events.vm(NAME).reboot()

    handler.poll()
    assert event.approved_by is None, "approved during a job: the job is lost"

    worker.finish()
    handler.poll()
    assert event.approved_by == NAME, "drained, but not approved"
    assert event.status == "Started"


def test_reboot_of_another_vm_is_ignored(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    event = scheduled_events.vm("web-1").reboot()

    handler.poll()
    handler.poll()

    assert event.approved_by is None, "approved an event of another VM, which may not be ready"
    assert worker.is_open


def test_worker_is_drained_before_a_spot_eviction(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    """The notice is 30 seconds."""
    event = scheduled_events.vm(NAME).preempt()

    watch(scheduled_events, handler, seconds=30)

    assert worker.is_drained, f"not drained when the VM was evicted: {event}"


def test_worker_accepts_jobs_again_after_the_event(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    event = scheduled_events.vm(NAME).freeze()
    handler.poll()
    assert not worker.is_open

    scheduled_events.advance(minutes=20)
    handler.poll()

    assert event.status == "Completed"
    assert worker.is_open


def test_worker_accepts_jobs_again_after_a_cancellation(
    scheduled_events: Lab, handler: Handler, worker: Worker
) -> None:
    worker.take("invoice 7")
    event = scheduled_events.vm(NAME).redeploy()
    handler.poll()
    assert event.status == "Scheduled", "approved during a job: nothing is left to cancel"
    event.cancel()

    handler.poll()

    assert worker.is_open


@pytest.mark.parametrize("kind", ["empty", "no-events", "truncate"])
def test_invalid_response_does_not_end_the_event(
    scheduled_events: Lab, handler: Handler, worker: Worker, kind: str
) -> None:
    worker.take("invoice 7")
    scheduled_events.vm(NAME).reboot()
    handler.poll()

    with scheduled_events.fault(kind, vm=NAME):
        handler.poll()

    assert not worker.is_open


def test_failed_approval_is_sent_again(scheduled_events: Lab, handler: Handler) -> None:
    event = scheduled_events.vm(NAME).reboot()
    scheduled_events.fault("status", vm=NAME, code=503, method="POST", requests=2)

    for _ in range(3):
        handler.poll()

    assert event.approved_by == NAME, "an approval was lost and not sent again"
