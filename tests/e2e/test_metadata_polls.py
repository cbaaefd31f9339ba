"""The quick way: the same bytes as the careful way, only where it is sound, and right at once when
something changes.
"""

import random
import time
from datetime import timedelta
from itertools import pairwise

import pytest

from forewarn.config import Config, Identify
from forewarn.core.command import Approve, Claim, Finish
from forewarn.core.fleet import Vm
from forewarn.lab.clock import VirtualClock
from forewarn.web.metadata import fast_path as poll
from forewarn.wire.versions import VERSIONS
from tests.builders import NOON
from tests.e2e.metadata_world import EVENT_ID, POLL, World
from tests.e2e.waiting import eventually

CAREFULLY = b"Prefer: respond-async\r\n"
"""A header that changes nothing but the way."""


def request(
    path: str = "/metadata/scheduledevents", version: str = "2020-07-01", *lines: str
) -> bytes:
    head = [
        f"GET {path}?api-version={version} HTTP/1.1",
        "Host: h",
        "Metadata: true",
        *lines,
        "\r\n",
    ]
    return "\r\n".join(head).encode()


def carefully(poll: bytes) -> bytes:
    return poll.replace(b"Host: h\r\n", b"Host: h\r\n" + CAREFULLY)


REQUESTS = [
    *(request(version=version.name) for version in VERSIONS),
    request("/METADATA/ScheduledEvents/"),
    request("/as/web-1/metadata/scheduledevents"),
    request("/as/db-0/metadata/scheduledevents"),
    request("/metadata/scheduledevents", "2020-07-01", 'If-None-Match: "2"'),
    request(
        "/metadata/scheduledevents", "2020-07-01", 'If-None-Match: W/"1", "2"', "Connection: close"
    ),
    request("/metadata/scheduledevents", "2020-07-01", 'If-None-Match: "1"'),
    request("/metadata/scheduledevents", "2020-07-01", "Connection: close"),
    request(
        "/metadata/scheduledevents", "2020-07-01", "Connection: keep-alive", "User-Agent: curl/8"
    ),
    request().replace(b"HTTP/1.1", b"HTTP/1.0"),
    request("/metadata/scheduledevents", "2017-03-01").replace(b"Metadata: true\r\n", b""),
]


@pytest.mark.parametrize("data", REQUESTS, ids=range(len(REQUESTS)))
def test_fast_path_and_application_send_the_same_bytes(data: bytes) -> None:
    """A client must not be able to tell them apart: the same headers in the same order, the same
    body, the same end.
    """
    with World() as world:
        world.ask(request("/as/db-0/metadata/scheduledevents"))
        world.ask(POLL)
        world.restart()
        world.called.clear()
        with world.connect() as client:
            client.send(carefully(data))
            careful = client.response()
        assert len(world.called) == 1
        for _ in range(3):  # parsed, remembered on the same kind of connection, and again
            assert world.ask(data).undated == careful.undated
        assert len(world.called) == 1
        assert data in world.polls.parsed


def test_poll_to_record_bypasses_the_fast_path() -> None:
    """The scope is enabled by a commit; the quick way writes nothing."""
    with World() as world, world.connect() as client:
        for _ in range(3):
            client.send(POLL)
            client.response()
        assert world.called == ["GET /metadata/scheduledevents"]
        assert world.scope().seen_at is not None


@pytest.mark.parametrize("wait", [(), ('If-None-Match: "3"', "Prefer: wait=30")])
def test_remembered_poll_of_a_booting_vm_ends_its_impact(wait: tuple[str, ...]) -> None:
    """The guest sends the same bytes before and after its restart, and may wait for a change."""
    data = request("/metadata/scheduledevents", "2020-07-01", *wait)
    with World() as world:
        world.ask(POLL)
        world.restart()
        world.ask(data)
        eventually(lambda: data in world.polls.parsed)
        for command in (
            Approve(event_ids=(EVENT_ID,)),
            Claim(event_id=EVENT_ID, vm="web-0", worker="w1"),
            Finish(event_id=EVENT_ID, vm="web-0", worker="w1", tries=1, is_back=False),
        ):
            world.submit(command)
        assert world.scope().incarnation == 3
        peer = request("/as/web-1/metadata/scheduledevents")
        assert b"Started" in world.ask(peer).body
        assert world.ask(data).status == 200
        eventually(lambda: world.scope().events == ())


def test_clock_jump_is_noticed_after_a_tick() -> None:
    """The fast path reads the clock once a second."""
    clock = VirtualClock(NOON)
    with World(clock=clock) as world, world.connect() as client:
        for _ in range(2):
            client.send(POLL)
            client.response()
        world.run(clock.advance(timedelta(days=2)))
        world.pass_time(timedelta())
        client.send(POLL)
        client.response()
        assert len(world.called) == 2
        assert world.scope().seen_at == NOON + timedelta(days=2)


