"""`http`: calls a URL. Also the HTTP client that the kubernetes step uses.

A request is bounded in time and size, follows no redirects, verifies TLS, and bypasses proxies
unless one is wanted.
"""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC
from typing import Annotated, ClassVar, Literal
from urllib.parse import quote, urlsplit

from forewarn.agent.config_reader import Range, SettingError
from forewarn.agent.steps.base import (
    FACT_NAMES,
    NUMERIC_FACTS,
    StepContext,
    StepFailed,
    call_with_timeout,
    check_template,
    escape_json,
    escape_line,
    event_facts,
    fill,
    pause,
)

ATTEMPT_SECONDS = 10.0
TIMEOUT_SECONDS_MIN = 0.01  # a socket timeout of 0 means something else
RETRY_STATUSES = (408, 429, 500, 502, 503, 504)
FIRST_PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 10.0
SHOWN_BYTES_MAX = 300
URL_FORM = "a URL with http:// or https:// and without a password"
SHAPE_CONTENT_TYPES = {"cloudevents": "application/cloudevents+json", "slack": "application/json"}
SLACK_TEXT = (
    "{event_type} of {event_resources}: {event_phase} on {event_vm}"
    " (event {event_id}, {event_status}, not before {event_notbefore}, source {event_source})"
)


@dataclass(frozen=True, slots=True)
class HttpStep:
    """`url`, header values and `body` are templates. `shape` creates the body instead."""

    url: Annotated[str, "a URL"]
    method: Literal["", "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"] = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    shape: Literal["", "cloudevents", "slack"] = ""
    expect: Annotated[tuple[int, ...], Range(100, 599), "a list of HTTP statuses"] = ()
    proxy: bool = False
    ca_file: str = ""

    SHORT: ClassVar[str] = "url"

    def __post_init__(self) -> None:
        check_template("url", self.url)
        check_url("url", fill(self.url, dict.fromkeys(FACT_NAMES, "x"), str))
        check_template("body", self.body)
        if self.shape and self.body:
            raise SettingError("body", f"no body beside shape = '{self.shape}'")
        for name, value in self.headers.items():
            check_template("headers", value)
            is_name = name.replace("-", "").replace("_", "").isalnum()
            if not is_name or not (name + value).isascii() or not value.isprintable():
                expected = "names of letters, digits and '-', and texts of one line in ASCII"
                raise SettingError("headers", expected)
        if self.body and self._is_json():
            _check_json_template(self.body)

    def describe(self) -> str:
        """Without path and query: in the URL of a web hook they are the secret."""
        parts = urlsplit(self.url)
        return f"{self._method()} {parts.scheme}://{parts.netloc}"

    def run(self, context: StepContext) -> None:
        seconds, reason = FIRST_PAUSE_SECONDS, ""
        while True:  # ends with a final response, or at the limit: `pause` raises there
            reason = self._attempt(context, reason)
            if not reason:
                return
            pause(context, seconds, f"{self.describe()}: {reason}")
            seconds = min(seconds * 2, PAUSE_SECONDS_MAX)

    def _attempt(self, context: StepContext, last_reason: str) -> str:
        """Return "" when done, else the reason to try again."""
        try:
            response = send(self._request(context), context, bytes_max=SHOWN_BYTES_MAX)
        except NoResponse as error:
            return error.reason(last_reason)
        if response.status in (self.expect or range(200, 300)):
            return ""
        body = escape_line(response.body.decode("utf-8", "replace")).strip()
        reason = f"status {response.status}" + (f": {body}" if body else "")
        if response.status not in RETRY_STATUSES:
            raise StepFailed(f"{self.describe()}: {reason}", status=response.status)
        return reason

    def _method(self) -> str:
        return self.method or ("POST" if self.shape or self.body else "GET")

    def _declared_type(self) -> str:
        values = (value for name, value in self.headers.items() if name.lower() == "content-type")
        return next(values, "")

    def _is_json(self) -> bool:
        declared = self._declared_type()
        return "json" in declared.lower() if declared else self.body.lstrip()[:1] in ("{", "[")

    def _request(self, context: StepContext) -> "HttpRequest":
        facts = event_facts(context)
        headers = {name: fill(value, facts, _escape_header) for name, value in self.headers.items()}
        if not self._declared_type() and (self.shape or self.body):
            default = "application/json" if self._is_json() else "text/plain; charset=utf-8"
            headers["Content-Type"] = SHAPE_CONTENT_TYPES.get(self.shape, default)
        url = fill(self.url, facts, lambda value: quote(value, safe=""))
        body = self._body(context, facts)
        return HttpRequest(self._method(), url, headers, body, self.ca_file, self.proxy)

    def _body(self, context: StepContext, facts: dict[str, str]) -> bytes | None:
        if self.shape == "cloudevents":
            return json.dumps(cloud_event(context, facts)).encode()
        if self.shape == "slack":
            return json.dumps({"text": fill(SLACK_TEXT, facts, _escape_slack)}).encode()
        if not self.body:
            return None
        return fill(self.body, facts, escape_json if self._is_json() else str).encode()


