"""A relay, and servers of which one is cut off from the store: it does not know what is new."""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Self

import pytest

from forewarn.auth.tokens import Role
from forewarn.core.command import Cancel, Restart, Seen
from forewarn.core.fleet import Vm
from forewarn.core.timing import Timing
from forewarn.hostd.settings import HostToken
from forewarn.lab.clock import VirtualClock
from forewarn.platform.remote import NOTICED_SECONDS_MAX, STALE_SECONDS_MIN, UNMARKED_SECONDS_MAX
from forewarn.web.metadata.fast_path import REQUEST_BYTES_MAX
from tests.e2e.metadata_world import EVENT_ID, POLL, RawResponse, World
from tests.unit.hostd.recording_server import RecordingServer
from tests.unit.hostd.relay_world import MINUTE, RelayWorld, until

SECRET = "a" * 64
TOKEN = HostToken("kvm-a", "", hashlib.sha256(SECRET.encode()).hexdigest().encode())
STALE_SECONDS = 5
GAP_SECONDS_MIN = Timing().gap_min.total_seconds()
AGE = int(STALE_SECONDS + NOTICED_SECONDS_MAX)
KNOWN = POLL.replace(b"Metadata:", b'If-None-Match: "1"\r\nMetadata:')
WAIT = KNOWN.replace(b"Metadata:", b"Prefer: wait=30\r\nMetadata:")


class Behind(RecordingServer):
    """A real server behind the relay. `v` is a VM of its host, in a scope of its own."""

    def __init__(self, incarnation: int = 1) -> None:
        super().__init__()
        self.world = World(clock=VirtualClock(datetime.fromtimestamp(MINUTE, UTC)))
        self._incarnation = incarnation

    @property
    def url(self) -> str:
        return self.world.url

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._start)
        return self

    def _start(self) -> None:
        self.world.__enter__()
        create = self.world.tokens.create
        self.world.run(create("root", Role.ADMIN, secret=SECRET, by="test"))
        self.world.run(create("kvm-a", Role.HOST, secret=SECRET, by="test", host="host-a"))
        self.world.enrol("v", Vm(name="v", id="id-1", host="host-a"))
        self.world.submit(Seen(), "v")
        changes = Restart(vm="v", event_id=EVENT_ID), Cancel(event_id=EVENT_ID)
        for change in changes[: self._incarnation - 1]:
            self.world.submit(change, "v")

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.world.__exit__, None, None, None)

    def cut_off(self, seconds: float = STALE_SECONDS) -> None:
        """From its store, since so long."""
        engine = self.world.engine
        engine.stale_since = engine.clock.now() - timedelta(seconds=seconds)
        self.world.pass_time(timedelta(0))


@contextmanager
def relay(*servers: Behind) -> Iterator[RelayWorld]:
    with RelayWorld(*servers, token=TOKEN) as world:
        yield world


def incarnation_of(response: RawResponse) -> str:
    return response.headers["etag"].strip('"')


def test_guest_reads_from_a_server_that_knows_what_is_new() -> None:
    cut, other = Behind(), Behind(incarnation=2)
    with relay(cut, other) as world:
        assert incarnation_of(world.ask(POLL)) == "1"
        cut.cut_off()
        response = world.ask(POLL)
        assert (response.status, incarnation_of(response)) == (200, "2")
        assert "age" not in response.headers


def test_answers_of_a_server_that_was_cut_off_are_no_notice() -> None:
    """It may have answered for some seconds before it noticed that."""
    cut, other = Behind(), Behind()
    with relay(cut, other) as world:
        world.ask(POLL)
        cut.cut_off()
        world.ask(POLL)
        assert world.unconfirmed.has_ended
        assert UNMARKED_SECONDS_MAX <= world.unconfirmed.seconds < GAP_SECONDS_MIN


@pytest.mark.parametrize("seconds", [6, 60, 290])
@pytest.mark.parametrize("request_", [POLL, WAIT], ids=["plain", "long poll"])
def test_time_in_which_another_server_could_be_read_is_notice(
    request_: bytes, seconds: int
) -> None:
    """The guest had no reason to poll before. It would have been answered."""
    cut, other = Behind(), Behind(incarnation=2)
    with relay(cut, other) as world:
        world.ask(POLL)
        world.ahead_seconds = seconds + NOTICED_SECONDS_MAX
        cut.cut_off(seconds)
        assert incarnation_of(world.ask(request_)) == "2"
        assert world.unconfirmed.has_ended
        assert UNMARKED_SECONDS_MAX <= world.unconfirmed.seconds < GAP_SECONDS_MIN


@pytest.mark.parametrize("seconds", [6, 60, 290])
def test_all_the_time_counts_if_all_servers_are_cut_off(seconds: int) -> None:
    servers = Behind(), Behind()
    with relay(*servers) as world:
        world.ask(POLL)
        world.ahead_seconds = seconds + NOTICED_SECONDS_MAX
        for server in servers:
            server.cut_off(seconds)
        world.ask(POLL)
        age = seconds + NOTICED_SECONDS_MAX
        assert age <= world.unconfirmed.seconds <= age + 2


