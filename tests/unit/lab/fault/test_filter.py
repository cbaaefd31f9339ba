"""What a VM gets from an endpoint that misbehaves, byte by byte; and that nothing is changed while
it behaves.
"""

import asyncio
import json

import pytest

from forewarn.core.fleet import Vm
from forewarn.lab.fault.active import FAULTS_MAX
from tests.builders import guid
from tests.unit.lab.fault.faulty_vm import NO_EVENTS, Filtered, body, entry, run
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


def shown(response: GuestResponse) -> tuple[int, dict[str, str], bytes]:
    return response.status, response.headers, response.body


@pytest.mark.parametrize(("target", "headers", "method", "sent"), REQUESTS)
@pytest.mark.parametrize("is_other_vm_touched", [False, True])
def test_response_without_faults_is_unchanged(
    target: str,
    headers: tuple[tuple[bytes, bytes], ...],
    method: str,
    sent: bytes,
    is_other_vm_touched: bool,
) -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        if is_other_vm_touched:
            guest.add("status", code=500, vms=["web-1"])
        through = await guest.call(target, *headers, method=method, body=sent)
        guest.application = guest.inner
        assert shown(through) == shown(await guest.call(target, *headers, method=method, body=sent))

    run(main)


def test_every_request_is_recorded() -> None:
    async def main(guest: Filtered) -> None:
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

    run(main)


def test_recorded_path_has_no_vm_prefix() -> None:
    async def main(guest: Filtered) -> None:
        await guest.call(f"/as/web-0{EVENTS}", TRUE)
        assert guest.transcript.entries[-1].path == EVENTS

    run(main)


def test_client_that_leaves_a_long_poll_is_recorded() -> None:
    async def main(guest: Filtered) -> None:
        guest.is_gone.set()
        response = await guest.poll('"1"')
        assert response.status == 304
        conditional = (b"if-none-match", b'"1"')
        assert (await guest.call(EVENTS, TRUE, conditional, (b"prefer", b"wait=60"))).is_nothing
        assert guest.transcript.entries[-1].status == 0

    run(main)


def test_client_that_leaves_during_a_delay_is_recorded() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.connection.is_gone = True
        guest.add("latency", seconds=20)
        approval_body = f'{{"StartRequests":[{{"EventId":"{guid(1)}"}}]}}'
        response = await guest.call(EVENTS, TRUE, method="POST", body=approval_body.encode())
        assert response.is_nothing
        last = guest.transcript.entries[-1]
        assert (last.status, last.request_body, last.faults) == (0, approval_body, ("latency",))
        assert guest.place.scope.events[0].status == "Scheduled"

    run(main)


def test_delayed_approval_keeps_its_body() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("latency", seconds=20)
        approval_body = f'{{"StartRequests":[{{"EventId":"{guid(1)}"}}]}}'
        assert (
            await guest.call(EVENTS, TRUE, method="POST", body=approval_body.encode())
        ).status == 200
        assert guest.place.scope.events[0].status == "Started"

    run(main)


def test_cancelled_request_is_recorded() -> None:
    """A lab that is closed cuts off what takes too long."""

    async def main(guest: Filtered) -> None:
        guest.connection.sleeps_for_good = True
        guest.add("latency", seconds=20)
        asking = asyncio.create_task(guest.poll())
        for _ in range(20):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert guest.transcript.entries[-1].status == 0
        assert guest.transcript.entries[-1].faults == ("latency",)

    run(main)


def test_only_the_first_call_of_each_vm_is_slow() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("first-call", seconds=90)
        await guest.bodies(2)
        assert guest.connection.slept == [90]
        await guest.poll(address="10.0.0.2")
        assert guest.connection.slept == [90, 90]
        guest.faults.by_id.clear()
        guest.add("first-call", seconds=30)
        await guest.bodies(2)
        assert guest.connection.slept == [90, 90, 30]

    run(main)


def test_latencies_add_up() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("latency", seconds=2)
        guest.add("latency", seconds="0.5")
        assert (await guest.poll()).body == NO_EVENTS
        assert guest.connection.slept == [2, 0.5]

    run(main)


def test_delayed_long_poll_still_waits() -> None:
    """A delay is no reason to answer a wait at once."""

    async def main(guest: Filtered) -> None:
        guest.add("latency", seconds=2)
        waiting = asyncio.create_task(
            guest.call(EVENTS, TRUE, (b"if-none-match", b'"1"'), (b"prefer", b"wait=60"))
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        await guest.restarts()
        assert (await waiting).body == body(2, entry())

    run(main)


def test_refused_request_has_no_effect() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("refuse")
        response = await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)
        assert response.is_nothing
        assert guest.connection.end == "reset"
        assert guest.place.scope.events[0].approvals == ()
        last = guest.transcript.entries[-1]
        assert (last.status, last.request_body) == (0, APPROVAL.decode())

    run(main)


@pytest.mark.parametrize("code", [404, 410, 429, 500, 503])
def test_error_status_keeps_the_request_from_the_application(code: int) -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("status", code=code)
        response = await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)
        assert (response.status, list(response.json), "retry-after" in response.headers) == (
            code,
            ["error"],
            False,
        )
        assert guest.place.scope.events[0].approvals == ()

    run(main)


def test_error_status_has_retry_after() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("status", code=429, retry_after=7)
        assert (await guest.poll()).headers["retry-after"] == "7"

    run(main)


def test_requests_limits_a_fault_to_three_requests() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("status", code=500, requests=3)
        assert [(await guest.poll()).status for _ in range(5)] == [500, 500, 500, 200, 200]

    run(main)


