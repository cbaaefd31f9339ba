"""What must always hold in a guest, whatever an endpoint sends."""

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

patient = settings(deadline=None)  # a busy machine is no broken rule

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
    """What an honest server shows over time: the number grows at each change, an id passes once
    from Scheduled to gone.
    """
    live: dict[str, Event] = {}
    shown = [Document(1, ())]
    for number in range(draw(st.integers(1, 12))):
        step = draw(st.sampled_from(["add", "start", "end"])) if live else "add"
        id = f"E{number}" if step == "add" else draw(st.sampled_from(sorted(live)))
        if step == "end":
            del live[id]
        else:
            status, at = ("Scheduled", NOON) if step == "add" else ("Started", None)
            live[id] = Event(id=id, type="Reboot", status=status, not_before=at)
        shown.append(Document(len(shown) + 1, tuple(live.values())))
    return shown


def tell(watcher: Watcher, seen: list[Document]) -> list[Change]:
    return [change for document in seen for change in watcher.update(document, NOON)]


def keys(document: Document) -> set[str]:
    return {event.key for event in document.events}


@patient
@given(st.lists(documents, max_size=20))
def test_everything_is_told_once_and_in_order_whatever_arrives(seen: list[Document]) -> None:
    """An agent that prepares twice, or recovers before it has prepared, does harm."""
    told = tell(Watcher(), seen)
    assert (
        max(
            Counter(
                (change.event.key, change.kind) for change in told if change.kind in ONCE
            ).values(),
            default=0,
        )
        <= 1
    )
    for key in {change.event.key for change in told}:
        kinds = [change.kind for change in told if change.event.key == key]
        assert kinds[0] is Kind.APPEARED
        assert [kind for kind in kinds[:-1] if kind in ENDS] == []


@patient
@given(st.lists(documents, max_size=10), documents)
def test_a_document_that_stays_is_told_in_full(seen: list[Document], last: Document) -> None:
    """Whatever came before: after three looks what lives is what is shown, but for ids that were
    over before.
    """
    watcher = Watcher()
    told = tell(watcher, [*seen, *[last] * LOOKS_MIN])
    over = {change.event.key for change in told if change.kind in ENDS}
    appeared = {change.event.key for change in told if change.kind is Kind.APPEARED}

    assert appeared - over == keys(last) - over
    assert not watcher.is_in_doubt
    assert tell(watcher, [last] * 3) == []


@patient
@given(histories(), st.data())
def test_an_honest_server_is_followed_through_repeats_and_gaps(
    history: list[Document], data: st.DataObject
) -> None:
    """A poller sees some numbers many times and others never.

    It hears of all that it saw, and of every end at once.
    """
    looks = data.draw(
        st.lists(st.integers(0, len(history) - 1), min_size=1, max_size=20).map(sorted)
    )
    watcher = Watcher()
    live: set[str] = set()
    for look in looks:
        told = watcher.update(history[look], NOON)
        live |= {change.event.key for change in told if change.kind is Kind.APPEARED}
        live -= {change.event.key for change in told if change.kind in ENDS}
        assert live == keys(history[look])


@patient
@given(histories(), st.data())
def test_a_server_that_lags_never_ends_what_lives(
    history: list[Document], data: st.DataObject
) -> None:
    """Between looks at the newest document come up to two at any older one.

    What lived before and after never ends between.
    """
    watcher = Watcher()
    for newest, document in enumerate(history):
        stale = data.draw(st.lists(st.integers(0, newest), max_size=LOOKS_MIN - 1))
        ended = [
            change.event.key
            for look in [document, *(history[index] for index in stale), document]
            for change in watcher.update(look, NOON)
            if change.kind in ENDS
        ]
        assert not set(ended) & keys(document)


