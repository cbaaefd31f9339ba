"""ETag, 304, and waiting for a change."""

import re

from forewarn.conformance.check import Level, Need, check, holds, same
from forewarn.conformance.checks.path import status
from forewarn.conformance.document import Document
from forewarn.conformance.raw_http import Answer
from forewarn.conformance.session import TRUE, Stage
from forewarn.conformance.spec import NEWEST, VERSIONS

MUST, SHOULD = Level.MUST, Level.SHOULD
QUOTED = re.compile(r'(?:W/)?"[!#-~]*"')
WAIT_SECONDS = 1
WAKE_SECONDS = 10
EARLY_SECONDS = 0.05


def tag(stage: Stage) -> str:
    answer = stage.get()
    said = answer.header("etag")
    holds(bool(said), "an ETag header", dict(answer.headers))
    assert said
    return said


def asked(
    stage: Stage, tags: str, *, version: str = NEWEST, prefer: str = "", seconds: float = 10
) -> Answer:
    headers = {**TRUE, "If-None-Match": tags, **({"Prefer": prefer} if prefer else {})}
    return stage.get(version=version, headers=headers, seconds=seconds)


@check(MUST, "PROTOCOL 2.7 (NODE)")
def etag_is_sent(stage: Stage) -> None:
    """Microsoft's Node client keeps the ETag of every answer and sends it with the next poll."""
    tag(stage)


@check(SHOULD, "RFC 9110 8.8.3")
def etag_is_quoted(stage: Stage) -> None:
    """HTTP libraries and caches drop an ETag that is not in quotes."""
    holds(QUOTED.fullmatch(tag(stage)) is not None, "an ETag in quotes", tag(stage))


@check(SHOULD, "PROTOCOL 10: ETag")
def etag_is_the_number(stage: Stage) -> None:
    """The documents of Terminate call DocumentIncarnation an ETag: whoever has the one has the
    other.
    """
    for version in VERSIONS:
        document = stage.document(version)
        same("the ETag", document.answer.header("etag"), f'"{document.number}"')


@check(MUST, "PROTOCOL 2.7 (NODE)")
def etag_known_is_304(stage: Stage) -> None:
    """Microsoft's Node client takes 304 for `nothing new`; without it it handles the same events at
    every poll.
    """
    status(asked(stage, tag(stage)), 304)


@check(MUST, "RFC 9110 15.4.5")
def etag_304_has_no_body(stage: Stage) -> None:
    """A body behind a 304 would be read as the beginning of the next answer."""
    known = tag(stage)
    with stage.line() as line:
        line.send(stage.request(headers={**TRUE, "If-None-Match": known, "Connection": "close"}))
        status(line.answer(), 304)
        same("the rest after the head of a 304 to be", line.rest(), b"")


@check(SHOULD, "RFC 9110 15.4.5")
def etag_304_repeats_the_tag(stage: Stage) -> None:
    """Microsoft's Node client stores the ETag of every answer: a 304 without one makes it forget."""
    known = tag(stage)
    same("the ETag of the 304", asked(stage, known).header("etag"), known)


@check(MUST, "PROTOCOL 2.7 (NODE begins with 0)")
def etag_0_gives_the_document(stage: Stage) -> None:
    """Microsoft's Node client sends If-None-Match: 0 before it has seen anything."""
    Document.of(asked(stage, "0"))


@check(MUST, "RFC 9110 13.1.2")
def etag_of_another_document_gives_the_document(stage: Stage) -> None:
    """A client with an old number wants what is new."""
    Document.of(asked(stage, '"987654321"'))


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_without_quotes_is_304(stage: Stage) -> None:
    """Shell scripts lose the quotes."""
    status(asked(stage, tag(stage).strip('"')), 304)


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_as_weak_is_304(stage: Stage) -> None:
    """Proxies that recompress make an ETag weak."""
    status(asked(stage, f"W/{tag(stage)}"), 304)


@check(SHOULD, "PROTOCOL 2.7: accept unquoted, W/ and lists")
def etag_known_among_others_is_304(stage: Stage) -> None:
    """HTTP lets a client name all that it has."""
    status(asked(stage, f'"987654321", {tag(stage)}'), 304)


@check(MUST, "PROTOCOL 2.7", Need.CONTROL)
def etag_changes_with_the_document(stage: Stage) -> None:
    """A client that holds the old ETag must not be told that nothing is new."""
    before = tag(stage)
    stage.until_shown(stage.make("restart"))
    Document.of(asked(stage, before))
    holds(tag(stage) != before, "another ETag after an event was announced", tag(stage))


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N")
def wait_holds_the_answer(stage: Stage) -> None:
    """Waiting instead of polling: a VM learns at once, and the endpoint is left in peace."""
    answer = asked(stage, tag(stage), prefer=f"wait={WAIT_SECONDS}")
    status(answer, 304)
    holds(
        answer.seconds > WAIT_SECONDS - EARLY_SECONDS,
        f"an answer after {WAIT_SECONDS} s",
        f"{answer.seconds:.2f} s",
    )


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N; RFC 7240 3")
def wait_is_told_to_be_applied(stage: Stage) -> None:
    """A client that knows its wish was heard need not pause before it asks again."""
    answer = asked(stage, tag(stage), prefer=f"wait={WAIT_SECONDS}")
    same("Preference-Applied", answer.header("preference-applied"), f"wait={WAIT_SECONDS}")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N")
def wait_is_not_for_those_who_know_nothing(stage: Stage) -> None:
    """A client that has no document yet wants it now."""
    answer = stage.get(headers={**TRUE, "Prefer": f"wait={WAKE_SECONDS}"}, seconds=WAKE_SECONDS * 2)
    Document.of(answer)
    holds(answer.seconds < WAIT_SECONDS, "an answer at once", f"{answer.seconds:.2f} s")


@check(SHOULD, "PROTOCOL 10: Prefer: wait=N", Need.CONTROL)
def wait_ends_with_the_change(stage: Stage) -> None:
    """Two minutes' notice are worth little to a VM that hears of them a minute late."""
    known, before = tag(stage), stage.document()
    with stage.line() as line:
        line.send(
            stage.request(
                headers={**TRUE, "If-None-Match": known, "Prefer": f"wait={WAKE_SECONDS}"}
            )
        )
        stage.time.sleep(EARLY_SECONDS)
        stage.make("restart")
        answer = line.answer(seconds=WAKE_SECONDS * 2)
    holds(Document.of(answer).number != before.number, "the document after the change", answer)
    holds(
        answer.seconds < WAKE_SECONDS / 2,
        "an answer when the event was announced",
        f"{answer.seconds:.2f} s",
    )
