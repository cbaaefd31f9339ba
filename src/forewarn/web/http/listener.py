"""One listening socket: uvicorn's server in our own event loop, without signal handlers."""

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from forewarn import __version__
from forewarn.config import Address
from forewarn.errors import Error, Invalid, Unavailable
from forewarn.web.http.admission import TimedConnection
from forewarn.web.http.connection import TICK_SECONDS, ConnectionPolicy
from forewarn.web.http.tls import HANDSHAKE_SECONDS_MAX, SHUTDOWN_SECONDS_MAX, Certificate

BACKLOG = 4096
SERVER_METADATA = f"Forewarn-IMDS/{__version__}"
"""Some clients look for IMDS in the Server header before they trust the endpoint."""
SERVER_CONTROL = f"Forewarn/{__version__}"
STOP_SECONDS_MAX = 1.5
ABORT_SECONDS_MAX = 1.0
"""Together below 3 seconds: a restart must not wait for a client that does not read."""
ACCEPT_ITERATIONS = 3
CLOSE_ITERATIONS_MAX = 100
DRAIN_SECONDS_MIN, DRAIN_SECONDS_MAX = 0.001, 0.1
"""Pause between checks whether all connections have closed; it doubles each time."""
BIND_ERRORS: dict[int | None, tuple[type[Error], str]] = {
    errno.EADDRINUSE: (Unavailable, "the address is in use"),
    errno.EACCES: (Invalid, "permission denied; ports below 1024 need a privilege"),
    errno.EPERM: (Invalid, "permission denied; ports below 1024 need a privilege"),
    errno.EADDRNOTAVAIL: (Invalid, "this machine does not have the address"),
}

Application = Callable[..., Any]


class Listener:
    """An application on an address. `address` has the real port after `start`.

    With a certificate, only TLS is accepted.
    """

    def __init__(
        self,
        application: Application,
        address: Address,
        policy: ConnectionPolicy,
        *,
        server_name: str,
        on_stop: Callable[[], None] | None = None,
        stop_seconds_max: float = STOP_SECONDS_MAX,
        certificate: Certificate | None = None,
    ) -> None:
        self.address = address
        self._on_stop = on_stop
        self._stop_seconds_max = stop_seconds_max
        self._server = _Server(_config(application, server_name), policy, certificate)
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ServerState:
        """Uvicorn's connections and tasks."""
        return self._server.server_state

    async def start(self) -> None:
        """Listen; Invalid or Unavailable if the address cannot be bound.

        Returns when connections are accepted.
        """
        listening = _bind(self.address)
        self.address = Address(*listening.getsockname()[:2])
        self._task = asyncio.create_task(self._server.run_in_loop(listening))
        is_ready = asyncio.create_task(self._server.is_ready.wait())
        await asyncio.wait({self._task, is_ready}, return_when=asyncio.FIRST_COMPLETED)
        is_ready.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Accept no more connections, finish requests in flight, and close.

        What takes too long is aborted.
        """
        task, self._task = self._task, None
        if task is None:
            return
        if self._on_stop:
            self._on_stop()
        self._server.is_stopping.set()
        done, _ = await asyncio.wait({task}, timeout=self._stop_seconds_max)
        if not done:
            await self._abort(task)
        await task

    async def disconnect(self) -> None:
        """Release the address and abort every connection. `stop` must still be called."""
        await self._server.release_address()
        self._abort_connections()

    async def wait(self) -> None:
        """Wait until it is stopped; raises what broke it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def _abort_connections(self) -> None:
        for connection in list(cast("set[TimedConnection]", self.state.connections)):
            connection.abort()

    async def _abort(self, task: asyncio.Task[None]) -> None:
        self._abort_connections()
        await asyncio.wait({task}, timeout=ABORT_SECONDS_MAX)
        self._server.force_exit = True
        for running in list(self.state.tasks):
            running.cancel()


class _Server(uvicorn.Server):
    """Uvicorn's server with our connections, and with events for start and stop."""

    def __init__(
        self, config: uvicorn.Config, policy: ConnectionPolicy, certificate: Certificate | None
    ) -> None:
        super().__init__(config)
        self.is_ready = asyncio.Event()
        self.is_stopping = asyncio.Event()
        self._policy = policy
        self._certificate = certificate
        self._listening: socket.socket | None = None

    async def run_in_loop(self, listening: socket.socket) -> None:
        """`serve` without its signal handlers."""
        self._listening = listening
        follow = asyncio.create_task(self._certificate.follow()) if self._certificate else None
        try:
            await self._serve([listening])
        finally:
            if follow:
                follow.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, without a lifespan, and with connections made by the policy."""
        await self._tick()  # the first response needs a Date header
        connector = self._policy.connector(
            config=self.config, server_state=self.server_state, app_state={}
        )
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._certificate:
            tls = {
                "ssl": self._certificate.context,
                "ssl_handshake_timeout": HANDSHAKE_SECONDS_MAX,
                "ssl_shutdown_timeout": SHUTDOWN_SECONDS_MAX,
            }
        self.servers = [
            await loop.create_server(connector, sock=listening, backlog=BACKLOG, **tls)
            for listening in sockets or ()
        ]
        self.started = True
        self.is_ready.set()

    async def release_address(self) -> None:
        """Close the listening socket. Returns when its address is free."""
        listening = self._listening
        if listening is None or listening.fileno() == -1:
            return
        asyncio.get_running_loop().remove_reader(listening)
        # asyncio loses a connection that is being accepted while its server closes.
        for _ in range(ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        listening.close()
        for _ in range(CLOSE_ITERATIONS_MAX):
            if listening.fileno() == -1:
                break
            await asyncio.sleep(0)

    async def main_loop(self) -> None:
        while not self.is_stopping.is_set():
            await self._tick()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.is_stopping.wait(), TICK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, without its fixed pause of 100 ms."""
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        # Connections that were accepted already get their responses.
        for _ in range(ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        pause = DRAIN_SECONDS_MIN
        while self._drain() and not self.force_exit:
            await asyncio.sleep(pause)
            pause = min(2 * pause, DRAIN_SECONDS_MAX)
        for server in self.servers:
            await server.wait_closed()

    def _drain(self) -> bool:
        """Let every connection close after its current response; whether any is left."""
        for connection in list(self.server_state.connections):
            connection.shutdown()
        return bool(self.server_state.connections or self.server_state.tasks)

    async def _tick(self) -> None:
        await self.on_tick(0)
        self._policy.tick(self.server_state, asyncio.get_running_loop().time())


def _config(application: Application, server_name: str) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        loop="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # would trust a client about its own address
        server_header=False,
        headers=[("server", server_name)],
    )


def _bind(address: Address) -> socket.socket:
    try:
        resolved = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError, OverflowError) as error:
        raise Invalid(
            f"cannot listen on {address}: no such address or name", address=str(address)
        ) from error
    family, kind, protocol, _, socket_address = resolved[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(socket_address)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise _bind_error(address, error) from error
    return listening


def _bind_error(address: Address, error: Exception) -> Error:
    number = getattr(error, "errno", None)
    kind, reason = BIND_ERRORS.get(number, (Invalid, getattr(error, "strerror", None) or error))
    return kind(f"cannot listen on {address}: {reason}", address=str(address))
