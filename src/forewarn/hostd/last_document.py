"""The last documents that guests got, for the time in which no server answers."""

from typing import NamedTuple

from forewarn.hostd.upstream import Request, Response
from forewarn.web.http.message import preferred_seconds
from forewarn.wire import document

DOCUMENT_SECONDS_MAX = 60.0
"""From the last time that a server sent or confirmed it."""
DOCUMENT_BYTES_MAX = 256 * 1024
KEY_BYTES_MAX = 1024
KEYS_MAX = 4
"""Different requests of one guest: it may have programs that use different api-versions."""
GUESTS_MAX = 1024
RELEVANT = (b"metadata", b"origin", b"if-none-match", b"prefer")


class Poll(NamedTuple):
    """A GET of the document. Requests with the same key get the same document."""

    vm: str
    key: tuple[bytes, ...]
    tags: frozenset[str]
    wait_seconds: int

    @classmethod
    def parse(cls, vm: str, request: Request) -> "Poll | None":
        path = request.target.partition(b"?")[0].lower()
        if request.method != "GET" or not path.removesuffix(b"/").endswith(b"/scheduledevents"):
            return None
        values = dict.fromkeys(RELEVANT, b"")
        for name, value in request.headers:
            if name in values:
                values[name] = b"%b, %b" % (values[name], value) if values[name] else value
        metadata, origin, known, prefer = values.values()
        tags = document.read_tags(known.decode("latin-1"))
        seconds = preferred_seconds(prefer.decode("latin-1")) if prefer else 0
        return cls(vm, (request.target, metadata, origin), tags, seconds)


class LastDocuments:
    """By guest and request, with the time at which a server has sent or confirmed it."""

    def __init__(self) -> None:
        self._guests: dict[str, dict[tuple[bytes, ...], tuple[Response, float]]] = {}

    def record(self, poll: Poll, response: Response, now: float) -> None:
        if len(self._guests) > GUESTS_MAX:
            self._guests.clear()
        last = self._guests.setdefault(poll.vm, {})
        known = last.pop(poll.key, None)
        if response.status == 304 and known is not None and _etag(known[0]) == _etag(response):
            response = known[0]
        is_small = len(response.body) <= DOCUMENT_BYTES_MAX
        if response.status == 200 and is_small and sum(map(len, poll.key)) <= KEY_BYTES_MAX:
            last[poll.key] = response, now
        if len(last) > KEYS_MAX:
            del last[next(iter(last))]

    def find(self, poll: Poll, now: float) -> Response | None:
        """The document, or that it has not changed; None if it is unknown or too old."""
        known = self._guests.get(poll.vm, {}).get(poll.key)
        if known is None or now - known[1] > DOCUMENT_SECONDS_MAX:
            return None
        response, at = known
        is_known = "*" in poll.tags or _etag(response) in poll.tags
        left_out = (b"preference-applied", *((b"content-",) if is_known else ()))
        headers = [each for each in response.headers if not each[0].lower().startswith(left_out)]
        headers.append((b"age", b"%d" % (now - at)))
        return Response(304, headers, b"") if is_known else Response(200, headers, response.body)


def _etag(response: Response) -> str:
    value = next((value for name, value in response.headers if name.lower() == b"etag"), b"")
    return value.decode("latin-1").strip('"')
