"""What a VM is shown of its document: exact bytes, and numbers that keep their promise."""

import json

import pytest

from forewarn.lab.fault.active import ActiveFault, parse_fault
from forewarn.lab.fault.shown_document import DocumentView, ShownDocument
from tests.builders import NOON
from tests.unit.lab.fault.faulty_vm import NO_EVENTS, Filtered, body, entry, run
from tests.unit.web.guest import EVENTS, TRUE


def test_stale_document_is_the_last_one_before_the_fault() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("stale")
        await guest.restarts()
        await guest.restarts(2, "web-1")
        response = await guest.poll()
        assert (response.body, response.headers["etag"]) == (NO_EVENTS, '"1"')
        assert (await guest.poll('"1"')).status == 304
        guest.faults.by_id.clear()
        assert (await guest.poll('"1"')).body == body(3, entry(), entry(2, "web-1"))

    run(main)


def test_stale_document_lags_by_some_changes() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        await guest.poll()
        guest.add("stale", by=1)
        assert await guest.bodies(2) == [NO_EVENTS, NO_EVENTS]
        await guest.restarts(2, "web-1")
        assert await guest.bodies(2) == [body(2, entry())] * 2

    run(main)


def test_stale_without_history_shows_the_first_document() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("stale", by=5)
        guest.add("stale")
        assert (await guest.poll(address="10.0.0.2")).body == NO_EVENTS

    run(main)


def test_incarnation_reset_starts_at_one() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        await guest.restarts(2, "web-1")
        assert (await guest.poll()).json["DocumentIncarnation"] == 3
        guest.add("incarnation-reset")
        response = await guest.poll()
        assert (response.body, response.headers["etag"]) == (
            body(1, entry(), entry(2, "web-1")),
            '"1"',
        )
        assert (await guest.poll('"1"')).status == 304
        await guest.cancels(2)
        assert await guest.bodies(2) == [body(2, entry())] * 2
        guest.faults.by_id.clear()
        assert (await guest.poll('"2"')).body == body(4, entry())

    run(main)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(90, "Wed, 04 Mar 2026 12:16:30 GMT"), (-43_500, "Wed, 04 Mar 2026 00:10:00 GMT")],
)
def test_skew_shifts_not_before(seconds: int, expected: str) -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("skew", seconds=seconds)
        assert (await guest.poll()).body == body(2, entry(not_before=expected))
        await guest.starts()
        assert (await guest.poll()).body == body(3, entry(not_before="", status="Started"))

    run(main)


def test_short_notice_hides_an_event_until_shortly_before() -> None:
    """Late visibility: the notice that a VM gets is shorter than the one that was given."""

    async def main(guest: Filtered) -> None:
        guest.add("short-notice", seconds=30)
        await guest.restarts()
        assert await guest.bodies(1) == [NO_EVENTS]
        await guest.pass_time(minutes=14, seconds=29)
        assert (await guest.poll('"1"')).status == 304
        await guest.pass_time(seconds=1)
        response = await guest.poll('"1"')
        assert (response.body, response.headers["etag"]) == (body(2, entry()), '"2"')

    run(main)


def test_short_notice_shows_started_events() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("short-notice", seconds=30)
        await guest.restarts()
        await guest.starts()
        assert (await guest.poll()).body == body(3, entry(not_before="", status="Started"))

    run(main)


def test_no_started_keeps_an_event_scheduled() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        await guest.poll()
        guest.add("no-started")
        await guest.starts()
        response = await guest.poll('"2"')
        assert response.status == 304
        assert (await guest.poll()).body == body(2, entry())

    run(main)


def test_no_started_hides_events_never_seen_scheduled() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("no-started")
        await guest.restarts()
        await guest.starts()
        assert (await guest.poll()).body == NO_EVENTS

    run(main)


