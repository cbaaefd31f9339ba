"""What a guest asks and how it reads what comes back.

No input or output: both clients share this.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from forewarn import __version__
from forewarn.client import dates as moment
from forewarn.client.errors import (
    HttpError,
    InvalidResponse,
    RedirectRefused,
    RetryableError,
    brief,
)
from forewarn.client.http1 import Answer, Endpoint, encode
from forewarn.client.models import Document, read_document, read_json
from forewarn.errors import Invalid

DEFAULT_ENDPOINT = "http://169.254.169.254"
API_VERSION = "2020-07-01"
INSTANCE_VERSION = "2021-02-01"
TIMEOUT_SECONDS = 10.0
KNOWN_SECONDS_MAX = 60.0
APPROVED_MAX = 1024

_PASSING = (404, 408, 410, 429)
_TAG = re.compile(r"[!-~]{1,200}")
_HEADERS = {
    "Metadata": "true",
    "Accept": "application/json",
    "User-Agent": f"forewarn/{__version__}",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """What to send and how to read the answer, which may be held for `wait_seconds`.

    Only what changes nothing is repeatable.
    """

    request: bytes
    read: Callable[[Answer], T]
    wait_seconds: float = 0.0
    is_repeatable: bool = True


class Known:
    """The document that a question may be conditional on (If-None-Match): one known from lately,
    and without a problem since.

    A server that lost its memory counts anew, and with bad luck its new number is the one we know.
    Asked often enough without a condition, it cannot hide behind a 304.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._document: Document | None = None
        self._until = 0.0

    @property
    def document(self) -> Document | None:
        return self._document if self._monotonic() < self._until else None

    def keep(self, document: Document) -> Document:
        """The very same one again, which is what a 304 gives, has not been read again."""
        if document is not self._document:
            self._document, self._until = document, self._monotonic() + KNOWN_SECONDS_MAX
        return document

    def forget(self) -> None:
        self._document = None


class Dialogue:
    """What is asked of one endpoint. `approved` holds the events approved here, by key."""

    def __init__(self, endpoint: str, *, api_version: str, instance_version: str) -> None:
        self.endpoint = Endpoint.parse(endpoint)
        self.approved: dict[str, None] = {}
        self._events = f"/metadata/scheduledevents?api-version={quote(api_version, safe='')}"
        self._instance = f"/metadata/instance?api-version={quote(instance_version, safe='')}"

    def document(self) -> Question[Document]:
        return Question(self._get(self._events), partial(_read_document, None))

    def wait(self, timeout_seconds: float, known: Document | None) -> Question[Document]:
        if known is None or not known.etag:
            return self.document()
        headers = {"If-None-Match": known.etag}
        if timeout_seconds >= 1:
            headers["Prefer"] = f"wait={int(timeout_seconds)}"
        return Question(
            self._get(self._events, **headers), partial(_read_document, known), timeout_seconds
        )

    def approval(self, event_ids: Sequence[str]) -> Question[None]:
        if not event_ids or not all(event_ids):
            raise Invalid(
                f"event_ids are {brief(event_ids)}; expected at least one, and none empty"
            )
        body = json.dumps(
            {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        ).encode()
        request = encode(
            self.endpoint,
            "POST",
            self._events,
            _HEADERS | {"Content-Type": "application/json"},
            body,
        )
        return Question(request, partial(self._read_approval, event_ids), is_repeatable=False)

    def instance(self) -> Question[dict[str, Any]]:
        return Question(self._get(self._instance), _read_instance)

    def _get(self, path: str, **headers: str) -> bytes:
        return encode(self.endpoint, "GET", path, _HEADERS | headers)

    def _read_approval(self, event_ids: Sequence[str], answer: Answer) -> None:
        if not 200 <= answer.status < 300:
            _check(answer)
        self.approved.update(dict.fromkeys(event_id.upper() for event_id in event_ids))
        while len(self.approved) > APPROVED_MAX:  # ends at the limit
            del self.approved[next(iter(self.approved))]


def name_of(instance: Mapping[str, Any]) -> str:
    """The name that Resources use. It is not the hostname (protocol 2.4)."""
    compute = instance.get("compute")
    name = compute.get("name") if isinstance(compute, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidResponse(f"compute.name is {brief(name)}; expected this VM's name")
    return name


def _read_document(known: Document | None, answer: Answer) -> Document:
    if answer.status == 304 and known is not None:
        return known
    _check(answer)
    etag = answer.headers.get("etag", "")
    return read_document(
        answer.body, etag=etag if _TAG.fullmatch(etag) else "", content_type=_content_type(answer)
    )


def _read_instance(answer: Answer) -> dict[str, Any]:
    _check(answer)
    said = read_json(answer.body, _content_type(answer))
    if not isinstance(said, dict):
        raise InvalidResponse(
            f"the answer is {brief(said)}; expected the description of an instance"
        )
    return said


def _check(answer: Answer) -> None:
    """Nothing but a 200 is gone on with."""
    status = answer.status
    if status == 200:
        return
    if 300 <= status < 400 and status != 304:
        where = answer.headers.get("location", "")
        raise RedirectRefused(
            f"the endpoint redirects ({status}) to {brief(where)}; expected an answer",
            status=status,
        )
    if status < 400:
        raise InvalidResponse(f"status {status} came; expected 200", status=status)
    kind = RetryableError if status in _PASSING or status >= 500 else HttpError
    message = f"the endpoint answered {status}: {_reason(answer.body)}"
    raise kind(message, status=status, retry_after_seconds=_retry_after(answer.headers))


def _reason(body: bytes) -> str:
    """The endpoint's own words: `{"error": "..."}`, or whatever came."""
    with suppress(ValueError, RecursionError):
        said = json.loads(body)
        if isinstance(said, dict) and isinstance(said.get("error"), str):
            return repr(said["error"][:300])
    return brief(body) if body else "without a word"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """In seconds.

    Where it is a date it is held against the answer's own Date: the clocks of two machines are no
    measure.
    """
    said = headers.get("retry-after", "")
    if said.isascii() and said.isdecimal():
        return float(said[:9])
    with suppress(ValueError):
        return max(
            0.0, (moment.parse(said) - moment.parse(headers.get("date", ""))).total_seconds()
        )
    return None


def _content_type(answer: Answer) -> str:
    return answer.headers.get("content-type", "")
