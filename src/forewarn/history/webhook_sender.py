"""Send a POST to a webhook, within limits of time and response size. No redirects, no proxies.

TLS is verified against the system's authorities, or those that SSL_CERT_FILE names.
"""

import asyncio
import ssl
from collections.abc import Mapping

import httpx

from forewarn.errors import Unavailable

RESPONSE_BYTES_MAX = 64 * 1024


class WebhookSender:
    """Posts to one URL. `name` is the part of it that may be shown: the path may hold a secret."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self._url = httpx.URL(url)
        self.name = f"{self._url.scheme}://{self._url.netloc.decode()}"
        self._timeout_seconds = timeout_seconds
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
        status, problem = 0, ""
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._client.stream("POST", self._url, content=body, headers=headers) as response,
            ):
                status = response.status_code
                await _read_to_the_end(response)
        except TimeoutError:
            problem = f"no response within {self._timeout_seconds:g} s"
        except (httpx.HTTPError, OSError) as error:
            problem = f"no response: {error or type(error).__name__}"
        if not status:
            raise Unavailable(problem, receiver=self.name)
        return status

    async def close(self) -> None:
        await self._client.aclose()


async def _read_to_the_end(response: httpx.Response) -> None:
    """Read the body, so that the connection can be used again, unless it is too large."""
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > RESPONSE_BYTES_MAX:
            return
