"""The relay counts the errors that guests get, and names guests that get nothing else."""

import pytest

from forewarn.errors import Unavailable
from forewarn.hostd.refusals import FORGET_SECONDS, GUESTS_MAX, LASTING_SECONDS, Refusals
from forewarn.platform.remote import REFUSED_GUESTS_MAX, RefusalReason, RefusedGuest
from forewarn.web.http.admission import Limits
from tests.unit.hostd.recording_server import RecordingServer, response
from tests.unit.hostd.relay_world import RelayWorld, until

POLL = (
    b"GET /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1\r\n"
    b"Host: h\r\nMetadata: true\r\n\r\n"
)
NO_SERVER = RefusalReason.NO_SERVER


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def refused(refusals: Refusals, clock: Clock, guest: str, seconds: float) -> None:
    """The VM polls each second of this time, and gets an error each time."""
    for _ in range(int(seconds) + 1):
        refusals.add(guest, NO_SERVER, is_poll=True)
        clock.seconds += 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("403 Forbidden", "server-refused"),
        ("429 Too Many Requests", "server-refused"),
        ("503 Service Unavailable", "server-error"),
        ("400 Bad Request", "bad-request"),
    ],
)
def test_errors_of_a_server_are_counted_by_reason(status: str, reason: str) -> None:
    with RelayWorld(RecordingServer(response(status, b"{}"))) as world:
        world.ask(POLL)

        assert world.refusals.counts == {reason: 1}


def test_a_client_that_is_no_vm_of_the_host_is_counted() -> None:
    """After a move, a guest may still ask the host that it was on."""
    with RelayWorld(RecordingServer(response())) as world:
        assert world.ask(POLL, "127.0.0.99").status == 403

        assert world.refusals.counts == {"not-a-vm": 1}


def test_a_port_in_doubt_is_counted() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ports.problem = Unavailable("in doubt")
        assert world.ask(POLL).status == 503

        assert world.refusals.counts == {"in-doubt": 1}


def test_a_poll_that_no_server_answers_is_counted() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.stop_servers()
        assert world.ask(POLL).status == 503

        assert world.refusals.counts == {"no-server": 1}


def test_a_connection_above_the_limit_is_counted() -> None:
    limits = Limits(connections_max=64, connections_per_address_max=1)
    with RelayWorld(RecordingServer(response()), limits=limits) as world:
        with world.connect() as client, world.connect() as other:
            client.send(POLL[:9])
            other.send(POLL)
            until(lambda: bool(world.refusals.counts))

        assert world.refusals.counts == {"too-many": 1}


def test_guest_above_its_limit_of_connections_is_named_until_it_gets_a_document() -> None:
    """It gets nothing but 503. What it would have asked for is not read."""
    limits = Limits(connections_max=64, connections_per_address_max=1)
    with RelayWorld(RecordingServer(response()), limits=limits) as world:
        with world.connect() as client:
            client.send(POLL[:9])
            for _ in range(2):
                with world.connect() as other:
                    assert other.response().status == 503
                world.ahead_seconds += LASTING_SECONDS + 1
            (named,) = world.refusals.lasting()
            assert (named.guest, named.reason) == ("id-1", "too-many")

            client.send(POLL[9:])
            assert client.response().status == 200

        assert world.refusals.lasting() == []


def test_documents_and_requests_for_other_paths_are_not_counted() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL)
        assert world.refusals.counts == {}
    with RelayWorld(RecordingServer(response("404 Not Found", b""))) as world:
        world.ask(POLL.replace(b"scheduledevents", b"openstack"))
        assert world.refusals.counts == {}


def test_guest_that_gets_only_errors_is_named_with_the_time_and_the_last_reason() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refused(refusals, clock, "id-1", LASTING_SECONDS - 1)
    assert refusals.lasting() == []

    refused(refusals, clock, "id-1", 0)

    assert refusals.lasting() == [RefusedGuest("id-1", NO_SERVER, int(LASTING_SECONDS) + 1)]


def test_one_document_in_between_is_enough() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refused(refusals, clock, "id-1", LASTING_SECONDS / 2)
    refusals.end("id-1")
    refused(refusals, clock, "id-1", LASTING_SECONDS / 2)

    assert refusals.lasting() == []


def test_the_relay_notices_that_a_guest_got_its_document() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.refusals.add("id-1", NO_SERVER, is_poll=True)
        world.ahead_seconds += LASTING_SECONDS + 1
        world.refusals.add("id-1", NO_SERVER, is_poll=True)
        assert world.refusals.lasting()

        world.ask(POLL)

        assert world.refusals.lasting() == []


def test_guest_that_has_stopped_asking_is_not_named() -> None:
    """It gets no errors. Servers notice that it is silent."""
    clock = Clock()
    refusals = Refusals(clock)
    refused(refusals, clock, "id-1", LASTING_SECONDS)
    clock.seconds += FORGET_SECONDS
    assert refusals.lasting() == []

    refusals.add("id-1", NO_SERVER, is_poll=True)

    assert refusals.lasting() == [], "this is the first error of a new run"


def test_memory_and_request_have_limits() -> None:
    """A guest can make up as many addresses as it likes."""
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(2):
        add_addresses(refusals, 2 * GUESTS_MAX)
        clock.seconds += LASTING_SECONDS
    assert refusals.lasting() == [], "each was forgotten before it came again"

    for _ in range(2):
        add_addresses(refusals, GUESTS_MAX)
        clock.seconds += LASTING_SECONDS
    assert len(refusals.lasting()) == REFUSED_GUESTS_MAX


def add_addresses(refusals: Refusals, count: int) -> None:
    """Polls from this many addresses at which no VM is known."""
    for number in range(count):
        address = f"10.0.0.{number}"
        refusals.add("", RefusalReason.NOT_A_VM, is_poll=True, address=address)


def test_made_up_addresses_do_not_hide_a_vm_that_gets_only_errors() -> None:
    """They repeat, and have got errors for longer."""
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(3):
        add_addresses(refusals, REFUSED_GUESTS_MAX)
        clock.seconds += LASTING_SECONDS
    refused(refusals, clock, "id-1", LASTING_SECONDS)

    lasting = refusals.lasting()

    assert lasting[0] == RefusedGuest("id-1", NO_SERVER, int(LASTING_SECONDS) + 1)
    assert lasting[1].guest == "10.0.0.0"
    assert len(lasting) == REFUSED_GUESTS_MAX


def test_made_up_addresses_do_not_make_the_relay_forget_a_vm() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refusals.add("id-1", NO_SERVER, is_poll=True)
    add_addresses(refusals, 2 * GUESTS_MAX)
    clock.seconds += LASTING_SECONDS
    refusals.add("id-1", NO_SERVER, is_poll=True)

    assert [each.guest for each in refusals.lasting()] == ["id-1"]


def test_client_that_is_no_vm_of_the_host_is_named_by_its_address() -> None:
    with RelayWorld(RecordingServer(response())) as world:
        world.ask(POLL, "127.0.0.99")
        world.ahead_seconds += LASTING_SECONDS + 1
        world.ask(POLL, "127.0.0.99")

        (named,) = world.refusals.lasting()
        assert (named.guest, named.reason) == ("127.0.0.99", "not-a-vm")
