"""The last documents that guests got, for the time in which no server answers."""

import math
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from forewarn.hostd.upstream import Request, Response
from forewarn.web.http.message import join_headers, preferred_seconds
from forewarn.wire import document

DOCUMENT_SECONDS_MAX = 60.0
"""From the last time that a server sent or confirmed it."""
DOCUMENT_BYTES_MAX = 256 * 1024
REQUESTS_MAX = 4
"""Of one guest: it may have programs that use different api-versions."""
GUESTS_MAX = 1024


class Poll(NamedTuple):
    """A GET of the document. `request` is what it depends on: the target, and Metadata."""

    vm: str
    request: tuple[bytes, bytes]
    tags: frozenset[str]
    wait_seconds: int

    @classmethod
    def parse(cls, vm: str, request: Request) -> "Poll | None":
        """None for anything else, and for a web page, which gets no document."""
        if request.method != "GET" or not is_document(request.target):
            return None
        headers = join_headers(request.headers)
        if b"origin" in headers:
            return None
        tags = document.read_tags(headers.get(b"if-none-match", b"").decode("latin-1"))
        seconds = preferred_seconds(headers.get(b"prefer", b"").decode("latin-1"))
        return cls(vm, (request.target, headers.get(b"metadata", b"")), tags, seconds)


class LastDocuments:
    """By guest and request, with the time at which a server has sent or confirmed it."""

    def __init__(self) -> None:
        self._guests: dict[str, dict[tuple[bytes, bytes], tuple[Response, float]]] = {}

    def record(self, poll: Poll, response: Response, now: float) -> None:
        known, _ = self._guests.get(poll.vm, {}).get(poll.request, (None, 0.0))
        if response.status == 304 and known is not None and _tag(known) == _tag(response):
            response = known
        is_kept = response.status == 200 and len(response.body) <= DOCUMENT_BYTES_MAX
        self._keep(poll, response if is_kept else None, now)

    def is_older(self, poll: Poll, response: Response) -> bool:
        """Whether the guest has a later document, or got one for the same request at any time."""
        known, _ = self._guests.get(poll.vm, {}).get(poll.request, (None, 0.0))
        seen = document.read_incarnations({*poll.tags, _tag(known) if known else ""})
        incarnations = document.read_incarnations({_tag(response)})
        return any(incarnation < max(seen, default=0) for incarnation in incarnations)

    def record_old(self, poll: Poll, response: Response) -> None:
        """A document of a server that is cut off from its store: only its incarnation counts."""
        if len(response.body) > DOCUMENT_BYTES_MAX:
            response = response._replace(status=304, body=b"")
        self._keep(poll, response, -math.inf)

    def _keep(self, poll: Poll, response: Response | None, at: float) -> None:
        """Replace what is kept for this request, within the limits. None only removes it."""
        if len(self._guests) > GUESTS_MAX:
            self._guests.clear()
        last = self._guests.setdefault(poll.vm, {})
        last.pop(poll.request, None)
        if response is not None:
            last[poll.request] = response, at
        if len(last) > REQUESTS_MAX:
            del last[next(iter(last))]

    def find(self, poll: Poll, now: float) -> Response | None:
        """The document, or that it has not changed; None if it is unknown or too old."""
        response, at = self._guests.get(poll.vm, {}).get(poll.request, (None, 0.0))
        if response is None or now - at > DOCUMENT_SECONDS_MAX:
            return None
        is_known = not poll.tags.isdisjoint(("*", _tag(response)))
        left_out = (b"preference-applied", *((b"content-",) if is_known else ()))
        headers = [each for each in response.headers if not each[0].lower().startswith(left_out)]
        headers.append((b"age", b"%d" % (now - at)))
        return Response(304, headers, b"") if is_known else Response(200, headers, response.body)


def is_document(target: bytes) -> bool:
    """Whether the target of a request is the document. Servers decode escapes of its path, too."""
    path = unquote_to_bytes(target.partition(b"?")[0]).lower()
    return path.removesuffix(b"/").endswith(b"/scheduledevents")


def _tag(response: Response) -> str:
    value = next((value for name, value in response.headers if name.lower() == b"etag"), b"")
    return value.decode("latin-1").strip('"')
