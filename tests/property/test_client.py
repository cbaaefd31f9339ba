"""Invariants of the client, whatever an endpoint sends."""

import contextlib
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.client import (
    Change,
    ConnectionFailed,
    Document,
    Event,
    InvalidDocument,
    InvalidResponse,
    Kind,
    RetryableError,
    Watcher,
)
from forewarn.client.backoff import PAUSE_SECONDS_MAX, RETRY_AFTER_SECONDS_MAX, pause_seconds
from forewarn.client.discovery import dhcp_endpoint
from forewarn.client.http1 import Reader, Response
from forewarn.client.models import parse_date, read_document
from forewarn.client.watcher import BLANKS_MIN, LOOKS_MIN

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ONCE = (Kind.APPEARED, Kind.STARTED, Kind.FINISHED, Kind.CANCELED)
ENDS = (Kind.FINISHED, Kind.CANCELED)

patient = settings(deadline=None)  # a busy machine must not fail the test

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=10,
)
events = st.builds(
    Event,
    id=st.sampled_from(["A", "a", "B", "C"]),
    type=st.just("Reboot"),
    status=st.sampled_from(["Scheduled", "Started"]),
    not_before=st.sampled_from([None, NOON, NOON + timedelta(hours=1)]),
)
documents = st.builds(Document, st.integers(0, 4), st.lists(events, max_size=4).map(tuple))


@st.composite
def histories(draw: st.DrawFn) -> list[Document]:
    """Documents of a correct server: the incarnation grows with each change, ids never return."""
    run_in_world: dict[str, Event] = {}
    shown = [Document(1, ())]
    for number in range(draw(st.integers(1, 12))):
        step = draw(st.sampled_from(["add", "start", "end"])) if run_in_world else "add"
        id = f"E{number}" if step == "add" else draw(st.sampled_from(sorted(run_in_world)))
        if step == "end":
            del run_in_world[id]
        else:
            status, at = ("Scheduled", NOON) if step == "add" else ("Started", None)
            run_in_world[id] = Event(id=id, type="Reboot", status=status, not_before=at)
        shown.append(Document(len(shown) + 1, tuple(run_in_world.values())))
    return shown


def update(watcher: Watcher, seen: list[Document]) -> list[Change]:
    return [change for document in seen for change in watcher.update(document, NOON)]


def keys(document: Document) -> set[str]:
    return {event.key for event in document.events}


@patient
@given(st.lists(documents, max_size=20))
def test_each_change_is_reported_once_and_in_order(seen: list[Document]) -> None:
    """An agent that prepares twice, or recovers before it has prepared, does harm."""
    changes = update(Watcher(), seen)
    assert (
        max(
            Counter(
                (change.event.key, change.kind) for change in changes if change.kind in ONCE
            ).values(),
            default=0,
        )
        <= 1
    )
    for key in {change.event.key for change in changes}:
        kinds = [change.kind for change in changes if change.event.key == key]
        assert kinds[0] is Kind.APPEARED
        assert [kind for kind in kinds[:-1] if kind in ENDS] == []


@patient
@given(st.lists(documents, max_size=10), documents)
def test_stable_document_is_reported_in_full(seen: list[Document], last: Document) -> None:
    """After three polls the live events are those shown, except for ids that ended before."""
    watcher = Watcher()
    changes = update(watcher, [*seen, *[last] * LOOKS_MIN])
    over = {change.event.key for change in changes if change.kind in ENDS}
    appeared = {change.event.key for change in changes if change.kind is Kind.APPEARED}

    assert appeared - over == keys(last) - over
    assert not watcher.is_in_doubt
    assert update(watcher, [last] * 3) == []


@patient
@given(histories(), st.data())
def test_correct_server_is_followed_through_repeats_and_gaps(
    history: list[Document], data: st.DataObject
) -> None:
    """A client sees some documents many times and others never."""
    polls = data.draw(
        st.lists(st.integers(0, len(history) - 1), min_size=1, max_size=20).map(sorted)
    )
    watcher = Watcher()
    run_in_world: set[str] = set()
    for poll in polls:
        changes = watcher.update(history[poll], NOON)
        run_in_world |= {change.event.key for change in changes if change.kind is Kind.APPEARED}
        run_in_world -= {change.event.key for change in changes if change.kind in ENDS}
        assert run_in_world == keys(history[poll])


@patient
@given(histories(), st.data())
def test_lagging_server_never_ends_a_live_event(
    history: list[Document], data: st.DataObject
) -> None:
    """Between two polls of the newest document come up to two of older ones."""
    watcher = Watcher()
    for newest, document in enumerate(history):
        stale = data.draw(st.lists(st.integers(0, newest), max_size=LOOKS_MIN - 1))
        ended = [
            change.event.key
            for poll in [document, *(history[index] for index in stale), document]
            for change in watcher.update(poll, NOON)
            if change.kind in ENDS
        ]
        assert not set(ended) & keys(document)


