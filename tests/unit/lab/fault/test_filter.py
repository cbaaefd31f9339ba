"""What a VM gets from an endpoint that misbehaves, byte by byte; and that nothing is changed while
it behaves.
"""

import asyncio
import json

import pytest

from forewarn.core.fleet import Vm
from forewarn.lab.fault.active import FAULTS_MAX
from forewarn.lab.fault.tcp import ConnectionDropped
from tests.builders import guid
from tests.unit.lab.fault.filtered import NO_EVENTS, Filtered, body, entry, run
from tests.unit.web.guest import EVENTS, TRUE, GuestResponse

APPROVAL = json.dumps({"StartRequests": [{"EventId": guid(1)}]}).encode()
HEADERS = {"content-type": "application/json; charset=utf-8", "etag": '"2"', "content-length": "37"}
INSTANCE = "/metadata/instance?api-version=2021-02-01"
REQUESTS = [
    (EVENTS, (TRUE,), "GET", b""),
    (EVENTS, (TRUE, (b"if-none-match", b'"2"')), "GET", b""),
    (EVENTS, (TRUE,), "HEAD", b""),
    (EVENTS, (TRUE,), "POST", APPROVAL),
    (EVENTS, (TRUE,), "POST", b"nonsense"),
    (EVENTS, (), "GET", b""),
    (EVENTS, (TRUE,), "PUT", b""),
    ("/metadata/scheduledevents", (TRUE,), "GET", b""),
    (EVENTS + "&api-version=2020-07-01", (TRUE,), "GET", b""),
    (INSTANCE, (TRUE,), "GET", b""),
    ("/elsewhere", (TRUE,), "GET", b""),
]


def shown(told: GuestResponse) -> tuple[int, dict[str, str], bytes]:
    return told.status, told.headers, told.body


@pytest.mark.parametrize(("target", "headers", "method", "sent"), REQUESTS)
@pytest.mark.parametrize("is_other_vm_touched", [False, True])
def test_without_a_fault_an_answer_is_not_changed_by_a_byte(
    target: str,
    headers: tuple[tuple[bytes, bytes], ...],
    method: str,
    sent: bytes,
    is_other_vm_touched: bool,
) -> None:
    async def story(guest: Filtered) -> None:
        await guest.restarts()
        if is_other_vm_touched:
            guest.add("status", code=500, vms=["web-1"])
        through = await guest.call(target, *headers, method=method, body=sent)
        guest.application = guest.inner
        assert shown(through) == shown(await guest.call(target, *headers, method=method, body=sent))

    run(story)


def test_every_request_is_recorded_with_who_what_and_the_answer() -> None:
    async def story(guest: Filtered) -> None:
        await guest.restarts()
        await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL, address="10.0.0.2")
        guest.add("status", code=503)
        await guest.poll()
        first, approval, refused = guest.transcript.entries
        assert (first.vm, first.method, first.path, first.status) == ("web-0", "GET", EVENTS, 200)
        assert (first.response_body, first.faults) == (NO_EVENTS.decode(), ())
        assert (approval.vm, approval.method, approval.status, approval.request_body) == (
            "web-1",
            "POST",
            200,
            APPROVAL.decode(),
        )
        assert (refused.status, refused.response_body, refused.faults) == (
            503,
            '{"error":"Service Unavailable"}',
            ("status",),
        )

    run(story)


def test_the_path_is_recorded_without_the_name_of_the_vm() -> None:
    async def story(guest: Filtered) -> None:
        await guest.call(f"/as/web-0{EVENTS}", TRUE)
        assert guest.transcript.entries[-1].path == EVENTS

    run(story)


def test_a_client_that_leaves_while_it_waits_is_recorded_without_an_answer() -> None:
    async def story(guest: Filtered) -> None:
        guest.is_gone.set()
        told = await guest.poll('"1"')
        assert told.status == 304
        conditional = (b"if-none-match", b'"1"')
        assert (await guest.call(EVENTS, TRUE, conditional, (b"prefer", b"wait=60"))).is_nothing
        assert guest.transcript.entries[-1].status == 0

    run(story)


def test_a_client_that_gives_up_while_its_answer_is_delayed_is_recorded_without_an_answer() -> None:
    async def story(guest: Filtered) -> None:
        await guest.restarts()
        guest.sleeps_for_good = True
        guest.add("latency", seconds=20)
        guest.is_gone.set()
        asked = f'{{"StartRequests":[{{"EventId":"{guid(1)}"}}]}}'
        told = await guest.call(EVENTS, TRUE, method="POST", body=asked.encode())
        assert told.is_nothing
        last = guest.transcript.entries[-1]
        assert (last.status, last.request_body, last.faults) == (0, asked, ("latency",))
        assert guest.place.scope.events[0].status == "Scheduled"

    run(story)