def cloud_event(context: StepContext, facts: Mapping[str, str]) -> dict[str, object]:
    """CloudEvents 1.0, structured mode. Its data is the event as the endpoint shows it, with this
    VM and the phase. The same event and phase have the same id at every attempt.
    """
    event, phase = context.event, context.phase.value
    not_before = event.not_before
    data = {
        "EventId": facts["event_id"],
        "EventType": facts["event_type"],
        "EventStatus": facts["event_status"],
        "EventSource": facts["event_source"],
        "ResourceType": facts["event_resourcetype"],
        "Resources": list(event.resources),
        "NotBefore": not_before.astimezone(UTC).isoformat().replace("+00:00", "Z")
        if not_before
        else "",
        "DurationInSeconds": event.duration_seconds,
        "Description": facts["event_description"],
        "vm": context.vm,
        "phase": phase,
    }
    return {
        "specversion": "1.0",
        "id": f"{facts['event_id']}/{phase}/{context.vm}",
        "source": f"/forewarn/agent/{quote(context.vm, safe='')}",
        "type": f"forewarn.scheduledevent.{phase}",
        "subject": facts["event_id"],
        "datacontenttype": "application/json",
        "data": data,
    }


def _check_json_template(body: str) -> None:
    """With sample values it must be JSON. Then it is with any value, because values are escaped."""
    samples = {name: "0" if name in NUMERIC_FACTS else "x" for name in FACT_NAMES}
    try:
        json.loads(fill(body, samples, str))
    except (ValueError, RecursionError) as error:
        raise SettingError("body", f"JSON ({error})") from error


def _escape_header(value: str) -> str:
    return escape_line(value).encode("ascii", "replace").decode()


def _escape_slack(value: str) -> str:
    """These three characters are Slack's markup."""
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class NoResponse(Exception):
    """The host does not respond, the attempt timed out, or the response is not HTTP. Retryable."""

    def __init__(self, reason: str, *, is_cut_short: bool = False) -> None:
        super().__init__(reason)
        self.is_cut_short = is_cut_short

    def reason(self, last_reason: str) -> str:
        """An attempt cut short by the end of the step explains less than the one before it."""
        return last_reason if last_reason and self.is_cut_short else str(self)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    ca_file: str = ""
    use_proxy: bool = False


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes


def send(request: HttpRequest, context: StepContext, *, bytes_max: int) -> HttpResponse:
    """One attempt. At most `bytes_max` of the body are read."""
    seconds = min(ATTEMPT_SECONDS, max(context.seconds_left, TIMEOUT_SECONDS_MIN))
    try:
        return call_with_timeout(context, seconds, lambda: _exchange(request, seconds, bytes_max))
    except urllib.error.URLError as error:
        reason = str(error.reason)
        raise NoResponse(reason, is_cut_short=context.seconds_left <= 0) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        # ValueError: an impossible host name
        reason = str(error) or type(error).__name__
        raise NoResponse(reason, is_cut_short=context.seconds_left <= 0) from error


def check_url(field_name: str, url: str) -> None:
    """For `__post_init__`."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "@" in parts.netloc or any(not "!" <= letter <= "~" for letter in url):
        raise SettingError(field_name, URL_FORM)


def _exchange(request: HttpRequest, seconds: float, bytes_max: int) -> HttpResponse:
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    handlers.append(urllib.request.ProxyHandler(None if request.use_proxy else {}))
    if request.url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=_tls_context(request.ca_file)))
    opener = urllib.request.build_opener(*handlers)
    headers = {"User-Agent": "forewarn-agent", **request.headers}
    prepared = urllib.request.Request(  # noqa: S310 - `check_url` has checked the scheme
        request.url, request.body, headers, method=request.method
    )
    try:
        with opener.open(prepared, timeout=seconds) as response:
            return HttpResponse(response.status, response.read(bytes_max))
    except urllib.error.HTTPError as response:
        with response:
            return HttpResponse(response.code, response.read(bytes_max))


def _tls_context(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        reason = error.strerror or error
        raise NoResponse(f"cannot read the certificates in {ca_file}: {reason}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET without its body, sent to a host that the configuration does
    not name.
    """

    def redirect_request(self, *_: object) -> None:
        return None
