"""Send a POST to a webhook, within limits of time and response size. No redirects, no proxies.

TLS is verified against the system's authorities, or those that SSL_CERT_FILE names.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from forewarn.errors import Unavailable
from forewarn.platform.threads import CallThreads

RESPONSE_BYTES_MAX = 64 * 1024

Lookup = Callable[..., Sequence[tuple[Any, Any, Any, Any, Any]]]
"""As `socket.getaddrinfo`."""


class WebhookSender:
    """Posts to one URL. `name` is the part of it that may be shown: the path may hold a secret."""

    def __init__(
        self, url: str, *, timeout_seconds: float, lookup: Lookup = socket.getaddrinfo
    ) -> None:
        self._url = httpx.URL(url)
        self._netloc = self._url.netloc.decode()
        self.name = f"{self._url.scheme}://{self._netloc}"
        self._timeout_seconds = timeout_seconds
        self._lookup, self._threads = lookup, CallThreads(1)
        self._addresses: Sequence[str] = ()
        self._client = httpx.AsyncClient(
            trust_env=False,
            verify=ssl.create_default_context(),
            timeout=None,  # noqa: S113, the limit is for the whole request, below
            limits=httpx.Limits(max_connections=1),
            headers={"user-agent": "forewarn", "accept-encoding": "identity"},
        )

    async def post(self, body: bytes, headers: Mapping[str, str]) -> int:
        """The status of the response.

        Unavailable if there was none in time; the request may still have been received.
        """
        status = 0
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await self._send(body, headers)
                status = response.status_code
                await _read_to_the_end(response)
        except TimeoutError as error:
            if not status:
                reason = f"no response within {self._timeout_seconds:g} s"
                raise self._unavailable(reason) from error
        except (httpx.HTTPError, OSError) as error:
            if not status:
                raise self._unavailable(f"no response: {error or type(error).__name__}") from error
        return status

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """Send to the first address that accepts a connection."""
        problem: Exception = OSError("the name has no address")
        for address in self._addresses or await self._resolve():
            request = self._client.build_request(
                "POST",
                self._url.copy_with(host=address),
                content=body,
                headers={**headers, "host": self._netloc},
                extensions={"sni_hostname": self._url.host},
            )
            try:
                response = await self._client.send(request, stream=True)
            except httpx.ConnectError as error:
                problem = error
            else:
                self._addresses = (address,)
                return response
        self._addresses = ()
        raise problem

    async def _resolve(self) -> Sequence[str]:
        """In a daemon thread: a lookup cannot be cancelled, and must not delay the exit."""
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        found = await self._threads.call(
            self.name,
            lambda: self._lookup(self._url.host, port, type=socket.SOCK_STREAM),
            self._timeout_seconds,
        )
        return tuple(dict.fromkeys(str(address[4][0]) for address in found))

    def _unavailable(self, reason: str) -> Unavailable:
        self._addresses = ()
        return Unavailable(reason, receiver=self.name)


async def _read_to_the_end(response: httpx.Response) -> None:
    """Read the body, so that the connection can be used again, unless it is too large."""
    size = 0
    try:
        async for chunk in response.aiter_raw():
            size += len(chunk)
            if size > RESPONSE_BYTES_MAX:
                return
    finally:
        await response.aclose()
