"""What a watch tells, from document to document."""

from datetime import datetime, timedelta

import pytest

from forewarn.client import Document, Event, Watcher
from forewarn.client.watcher import BLANKS_MIN, ENDED_MAX
from tests.unit.client.build import NOON, SOON, page, reboot, started

SECOND = timedelta(seconds=1)
BLANK = Document(0, (), is_blank=True)


def tell(watcher: Watcher, *documents: Document, now: datetime = NOON) -> list[tuple[str, str]]:
    """All that is told about these documents: kind and id."""
    return [
        (change.kind, change.event.id)
        for document in documents
        for change in watcher.update(document, now)
    ]


def test_an_event_appears_starts_and_finishes() -> None:
    assert tell(Watcher(), page(1), page(2, reboot()), page(3, started()), page(4)) == [
        ("appeared", "E1"),
        ("started", "E1"),
        ("finished", "E1"),
    ]


def test_the_same_document_again_is_no_news() -> None:
    """A guest polls once a second; an event lives for minutes."""
    watcher = Watcher()
    tell(watcher, page(2, reboot()))

    assert tell(watcher, page(2, reboot()), page(2, reboot())) == []
    assert not watcher.is_in_doubt


def test_a_change_has_the_event_and_the_document_that_showed_it() -> None:
    """At its end the event is as it was last seen: somebody may need to know which VMs it was
    about.
    """
    watcher = Watcher()
    (appeared,) = watcher.update(page(2, reboot()), NOON)
    (finished,) = watcher.update(page(3), SOON)

    assert (appeared.event, appeared.document) == (reboot(), page(2, reboot()))
    assert (finished.event, finished.document) == (reboot(), page(3))


def test_an_event_first_seen_as_started_is_told_as_appeared_and_as_started() -> None:
    """Failed hardware gives no notice. Who only handles one of the two still hears of it."""
    assert tell(Watcher(), page(2, started())) == [("appeared", "E1"), ("started", "E1")]


def test_ends_are_told_before_beginnings() -> None:
    """In a rolling maintenance the next VM begins when the last is back."""
    watcher = Watcher()
    tell(watcher, page(2, started("E1")))

    assert tell(watcher, page(3, reboot("E2"))) == [("finished", "E1"), ("appeared", "E2")]


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
def test_an_event_that_vanishes_is_finished_if_it_was_due_and_canceled_if_it_was_not(
    gone_at: datetime, kind: str
) -> None:
    """Its Started may never have been seen. Two clocks are allowed to differ by five seconds."""
    watcher = Watcher()
    tell(watcher, page(2, reboot(not_before=SOON)))

    assert tell(watcher, page(3), now=gone_at) == [(kind, "E1")]


def test_an_event_that_was_approved_here_and_vanishes_is_finished() -> None:
    """Approved, a reboot may be over within a minute and never be seen Started; so it was in a
    published log.
    """
    approved: set[str] = set()
    watcher = Watcher(approved=approved)
    tell(watcher, page(2, reboot("e1")))
    approved.add("E1")

    assert tell(watcher, page(3)) == [("finished", "e1")]


def test_an_event_without_a_not_before_is_due() -> None:
    watcher = Watcher()
    tell(watcher, page(2, reboot(not_before=None)))

    assert tell(watcher, page(3)) == [("finished", "E1")]


def test_a_deadline_that_moves_is_told() -> None:
    """Who has split the time over some steps must split it again."""
    watcher = Watcher()
    tell(watcher, page(2, reboot()))
    later = reboot(not_before=SOON + SECOND)

    assert tell(watcher, page(3, later), page(3, later)) == [("changed", "E1")]


def test_an_id_in_another_case_of_letters_is_the_same_event() -> None:
    watcher = Watcher()
    tell(watcher, page(2, reboot("ab")))

    assert tell(watcher, page(3, started("AB"))) == [("started", "AB")]


@pytest.mark.parametrize("twice", [(reboot(), started()), (started(), reboot())])
def test_of_two_events_with_one_id_the_started_one_counts(twice: tuple[Event, Event]) -> None:
    watcher = Watcher()

    assert tell(watcher, page(2, *twice), page(2, *twice)) == [
        ("appeared", "E1"),
        ("started", "E1"),
    ]


def test_of_two_scheduled_events_with_one_id_the_first_counts() -> None:
    watcher = Watcher()
    (change,) = watcher.update(page(2, reboot(description="one"), reboot(description="two")), NOON)

    assert change.event.description == "one"


def test_an_older_document_does_not_end_what_it_does_not_yet_show() -> None:
    """Two servers on one store: the one asked last may lag.

    A false end would undo what was prepared.
    """
    watcher = Watcher()
    tell(watcher, page(5, reboot("E1")), page(6, reboot("E1"), reboot("E2")))

    assert tell(watcher, page(5, reboot("E1"))) == []
    assert watcher.is_in_doubt
    assert tell(watcher, page(6, reboot("E1"), reboot("E2"))) == []
    assert not watcher.is_in_doubt


def test_an_older_document_does_not_bring_back_what_is_over() -> None:
    watcher = Watcher()
    tell(watcher, page(5, started()), page(6))

    assert tell(watcher, page(5, started()), page(5, started()), page(5, started()), page(6)) == []


def test_an_older_document_does_not_unstart_an_event() -> None:
    watcher = Watcher()
    tell(watcher, page(5, reboot()), page(6, started()))

    assert tell(watcher, page(5, reboot()), page(6, started())) == []
    assert tell(watcher, page(7)) == [("finished", "E1")]


def test_an_older_document_does_not_move_a_deadline_back_and_forth() -> None:
    watcher = Watcher()
    tell(watcher, page(5, reboot()), page(6, reboot(not_before=SOON + SECOND)))

    assert tell(watcher, page(5, reboot()), page(6, reboot(not_before=SOON + SECOND))) == []