@patient
@given(st.lists(documents, max_size=10), st.data())
def test_empty_bodies_that_pass_change_nothing_of_what_is_told(
    seen: list[Document], data: st.DataObject
) -> None:
    """Whatever an endpoint shows: with less than a minute of empty bodies before each document, the
    same is told.
    """
    blank = Document(0, (), is_blank=True)
    watcher = Watcher()
    told: list[Change] = []
    for document in seen:
        told += tell(watcher, [blank] * data.draw(st.integers(0, BLANKS_MIN - 1)))
        told += watcher.update(document, NOON)

    assert told == tell(Watcher(), seen)


@patient
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_document_or_a_bad_one(body: bytes) -> None:
    """Nothing else is raised, so nothing else can stop an agent."""
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
def test_any_entry_is_an_event_or_a_bad_document(
    entry: dict[str, object], incarnation: object
) -> None:
    with contextlib.suppress(InvalidDocument):
        read_document(json.dumps({"DocumentIncarnation": incarnation, "Events": [entry]}).encode())


@patient
@given(st.text(max_size=40))
def test_any_text_is_a_date_or_no_date(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_date(text).tzinfo is UTC


FORMS = (
    lambda moment: format_datetime(moment, usegmt=True),
    lambda moment: format_datetime(moment, usegmt=True).lower(),
    lambda moment: format_datetime(moment.astimezone(None)),
    lambda moment: moment.isoformat(),
    lambda moment: moment.isoformat().replace("+00:00", "Z"),
    lambda moment: moment.replace(tzinfo=None).isoformat(sep=" "),
    lambda moment: moment.isoformat(timespec="microseconds"),
)


@patient
@given(st.datetimes(datetime(1971, 1, 1), datetime(9000, 1, 1)), st.sampled_from(FORMS))  # noqa: DTZ001
def test_every_moment_is_read_back_from_every_form(moment: datetime, form: object) -> None:
    moment = moment.replace(tzinfo=UTC, microsecond=0)
    assert callable(form)
    assert parse_date(form(moment)) == moment


def read(pieces: list[bytes]) -> Response | str:
    """The answer, or the name of the problem."""
    reader = Reader()
    try:
        for piece in [*filter(None, pieces), b""]:
            answer = reader.feed(piece)
            if answer is not None:
                return answer
    except (InvalidResponse, ConnectionFailed) as problem:
        return type(problem).__name__
    raise AssertionError("the end of a connection is the end of an answer")


def split(whole: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(whole) + 1) for cut in cuts} | {len(whole)})
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@patient
@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=5),
    st.booleans(),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_an_answer_is_the_same_however_it_is_cut(
    chunks: list[bytes], is_chunked: bool, cuts: list[int]
) -> None:
    """The network cuts where it likes."""
    body = b"".join(chunks)
    framed = (
        b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        if is_chunked
        else body
    )
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    answer = read(split(b"HTTP/1.1 200 OK\r\nETag: x\r\n" + framing + b"\r\n\r\n" + framed, cuts))

    assert isinstance(answer, Response)
    assert (answer.status, answer.body, answer.headers["etag"], answer.is_last) == (
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
def test_any_bytes_are_an_answer_or_a_problem(rest: bytes, start: bytes) -> None:
    """And it makes no difference whether they come at once or one by one."""
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
def test_a_pause_is_at_least_a_second_and_never_long(
    failures: int, asked: float | None, chance: float
) -> None:
    """Never faster than once a second, and never so long that a notice passes unread."""
    pause = pause_seconds(
        failures, RetryableError("busy", status=503, retry_after_seconds=asked), chance
    )

    assert 1 <= pause <= max(PAUSE_SECONDS_MAX * 1.5, RETRY_AFTER_SECONDS_MAX)


@patient
@given(st.binary(max_size=80))
def test_any_packet_tells_an_address_or_nothing(options: bytes) -> None:
    """DHCP answers come from anybody on the network."""
    transaction, card = bytes(4), bytes(6)
    packet = (b"\x02" + bytes(235) + bytes.fromhex("63825363"))[:240] + options

    found = dhcp_endpoint(packet, transaction, card)
    assert found == "" or [0 <= int(part) <= 255 for part in found.split(".")] == [True] * 4