def test_same_number_is_the_same_document() -> None:
    """A VM that keeps a document by its number must never be wrong, during a fault or after it."""

    async def main(guest: Filtered) -> None:
        seen: dict[int, list[dict[str, str]]] = {}
        last = 0

        async def look() -> None:
            nonlocal last
            shown = (await guest.poll()).json
            assert seen.setdefault(shown["DocumentIncarnation"], shown["Events"]) == shown["Events"]
            assert shown["DocumentIncarnation"] >= last
            last = shown["DocumentIncarnation"]

        await guest.restarts()
        faults = (
            ("skew", {"seconds": 60}),
            ("skew", {"seconds": 120}),
            ("short-notice", {"seconds": 1}),
        )
        for number, (kind, members) in enumerate(faults, 2):
            await look()
            guest.add(kind, **members)
            await look()
            await guest.restarts(number, "web-1")
            await look()
            guest.faults.by_id.clear()
            await look()
            await guest.cancels(number)
            await look()
        assert len(seen) == 12

    run(main)


def test_numbers_stay_ahead_and_long_polls_still_work() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        await guest.poll()
        guest.add("skew", seconds=60, requests=1)
        assert (await guest.poll()).headers["etag"] == '"3"'
        assert (await guest.poll()).body == body(4, entry())
        conditional, prefer = (b"if-none-match", b'"4"'), (b"prefer", b"wait=60")
        response = await guest.call(EVENTS, TRUE, conditional, prefer, meanwhile=guest.cancels)
        assert (response.status, response.body) == (200, b'{"DocumentIncarnation":5,"Events":[]}')
        response = await guest.poll('"5"')
        assert (response.status, response.headers) == (304, {"etag": '"5"'})

    run(main)


def test_long_poll_returns_immediately_under_a_document_fault() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("skew", seconds=60)
        response = await guest.call(
            EVENTS, TRUE, (b"if-none-match", b'"1"'), (b"prefer", b"wait=60")
        )
        assert (response.status, response.headers, response.body) == (304, {"etag": '"1"'}, b"")

    run(main)


def test_fault_added_during_a_long_poll_affects_its_response() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("latency", seconds=1)

        async def meanwhile() -> None:
            guest.add("text-plain", method="POST")
            guest.add("stale", requests=1)
            await guest.restarts()

        conditional, prefer = (b"if-none-match", b'"1"'), (b"prefer", b"wait=60")
        response = await guest.call(EVENTS, TRUE, conditional, prefer, meanwhile=meanwhile)
        assert (response.status, response.headers) == (304, {"etag": '"1"'})
        assert guest.transcript.entries[-1].faults == ("latency", "stale")
        assert guest.connection.slept == [1]
        assert (await guest.poll()).body == body(2, entry())

    run(main)


def test_each_vm_and_version_has_its_own_view() -> None:
    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("stale", vms=["web-0"])
        assert (await guest.poll()).body == NO_EVENTS
        assert (await guest.poll(address="10.0.0.2")).body == body(2, entry())
        old = EVENTS.replace("2020-07-01", "2017-03-01")
        assert (await guest.call(old, TRUE)).json["Events"][0]["Resources"] == ["_web-0"]

    run(main)


def test_document_faults_are_combined_in_order() -> None:
    """Skewed, then late by one change, then renumbered."""

    async def main(guest: Filtered) -> None:
        await guest.restarts()
        guest.add("incarnation-reset")
        guest.add("stale", by=1)
        guest.add("skew", seconds=60)
        await guest.poll()
        await guest.restarts(2, "web-1")
        assert (await guest.poll()).body == body(
            2, entry(not_before="Wed, 04 Mar 2026 12:16:00 GMT")
        )
        assert guest.transcript.entries[-1].faults == ("skew", "stale", "incarnation-reset")

    run(main)


def test_errors_are_not_changed_by_document_faults() -> None:
    async def main(guest: Filtered) -> None:
        guest.add("stale")
        response = await guest.call(EVENTS)
        assert (response.status, response.json) == (
            400,
            {"error": "Bad request. Required metadata header not specified"},
        )

    run(main)


def test_skew_keeps_the_date_format() -> None:
    skew = ActiveFault("f1", parse_fault({"fault": "skew", "seconds": 60}), NOON)
    old = json.loads(entry(not_before="2026-03-04T12:15:00Z"))

    assert DocumentView().apply(ShownDocument(1, [old]), [skew], NOON).events == [
        old | {"NotBefore": "2026-03-04T12:16:00Z"}
    ]
