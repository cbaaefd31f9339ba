"""The document as a whole: its form, its number, and the headers around it."""

import re
from itertools import pairwise

from forewarn.conformance.check import Level, check, holds, same
from forewarn.conformance.document import Entry
from forewarn.conformance.session import TRUE, Stage
from forewarn.conformance.spec import VERSIONS

MUST, SHOULD = Level.MUST, Level.SHOULD
POLLS = 5
MEMBERS = ["DocumentIncarnation", "Events"]
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
HTTP_DATE = re.compile(
    r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d{2} (Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) \d{4} \d{2}:\d{2}:\d{2} GMT"
)


@check(MUST, "PROTOCOL 3: zero-byte bodies were seen (NTH #70)")
def document_is_a_json_object(stage: Stage) -> None:
    """A 200 with no body, or with anything but an object, made the AKS termination handler fail."""
    answer = stage.get()
    holds(answer.status == 200, "status 200", answer)
    answer.object()


@check(MUST, "PROTOCOL 2.1: every capture")
def document_has_two_members_in_order(stage: Stage) -> None:
    """Every capture has these two in this order and nothing else; scripts cut them out as text."""
    for version in VERSIONS:
        same(f"the members in {version} to be", list(stage.get(version=version).object()), MEMBERS)


@check(MUST, "PROTOCOL 2.1: compact, one line")
def document_is_compact(stage: Stage) -> None:
    """Real bodies are one line without spaces or a newline at the end, and shell scripts match on
    that.
    """
    for version in VERSIONS:
        answer = stage.get(version=version)
        holds(
            not re.search(rb"\s", _STRING.sub(b"", answer.body)),
            "JSON without white space between its parts",
            answer,
        )


@check(MUST, "PROTOCOL 2.2: DocumentIncarnation")
def document_number_is_an_integer(stage: Stage) -> None:
    """Clients in Go read it into an int; a string or a fraction breaks them."""
    number = stage.get().object()["DocumentIncarnation"]
    holds(type(number) is int, "a DocumentIncarnation that is a JSON integer", number)


@check(SHOULD, "PROTOCOL 2.6: sentinels")
def document_number_is_at_least_1(stage: Stage) -> None:
    """0 and -1 mean `nothing seen yet` to clients: with these they would miss the first event."""
    number = stage.get().object()["DocumentIncarnation"]
    holds(type(number) is int and number >= 1, "a DocumentIncarnation of at least 1", number)


@check(MUST, "PROTOCOL 2.2")
def document_events_is_a_list_of_objects(stage: Stage) -> None:
    """Every client loops over it, also when it is empty: never null, never left out."""
    events = stage.get().object()["Events"]
    holds(
        isinstance(events, list) and all(isinstance(event, Entry) for event in events),
        "a list of objects",
        events,
    )


@check(MUST, "PROTOCOL 2.6: not on mere polling")
def document_number_stays_while_nothing_changes(stage: Stage) -> None:
    """Clients act on every new number; one that counts polls keeps them busy for nothing."""
    polled = [stage.document() for _ in range(POLLS)]
    for earlier, later in pairwise(polled):
        is_so = earlier.number == later.number or earlier.events != later.events
        holds(is_so, f"DocumentIncarnation {earlier.number} while the events are the same", later)


@check(MUST, "PROTOCOL 2.2: same number, same content")
def document_of_the_same_number_is_the_same(stage: Stage) -> None:
    """Clients look no further when the number is the one they know."""
    seen: dict[int, bytes] = {}
    for _ in range(POLLS):
        document = stage.document()
        known = seen.setdefault(document.number, document.answer.body)
        holds(known == document.answer.body, f"the bytes {known!r} again", document)


@check(MUST, "PROTOCOL 3: Content-Type (DASK)")
def document_is_application_json(stage: Stage) -> None:
    """aiohttp refuses to read JSON of any other type, and so does dask-cloudprovider."""
    said = stage.get().header("content-type") or ""
    same("the Content-Type", said.partition(";")[0].strip().lower(), "application/json")


@check(SHOULD, "PROTOCOL 3: captured headers of IMDS")
def document_says_utf_8(stage: Stage) -> None:
    """Old PowerShell takes Latin-1 where no charset is told."""
    said = (stage.get().header("content-type") or "").replace(" ", "").lower()
    holds("charset=utf-8" in said, "a Content-Type with charset=utf-8", said)


@check(MUST, "PROTOCOL 3: captured headers of IMDS")
def document_length_is_told_exactly(stage: Stage) -> None:
    """Clients that reuse a connection count bytes: one too many and the next answer is garbage."""
    with stage.line() as line:
        line.send(stage.request(headers={**TRUE, "Connection": "close"}))
        answer = line.answer()
        same("the body's end to be told by", answer.framing, "length")
        same("the rest after Content-Length bytes to be", line.rest(), b"")


@check(MUST, "PROTOCOL 3: captured headers of IMDS")
def answer_has_a_date(stage: Stage) -> None:
    """A client on a VM with a wrong clock can still tell how far off NotBefore is."""
    said = stage.get().header("date") or ""
    holds(
        HTTP_DATE.fullmatch(said) is not None,
        "a Date header such as 'Thu, 22 Jul 2021 04:50:17 GMT'",
        said,
    )


@check(SHOULD, "PROTOCOL 10: Server header")
def answer_names_its_server(stage: Stage) -> None:
    """Whoever debugs a fleet wants to know what answered."""
    said = stage.get().header("server")
    holds(bool(said), "a Server header", said)