def test_next_poll_shows_the_change() -> None:
    with World() as world, world.connect() as client:
        for _ in range(3):
            client.send(POLL)
            assert b'"DocumentIncarnation":1' in client.response().body
        world.restart()
        client.send(POLL)
        assert b'"DocumentIncarnation":2' in client.response().body


def test_cached_poll_of_a_moved_or_removed_vm_is_current() -> None:
    """What is remembered of a request says nothing of who sent it."""
    with World() as world, world.connect() as client:
        for _ in range(3):
            client.send(POLL)
            client.response()
        world.enrol("web", Vm(name="web-1"))
        client.send(POLL)
        assert client.response().status == 403
        world.enrol("web", Vm(name="web-1"), Vm(name="web-2", address="127.0.0.1"))
        client.send(POLL)
        assert client.response().status == 200


def test_document_is_rendered_once_per_scope() -> None:
    with World() as world:
        for vm in ("web-0", "web-1", "web-0"):
            world.ask(request(f"/as/{vm}/metadata/scheduledevents"))
        assert list(world.engine.board.scopes["web"].pages) == ["2020-07-01"]


@pytest.mark.parametrize(
    "data",
    [
        POLL.replace(b"GET", b"HEAD"),
        POLL.replace(b"GET", b"OPTIONS"),
        POLL.replace(b"2020-07-01", b"2020-07-02"),
        POLL.replace(b"Metadata: true", b"Metadata: no"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nX-Forwarded-For: 10.0.0.1"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nPrefer: wait=1"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nExpect: something"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nContent-Length: 0"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nX-Instance-ID: web-0"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nOrigin: http://web.example"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nConnection: upgrade\r\nUpgrade: h2c"),
        POLL.replace(b"Metadata: true", b"Metadata: true\r\nIf-None-Match: *"),
        POLL.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: h", b"Connection: keep-alive"),
        POLL.replace(b"scheduledevents", b"scheduled%65vents"),
        POLL.replace(b"/metadata", b"http://h/metadata"),
        POLL.replace(b"/metadata", b"/as/web-9/metadata"),
        POLL.replace(b"scheduledevents", b"versions"),
        POLL.replace(b"?", b"?a=1&a=1&"),
    ],
)
def test_unusual_request_is_not_cached_by_the_fast_path(data: bytes) -> None:
    with World() as world:
        world.ask(POLL)
        world.called.clear()
        for _ in range(2):
            with world.connect() as client:
                client.send(data)
                client.response(has_body=not data.startswith(b"HEAD"))
        assert len(world.called) == 2
        assert data not in world.polls.parsed


def test_only_a_complete_single_request_is_cached() -> None:
    """Half a request, or one and a half, would mean something else the next time."""
    with World() as world, world.connect() as client:
        client.send(POLL)
        client.response()
        client.send(POLL + POLL)
        client.response()
        client.response()
        client.send(POLL + b"GET ")
        client.response()
        client.send(POLL[4:])
        client.response()
        assert world.polls.parsed == {}
        client.send(POLL)
        client.response()
        assert list(world.polls.parsed) == [POLL]


@pytest.mark.parametrize("stray", [b"\r\n\r\n", b"\n\r\n\r\n", b"\r\r\n\r\n"])
@pytest.mark.parametrize("path", ["", "/as/db-0"])
def test_blank_lines_get_no_response(stray: bytes, path: str) -> None:
    """Remembered as a poll, they would be answered for every other VM too, whose answers would then
    be off by one.
    """
    with World() as world:
        data = request(f"{path}/metadata/scheduledevents")
        with world.connect() as attacker:
            for _ in range(2):
                attacker.send(data)
                assert attacker.response().status == 200
            attacker.send(stray)
            assert attacker.is_silent(timedelta(seconds=0.1))
            attacker.send(data)
            assert attacker.response().status == 200
        with world.connect() as victim:
            victim.send(stray)
            assert victim.is_silent(timedelta(seconds=0.1))
            victim.send(request("/metadata/instance/compute/name", "2021-02-01&format=text"))
            assert victim.response().body == b"web-0"
        assert list(world.polls.parsed) == [data]


def test_poll_bytes_in_a_body_are_not_a_request() -> None:
    """A POST whose body is the very text of a poll gets one answer, to the POST."""
    with World() as world, world.connect() as client:
        for _ in range(2):
            client.send(POLL)
            client.response()
        eventually(lambda: POLL in world.polls.parsed)  # just after its response
        path = b"/metadata/scheduledevents?api-version=2020-07-01"
        post = b"POST " + path + b" HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n"
        client.send(post + b"Content-Length: %d\r\n\r\n" % len(POLL))
        assert client.is_silent(timedelta(seconds=0.1))
        client.send(POLL)
        assert client.response().status == 400
        client.send(POLL)
        assert client.response().status == 200
        assert client.is_silent(timedelta(seconds=0.1))


def test_poll_bytes_in_an_unread_body_are_not_a_request() -> None:
    """The answer is out before the body is in; the connection is not at rest for all that."""
    with World() as world, world.connect() as client:
        for _ in range(2):
            client.send(POLL)
            client.response()
        client.send(b"POST /nothing HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(POLL))
        assert client.response().status == 404
        client.send(POLL)
        assert client.is_silent(timedelta(seconds=0.1))
        client.send(POLL)
        assert client.response().status == 200


def test_fast_path_waits_for_the_pending_response() -> None:
    with World() as world, world.connect() as client:
        for _ in range(2):
            client.send(POLL)
            client.response()
        client.send(POLL.replace(b"Host: h", b'Host: h\r\nPrefer: wait=60\r\nIf-None-Match: "1"'))
        client.send(POLL)
        assert client.is_silent(timedelta(seconds=0.1))
        world.restart()
        first, second = client.response(), client.response()
        assert "preference-applied" in first.headers
        assert "preference-applied" not in second.headers
        assert first.body == second.body


def test_large_requests_are_not_cached() -> None:
    with World() as world:
        large = POLL.replace(b"Host: h", b"Host: h\r\nA: " + b"a" * poll.REQUEST_BYTES_MAX)
        for _ in range(3):
            assert world.ask(large).status == 200
        assert world.polls.parsed == {}


def test_rate_limit_counts_fast_path_requests() -> None:
    config = Config(requests_per_second=5)
    with World(config) as world, world.connect() as client:
        for _ in range(6):
            client.send(POLL)
        assert [client.response().status for _ in range(6)] == [200] * 5 + [429]


def test_address_is_unknown_without_identify_address() -> None:
    with World(Config(identify=(Identify.PATH,))) as world:
        assert [world.ask(POLL).status for _ in range(2)] == [403, 403]
        assert world.polls.parsed == {}


def test_as_path_is_404_without_identify_path() -> None:
    with World(Config(identify=(Identify.ADDRESS,))) as world:
        data = request("/as/web-1/metadata/scheduledevents")
        assert [world.ask(data).status for _ in range(2)] == [404, 404]


@pytest.mark.parametrize("seed", range(8))
def test_pipelined_requests_get_the_responses_of_single_ones(
    seed: int,
) -> None:
    """What is remembered, parsed and given to the application must never be mistaken for one
    another.
    """
    chance = random.Random(seed)
    kinds = [
        POLL,
        POLL,
        carefully(POLL),
        request("/as/web-1/metadata/scheduledevents", "2019-08-01"),
        request("/metadata/scheduledevents", "2020-07-01", 'If-None-Match: "2"'),
        request("/metadata/scheduledevents", "2020-07-01", 'If-None-Match: "1"'),
        request("/nothing"),
        POLL.replace(b"GET", b"PUT"),
        POLL.replace(b"GET", b"POST").replace(
            b"Host: h", b"Host: h\r\nContent-Length: %d" % len(POLL)
        )
        + POLL,
        b"POST /nothing HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(POLL), POLL),
    ]
    with World() as world, world.connect() as client:
        world.ask(POLL)
        world.restart()
        alone = {kind: world.ask(kind).undated for kind in kinds}
        for _ in range(20):
            data = chance.choices(kinds, k=chance.randint(1, 12))
            stream = b"".join(data)
            cuts = sorted(
                {0, len(stream), *chance.choices(range(len(stream)), k=chance.randint(0, 8))}
            )
            for start, end in pairwise(cuts):
                client.send(stream[start:end])
                time.sleep(chance.choice((0, 0.001)))
            assert [client.response().undated for _ in data] == [alone[kind] for kind in data]


def test_poll_from_an_address_that_two_vms_have_is_forbidden_at_once() -> None:
    """Also on a connection whose polls came the quick way until now."""
    with World(Config(identify=(Identify.ADDRESS,))) as world, world.connect() as client:
        for _ in range(2):
            client.send(POLL)
            assert client.response().status == 200
        world.enrol("twin", Vm(name="twin", address="127.0.0.1", host="host-b"))
        client.send(POLL)
        response = client.response()
        assert response.status == 403
        assert b"Several VMs have the address 127.0.0.1; expected forewarn hostd" in response.body
