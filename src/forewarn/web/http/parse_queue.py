"""The order in which connections with much input are parsed."""

import asyncio
from collections import OrderedDict
from typing import Protocol


class Parsing(Protocol):
    """A connection with more input than one turn."""

    def parse_turn(self) -> None: ...


class ParseQueue:
    """Connections that wait to continue parsing.

    One turn per iteration of the event loop, for all connections together. However much clients
    pipeline, and on however many connections, the others are delayed by one turn only.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Parsing, None] = OrderedDict()

    def add(self, connection: Parsing) -> None:
        """Continue parsing this connection after the others in the queue."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._give_turn)
        self._waiting[connection] = None

    def _give_turn(self) -> None:
        connection, _ = self._waiting.popitem(last=False)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give_turn)
        connection.parse_turn()