def test_long_poll_that_waits_at_the_server_counts_once() -> None:
    cut, other = Behind(), Behind(incarnation=2)
    with relay(cut, other) as world, world.connect() as client:
        client.send(WAIT)
        until(lambda: cut.world.polls.waiting == 1)
        world.ahead_seconds = 60.0
        cut.cut_off(STALE_SECONDS_MIN)
        assert incarnation_of(client.response()) == "2"
        assert world.unconfirmed.has_ended
        least = NOTICED_SECONDS_MAX + STALE_SECONDS_MIN
        assert least <= world.unconfirmed.seconds < GAP_SECONDS_MIN


def test_long_poll_that_the_application_holds_ends_when_its_server_is_cut_off() -> None:
    """It is too large for the fast path, which looks once a second."""
    cut, other = Behind(), Behind(incarnation=2)
    with relay(cut, other) as world, world.connect() as client:
        client.send(WAIT.replace(b"Host: h", b"Host: h\r\nA: " + b"a" * REQUEST_BYTES_MAX))
        until(lambda: cut.world.metadata.waiting == 1)
        cut.world.engine.stale_since = cut.world.engine.clock.now() - timedelta(seconds=60)
        assert incarnation_of(client.response()) == "2"


@pytest.mark.parametrize("seconds", [STALE_SECONDS_MIN - 1, STALE_SECONDS_MIN])
def test_election_of_a_leader_in_the_store_is_not_an_outage(seconds: float) -> None:
    server = Behind()
    with relay(server) as world:
        server.cut_off(seconds)
        assert ("age" in world.ask(POLL).headers) == (seconds >= STALE_SECONDS_MIN)


def test_long_poll_ends_when_its_server_is_cut_off() -> None:
    """Another server may have a new document for the guest."""
    cut, other = Behind(), Behind(incarnation=2)
    with relay(cut, other) as world, world.connect() as client:
        client.send(WAIT)
        until(lambda: cut.world.polls.waiting == 1)
        cut.cut_off()
        assert incarnation_of(client.response()) == "2"


def test_long_poll_does_not_wait_at_a_server_that_is_cut_off() -> None:
    server = Behind()
    with relay(server) as world:
        server.cut_off()
        assert world.ask(WAIT).status == 304
        assert world.ask(KNOWN).headers["age"] == str(AGE)


def test_long_poll_of_a_vm_that_no_daemon_passes_on_waits_as_always() -> None:
    """It cannot ask another server, and would ask again and again."""
    server = Behind()
    with relay(server):
        direct = server.world
        direct.ask(POLL)
        server.cut_off()
        with direct.connect() as client:
            client.send(WAIT)
            direct.until(lambda: direct.polls.waiting == 1)


def test_guest_gets_the_document_with_its_age_if_all_servers_are_cut_off() -> None:
    servers = Behind(), Behind()
    with relay(*servers) as world:
        for server in servers:
            server.cut_off()
        response = world.ask(POLL)
        assert (response.status, response.headers["age"]) == (200, str(AGE))
        assert AGE <= world.unconfirmed.seconds <= AGE + 2
        assert not world.unconfirmed.has_ended


def test_guest_gets_a_newer_document_although_its_server_is_cut_off() -> None:
    """The relay has one that is not older than a minute, and must not prefer it."""
    server = Behind()
    with relay(server) as world:
        assert incarnation_of(world.ask(POLL)) == "1"
        server.world.submit(Restart(vm="v", event_id=EVENT_ID), "v")
        server.cut_off()
        response = world.ask(POLL)
        assert (incarnation_of(response), response.headers["age"]) == ("2", str(AGE))


def test_guest_gets_no_older_document_from_another_server_that_is_cut_off() -> None:
    newer, older = Behind(incarnation=3), Behind()
    with relay(newer, older) as world:
        for server in (newer, older):
            server.cut_off()
        assert incarnation_of(world.ask(POLL)) == "3"
        newer.world.stop()
        assert world.ask(POLL).status == 503


def test_guest_gets_no_older_document_than_the_one_that_it_names() -> None:
    """The relay was restarted, and has seen none."""
    server = Behind()
    with relay(server) as world:
        server.cut_off()
        assert world.ask(KNOWN.replace(b'"1"', b'"3"')).status == 503
        assert world.ask(KNOWN).status == 304


def test_guest_never_gets_an_older_document_than_before() -> None:
    """Events that it knows would seem to be over."""
    newer, cut = Behind(incarnation=3), Behind()
    with relay(newer, cut) as world:
        assert incarnation_of(world.ask(POLL)) == "3"
        for server in (newer, cut):
            server.cut_off()
        newer.world.stop()
        assert incarnation_of(world.ask(POLL)) == "3", "the relay has the last document"
        world.ahead_seconds = 61.0
        assert world.ask(POLL).status == 503