def test_a_counter_that_began_again_is_believed_at_the_third_look() -> None:
    """A new store, or 24 hours without a poll.

    A client that waited for a greater number would be deaf from then on.
    """
    watcher = Watcher()
    tell(watcher, page(190, reboot()))

    assert tell(watcher, page(1), page(1)) == []
    assert tell(watcher, page(1)) == [("canceled", "E1")]
    assert not watcher.is_in_doubt
    assert tell(watcher, page(2, reboot("E2")), page(3)) == [("appeared", "E2"), ("canceled", "E2")]


def test_what_appears_or_starts_is_told_at_once_whatever_the_number() -> None:
    """A warning is urgent, and true of a lagging server as of a new one."""
    watcher = Watcher()
    tell(watcher, page(190, reboot("E1")))

    assert tell(watcher, page(1, reboot("E1"), reboot("E2"))) == [("appeared", "E2")]
    assert tell(watcher, page(1, started("E1"), reboot("E2"))) == [("started", "E1")]


def test_a_counter_that_began_again_and_moves_on_is_believed_too() -> None:
    watcher = Watcher()
    tell(watcher, page(190, reboot()))

    assert tell(watcher, page(1), page(2), page(3)) == [("canceled", "E1")]


def test_the_same_number_with_other_events_is_believed_at_the_third_look() -> None:
    """By chance a counter that began again may stand where the old one stood."""
    watcher = Watcher()
    tell(watcher, page(2, reboot("E1")))

    assert tell(watcher, page(2, reboot("E2")), page(2, reboot("E2")), page(2, reboot("E2"))) == [
        ("appeared", "E2"),
        ("canceled", "E1"),
    ]


def test_empty_bodies_for_less_than_a_minute_end_nothing() -> None:
    """An empty body may mean no events, but some endpoints hiccup: whoever believed it was deaf to
    the event that came back.
    """
    watcher = Watcher()
    tell(watcher, page(2, reboot()))

    assert tell(watcher, *[BLANK] * (BLANKS_MIN - 1)) == []
    assert watcher.is_in_doubt
    assert tell(watcher, page(2, reboot())) == []
    assert not watcher.is_in_doubt
    assert tell(watcher, *[BLANK] * (BLANKS_MIN - 1), page(3, started()), page(4)) == [
        ("started", "E1"),
        ("finished", "E1"),
    ]


def test_empty_bodies_for_a_minute_end_what_is_known() -> None:
    """Some hosts answer so when there are no events.

    An agent must take up its work again there too.
    """
    watcher = Watcher()
    tell(watcher, page(2, started("E1"), reboot("E2")))

    assert tell(watcher, *[BLANK] * BLANKS_MIN) == [("finished", "E1"), ("canceled", "E2")]
    assert not watcher.is_in_doubt
    assert tell(watcher, BLANK) == []


def test_an_event_that_comes_back_after_a_minute_of_empty_bodies_is_told_again() -> None:
    """No document ever said that it was over."""
    watcher = Watcher()
    tell(watcher, page(2, reboot()), *[BLANK] * BLANKS_MIN)

    assert tell(watcher, page(2, reboot()), page(3, started())) == [
        ("appeared", "E1"),
        ("started", "E1"),
    ]


def test_where_nothing_is_known_an_empty_body_leaves_no_doubt() -> None:
    """In doubt nothing is approved, and some hosts answer so for years."""
    watcher = Watcher()

    assert tell(watcher, BLANK) == []
    assert not watcher.is_in_doubt
    assert tell(watcher, page(2, reboot())) == [("appeared", "E1")]
    assert not watcher.is_in_doubt


def test_a_document_without_a_number_that_has_no_events_is_no_empty_body() -> None:
    """It says that there are none, and is believed like any other."""
    watcher = Watcher()
    tell(watcher, page(2, reboot()))

    assert tell(watcher, *[Document(0, ())] * 3) == [("canceled", "E1")]


def test_what_was_told_in_an_earlier_life_is_not_told_again() -> None:
    """An agent that comes back after the reboot goes on from its journal."""
    watcher = Watcher([reboot("E1"), started("E2")])

    assert tell(watcher, page(9, started("E1"), reboot("E3"))) == [
        ("started", "E1"),
        ("appeared", "E3"),
    ]
    assert watcher.is_in_doubt
    assert tell(watcher, *[page(9, started("E1"), reboot("E3"))] * 2) == [("finished", "E2")]


def test_empty_bodies_at_the_start_of_a_life_end_nothing() -> None:
    """There is no document yet to compare it with, only what is remembered."""
    watcher = Watcher([reboot("E1")])

    assert tell(watcher, *[BLANK] * 5, page(2, reboot("E1")), page(3, started("E1"))) == [
        ("started", "E1")
    ]


def test_who_looks_only_once_believes_what_it_sees() -> None:
    assert tell(Watcher([started("E1")], looks_min=1), page(9)) == [("finished", "E1")]
    assert tell(Watcher([started("E1")], looks_min=1), BLANK) == [("finished", "E1")]


def test_a_watch_for_years_does_not_grow() -> None:
    """Only so many ends are remembered; never is one forgotten that is still shown."""
    watcher = Watcher()
    tell(watcher, page(1, started("first")), page(2))
    for number in range(ENDED_MAX + 10):
        tell(
            watcher,
            page(2 * number + 3, reboot(f"E{number}"), started("first")),
            page(2 * number + 4, started("first")),
        )

    assert len(watcher._ended) == ENDED_MAX
    assert tell(watcher, page(10**6, started("first"), reboot("E1000"))) == []
    assert tell(watcher, page(10**6 + 1, reboot("E0"))) == [("appeared", "E0")]
