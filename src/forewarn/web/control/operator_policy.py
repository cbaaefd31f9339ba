"""Which connections the control listener accepts: one address without a token cannot take all."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from forewarn.web.http.admission import UNKNOWN_SHARE, Group, TimedConnection
from forewarn.web.http.connection import Connection, ConnectionPolicy, ConnectionState
from forewarn.web.http.message import Message

TRUSTED_MAX = 4096
"""How many addresses that have sent a valid token are remembered: the latest."""


class OperatorPolicy(ConnectionPolicy):
    """An address may have an eighth of the connections, until it has sent a valid token.

    A proxy, or a network behind one address, may need more than that. At a limit the oldest
    connection whose request has not arrived is closed for a new one, else an idle one.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._trusted: OrderedDict[str, None] = OrderedDict()
        self._by_address: dict[str, Group] = {}
        self._untrusted_max = max(1, self.limits.connections_max // UNKNOWN_SHARE)

    def connector(self, **arguments: Any) -> Callable[[], asyncio.Protocol]:
        return partial(OperatorConnection, self, **arguments)

    def trust(self, address: str) -> None:
        """A request from this address had a valid token."""
        self._trusted[address] = None
        self._trusted.move_to_end(address)
        if len(self._trusted) > TRUSTED_MAX:
            self._trusted.popitem(last=False)

    def admit(self, connection: TimedConnection) -> bool:
        address = connection.address
        group = self._by_address.get(address, OrderedDict())
        is_full = address not in self._trusted and len(group) >= self._untrusted_max
        if is_full and not self._make_room("address", self._untrusted_max, address, group):
            return False
        if not super().admit(connection):
            return False
        self._by_address.setdefault(address, group)[connection] = None
        return True

    def release(self, connection: TimedConnection) -> None:
        super().release(connection)
        group = self._by_address.get(connection.address, OrderedDict())
        group.pop(connection, None)
        if not group:
            self._by_address.pop(connection.address, None)

    def _evict(self, group: Group) -> bool:
        return self._evict_first(group, is_half_read) or super()._evict(group)


class OperatorConnection(Connection):
    """The application gets the connection too: it knows which requests have a valid token."""

    policy: OperatorPolicy

    def start_request(self) -> None:
        cast("Message", self.scope)["connection"] = self
        super().start_request()


def is_half_read(connection: TimedConnection) -> bool:
    """Whether a request is arriving, and no response has begun."""
    assert isinstance(connection, Connection)
    is_arriving = connection.state in (ConnectionState.HEAD, ConnectionState.BODY)
    return is_arriving and not (connection.cycle and connection.cycle.response_started)
