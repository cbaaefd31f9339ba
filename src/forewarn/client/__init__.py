"""What runs inside a VM: read, wait, approve. Standard library only, for Forewarn and for Azure, on Unix and on Windows.

`AsyncClient` is loaded when it is first asked for: asyncio is a third of the memory that a guest may use.
"""

from typing import TYPE_CHECKING

from forewarn.client.client import Client
from forewarn.client.dialogue import DEFAULT_ENDPOINT
from forewarn.client.discovery import ask_dhcp, discover
from forewarn.client.event import Document, Event
from forewarn.client.pace import Clock
from forewarn.client.problem import BadAnswer, BadDocument, Declined, EndpointProblem, NoAnswer, Redirected, TryLater
from forewarn.client.watch import Change, Kind, Watcher

if TYPE_CHECKING:
    from forewarn.client.async_client import AsyncClient
else:

    def __getattr__(name: str) -> object:
        if name != "AsyncClient":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from forewarn.client.async_client import AsyncClient

        return AsyncClient


__all__ = [
    "DEFAULT_ENDPOINT",
    "AsyncClient",
    "BadAnswer",
    "BadDocument",
    "Change",
    "Client",
    "Clock",
    "Declined",
    "Document",
    "EndpointProblem",
    "Event",
    "Kind",
    "NoAnswer",
    "Redirected",
    "TryLater",
    "Watcher",
    "ask_dhcp",
    "discover",
]
