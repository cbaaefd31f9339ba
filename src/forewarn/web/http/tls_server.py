"""Accepts TCP connections, and passes them on after their TLS handshake.

`loop.create_server` with `ssl` calls the protocol only after the handshake, so the limits of
connections (`admission.py`) would not see a client that never sends its part of it.
"""

import asyncio
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable

from forewarn.web.http.admission import UNKNOWN_SHARE, Admission
from forewarn.web.http.message import plain_address

HANDSHAKE_SECONDS_MAX = 3.0
SHUTDOWN_SECONDS_MAX = 1.0
"""How long to wait for the client's part of the TLS shutdown."""
HANDSHAKES_MIN = 16
"""An address may have as many, whatever the limits: a browser opens several connections at once."""
PAUSE_SECONDS = 1.0
"""After an error such as EMFILE."""

Handshake = asyncio.Task[None]


class TlsServer:
    """Listens on a socket. At most half as many handshakes as connections are in progress, and an
    eighth for one address: at a limit, the oldest is closed for a new one.
    """

    def __init__(
        self,
        listening: socket.socket,
        connector: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        admission: Admission,
    ) -> None:
        self._listening = listening
        self._connector = connector
        self._context = context
        self._admission = admission
        connections_max = admission.limits.connections_max
        self._address_max = max(HANDSHAKES_MIN, connections_max // UNKNOWN_SHARE)
        self._total_max = max(self._address_max, connections_max // 2)
        self._handshakes: OrderedDict[Handshake, str] = OrderedDict()  # with their address
        self._by_address: dict[str, OrderedDict[Handshake, str]] = {}
        self._accepting: asyncio.Task[None] | None = None

    async def start_serving(self) -> None:
        self._listening.settimeout(0)  # as `sock_accept` expects
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections."""
        if self._accepting is None:
            self._listening.close()
        else:
            self._accepting.cancel()

    async def wait_closed(self) -> None:
        """End the handshakes in progress."""
        for handshake in self._handshakes:
            handshake.cancel()
        tasks = [*self._handshakes, *([self._accepting] if self._accepting else ())]
        if tasks:
            await asyncio.wait(tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:  # ends when cancelled
                try:
                    accepted, address = await loop.sock_accept(self._listening)
                except Exception as error:  # otherwise the server would accept no more
                    self._admission.throttled_log.warn("connection not accepted", error=error)
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                self._begin(accepted, plain_address(address[0]))
                await asyncio.sleep(0)  # it does not wait while there is something to accept
        finally:
            self._listening.close()

    def _begin(self, accepted: socket.socket, address: str) -> None:
        self._make_room("address", self._address_max, self._by_address.get(address), address)
        self._make_room("total", self._total_max, self._handshakes, address)
        handshake = asyncio.create_task(self._shake_hands(accepted))
        self._handshakes[handshake] = address
        self._by_address.setdefault(address, OrderedDict())[handshake] = address
        handshake.add_done_callback(self._forget)

    def _make_room(
        self, limit: str, limit_max: int, group: OrderedDict[Handshake, str] | None, address: str
    ) -> None:
        """Close the oldest handshake of a group that is full."""
        if group is None or len(group) < limit_max:
            return
        self._admission.limits_reached[limit] += 1
        self._admission.throttled_log.warn(
            f"limit of TLS handshakes reached: {limit}", limit_max=limit_max, address=address
        )
        oldest = next(iter(group))
        self._forget(oldest)
        oldest.cancel()

    def _forget(self, handshake: Handshake) -> None:
        address = self._handshakes.pop(handshake, None)
        if address is not None:
            del self._by_address[address][handshake]
            if not self._by_address[address]:
                del self._by_address[address]

    async def _shake_hands(self, accepted: socket.socket) -> None:
        """Pass the connection to its protocol, or close it if the handshake fails."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connector,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS_MAX,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS_MAX,
            )
        except OSError:
            pass  # the client has sent no valid handshake, or not in time: nothing is logged
        except Exception as error:
            self._admission.throttled_log.warn("TLS handshake failed", error=error)