@patient
@given(st.lists(documents, max_size=10), st.data())
def test_temporary_empty_bodies_change_nothing(seen: list[Document], data: st.DataObject) -> None:
    """Less than a minute of empty bodies before each document gives the same changes."""
    blank = Document(0, (), is_blank=True)
    watcher = Watcher()
    changes: list[Change] = []
    for document in seen:
        changes += update(watcher, [blank] * data.draw(st.integers(0, BLANKS_MIN - 1)))
        changes += watcher.update(document, NOON)

    assert changes == update(Watcher(), seen)


@patient
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_document_or_an_invalid_one(body: bytes) -> None:
    """No other exception can stop an agent."""
    with contextlib.suppress(InvalidDocument):
        read_document(body)


@patient
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "EventId",
                "EventStatus",
                "EventType",
                "Resources",
                "NotBefore",
                "DurationInSeconds",
                "Description",
                "X",
            ]
        ),
        json_values | st.just("Scheduled") | st.just(["web-0"]),
    ),
    json_values,
)
def test_any_entry_is_an_event_or_an_invalid_document(
    entry: dict[str, object], incarnation: object
) -> None:
    with contextlib.suppress(InvalidDocument):
        read_document(json.dumps({"DocumentIncarnation": incarnation, "Events": [entry]}).encode())


@patient
@given(st.text(max_size=40))
def test_any_text_is_a_date_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_date(text).tzinfo is UTC


FORMS = (
    lambda date: format_datetime(date, usegmt=True),
    lambda date: format_datetime(date, usegmt=True).lower(),
    lambda date: format_datetime(date.astimezone(None)),
    lambda date: date.isoformat(),
    lambda date: date.isoformat().replace("+00:00", "Z"),
    lambda date: date.replace(tzinfo=None).isoformat(sep=" "),
    lambda date: date.isoformat(timespec="microseconds"),
)


@patient
@given(st.datetimes(datetime(1971, 1, 1), datetime(9000, 1, 1)), st.sampled_from(FORMS))  # noqa: DTZ001
def test_every_date_is_read_back_from_every_form(date: datetime, form: object) -> None:
    date = date.replace(tzinfo=UTC, microsecond=0)
    assert callable(form)
    assert parse_date(form(date)) == date


def read(pieces: list[bytes]) -> Response | str:
    """The response, or the name of the error."""
    reader = Reader()
    try:
        for piece in [*filter(None, pieces), b""]:
            response = reader.feed(piece)
            if response is not None:
                return response
    except (InvalidResponse, ConnectionFailed) as error:
        return type(error).__name__
    raise AssertionError("the end of the connection must end the response")


def split(whole: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(whole) + 1) for cut in cuts} | {len(whole)})
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@patient
@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=5),
    st.booleans(),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_response_is_the_same_however_it_is_split(
    chunks: list[bytes], is_chunked: bool, cuts: list[int]
) -> None:
    """Networks split data anywhere."""
    body = b"".join(chunks)
    framed = (
        b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        if is_chunked
        else body
    )
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    response = read(split(b"HTTP/1.1 200 OK\r\nETag: x\r\n" + framing + b"\r\n\r\n" + framed, cuts))

    assert isinstance(response, Response)
    assert (response.status, response.body, response.headers["etag"], response.is_last) == (
        200,
        body,
        "x",
        False,
    )


@patient
@given(
    st.binary(max_size=100),
    st.sampled_from(
        [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
    ),
)
def test_any_bytes_are_a_response_or_an_error(rest: bytes, start: bytes) -> None:
    """Whether they arrive together or one by one."""
    whole = start + rest
    together, apart = read([whole]), read([bytes([byte]) for byte in whole])

    if isinstance(together, Response) and isinstance(
        apart, Response
    ):  # one by one, nothing can be left over
        assert (together.status, together.headers, together.body) == (
            apart.status,
            apart.headers,
            apart.body,
        )
    else:
        assert together == apart


@patient
@given(st.integers(1, 10**6), st.none() | st.floats(0, 1e12), st.floats(0, 1, exclude_max=True))
def test_pause_is_at_least_a_second_and_never_long(
    failures: int, retry_after: float | None, chance: float
) -> None:
    """Never more than one poll a second, and never so long that a notice is missed."""
    pause = pause_seconds(
        failures, RetryableError("busy", status=503, retry_after_seconds=retry_after), chance
    )

    assert 1 <= pause <= max(PAUSE_SECONDS_MAX * 1.5, RETRY_AFTER_SECONDS_MAX)


@patient
@given(st.binary(max_size=80))
def test_any_packet_gives_an_address_or_nothing(options: bytes) -> None:
    """DHCP replies come from any machine on the network."""
    transaction, card = bytes(4), bytes(6)
    packet = (b"\x02" + bytes(235) + bytes.fromhex("63825363"))[:240] + options

    address = dhcp_endpoint(packet, transaction, card)
    assert address == "" or [0 <= int(part) <= 255 for part in address.split(".")] == [True] * 4
