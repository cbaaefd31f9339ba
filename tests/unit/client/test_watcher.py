"""The changes that a watch reports, from document to document."""

from datetime import datetime, timedelta

import pytest

from forewarn.client import Document, Event, Watcher
from forewarn.client.watcher import BLANKS_MIN, ENDED_MAX
from tests.unit.client.build import NOON, SOON, page, reboot, started

SECOND = timedelta(seconds=1)
BLANK = Document(0, (), is_blank=True)


def update(watcher: Watcher, *documents: Document, now: datetime = NOON) -> list[tuple[str, str]]:
    """All changes in these documents: kind and id."""
    return [
        (change.kind, change.event.id)
        for document in documents
        for change in watcher.update(document, now)
    ]


def test_event_appears_starts_and_finishes() -> None:
    assert update(Watcher(), page(1), page(2, reboot()), page(3, started()), page(4)) == [
        ("appeared", "E1"),
        ("started", "E1"),
        ("finished", "E1"),
    ]


def test_same_document_again_gives_no_change() -> None:
    """A guest polls once a second; an event lives for minutes."""
    watcher = Watcher()
    update(watcher, page(2, reboot()))

    assert update(watcher, page(2, reboot()), page(2, reboot())) == []
    assert not watcher.is_in_doubt


def test_change_has_the_event_and_the_document() -> None:
    """After its end the event is as it was last seen: a handler may need its resources."""
    watcher = Watcher()
    (appeared,) = watcher.update(page(2, reboot()), NOON)
    (finished,) = watcher.update(page(3), SOON)

    assert (appeared.event, appeared.document) == (reboot(), page(2, reboot()))
    assert (finished.event, finished.document) == (reboot(), page(3))


def test_event_first_seen_as_started_appears_and_starts() -> None:
    """Failed hardware gives no notice. A handler of either kind still gets it."""
    assert update(Watcher(), page(2, started())) == [("appeared", "E1"), ("started", "E1")]


def test_ends_come_before_beginnings() -> None:
    """In a rolling maintenance the next VM starts when the last one is back."""
    watcher = Watcher()
    update(watcher, page(2, started("E1")))

    assert update(watcher, page(3, reboot("E2"))) == [("finished", "E1"), ("appeared", "E2")]


@pytest.mark.parametrize(
    ("gone_at", "kind"),
    [
        (SOON - timedelta(minutes=10), "canceled"),
        (SOON - 6 * SECOND, "canceled"),
        (SOON - 5 * SECOND, "finished"),
        (SOON, "finished"),
        (SOON + timedelta(hours=1), "finished"),
    ],
)
def test_missing_event_is_finished_if_due_and_canceled_if_not(gone_at: datetime, kind: str) -> None:
    """Its Started may have been missed. Two clocks may differ by five seconds."""
    watcher = Watcher()
    update(watcher, page(2, reboot(not_before=SOON)))

    assert update(watcher, page(3), now=gone_at) == [(kind, "E1")]


def test_missing_event_approved_here_is_finished() -> None:
    """An approved reboot may finish between two polls; a published log shows that."""
    approved: set[str] = set()
    watcher = Watcher(approved=approved)
    update(watcher, page(2, reboot("e1")))
    approved.add("E1")

    assert update(watcher, page(3)) == [("finished", "e1")]


def test_event_without_not_before_is_due() -> None:
    watcher = Watcher()
    update(watcher, page(2, reboot(not_before=None)))

    assert update(watcher, page(3)) == [("finished", "E1")]


def test_moved_deadline_is_a_change() -> None:
    """A handler that divided the time among its steps must do so again."""
    watcher = Watcher()
    update(watcher, page(2, reboot()))
    later = reboot(not_before=SOON + SECOND)

    assert update(watcher, page(3, later), page(3, later)) == [("changed", "E1")]


def test_id_in_another_case_is_the_same_event() -> None:
    watcher = Watcher()
    update(watcher, page(2, reboot("ab")))

    assert update(watcher, page(3, started("AB"))) == [("started", "AB")]


@pytest.mark.parametrize("twice", [(reboot(), started()), (started(), reboot())])
def test_started_event_wins_over_its_duplicate(twice: tuple[Event, Event]) -> None:
    watcher = Watcher()

    assert update(watcher, page(2, *twice), page(2, *twice)) == [
        ("appeared", "E1"),
        ("started", "E1"),
    ]


def test_first_of_two_scheduled_duplicates_wins() -> None:
    watcher = Watcher()
    (change,) = watcher.update(page(2, reboot(description="one"), reboot(description="two")), NOON)

    assert change.event.description == "one"


def test_older_document_does_not_end_an_event() -> None:
    """Of two servers on one store one may lag. A false end would undo preparations."""
    watcher = Watcher()
    update(watcher, page(5, reboot("E1")), page(6, reboot("E1"), reboot("E2")))

    assert update(watcher, page(5, reboot("E1"))) == []
    assert watcher.is_in_doubt
    assert update(watcher, page(6, reboot("E1"), reboot("E2"))) == []
    assert not watcher.is_in_doubt


def test_older_document_does_not_bring_back_an_ended_event() -> None:
    watcher = Watcher()
    update(watcher, page(5, started()), page(6))

    assert (
        update(watcher, page(5, started()), page(5, started()), page(5, started()), page(6)) == []
    )


def test_older_document_does_not_unstart_an_event() -> None:
    watcher = Watcher()
    update(watcher, page(5, reboot()), page(6, started()))

    assert update(watcher, page(5, reboot()), page(6, started())) == []
    assert update(watcher, page(7)) == [("finished", "E1")]


