"""Parsing a poll, and responding to it from prepared bytes."""

import asyncio
import errno
from dataclasses import replace

import pytest

from forewarn.config import Config, Identify
from forewarn.core.command import Seen, SetMembers
from forewarn.core.fleet import DEFAULT_POLICY, Scope, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.lab.clock import VirtualClock
from forewarn.store.memory import MemoryStore
from forewarn.web.http.admission import Limits
from forewarn.web.metadata import fast_path as poll
from forewarn.web.metadata.fast_path import ParsedPoll, PollConnection, Polls
from forewarn.wire.versions import BY_NAME, NEWEST
from tests.builders import NOON
from tests.cpu_growth import LINEAR_MAX, growth

URL = b"/metadata/scheduledevents?api-version=2020-07-01"
HEADERS = [(b"host", b"h"), (b"metadata", b"true")]
BOTH = Config(identify=(Identify.ADDRESS, Identify.PATH))
PLAIN = ParsedPoll("", NEWEST, frozenset(), is_last=False)


def polls(config: Config = BOTH) -> Polls:
    """`web-0` at 10.0.0.1, whose scope was polled just now."""
    engine = Engine(MemoryStore(), VirtualClock(NOON), Timing())
    engine.board.publish(
        Scope(name="web", vms=(Vm(name="web-0", address="10.0.0.1"),), incarnation=7), 1
    )
    engine.board.see("web", NOON, 2)
    return Polls(engine, config, Limits())


def test_poll_by_address_is_parsed() -> None:
    assert polls().parse(URL, HEADERS, is_last=False) == PLAIN
    assert polls().parse(URL, HEADERS, is_last=True) == ParsedPoll(
        "", NEWEST, frozenset(), is_last=True
    )


def test_poll_by_path_is_parsed() -> None:
    assert polls().parse(b"/as/web-0" + URL, HEADERS, is_last=False) == ParsedPoll(
        "web-0", NEWEST, frozenset(), is_last=False
    )
    assert polls(Config()).parse(b"/as/web-0" + URL, HEADERS, is_last=False) is None


@pytest.mark.parametrize(
    ("tags", "known"),
    [
        (b'"7"', {7}),
        (b"7", {7}),
        (b'W/"7"', {7}),
        (b'"6", "7"', {6, 7}),
        (b'"07"', set()),
        (b'"7-8"', set()),
        (b'"seven"', set()),
        (b"", set()),
    ],
)
def test_if_none_match_of_a_poll_is_parsed(tags: bytes, known: set[int]) -> None:
    plan = polls().parse(URL, [*HEADERS, (b"if-none-match", tags)], is_last=False)
    assert plan is not None
    assert plan.known == known


def test_reading_if_none_match_takes_time_linear_in_its_length() -> None:
    """It is read before the client is known, on the one event loop:

    64 KB of tags must not stop the service.
    """

    def plan(tags: int) -> ParsedPoll | None:
        return ready.parse(URL, [*HEADERS, (b"if-none-match", b"1," * tags)], is_last=False)

    ready = polls()
    assert growth(plan, 500) < LINEAR_MAX


def test_if_none_match_star_is_left_to_the_application() -> None:
    assert polls().parse(URL, [*HEADERS, (b"if-none-match", b"*")], is_last=False) is None


@pytest.mark.parametrize("name", sorted(poll.UNUSUAL_HEADERS))
def test_unusual_headers_are_left_to_the_application(name: bytes) -> None:
    assert polls().parse(URL, [*HEADERS, (name, b"x")], is_last=False) is None


@pytest.mark.parametrize(
    "url",
    [
        b"/metadata/scheduledevents",
        b"/metadata/scheduledevents?api-version=2020-07-02",
        URL + b"&api-version=2020-07-01",
        b"/metadata/versions?api-version=2020-07-01",
        b"/metadata/latest/scheduledevents",
        b"/metadata/scheduled%65vents?api-version=2020-07-01",
        b"/as/web%2D0" + URL,
        b"http://h" + URL,
        b"*",
    ],
)
def test_other_requests_are_left_to_the_application(url: bytes) -> None:
    assert polls().parse(url, HEADERS, is_last=False) is None


def test_rate_limited_polls_go_to_the_application() -> None:
    assert polls(Config(requests_per_second=5)).parse(URL, HEADERS, is_last=False) is None


def test_response_is_the_document_of_the_clients_scope() -> None:
    ready = polls()
    ready.ok, ready.unchanged = b"OK\r\n", b"UNCHANGED\r\n"
    page = b'content-type: application/json; charset=utf-8\r\netag: "7"\r\ncontent-length: 37\r\n'
    body = b'{"DocumentIncarnation":7,"Events":[]}'
    assert ready.respond(PLAIN, "10.0.0.1") == b"OK\r\n" + page + b"\r\n" + body
    closing = ParsedPoll("web-0", NEWEST, frozenset(), is_last=True)
    assert ready.respond(closing, "") == b"OK\r\n" + page + b"connection: close\r\n\r\n" + body
    knowing = ParsedPoll("web-0", BY_NAME["2017-03-01"], frozenset({7}), is_last=False)
    assert ready.respond(knowing, "") == b'UNCHANGED\r\netag: "7"\r\n\r\n'


