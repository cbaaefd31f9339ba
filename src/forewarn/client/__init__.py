"""The client in a VM: read, wait, approve. Standard library only, on Unix and Windows.

Works with Forewarn and with Azure. `AsyncClient` is imported on first use, because asyncio is a
third of a guest's memory.
"""

from typing import TYPE_CHECKING

from forewarn.client.backoff import ClientClock
from forewarn.client.client import Client
from forewarn.client.discovery import ask_dhcp, discover
from forewarn.client.errors import (
    ConnectionFailed,
    EndpointError,
    HttpError,
    InvalidDocument,
    InvalidResponse,
    RedirectRefused,
    RetryableError,
)
from forewarn.client.models import Document, Event
from forewarn.client.protocol import DEFAULT_ENDPOINT
from forewarn.client.watcher import Change, Kind, Watcher

if TYPE_CHECKING:
    from forewarn.client.aio import AsyncClient
else:

    def __getattr__(name: str) -> object:
        if name != "AsyncClient":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from forewarn.client.aio import AsyncClient

        return AsyncClient


__all__ = [
    "DEFAULT_ENDPOINT",
    "AsyncClient",
    "Change",
    "Client",
    "ClientClock",
    "ConnectionFailed",
    "Document",
    "EndpointError",
    "Event",
    "HttpError",
    "InvalidDocument",
    "InvalidResponse",
    "Kind",
    "RedirectRefused",
    "RetryableError",
    "Watcher",
    "ask_dhcp",
    "discover",
]