def test_older_document_does_not_move_a_deadline() -> None:
    watcher = Watcher()
    update(watcher, page(5, reboot()), page(6, reboot(not_before=SOON + SECOND)))

    assert update(watcher, page(5, reboot()), page(6, reboot(not_before=SOON + SECOND))) == []


def test_restarted_counter_is_trusted_at_the_third_poll() -> None:
    """A new store, or 24 hours without a poll: waiting for a greater one would never end."""
    watcher = Watcher()
    update(watcher, page(190, reboot()))

    assert update(watcher, page(1), page(1)) == []
    assert update(watcher, page(1)) == [("canceled", "E1")]
    assert not watcher.is_in_doubt
    assert update(watcher, page(2, reboot("E2")), page(3)) == [
        ("appeared", "E2"),
        ("canceled", "E2"),
    ]


def test_appearance_and_start_are_reported_at_any_incarnation() -> None:
    """A warning is urgent, and true for a lagging server and for a new one."""
    watcher = Watcher()
    update(watcher, page(190, reboot("E1")))

    assert update(watcher, page(1, reboot("E1"), reboot("E2"))) == [("appeared", "E2")]
    assert update(watcher, page(1, started("E1"), reboot("E2"))) == [("started", "E1")]


def test_restarted_counter_that_grows_is_trusted_too() -> None:
    watcher = Watcher()
    update(watcher, page(190, reboot()))

    assert update(watcher, page(1), page(2), page(3)) == [("canceled", "E1")]


def test_same_incarnation_with_other_events_is_trusted_on_third_poll() -> None:
    """A restarted counter may happen to be where the old one was."""
    watcher = Watcher()
    update(watcher, page(2, reboot("E1")))

    assert update(watcher, page(2, reboot("E2")), page(2, reboot("E2")), page(2, reboot("E2"))) == [
        ("appeared", "E2"),
        ("canceled", "E1"),
    ]


def test_empty_bodies_for_less_than_a_minute_end_nothing() -> None:
    """An empty body may be a fault: the event comes back, and must not have ended."""
    watcher = Watcher()
    update(watcher, page(2, reboot()))

    assert update(watcher, *[BLANK] * (BLANKS_MIN - 1)) == []
    assert watcher.is_in_doubt
    assert update(watcher, page(2, reboot())) == []
    assert not watcher.is_in_doubt
    assert update(watcher, *[BLANK] * (BLANKS_MIN - 1), page(3, started()), page(4)) == [
        ("started", "E1"),
        ("finished", "E1"),
    ]


def test_empty_bodies_for_a_minute_end_known_events() -> None:
    """Some hosts respond so when there are no events. An agent must resume there too."""
    watcher = Watcher()
    update(watcher, page(2, started("E1"), reboot("E2")))

    assert update(watcher, *[BLANK] * BLANKS_MIN) == [("finished", "E1"), ("canceled", "E2")]
    assert not watcher.is_in_doubt
    assert update(watcher, BLANK) == []


def test_event_that_comes_back_after_empty_bodies_is_reported_again() -> None:
    """No document said that it ended."""
    watcher = Watcher()
    update(watcher, page(2, reboot()), *[BLANK] * BLANKS_MIN)

    assert update(watcher, page(2, reboot()), page(3, started())) == [
        ("appeared", "E1"),
        ("started", "E1"),
    ]


def test_empty_body_without_known_events_leaves_no_doubt() -> None:
    """In doubt nothing is approved, and some hosts respond so for years."""
    watcher = Watcher()

    assert update(watcher, BLANK) == []
    assert not watcher.is_in_doubt
    assert update(watcher, page(2, reboot())) == [("appeared", "E1")]
    assert not watcher.is_in_doubt


def test_document_without_incarnation_is_not_an_empty_body() -> None:
    """It says that there are no events, and is trusted like any other."""
    watcher = Watcher()
    update(watcher, page(2, reboot()))

    assert update(watcher, *[Document(0, ())] * 3) == [("canceled", "E1")]


def test_events_known_from_an_earlier_process_do_not_appear_again() -> None:
    """An agent continues from its journal after the reboot."""
    watcher = Watcher([reboot("E1"), started("E2")])

    assert update(watcher, page(9, started("E1"), reboot("E3"))) == [
        ("started", "E1"),
        ("appeared", "E3"),
    ]
    assert watcher.is_in_doubt
    assert update(watcher, *[page(9, started("E1"), reboot("E3"))] * 2) == [("finished", "E2")]


def test_empty_bodies_at_the_start_end_nothing() -> None:
    """There is no document yet to compare with, only known events."""
    watcher = Watcher([reboot("E1")])

    assert update(watcher, *[BLANK] * 5, page(2, reboot("E1")), page(3, started("E1"))) == [
        ("started", "E1")
    ]


def test_single_poll_is_trusted() -> None:
    assert update(Watcher([started("E1")], looks_min=1), page(9)) == [("finished", "E1")]
    assert update(Watcher([started("E1")], looks_min=1), BLANK) == [("finished", "E1")]


def test_ended_ids_have_a_limit() -> None:
    """But one that is still shown is never forgotten."""
    watcher = Watcher()
    update(watcher, page(1, started("first")), page(2))
    for number in range(ENDED_MAX + 10):
        update(
            watcher,
            page(2 * number + 3, reboot(f"E{number}"), started("first")),
            page(2 * number + 4, started("first")),
        )

    assert len(watcher._ended) == ENDED_MAX
    assert update(watcher, page(10**6, started("first"), reboot("E1000"))) == []
    assert update(watcher, page(10**6 + 1, reboot("E0"))) == [("appeared", "E0")]
