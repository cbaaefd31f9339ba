"""A guest polls through the relay of its host, which reports for how long it could not read."""

import hashlib
from datetime import timedelta
from typing import Any, cast

from forewarn.config import Config
from forewarn.hostd.moves import Moves
from forewarn.hostd.relay import Relay, RelayConnection
from forewarn.hostd.settings import HostToken
from forewarn.hostd.unconfirmed import Unconfirmed
from forewarn.hostd.upstream import Request, Response, Upstream
from forewarn.hostd.upstream import Server as UpstreamServer
from forewarn.store.base import Store
from forewarn.web.metadata.app import Metadata
from tests.e2e.metadata_world import TARGET
from tests.unit.engine.hostd_world import (
    NOON,
    SECOND,
    Daemon,
    Path,
    Server,
    World,
    reported,
    run,
    vm_id,
)
from tests.unit.web.control_world import make_client

MINUTE, STEP = timedelta(minutes=1), timedelta(seconds=5)


class MetadataServer(UpstreamServer):
    """The metadata listener of a server, called without a socket."""

    def __init__(self, server: Server) -> None:
        super().__init__(f"http://{server.name}")
        service = server.service
        self._client = make_client(Metadata(service.engine, Config(), tokens=service.tokens))

    async def ask(self, request: Request) -> Response:
        target = request.target.decode()
        response = await self._client.request(request.method, target, headers=request.headers)
        return Response(response.status_code, response.headers.raw, response.content)


class Servers(Upstream):
    def __init__(self, *servers: Server) -> None:
        super().__init__([])
        self._servers = [MetadataServer(server) for server in servers]


class Connection:
    """A guest's, without a socket."""

    url = TARGET.encode()
    headers = ((b"host", b"h"), (b"metadata", b"true"))

    def __init__(self, vm: str) -> None:
        self.address = vm_id(vm)
        self.scope = {"method": "GET", "path": TARGET}
        self.responses: list[Response] = []

    def check_identity(self) -> None:
        pass

    def send_response(self, response: Response) -> None:
        self.responses.append(response)


class Relayed:
    """The host of a daemon, with the relay that its guests poll."""

    def __init__(self, world: World, daemon: Daemon, *servers: Server) -> None:
        self._world, self._daemon, clock = world, daemon, world.clock

        def now() -> float:
            return clock.now().timestamp()

        self.unconfirmed = Unconfirmed(now)
        digest = hashlib.sha256(world.secret.encode()).hexdigest().encode()
        self._relay = Relay(
            Servers(*servers),
            HostToken(daemon.host, "", digest),
            Moves(),
            now,
            now,
            unconfirmed=self.unconfirmed,
        )

    async def poll(self, vm: str) -> Response:
        connection = Connection(vm)

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        scope: Any = connection.scope | {"connection": cast("RelayConnection", connection)}
        await self._relay(scope, receive, None)
        return connection.responses[0]

    async def pass_time(self, duration: timedelta, vm: str, every: timedelta) -> None:
        """The guest polls regularly, and the daemon reports every five seconds, and at once what
        has ended, as `ControlLoop` does.
        """
        for number in range(int(duration / STEP)):
            if number % int(every / STEP) == 0:
                assert (await self.poll(vm)).status == 200
            if self.unconfirmed.has_ended:
                await self._report()
            await self._report()
            await self._world.clock.advance(STEP)
            await self._world.settle()

    async def _report(self) -> None:
        seconds = self.unconfirmed.seconds
        await self._daemon.work(unconfirmed_seconds=seconds)
        self.unconfirmed.report(seconds)


def test_one_of_three_servers_that_is_cut_off_leaves_not_before_unchanged() -> None:
    """Its relay reads from another server as soon as the first one marks its documents."""

    async def test(world: World) -> None:
        path = Path(world.store)
        cut = Server(cast("Store", path), world.clock, "server-3", is_confirming=True)
        await cut.start()
        daemon = await world.daemon("host-a", reported("a"))
        host, every = Relayed(world, daemon, cut, *world.servers), 10 * SECOND
        await host.poll("a")
        assert await world.servers[0].operations.restart("a", by="ann")
        await host.pass_time(MINUTE, "a", every)
        path.is_cut = True
        await host.pass_time(10 * MINUTE, "a", every)
        assert cut.engine.age_seconds > 0
        path.is_cut = False
        await host.pass_time(4 * MINUTE - STEP, "a", every)
        (event,) = world.servers[0].scope("a").events
        assert (event.status, event.not_before) == ("Scheduled", NOON + 15 * MINUTE)
        await host.pass_time(2 * STEP, "a", every)
        (event,) = world.servers[0].scope("a").events
        assert event.status == "Started"
        await cut.stop()

    run(test, is_confirming=True)