def test_long_poll_waits_only_if_its_document_is_known() -> None:
    ready = polls()
    for tag, response in ((b'"7"', True), (b'"6"', False)):
        headers = [*HEADERS, (b"if-none-match", tag), (b"prefer", b"respond-async, wait=30")]
        plan = ready.parse(URL, headers, is_last=False)
        assert plan is not None
        assert plan.wait_seconds == 30
        assert (ready.respond(plan, "10.0.0.1") == b"") == response
    assert ready.parse(URL, [*HEADERS, (b"prefer", b"wait=30")], is_last=False) is None
    assert ready.parse(URL, [*HEADERS, (b"prefer", b"x")], is_last=False) is None


def test_unknown_client_is_left_to_the_application() -> None:
    assert polls().respond(PLAIN, "10.9.9.9") is None
    assert (
        polls().respond(ParsedPoll("web-9", NEWEST, frozenset(), is_last=False), "10.0.0.1") is None
    )


def test_poll_is_noted_with_its_vm() -> None:
    ready = polls()
    ready.now = NOON.timestamp() + 5
    assert ready.respond(PLAIN, "10.0.0.1") is not None
    assert ready.board.polled == {"web-0": NOON.timestamp() + 5}


def test_client_with_a_shared_address_is_left_to_the_application() -> None:
    ready = polls()
    twin = Vm(name="twin", address="10.0.0.1", host="host-b")
    ready.board.publish(Scope(name="twin", vms=(twin,)), 3)
    assert ready.respond(PLAIN, "10.0.0.1") is None
    ready.board.withdraw("twin", 4)
    assert ready.respond(PLAIN, "10.0.0.1") is not None


def test_poll_to_record_is_left_to_the_application() -> None:
    ready = polls()
    place = ready.board.scopes["web"]
    place.fresh_until = NOON.timestamp() + 1
    assert ready.respond(PLAIN, "10.0.0.1") is not None
    place.fresh_until = NOON.timestamp()
    assert ready.respond(PLAIN, "10.0.0.1") is None


async def answer_first_poll() -> dict[str, int]:
    """The last polls of a scope of two VMs, of which only web-0 is known to poll."""
    engine = Engine(MemoryStore(), VirtualClock(NOON), Timing())
    await engine.load()
    vms = (Vm(name="web-0"), Vm(name="web-1", address="10.0.0.2"))
    members = SetMembers(kind=ScopeKind.AVAILABILITY_SET, policy=DEFAULT_POLICY, vms=vms)
    await engine.submit("web", members, by="ann")
    engine.board.polled["web-0"] = NOON.timestamp()
    await engine.submit("web", Seen(), by="poll")
    place = engine.board.scopes["web"]
    ready = Polls(engine, BOTH, Limits())
    assert ready.respond(PLAIN, "10.0.0.2") is not None
    await engine.record_poll(place)
    engine.board.polled.clear()
    return engine.last_polls.times(place.scope)


def test_first_poll_of_a_vm_is_answered_at_once_and_recorded() -> None:
    """The other servers must know that it polls: a host that is away delays its events."""
    assert asyncio.run(answer_first_poll()).keys() == {"web-0", "web-1"}


def test_poll_of_a_booting_vm_is_left_to_the_application() -> None:
    """It ends the VM's impact. Polls of its peers stay on the fast path."""
    ready = polls()
    place = ready.board.scopes["web"]
    place.booting = {"web-1"}
    assert ready.respond(PLAIN, "10.0.0.1") is not None
    place.booting = {"web-0", "web-1"}
    assert ready.respond(PLAIN, "10.0.0.1") is None
    assert ready.respond(replace(PLAIN, vm="web-0"), "10.9.9.9") is None
    place.booting = None
    assert ready.respond(PLAIN, "10.0.0.1") is not None


@pytest.mark.parametrize(
    "data",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\n\r\nG",
        b"A\r\n\r\nB\r\n\r\n",
        b"a" * poll.REQUEST_BYTES_MAX + b"\r\n\r\n",
    ],
)
def test_only_a_single_small_request_is_remembered(data: bytes) -> None:
    assert not poll.can_remember(data)
    assert poll.can_remember(b"GET / HTTP/1.1\r\n\r\n")


def test_number_of_remembered_polls_is_limited() -> None:
    """Clients that send another header at each poll fill it; then it is cleared."""
    ready = polls()
    for number in range(poll.POLLS_MAX + 10):
        ready.remember(b"%d\r\n\r\n" % number, PLAIN)
    assert len(ready.parsed) == 10


class BrokenTransport(asyncio.Transport):
    """Of a client that has gone when the loop looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        raise OSError(errno.ENOTCONN, "the client is gone")

    def abort(self) -> None:
        self.is_aborted = True


def test_connection_that_fails_where_it_begins_leaves_nothing_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, transport = polls(), BrokenTransport()
    connection = PollConnection(ours)
    connection.connection_made(transport)
    assert transport.is_aborted
    connection.connection_lost(None)
    assert (len(ours.connections), ours.connections_count) == (0, 0)
    assert [record.getMessage() for record in caplog.records] == ["connection failed"]
