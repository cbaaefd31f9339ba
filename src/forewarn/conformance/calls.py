"""The requests of a run: as which VM, on which connection, and how often.

Sends nothing that could approve an event unless `may_approve`.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

from forewarn.client.http1 import Endpoint, encode
from forewarn.conformance.check import expect
from forewarn.conformance.expectation import PolledDocument, ResponseTest, a_document
from forewarn.conformance.raw_http import (
    TIMEOUT_SECONDS,
    RateLimited,
    RawConnection,
    RawResponse,
    Request,
    SessionClock,
    instance_text,
)
from forewarn.conformance.spec import EVENTS, NEWEST

TRIES_MAX = 10
PAUSE_SECONDS = 1.0
PAUSES_MAX = 600
"""After a 429, in one session: the real endpoint allows five requests a second."""


def parse_endpoint(url: str) -> Endpoint:
    """With or without the path of the document."""
    return Endpoint.parse(re.sub(rf"{EVENTS}/?$", "", url, flags=re.IGNORECASE))


@dataclass(kw_only=True, eq=False)
class EndpointCalls:
    """`names` are the VMs to call as; without any, the endpoint identifies the caller."""

    endpoint: Endpoint
    names: tuple[str, ...]
    may_approve: bool
    clock: SessionClock
    pauses_left: int = PAUSES_MAX

    def encode(self, request: Request) -> bytes:
        assert self.may_approve or request.method != "POST", "a POST needs Need.APPROVE"
        vm = request.vm or next(iter(self.names), "")
        prefix = self.endpoint.prefix + (f"/as/{quote(vm, safe='')}" if vm else "")
        version = "" if request.version is None else f"api-version={request.version}"
        query = "&".join(filter(None, (version, request.query)))
        target = prefix + request.path + (f"?{query}" if query else "")
        host = {"Host": str(self.endpoint)} if request.http == "1.1" else {}
        headers = {**host, **request.headers}
        return encode(request.method, target, headers, request.body, http=request.http)

    def connect(self, *requests: Request) -> RawConnection:
        """A connection on which these requests have been sent, and anything else may be.

        If the endpoint has a rate limit, it begins with the full allowance.
        """
        if self.pauses_left < PAUSES_MAX:
            self.pause()
        connection = RawConnection(self.endpoint, self.clock)
        if requests:
            connection.send(b"".join(map(self.encode, requests)))
        return connection

    def pause(self) -> None:
        """After a 429."""
        if self.pauses_left:
            self.pauses_left -= 1
            self.clock.sleep(PAUSE_SECONDS)

    def send(
        self,
        request: Request,
        expected: ResponseTest | None = None,
        *,
        seconds: float = TIMEOUT_SECONDS,
    ) -> RawResponse:
        """Send on a new connection; on 429 pause and retry."""
        for _ in range(TRIES_MAX):
            with suppress(RateLimited), RawConnection(self.endpoint, self.clock) as connection:
                connection.send(self.encode(request))
                response = connection.receive(seconds=seconds)
                if expected is not None:
                    expected(response)
                return response
            self.pause()
        raise RateLimited(f"expected another status; got {TRIES_MAX} times 429 in a row")

    def document(self, version: str = NEWEST, *, vm: str = "") -> PolledDocument:
        return a_document(self.send(Request(version=version, vm=vm)))

    @cached_property
    def vm(self) -> str:
        """The name of the VM that we call as, as in Resources and the instance tree."""
        if self.names:
            return self.names[0]
        response = self.send(instance_text("/compute/name"))
        is_name = response.status == 200 and response.body
        expect(is_name, "the name of the calling VM", response)
        return response.body.decode("latin-1")
