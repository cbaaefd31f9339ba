"""Long polls on a real socket: they are answered by the fast path, without a task of their own."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest

from forewarn.core.command import Cancel, Restart
from forewarn.core.fleet import Vm
from forewarn.engine.board import TURN_CALLBACKS
from forewarn.web.http.admission import Limits
from forewarn.web.metadata.fast_path import REQUEST_BYTES_MAX
from tests.e2e.metadata_world import EVENT_ID, POLL, Client, RawResponse, World

MOMENT = timedelta(seconds=0.1)
WAIT_SECONDS = 60
WEB_0 = Vm(name="web-0", address="127.0.0.1")


def wait(incarnation: int = 1, vm: str = "", line: str = "Accept: */*") -> bytes:
    path = f"/as/{vm}/metadata" if vm else "/metadata"
    lines = f'Prefer: wait={WAIT_SECONDS}\r\nIf-None-Match: "{incarnation}"\r\n{line}\r\n\r\n'
    return POLL.replace(b"/metadata", path.encode()).replace(b"\r\n\r\n", b"\r\n" + lines.encode())


def by_the_application(request: bytes) -> bytes:
    """The same request, too large to be remembered."""
    return request.replace(b"Host: h", b"Host: h\r\nA: " + b"a" * REQUEST_BYTES_MAX)


def waits(world: World) -> int:
    return world.polls.waiting + world.metadata.waiting


@contextmanager
def recorded(limits: Limits | None = None) -> Iterator[World]:
    """The scope has been polled, so that no poll needs to be recorded."""
    with World(limits=limits) as world:
        world.ask(POLL)
        world.called.clear()
        yield world
        world.until(lambda: waits(world) == 0)
        assert [each.waiters for each in world.engine.board.scopes.values()] == [None, None]


def begin(world: World, client: Client, request: bytes) -> None:
    """Send a long poll. It waits when this returns."""
    before = waits(world)
    client.send(request)
    world.until(lambda: waits(world) == before + 1)


@contextmanager
def waiting(world: World, request: bytes = wait()) -> Iterator[Client]:
    with world.connect() as client:
        begin(world, client, request)
        assert world.polls.waiting
        yield client


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("is_changed", [True, False])
def test_waiting_client_gets_the_bytes_of_the_application(
    connection: str, version: bytes, is_changed: bool
) -> None:
    """The same headers in the same order, the same body, the same end."""
    request = wait(line=f"Connection: {connection}").replace(b"HTTP/1.1", version)
    with World() as world:
        world.ask(POLL)
        sent = [request, by_the_application(request), request]
        with ExitStack() as stack:
            clients = [stack.enter_context(world.connect()) for _ in sent]
            for client, data in zip(clients, sent, strict=True):
                begin(world, client, data)
            if is_changed:
                world.restart()
                responses = [client.response() for client in clients]
            else:
                world.stop()
                responses = [client.response() for client in clients]
            assert len({response.undated for response in responses}) == 1
            assert responses[0].status == (200 if is_changed else 304)
            assert responses[0].headers["preference-applied"] == f"wait={WAIT_SECONDS}"
            if connection == "close" or not is_changed:
                assert [client.read_to_end() for client in clients] == [b""] * 3
        called = 3 if connection == "keep-alive" and version == b"HTTP/1.0" else 1
        assert len(world.called) == 1 + called  # the first poll was recorded


def test_long_poll_with_an_old_etag_is_answered_at_once() -> None:
    with recorded() as world, world.connect() as client:
        for _ in range(2):
            client.send(wait(7))
            response = client.response()
            assert (response.status, "preference-applied" in response.headers) == (200, False)
        assert world.called == []


def test_waiting_does_not_take_a_task() -> None:
    """Neither where the bytes are new, nor on a connection that the application has served."""
    with recorded() as world, ExitStack() as stack:
        clients = [stack.enter_context(waiting(world, wait(vm=f"web-{n % 2}"))) for n in range(6)]
        served = stack.enter_context(world.connect())
        served.send(POLL.replace(b"GET", b"PUT"))
        assert served.response().status == 405
        begin(world, served, wait())
        assert (world.polls.waiting, world.listener.state.tasks) == (7, set())
        world.restart()
        assert {client.response().status for client in (*clients, served)} == {200}
        served.send(POLL)
        assert served.response().status == 200
        assert len(world.called) == 1


def test_input_behind_a_long_poll_is_answered_after_it() -> None:
    with recorded() as world, waiting(world) as client:
        client.send(POLL[:20])
        client.send(POLL[20:] + POLL.replace(b"GET", b"PUT"))
        assert client.is_silent(MOMENT)
        world.restart()
        responses = [client.response() for _ in range(3)]
        assert [response.status for response in responses] == [200, 200, 405]
        applied = ["preference-applied" in response.headers for response in responses]
        assert applied == [True, False, False]


@pytest.mark.parametrize("is_half_closed", [True, False])
def test_disconnect_ends_a_long_poll(is_half_closed: bool) -> None:
    with recorded() as world, waiting(world) as client, waiting(world) as other:
        if is_half_closed:
            client.finish_sending()
            assert client.read_to_end() == b""
        else:
            client.__exit__(None, None, None)
        world.until(lambda: world.polls.waiting == 1)
        world.restart()
        assert other.response().status == 200


def test_long_poll_ends_with_a_304_and_not_a_second_earlier() -> None:
    with recorded(Limits(idle_seconds=5)) as world, waiting(world) as client:
        world.pass_time(timedelta(seconds=WAIT_SECONDS - 2))
        assert client.is_silent(MOMENT)
        world.pass_time(timedelta(seconds=WAIT_SECONDS + 1))
        response = client.response()
        assert (response.status, response.headers["etag"]) == (304, '"1"')
        assert response.headers["preference-applied"] == f"wait={WAIT_SECONDS}"


def test_vm_that_leaves_during_a_long_poll_is_forbidden() -> None:
    with recorded() as world, waiting(world) as client:
        world.enrol("web", Vm(name="web-1"))
        assert client.response().status == 403
        world.enrol("web", WEB_0)
        client.send(POLL)
        assert client.response().status == 200


def test_vm_that_moves_waits_for_a_change_of_its_new_scope() -> None:
    """Both documents have the same incarnation: the move itself changes nothing for the VM."""
    with recorded() as world, waiting(world) as client:
        world.ask(POLL.replace(b"/metadata", b"/as/db-0/metadata"))
        world.enrol("db", Vm(name="db-0"), WEB_0)
        world.enrol("web", Vm(name="web-1"))
        assert client.is_silent(MOMENT)
        assert (world.polls.waiting, world.engine.board.scopes["web"].waiters) == (1, None)
        world.submit(Restart(vm="db-0", event_id=EVENT_ID), "db")
        response = client.response()
        assert json.loads(response.body)["Events"][0]["Resources"] == ["db-0"]


def test_polls_are_answered_while_many_are_woken() -> None:
    """A change that thousands wait for must not delay the polls of others by all their answers."""

    async def count_turns() -> int:
        """The iterations of the event loop from the change to the last response."""
        await world.engine.submit("web", Restart(vm="web-0", event_id=EVENT_ID), by="test")
        turns = 0
        while world.polls.waiting:
            await asyncio.sleep(0)
            turns += 1
        return turns

    with recorded() as world, ExitStack() as stack:
        count = 4 * TURN_CALLBACKS + 1
        clients = [stack.enter_context(world.connect()) for _ in range(count)]
        for client in clients:
            client.send(wait())
        world.until(lambda: world.polls.waiting == count)
        assert world.run(count_turns()) >= 3
        assert {client.response().status for client in clients} == {200}


class RandomWaits:
    """Clients that wait while documents change, VMs move and leave, clients give up, and time
    passes. Checks that each gets exactly the response it should, and when.
    """

    def __init__(self, world: World, stack: ExitStack, seed: int) -> None:
        self.world = world
        self.stack = stack
        self.chance = random.Random(seed)
        self.scope_of = {f"vm-{n}": "web" if n % 2 else "db" for n in range(6)}
        self.known: dict[Client, int] = {}
        """What each client that waits has."""
        self.behind: set[Client] = set()
        """Those that have sent another poll behind the long poll."""
        self.vm_of: dict[Client, str] = {}
        self.enrol()
        for name in ("web", "db"):
            vm = next(vm for vm, scope in self.scope_of.items() if scope == name)
            assert world.ask(POLL.replace(b"/metadata", f"/as/{vm}/metadata".encode()))

    def step(self) -> None:
        deeds = [self.wait] * 8 + [self.poll_behind, self.change, self.move, self.leave]
        self.chance.choice([*deeds, self.give_up, self.time_out])()

    def enrol(self) -> None:
        """New members first: a VM that moves is never without a scope."""
        for is_removing in (False, True):
            for name in ("web", "db"):
                here = {vm for vm, scope in self.scope_of.items() if scope == name}
                old = {vm.name for vm in self.world.scope(name).vms} - {"web-0", "web-1", "db-0"}
                names = here if is_removing else here | (old & self.scope_of.keys())
                self.world.enrol(name, *(Vm(name=vm) for vm in sorted(names)))
        self.check()

    def wait(self) -> None:
        idle = [client for client in self.vm_of if client not in self.known]
        client = (
            self.chance.choice(idle)
            if len(idle) > 2
            else self.stack.enter_context(self.world.connect())
        )
        vm = self.vm_of.setdefault(client, self.chance.choice([f"vm-{n}" for n in range(6)]))
        if vm not in self.scope_of:
            client.send(wait(1, vm))
            assert client.response().status == 403
            return
        current = self.world.scope(self.scope_of[vm]).incarnation
        if self.chance.random() < 0.1:
            client.send(wait(current + 1, vm))
            self.expect(client, client.response(), current + 1)
            return
        begin(self.world, client, wait(current, vm))
        self.known[client] = current

    def poll_behind(self) -> None:
        for client in self.chance.sample([*self.known], min(1, len(self.known))):
            if client not in self.behind:
                client.send(
                    POLL.replace(b"/metadata", f"/as/{self.vm_of[client]}/metadata".encode())
                )
                self.world.until(lambda: bool(self.world.metadata.waiting > len(self.behind)))
                self.behind.add(client)

    def change(self) -> None:
        name = self.chance.choice(("web", "db"))
        scope = self.world.scope(name)
        if scope.events:
            self.world.submit(Cancel(event_id=scope.events[0].id), name)
        elif scope.vms:
            event_id = f"602D9444-D2CD-49C7-8624-{self.chance.getrandbits(48):012X}"
            self.world.submit(Restart(vm=scope.vms[0].name, event_id=event_id), name)
        self.check()

    def move(self) -> None:
        for vm in self.chance.sample([*self.scope_of], min(1, len(self.scope_of))):
            self.scope_of[vm] = self.chance.choice(("web", "db"))
        self.enrol()

    def leave(self) -> None:
        """A VM leaves the fleet, or comes back."""
        vm = f"vm-{self.chance.randrange(6)}"
        if self.scope_of.pop(vm, None) is None:
            self.scope_of[vm] = self.chance.choice(("web", "db"))
        self.enrol()

    def give_up(self) -> None:
        for client in self.chance.sample([*self.known], min(1, len(self.known))):
            self.forget(client)
            self.world.until(lambda: waits(self.world) == len(self.known))

    def time_out(self) -> None:
        """A request with another behind it waits in the application, on the real clock."""
        self.world.pass_time(timedelta(seconds=WAIT_SECONDS + 1))
        for client in [*self.known]:
            if client not in self.behind:
                response = client.response()
                assert response.status == 304
                self.expect(client, response, self.known.pop(client))
        self.world.pass_time(timedelta())

    def check(self) -> None:
        """Read the responses of all whose document is another now. The others still wait."""
        for client, known in [*self.known.items()]:
            scope = self.scope_of.get(self.vm_of[client])
            if scope is None or self.world.scope(scope).incarnation != known:
                del self.known[client]
                self.expect(client, client.response(), known)
                if client in self.behind:
                    self.behind.remove(client)
                    self.expect(client, client.response(), 0)
        self.world.until(lambda: waits(self.world) == len(self.known))

    def expect(self, client: Client, response: RawResponse, known: int) -> None:
        scope = self.scope_of.get(self.vm_of[client])
        if scope is None:
            assert response.status == 403
            return
        current = self.world.scope(scope).incarnation
        assert response.headers["etag"] == f'"{current}"'
        assert response.status == (304 if current == known else 200)

    def forget(self, client: Client) -> None:
        client.__exit__(None, None, None)
        del self.vm_of[client]
        self.known.pop(client, None)
        self.behind.discard(client)

    def finish(self) -> None:
        """All that wait are answered, and none has got anything else."""
        self.world.stop()
        for client in self.vm_of:
            if client in self.known:
                self.expect(client, client.response(), self.known[client])
            if client not in self.behind:
                assert client.read_to_end() == b""


@pytest.mark.parametrize("seed", range(6))
def test_every_waiting_client_gets_one_correct_response(seed: int) -> None:
    with recorded(Limits(idle_seconds=10_000)) as world, ExitStack() as stack:
        story = RandomWaits(world, stack, seed)
        for _ in range(150):
            story.step()
        story.finish()
        assert (world.listener.state.connections, world.listener.state.tasks) == (set(), set())
        assert world.polls.counts == {}
