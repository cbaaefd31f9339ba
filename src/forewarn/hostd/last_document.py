"""The last documents that guests got, for the time in which no server answers."""

from collections import OrderedDict
from typing import NamedTuple

from forewarn.hostd.connection import Response
from forewarn.hostd.upstream import Request
from forewarn.web.http.message import preferred_seconds
from forewarn.wire import document

DOCUMENT_SECONDS_MAX = 60.0
"""From the last time that a server sent or confirmed it."""
DOCUMENTS_PER_GUEST_MAX = 4
DOCUMENT_BYTES_MAX = 256 * 1024
DOCUMENTS_BYTES_MAX = 8 << 20
KEY_BYTES_MAX = 1024
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
        key = (request.target, metadata, origin)
        tags = document.read_tags(known.decode("latin-1"))
        return cls(vm, key, tags, preferred_seconds(prefer.decode("latin-1")) if prefer else 0)


class LastDocuments:
    """The last documents of each guest, and when a server has sent or confirmed each."""

    def __init__(self) -> None:
        self._guests: dict[str, OrderedDict[tuple[bytes, ...], tuple[Response, float]]] = {}
        self._bytes = 0

    def record(self, poll: Poll, response: Response, now: float) -> None:
        last = self._guests.setdefault(poll.vm, OrderedDict())
        known = last.pop(poll.key, None)
        if known is not None:
            self._bytes -= len(known[0].body)
        if response.status == 304 and known is not None and _etag(known[0]) == _etag(response):
            response = known[0]
        is_kept = response.status == 200 and len(response.body) <= DOCUMENT_BYTES_MAX
        if not is_kept or sum(map(len, poll.key)) > KEY_BYTES_MAX:
            return
        last[poll.key] = response, now
        self._bytes += len(response.body)
        if len(last) > DOCUMENTS_PER_GUEST_MAX:
            _, (oldest, _) = last.popitem(last=False)
            self._bytes -= len(oldest.body)
        if self._bytes > DOCUMENTS_BYTES_MAX:
            self._guests.clear()
            self._bytes = 0

    def find(self, poll: Poll, now: float) -> Response | None:
        """The document, or that it has not changed; None if it is unknown or too old."""
        last = self._guests.get(poll.vm)
        response, at = last.get(poll.key, (None, 0.0)) if last else (None, 0.0)
        if response is None or now - at > DOCUMENT_SECONDS_MAX:
            return None
        age = (b"age", b"%d" % (now - at))
        headers = [each for each in response.headers if each[0].lower() != b"preference-applied"]
        if "*" in poll.tags or _etag(response) in poll.tags:
            kept = [each for each in headers if not each[0].lower().startswith(b"content-")]
            return Response(304, [*kept, age], b"")
        return Response(200, [*headers, age], response.body)


def _etag(response: Response) -> str:
    value = next((value for name, value in response.headers if name.lower() == b"etag"), b"")
    return value.decode("latin-1").strip('"')