def test_fault_begins_and_ends_by_the_labs_clock() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("status", code=500, from_="10s", for_="5s")
        seen = []
        for _ in range(4):
            seen.append((await guest.poll()).status)
            await guest.pass_time(seconds=5)
        assert seen == [200, 200, 500, 200]

    run(main)


def test_same_seed_affects_the_same_requests() -> None:
    def statuses(seed: int) -> list[int]:
        seen: list[int] = []

        async def main(guest: Filtered) -> None:
            guest.add("status", code=500, chance=0.5)
            seen.extend([(await guest.poll()).status for _ in range(20)])

        run(main, seed)
        return seen

    assert statuses(1) == statuses(1) != statuses(2)
    assert set(statuses(1)) == {200, 500}


def test_no_events_removes_the_member() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("no-events")
        response = await guest.poll()
        assert (response.body, response.headers["content-length"]) == (
            b'{"DocumentIncarnation":1}',
            "25",
        )

    run(main)


def test_text_plain_changes_the_content_type() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("text-plain")
        response = await guest.poll()
        assert (response.body, response.headers["content-type"]) == (
            NO_EVENTS,
            "text/plain; charset=utf-8",
        )
        assert list(response.headers) == list(HEADERS)

    run(main)


def test_empty_affects_responses_but_not_errors() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("empty")
        response = await guest.poll('"1"')
        assert shown(response) == (
            200,
            {"content-type": "application/json; charset=utf-8", "content-length": "0"},
            b"",
        )
        assert (await guest.call(EVENTS)).status == 400

    run(main)


def test_truncate_whole_adjusts_content_length() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("truncate", mode="whole", bytes=20)
        response = await guest.poll()
        assert (response.status, response.body, response.headers["content-length"]) == (
            200,
            NO_EVENTS[:20],
            "20",
        )

    run(main)


@pytest.mark.parametrize(("kind", "end"), [("truncate", "close"), ("reset", "reset")])
def test_truncate_closes_before_content_length(kind: str, end: str) -> None:
    async def main(guest: Filtered) -> None:
        guest.add(kind, bytes=5)
        response = await guest.poll()
        assert (response.body, response.headers["content-length"]) == (NO_EVENTS[:5], "37")
        assert guest.connection.end == end
        assert (
            guest.transcript.entries[-1].status,
            guest.transcript.entries[-1].response_body,
        ) == (
            0,
            '{"Doc',
        )

    run(main)


@pytest.mark.parametrize("kind", ["truncate", "reset"])
def test_default_cut_is_in_the_middle_and_never_at_the_end(kind: str) -> None:
    async def main(guest: Filtered) -> None:
        guest.add(kind, requests=1)
        assert (await guest.poll()).body == NO_EVENTS[:18]
        guest.faults.by_id.clear()
        guest.add(kind, bytes=9999)
        assert (await guest.poll()).body == NO_EVENTS[:-1]

    run(main)


def test_reset_approval_still_counts() -> None:
    """The client cannot know; it must be able to approve again."""

    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("reset", method="POST")
        assert (await guest.call(EVENTS, TRUE, method="POST", body=APPROVAL)).is_nothing
        assert [event.status for event in guest.place.scope.events] == ["Started"]

    run(main)


def test_body_fault_replaces_a_304() -> None:
    """Else a client that asks conditionally would never meet the fault."""

    async def main(guest: Filtered) -> None:
        guest.add("text-plain")
        response = await guest.call(
            EVENTS, TRUE, (b"if-none-match", b'"1"'), (b"prefer", b"wait=60")
        )
        assert (response.status, response.body) == (200, NO_EVENTS)

    run(main)


def test_several_faults_are_applied_in_order() -> None:
    """Late, an error, as text, cut off: all of it, in this order, whatever came first."""

    async def main(guest: Filtered) -> None:
        for kind, members in (
            ("reset", {"bytes": 3}),
            ("text-plain", {}),
            ("status", {"code": 500}),
            ("latency", {"seconds": 9}),
        ):
            guest.add(kind, **members)
        response = await guest.poll()
        assert guest.connection.slept == [9]
        assert (response.status, response.headers["content-type"], response.body) == (
            500,
            "text/plain; charset=utf-8",
            b'{"e',
        )
        assert guest.transcript.entries[-1].faults == ("latency", "status", "text-plain", "reset")

    run(main)


def test_empty_combined_with_truncate_and_reset() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("empty")
        guest.add("truncate")
        assert (await guest.poll()).body == b""
        guest.add("reset")
        assert (await guest.poll()).is_nothing

    run(main)


def test_instance_is_affected_by_body_faults_only() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("stale")
        guest.add("no-events")
        guest.add("text-plain")
        response = await guest.call(INSTANCE, TRUE)
        assert (response.status, response.json["compute"]["name"]) == (200, "web-0")
        assert guest.transcript.entries[-1].faults == ("text-plain",)

    run(main)


def test_unknown_client_is_not_affected_by_faults() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("status", code=500)
        assert (await guest.poll(address="10.9.9.9")).status == 403

    run(main)


def test_a_hundred_faults_still_give_a_response() -> None:
    async def main(guest: Filtered) -> None:
        await guest.enrol("db", Vm(name="db-0", address="10.0.1.1"))
        for _ in range(FAULTS_MAX - 1):
            guest.add("skew", seconds=1)
        guest.add("text-plain")
        await guest.restarts()
        response = await guest.poll()
        assert response.json["Events"][0]["NotBefore"] == "Wed, 04 Mar 2026 12:16:39 GMT"

    run(main)
