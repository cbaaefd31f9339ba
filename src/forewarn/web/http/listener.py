"""One listening socket, whose connections pass requests to an application."""

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from email.utils import formatdate
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from forewarn import __version__
from forewarn.errors import Error, Invalid, Unavailable
from forewarn.option_kind import Address
from forewarn.web.http.admission import TimedConnection
from forewarn.web.http.compatibility import probe
from forewarn.web.http.connection import TICK_SECONDS, Connection, ConnectionPolicy
from forewarn.web.http.tls import Certificate
from forewarn.web.http.tls_server import TlsServer

BACKLOG = 4096
SERVER_METADATA = f"Forewarn-IMDS/{__version__}"
"""Some clients look for IMDS in the Server header before they trust the endpoint."""
SERVER_CONTROL = f"Forewarn/{__version__}"
STOP_SECONDS_MAX = 1.5
ABORT_SECONDS_MAX = 1.0
"""Together below 3 seconds: a restart must not wait for a client that does not read."""
ACCEPT_ITERATIONS = 3
DRAIN_SECONDS_MIN, DRAIN_SECONDS_MAX = 0.001, 0.1
"""Pause between checks whether all connections have closed; it doubles each time."""
BIND_ERRORS: dict[int | None, tuple[type[Error], object]] = {
    errno.EADDRINUSE: (Unavailable, "the address is in use"),
    errno.EACCES: (Invalid, "permission denied; ports below 1024 need a privilege"),
    errno.EPERM: (Invalid, "permission denied; ports below 1024 need a privilege"),
    errno.EADDRNOTAVAIL: (Invalid, "this machine does not have the address"),
}

Application = Callable[..., Any]


@dataclass(eq=False)
class Listener:
    """An application on an address. `address` has the real port after `start`.

    With a certificate, only TLS is accepted. With `reuse_port`, other listeners of this user may
    share the address. `bound` is a socket that listens already. `state` has uvicorn's connections
    and tasks.
    """

    application: Application
    address: Address
    policy: ConnectionPolicy
    _: KW_ONLY
    server_name: str
    on_stop: Callable[[], None] = lambda: None
    stop_seconds_max: float = STOP_SECONDS_MAX
    certificate: Certificate | None = None
    reuse_port: bool = False
    bound: socket.socket | None = None

    def __post_init__(self) -> None:
        self.state = ServerState()
        self._server: asyncio.Server | TlsServer | None = None
        self._is_stopping = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections; Invalid or Unavailable if the address cannot be bound."""
        listening = self.bound or _bind(self.address, reuse_port=self.reuse_port)
        self.address = Address(*listening.getsockname()[:2])
        self._tick()  # the first response needs a Date header
        config = _config(self.application)
        arguments: dict[str, Any] = {"config": config, "server_state": self.state, "app_state": {}}
        self.policy.can_replace = probe(partial(Connection, self.policy, **arguments))
        connector = self.policy.connector(**arguments)
        server: asyncio.Server | TlsServer
        if self.certificate:
            server = TlsServer(listening, connector, self.certificate.context, self.policy)
        else:
            server = await asyncio.get_running_loop().create_server(
                connector, sock=listening, backlog=BACKLOG, start_serving=False
            )
        try:
            await server.start_serving()
        except asyncio.CancelledError:  # nobody stops a listener that has not started
            server.close()
            raise
        self._server = server
        self._ticking = asyncio.create_task(self._run())

    async def wait(self) -> None:
        """Wait until it is stopped; raises what broke it."""
        if self._ticking is not None:
            await asyncio.shield(self._ticking)

    async def stop(self) -> None:
        """Accept no more connections, finish requests in flight, and close.

        What takes too long is aborted.
        """
        server, self._server = self._server, None
        if server is None:
            return
        self.on_stop()
        self._is_stopping.set()
        server.close()
        # Connections that were accepted already get their responses.
        for _ in range(ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        if not await self._drain(self.stop_seconds_max):
            for connection in list(cast("set[TimedConnection]", self.state.connections)):
                connection.abort()
            await self._drain(ABORT_SECONDS_MAX)
            for task in list(self.state.tasks):
                task.cancel()
        await server.wait_closed()
        await self.wait()

    async def _drain(self, seconds_max: float) -> bool:
        """Let every connection close after its current response; whether all have, in time."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + seconds_max, DRAIN_SECONDS_MIN
        while self.state.connections or self.state.tasks:
            for connection in list(self.state.connections):
                connection.shutdown()
            if loop.time() > deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, DRAIN_SECONDS_MAX)
        return True

    async def _run(self) -> None:
        follow = asyncio.create_task(self.certificate.follow()) if self.certificate else None
        try:
            while not self._is_stopping.is_set():
                self._tick()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_stopping.wait(), TICK_SECONDS)
        finally:
            if follow:
                follow.cancel()

    def _tick(self) -> None:
        date = formatdate(usegmt=True).encode()
        self.state.default_headers = [(b"date", date), (b"server", self.server_name.encode())]
        self.policy.tick(self.state, asyncio.get_running_loop().time())


def _config(application: Application) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # would trust a client about its own address
    )


def _bind(address: Address, *, reuse_port: bool) -> socket.socket:
    try:
        resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, socket_address = resolved[0]
        return socket.create_server(
            socket_address,
            family=family,
            backlog=BACKLOG,
            reuse_port=reuse_port,
            dualstack_ipv6=family is socket.AF_INET6,
        )
    except (OSError, UnicodeError, OverflowError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
        kind, reason = BIND_ERRORS.get(number, (Invalid, reason or error))
        if reuse_port and number == errno.EADDRINUSE:
            reason = f"{reason} by a program without reuse_port, or of another user"
        message = f"cannot listen on {address}: {reason}"
        raise kind(message, address=str(address)) from error