def test_a_delayed_approval_is_heard_with_its_body() -> None:
    async def story(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("latency", seconds=20)
        asked = f'{{"StartRequests":[{{"EventId":"{guid(1)}"}}]}}'
        assert (await guest.call(EVENTS, TRUE, method="POST", body=asked.encode())).status == 200
        assert guest.place.scope.events[0].status == "Started"

    run(story)


def test_a_request_that_is_cut_off_is_recorded_without_an_answer() -> None:
    """A lab that is closed cuts off what takes too long."""

    async def story(guest: Filtered) -> None:
        guest.sleeps_for_good = True
        guest.add("latency", seconds=20)
        asking = asyncio.create_task(guest.poll())
        for _ in range(20):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert guest.transcript.entries[-1].status == 0
        assert guest.transcript.entries[-1].faults == ("latency",)

    run(story)


def test_the_first_call_of_each_vm_is_slow_and_the_second_is_not() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("first-call", seconds=90)
        await guest.bodies(2)
        assert guest.slept == [90]
        await guest.poll(address="10.0.0.2")
        assert guest.slept == [90, 90]
        guest.faults.by_id.clear()
        guest.add("first-call", seconds=30)
        await guest.bodies(2)
        assert guest.slept == [90, 90, 30]

    run(story)


def test_latencies_add_up_and_the_answer_is_as_it_was() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("latency", seconds=2)
        guest.add("latency", seconds="0.5")
        assert (await guest.poll()).body == NO_EVENTS
        assert guest.slept == [2, 0.5]

    run(story)


def test_a_late_answer_may_still_be_waited_for() -> None:
    """A delay is no reason to answer a wait at once."""

    async def story(guest: Filtered) -> None:
        guest.add("latency", seconds=2)
        waiting = asyncio.create_task(
            guest.call(EVENTS, TRUE, (b"if-none-match", b'"1"'), (b"prefer", b"wait=60"))
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        await guest.restarts()
        assert (await waiting).body == body(2, entry())

    run(story)


def test_a_refused_request_is_dropped_without_a_byte_and_never_heard() -> None:
    async def story(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("refuse")
        told = await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)
        assert told.is_nothing
        assert guest.connection is not None
        assert guest.connection.end == "reset"
        assert guest.place.scope.events[0].approvals == ()
        assert guest.transcript.entries[-1].status == 0

    run(story)


@pytest.mark.parametrize("kind", ["refuse", "reset", "truncate"])
def test_a_caller_without_a_connection_is_told_that_it_was_dropped(kind: str) -> None:
    async def story(guest: Filtered) -> None:
        guest.connection = None
        guest.add(kind)
        with pytest.raises(ConnectionDropped):
            await guest.poll()
        assert guest.transcript.entries[-1].faults == (kind,)

    run(story)


@pytest.mark.parametrize("code", [404, 410, 429, 500, 503])
def test_an_error_is_answered_instead_and_the_request_is_not_heard(code: int) -> None:
    async def story(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("status", code=code)
        told = await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)
        assert (told.status, list(told.json), "retry-after" in told.headers) == (
            code,
            ["error"],
            False,
        )
        assert guest.place.scope.events[0].approvals == ()

    run(story)


def test_an_error_may_say_when_to_come_again() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("status", code=429, retry_after=7)
        assert (await guest.poll()).headers["retry-after"] == "7"

    run(story)


def test_exactly_three_requests_are_touched_and_the_fourth_is_answered() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("status", code=500, requests=3)
        assert [(await guest.poll()).status for _ in range(5)] == [500, 500, 500, 200, 200]

    run(story)


def test_a_fault_begins_and_ends_by_the_clock_of_the_lab() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("status", code=500, from_="10s", for_="5s")
        seen = []
        for _ in range(4):
            seen.append((await guest.poll()).status)
            await guest.pass_time(seconds=5)
        assert seen == [200, 200, 500, 200]

    run(story)


def test_chance_gives_the_same_story_for_the_same_seed() -> None:
    def statuses(seed: int) -> list[int]:
        seen: list[int] = []

        async def story(guest: Filtered) -> None:
            guest.add("status", code=500, chance=0.5)
            seen.extend([(await guest.poll()).status for _ in range(20)])

        run(story, seed)
        return seen

    assert statuses(1) == statuses(1) != statuses(2)
    assert set(statuses(1)) == {200, 500}


def test_events_may_be_missing() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("no-events")
        told = await guest.poll()
        assert (told.body, told.headers["content-length"]) == (b'{"DocumentIncarnation":1}', "25")

    run(story)


def test_the_content_type_may_be_text() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("text-plain")
        told = await guest.poll()
        assert (told.body, told.headers["content-type"]) == (NO_EVENTS, "text/plain; charset=utf-8")
        assert list(told.headers) == list(HEADERS)

    run(story)


def test_an_answer_may_be_empty_but_a_refusal_is_not() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("empty")
        told = await guest.poll('"1"')
        assert shown(told) == (
            200,
            {"content-type": "application/json; charset=utf-8", "content-length": "0"},
            b"",
        )
        assert (await guest.call(EVENTS)).status == 400

    run(story)


def test_json_may_be_cut_with_a_length_that_fits() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("truncate", mode="whole", bytes=20)
        told = await guest.poll()
        assert (told.status, told.body, told.headers["content-length"]) == (
            200,
            NO_EVENTS[:20],
            "20",
        )

    run(story)


@pytest.mark.parametrize(("kind", "end"), [("truncate", "close"), ("reset", "reset")])
def test_an_answer_may_end_before_its_length(kind: str, end: str) -> None:
    async def story(guest: Filtered) -> None:
        guest.add(kind, bytes=5)
        told = await guest.poll()
        assert (told.body, told.headers["content-length"]) == (NO_EVENTS[:5], "37")
        assert guest.connection is not None
        assert guest.connection.end == end
        assert (
            guest.transcript.entries[-1].status,
            guest.transcript.entries[-1].response_body,
        ) == (
            0,
            '{"Doc',
        )

    run(story)


@pytest.mark.parametrize("kind", ["truncate", "reset"])
def test_a_cut_is_in_the_middle_if_nothing_else_is_said_and_never_at_the_end(kind: str) -> None:
    async def story(guest: Filtered) -> None:
        guest.add(kind, requests=1)
        assert (await guest.poll()).body == NO_EVENTS[:18]
        guest.faults.by_id.clear()
        guest.add(kind, bytes=9999)
        assert (await guest.poll()).body == NO_EVENTS[:-1]

    run(story)


def test_the_answer_to_an_approval_may_be_lost_though_it_was_heard() -> None:
    """The client cannot know; it must be able to approve again."""

    async def story(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("reset", method="POST")
        assert (await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)).is_nothing
        assert [event.status for event in guest.place.scope.events] == ["Started"]

    run(story)


def test_a_spoilt_document_is_given_to_who_has_it_already() -> None:
    """Else a client that asks conditionally would never meet the fault."""

    async def story(guest: Filtered) -> None:
        guest.add("text-plain")
        told = await guest.call(EVENTS, TRUE, (b"if-none-match", b'"1"'), (b"prefer", b"wait=60"))
        assert (told.status, told.body) == (200, NO_EVENTS)

    run(story)


def test_several_faults_are_applied_in_order() -> None:
    """Late, an error, as text, cut off: all of it, in this order, whatever came first."""

    async def story(guest: Filtered) -> None:
        for kind, members in (
            ("reset", {"bytes": 3}),
            ("text-plain", {}),
            ("status", {"code": 500}),
            ("latency", {"seconds": 9}),
        ):
            guest.add(kind, **members)
        told = await guest.poll()
        assert guest.slept == [9]
        assert (told.status, told.headers["content-type"], told.body) == (
            500,
            "text/plain; charset=utf-8",
            b'{"e',
        )
        assert guest.transcript.entries[-1].faults == ("latency", "status", "text-plain", "reset")

    run(story)


def test_an_empty_answer_leaves_nothing_to_cut_and_a_reset_leaves_nothing_at_all() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("empty")
        guest.add("truncate")
        assert (await guest.poll()).body == b""
        guest.add("reset")
        assert (await guest.poll()).is_nothing

    run(story)


def test_the_instance_may_be_spoilt_but_shows_no_document() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("stale")
        guest.add("no-events")
        guest.add("text-plain")
        told = await guest.call(INSTANCE, TRUE)
        assert (told.status, told.json["compute"]["name"]) == (200, "web-0")
        assert guest.transcript.entries[-1].faults == ("text-plain",)

    run(story)


def test_a_caller_that_is_no_vm_meets_no_fault() -> None:
    async def story(guest: Filtered) -> None:
        guest.add("status", code=500)
        assert (await guest.poll(address="10.9.9.9")).status == 403

    run(story)


def test_all_faults_at_once_end_in_some_answer() -> None:
    async def story(guest: Filtered) -> None:
        await guest.enrol("db", Vm(name="db-0", address="10.0.1.1"))
        for _ in range(FAULTS_MAX - 1):
            guest.add("skew", seconds=1)
        guest.add("text-plain")
        await guest.restarts()
        told = await guest.poll()
        assert told.json["Events"][0]["NotBefore"] == "Wed, 04 Mar 2026 12:16:39 GMT"

    run(story)
