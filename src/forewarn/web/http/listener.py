"""One listening socket: uvicorn's server inside our own event loop, started and stopped by us.

It touches no signals.
"""

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
from forewarn.web.http.connection import TICK_SECONDS, ConnectionPolicy, Timed
from forewarn.web.http.tls import GOODBYE_SECONDS_MAX, HANDSHAKE_SECONDS_MAX, Certificate

BACKLOG = 4096
SERVER_METADATA = f"Forewarn-IMDS/{__version__}"
"""Some clients look for IMDS in this header before they trust the endpoint."""
SERVER_CONTROL = f"Forewarn/{__version__}"
STOP_SECONDS_MAX = 1.5
ABORT_SECONDS_MAX = 1.0
"""Together below 3 seconds: a service manager that restarts us must not have to wait for a client
that does not read.
"""
ACCEPT_TURNS = 3
CLOSE_TURNS_MAX = 100
DRAIN_SECONDS_MIN, DRAIN_SECONDS_MAX = 0.001, 0.1
"""How long to wait before looking again whether all connections have ended: at first briefly, then
ever longer.
"""

Application = Callable[..., Any]


class Listener:
    """An application on an address.

    `address` tells the real port once it is started. With a certificate it speaks TLS only.
    """

    def __init__(
        self,
        application: Application,
        address: Address,
        guard: ConnectionPolicy,
        *,
        server_name: str,
        on_stop: Callable[[], None] | None = None,
        stop_seconds_max: float = STOP_SECONDS_MAX,
        certificate: Certificate | None = None,
    ) -> None:
        self.address = address
        self._on_stop = on_stop
        self._stop_seconds_max = stop_seconds_max
        self._server = _Server(_config(application, server_name), guard, certificate)
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ServerState:
        """The connections and tasks that there are."""
        return self._server.server_state

    async def start(self) -> None:
        """Listen.

        Returns when the first connection could be made; raises Invalid or Unavailable if the
        address cannot be had.
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
        """Take no more connections, answer what is in flight, and close.

        What takes too long is cut off.
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

    async def cut_off(self) -> None:
        """Let go of the address and of every connection, at once: nobody is answered any more.

        `stop` is still to come.
        """
        await self._server.let_go()
        self._drop_connections()

    async def wait(self) -> None:
        """Until it ends: when it is stopped, or by what broke it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def _drop_connections(self) -> None:
        for connection in list(cast("set[Timed]", self.state.connections)):
            connection.abort()

    async def _abort(self, task: asyncio.Task[None]) -> None:
        self._drop_connections()
        await asyncio.wait({task}, timeout=ABORT_SECONDS_MAX)
        self._server.force_exit = True
        for running in list(self.state.tasks):
            running.cancel()


class _Server(uvicorn.Server):
    """Uvicorn's server with connections of our own, a beginning that is told, and an end that is
    asked for.
    """

    def __init__(
        self, config: uvicorn.Config, guard: ConnectionPolicy, certificate: Certificate | None
    ) -> None:
        super().__init__(config)
        self.is_ready = asyncio.Event()
        self.is_stopping = asyncio.Event()
        self._guard = guard
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
        """Uvicorn's, without a lifespan, and with connections made by the guard."""
        await self._tick()  # the first connection finds a Date line
        connector = self._guard.connector(
            config=self.config, server_state=self.server_state, app_state={}
        )
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._certificate:
            tls = {
                "ssl": self._certificate.context,
                "ssl_handshake_timeout": HANDSHAKE_SECONDS_MAX,
                "ssl_shutdown_timeout": GOODBYE_SECONDS_MAX,
            }
        self.servers = [
            await loop.create_server(connector, sock=one, backlog=BACKLOG, **tls)
            for one in sockets or ()
        ]
        self.started = True
        self.is_ready.set()

    async def let_go(self) -> None:
        """Close the listening socket. Returns when its address is free."""
        listening = self._listening
        if listening is None or listening.fileno() == -1:
            return
        asyncio.get_running_loop().remove_reader(listening)
        for _ in range(
            ACCEPT_TURNS
        ):  # asyncio forgets a connection that it accepts while its server is closed
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        listening.close()
        for _ in range(CLOSE_TURNS_MAX):
            if listening.fileno() == -1:
                break
            await asyncio.sleep(0)

    async def main_loop(self) -> None:
        while not self.is_stopping.is_set():  # ends when we are stopped
            await self._tick()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.is_stopping.wait(), TICK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's, without its fixed pause of 100 ms: a listener that has nothing left to answer
        ends at once.
        """
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        for _ in range(
            ACCEPT_TURNS
        ):  # what has been accepted already becomes a connection, and is answered
            await asyncio.sleep(0)
        pause = DRAIN_SECONDS_MIN
        while (
            self._drain() and not self.force_exit
        ):  # ends: `Listener.stop` cuts off what takes too long
            await asyncio.sleep(pause)
            pause = min(2 * pause, DRAIN_SECONDS_MAX)
        for server in self.servers:
            await server.wait_closed()

    def _drain(self) -> bool:
        """Ask every connection to close after its current answer; whether anything is left."""
        for connection in list(self.server_state.connections):
            connection.shutdown()
        return bool(self.server_state.connections or self.server_state.tasks)

    async def _tick(self) -> None:
        await self.on_tick(0)
        self._guard.tick(self.server_state, asyncio.get_running_loop().time())


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
        proxy_headers=False,  # would take a caller's word for its own address
        server_header=False,
        headers=[("server", server_name)],
    )


def _bind(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError, OverflowError) as error:
        raise Invalid(
            f"cannot listen on {address}: no such address or name", address=str(address)
        ) from error
    family, kind, protocol, _, where = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise _bind_problem(address, error) from error
    return listening


def _bind_problem(address: Address, error: Exception) -> Error:
    why = getattr(error, "errno", None)
    if why == errno.EADDRINUSE:
        return Unavailable(
            f"cannot listen on {address}: another program does already", address=str(address)
        )
    if why in (errno.EACCES, errno.EPERM):
        return Invalid(
            f"cannot listen on {address}: not permitted; ports below 1024 need a privilege",
            address=str(address),
        )
    if why == errno.EADDRNOTAVAIL:
        return Invalid(
            f"cannot listen on {address}: {address.host} is no address of this machine",
            address=str(address),
        )
    return Invalid(
        f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}",
        address=str(address),
    )
