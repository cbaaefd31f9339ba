"""Requests of a guest, and how their responses are read. No I/O: both clients share this."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from forewarn import __version__
from forewarn.client.errors import (
    HttpError,
    InvalidResponse,
    RedirectRefused,
    RetryableError,
    brief,
)
from forewarn.client.http1 import Endpoint, Response, encode
from forewarn.client.models import Document, parse_date, read_document, read_json
from forewarn.errors import Invalid

DEFAULT_ENDPOINT = "http://169.254.169.254"
API_VERSION = "2020-07-01"
INSTANCE_VERSION = "2021-02-01"
TIMEOUT_SECONDS = 10.0
CACHE_SECONDS_MAX = 60.0
WAIT_SECONDS_MAX = 3600.0
"""No endpoint holds a request longer, and a lost connection must be noticed some time."""
APPROVED_MAX = 1024

_RETRYABLE = (404, 408, 410, 429)
_ETAG = re.compile(r"[!-~]{1,200}")
_HEADERS = {
    "Metadata": "true",
    "Accept": "application/json",
    "User-Agent": f"forewarn/{__version__}",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[T]):
    """The bytes to send and how to read the response, which may be held for `wait_seconds`.

    Only a request that changes nothing is repeatable.
    """

    data: bytes
    read: Callable[[Response], T]
    wait_seconds: float = 0.0
    is_repeatable: bool = True


class ConditionalCache:
    """The document for If-None-Match: read within the last minute, and without an error since.

    A server that lost its state starts its counter again, and may reach the number that we have
    with other events. An unconditional request once a minute finds that out; a 304 cannot.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._document: Document | None = None
        self._expires = 0.0

    @property
    def document(self) -> Document | None:
        return self._document if self._monotonic() < self._expires else None

    def put(self, document: Document) -> Document:
        """A 304 gives the same object again, which does not extend its life."""
        if document is not self._document:
            self._document, self._expires = document, self._monotonic() + CACHE_SECONDS_MAX
        return document

    def clear(self) -> None:
        self._document = None


class Api:
    """Builds the requests for one endpoint. `approved` has the keys of events approved here."""

    def __init__(self, endpoint: str, *, api_version: str, instance_version: str) -> None:
        self.endpoint = Endpoint.parse(endpoint)
        self.approved: dict[str, None] = {}
        self._headers = {"Host": str(self.endpoint)} | _HEADERS
        self._events = self._target("scheduledevents", api_version)
        self._instance = self._target("instance", instance_version)

    def document(self) -> ApiRequest[Document]:
        return ApiRequest(self._get(self._events), partial(_read_document, None))

    def wait(self, timeout_seconds: float, known: Document | None) -> ApiRequest[Document]:
        """A long poll, or a plain one without a known document to compare with."""
        if math.isnan(timeout_seconds):
            raise Invalid("timeout_seconds is nan; expected a number")
        timeout_seconds = min(timeout_seconds, WAIT_SECONDS_MAX)
        if known is None or not known.etag:
            return self.document()
        headers = {"If-None-Match": known.etag}
        if timeout_seconds >= 1:
            headers["Prefer"] = f"wait={int(timeout_seconds)}"
        data = self._get(self._events, **headers)
        return ApiRequest(data, partial(_read_document, known), timeout_seconds)

    def approval(self, event_ids: Sequence[str]) -> ApiRequest[None]:
        if not event_ids or not all(event_ids):
            raise Invalid(
                f"event_ids are {brief(event_ids)}; expected at least one, and none empty"
            )
        requests = [{"EventId": event_id} for event_id in event_ids]
        body = json.dumps({"StartRequests": requests}).encode()
        headers = self._headers | {"Content-Type": "application/json"}
        data = encode("POST", self._events, headers, body)
        return ApiRequest(data, partial(self._read_approval, event_ids), is_repeatable=False)

    def instance(self) -> ApiRequest[dict[str, Any]]:
        return ApiRequest(self._get(self._instance), _read_instance)

    def _target(self, name: str, version: str) -> str:
        return f"{self.endpoint.prefix}/metadata/{name}?api-version={quote(version, safe='')}"

    def _get(self, target: str, **headers: str) -> bytes:
        return encode("GET", target, self._headers | headers)

    def _read_approval(self, event_ids: Sequence[str], response: Response) -> None:
        if not 200 <= response.status < 300:
            _check_status(response)
        self.approved.update(dict.fromkeys(event_id.upper() for event_id in event_ids))
        while len(self.approved) > APPROVED_MAX:
            del self.approved[next(iter(self.approved))]


def vm_name(instance: Mapping[str, Any]) -> str:
    """The name that Resources use. It is not the hostname (protocol 2.4)."""
    compute = instance.get("compute")
    name = compute.get("name") if isinstance(compute, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidResponse(f"compute.name is {brief(name)}; expected this VM's name")
    return name


def _read_document(known: Document | None, response: Response) -> Document:
    if response.status == 304 and known is not None:
        return known
    _check_status(response)
    etag = response.headers.get("etag", "")
    if not _ETAG.fullmatch(etag):
        etag = ""
    content_type = response.headers.get("content-type", "")
    return read_document(response.body, etag=etag, content_type=content_type)


def _read_instance(response: Response) -> dict[str, Any]:
    _check_status(response)
    value = read_json(response.body, response.headers.get("content-type", ""))
    if not isinstance(value, dict):
        raise InvalidResponse(f"the response is {brief(value)}; expected an instance's metadata")
    return value


def _check_status(response: Response) -> None:
    """Raise the error for any status but 200."""
    status = response.status
    if status == 200:
        return
    if 300 <= status < 400 and status != 304:
        location = response.headers.get("location", "")
        raise RedirectRefused(
            f"the endpoint redirects ({status}) to {brief(location)}; expected a response",
            status=status,
        )
    if status < 400:
        raise InvalidResponse(f"the status is {status}; expected 200", status=status)
    error = RetryableError if status in _RETRYABLE or status >= 500 else HttpError
    raise error(
        f"the endpoint returned {status}: {_reason(response.body)}",
        status=status,
        retry_after_seconds=_retry_after_seconds(response.headers),
    )


def _reason(body: bytes) -> str:
    """The endpoint's own message (`{"error": "..."}`), or else the body."""
    with suppress(ValueError, RecursionError):
        value = json.loads(body)
        if isinstance(value, dict) and isinstance(value.get("error"), str):
            return repr(value["error"][:300])
    return brief(body) if body else "no message"


def _retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """A Retry-After date is relative to the response's own Date: two clocks may differ."""
    value = headers.get("retry-after", "")
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    with suppress(ValueError):
        pause = parse_date(value) - parse_date(headers.get("date", ""))
        return max(0.0, pause.total_seconds())
    return None
