"""NotBefore: how a time is written, and that it is the one that was promised."""

from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime

from forewarn.conformance.check import Level, Need, check, check_each, holds, same
from forewarn.conformance.checks.document import HTTP_DATE
from forewarn.conformance.document import Entry
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import VERSIONS

MUST, SHOULD = Level.MUST, Level.SHOULD


def scheduled(stage: Stage, version: str = VERSIONS[-1]) -> list[Entry]:
    return [event for event in stage.events(version) if event["EventStatus"] == "Scheduled"]


@check(MUST, "PROTOCOL 2.3: always a string", Need.EVENT)
def not_before_is_text(stage: Stage) -> None:
    """The documents' samples call string methods on it, so null crashes them."""
    for event in stage.events():
        holds(
            isinstance(event["NotBefore"], str), "a NotBefore that is a string", event["NotBefore"]
        )


@check_each(VERSIONS, MUST, "PROTOCOL 2.3: RFC 1123 in every capture", Need.EVENT)
def not_before_is_rfc_1123_in(stage: Stage, version: str) -> None:
    """giantswarm's and dask's clients read nothing else;

    ISO 8601 stood in documents, never on the wire.
    """
    for event in scheduled(stage, version):
        said = event["NotBefore"]
        is_so = isinstance(said, str) and HTTP_DATE.fullmatch(said) is not None
        holds(is_so, "a NotBefore such as 'Thu, 22 Jul 2021 04:50:17 GMT'", said)


@check(SHOULD, "PROTOCOL 2.3: weekdays", Need.EVENT)
def not_before_has_the_right_weekday(stage: Stage) -> None:
    """Some date parsers check the weekday against the date, and refuse."""
    for event in scheduled(stage):
        said = str(event["NotBefore"])
        holds(
            HTTP_DATE.fullmatch(said) is not None,
            "a NotBefore such as 'Thu, 22 Jul 2021 04:50:17 GMT'",
            said,
        )
        same(
            "NotBefore",
            said,
            format_datetime(parsedate_to_datetime(said).astimezone(UTC), usegmt=True),
        )


@check(MUST, "PROTOCOL 4: nothing starts earlier unless approved", Need.CONTROL)
def not_before_is_what_was_promised(stage: Stage) -> None:
    """It is the earliest start: a guest that has an hour and believes in a minute breaks off its
    work for nothing.
    """
    event_id = stage.make("restart")
    event = stage.until_shown(event_id).find(event_id)
    promised = datetime.fromisoformat(stage.told(event_id)["not_before"])
    assert event is not None
    same("NotBefore", event["NotBefore"], format_datetime(promised.astimezone(UTC), usegmt=True))


@check(MUST, "PROTOCOL 6.4 and 2.2: same number, same content", Need.CONTROL)
def not_before_stays_where_it_is(stage: Stage) -> None:
    """A time that moves with every poll never comes."""
    event_id = stage.make("restart")
    first = stage.until_shown(event_id).find(event_id)
    for _ in range(3):
        later = stage.document().find(event_id)
        assert first is not None
        same("NotBefore", (later or Entry())["NotBefore"], first["NotBefore"])
