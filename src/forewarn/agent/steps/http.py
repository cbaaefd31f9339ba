"""`http`: calls a URL. Also the HTTP client that the kubernetes step uses.

A request is bounded in time and size, follows no redirects, verifies TLS, and bypasses proxies
unless one is wanted.
"""

import http.client
import json
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal
from urllib.parse import quote, urlsplit

from forewarn.agent.config_reader import SettingError, list_of, reject
from forewarn.agent.steps.base import (
    FACTS,
    NUMERIC_FACTS,
    StepContext,
    StepFailed,
    call_with_timeout,
    escape_json,
    escape_line,
    event_facts,
    fill,
    format_not_before,
    pause,
    template,
)

ATTEMPT_SECONDS = 10.0
TIMEOUT_SECONDS_MIN = 0.01  # a socket timeout of 0 means something else
RETRY_STATUSES = (408, 429, 500, 502, 503, 504)
FIRST_PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 10.0
SHOWN_BYTES_MAX = 300
URL_FORM = "a URL with http:// or https:// and without a password"
HEADERS_FORM = "names of letters, digits and '-', and texts of one line in ASCII"
SHAPE_CONTENT_TYPES = {"cloudevents": "application/cloudevents+json", "slack": "application/json"}
SLACK_TEXT = (
    "{event_type} of {event_resources}: {event_phase} on {event_vm}"
    " (event {event_id}, {event_status}, not before {event_notbefore}, source {event_source})"
)


def convert_url(value: object, path: str) -> str:
    """A converter for the configuration."""
    text = template(value, path)
    url = fill(text, dict.fromkeys(FACTS, "x"), str)
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "@" in parts.netloc or any(not "!" <= letter <= "~" for letter in url):
        reject(path, value, URL_FORM)
    return text


def _convert_headers(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        reject(path, value, "a table of names and texts")
    for name, text in value.items():
        template(text, path)
        is_name = name.replace("-", "").replace("_", "").isalnum()
        if not is_name or not (name + text).isascii() or not text.isprintable():
            reject(path, value, HEADERS_FORM)
    return value


def _is_status(value: object) -> bool:
    return type(value) is int and 100 <= value <= 599


@dataclass(frozen=True, slots=True)
class HttpStep:
    """`url`, header values and `body` are templates. `shape` creates the body instead."""

    url: Annotated[str, convert_url]
    method: Literal["", "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"] = ""
    headers: Annotated[Mapping[str, str], _convert_headers] = field(default_factory=dict)
    body: Annotated[str, template] = ""
    shape: Literal["", "cloudevents", "slack"] = ""
    expect: Annotated[tuple[int, ...], list_of("a list of HTTP statuses", _is_status)] = ()
    proxy: bool = False
    ca_file: str = ""

    SHORT: ClassVar[str] = "url"

    def __post_init__(self) -> None:
        if self.shape and self.body:
            raise SettingError("body", f"no body together with shape = '{self.shape}'")
        if self.body and self._is_json():
            # If it is JSON with sample values, it is with any, because values are escaped.
            samples = {name: "0" if name in NUMERIC_FACTS else "x" for name in FACTS}
            try:
                json.loads(fill(self.body, samples, str))
            except (ValueError, RecursionError) as error:
                raise SettingError("body", f"JSON ({error})") from error

    def describe(self) -> str:
        return describe_request(self._method(), self.url)

    def run(self, context: StepContext) -> None:
        expected = self.expect or range(200, 300)
        status, body = send(
            self._request(context),
            context,
            is_final=lambda status: status in expected or status not in RETRY_STATUSES,
            bytes_max=SHOWN_BYTES_MAX,
            ca_file=self.ca_file,
            use_proxy=self.proxy,
        )
        if status not in expected:
            reason = describe_status(status, body)
            raise StepFailed(f"{self.describe()}: {reason}", status=status)

    def _method(self) -> str:
        return self.method or ("POST" if self.shape or self.body else "GET")

    def _declared_type(self) -> str:
        values = (value for name, value in self.headers.items() if name.lower() == "content-type")
        return next(values, "")

    def _is_json(self) -> bool:
        declared = self._declared_type()
        return "json" in declared.lower() if declared else self.body.lstrip()[:1] in ("{", "[")

    def _request(self, context: StepContext) -> urllib.request.Request:
        facts = event_facts(context)
        headers = {name: fill(value, facts, _escape_header) for name, value in self.headers.items()}
        if not self._declared_type() and (self.shape or self.body):
            default = "application/json" if self._is_json() else "text/plain; charset=utf-8"
            headers["Content-Type"] = SHAPE_CONTENT_TYPES.get(self.shape, default)
        url = fill(self.url, facts, lambda value: quote(value, safe=""))
        body = self._body(context, facts)
        return urllib.request.Request(url, body, headers, method=self._method())  # noqa: S310 - checked by `convert_url`

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
    data = {
        "EventId": facts["event_id"],
        "EventType": facts["event_type"],
        "EventStatus": facts["event_status"],
        "EventSource": facts["event_source"],
        "ResourceType": facts["event_resourcetype"],
        "Resources": list(event.resources),
        "NotBefore": format_not_before(event, "%Y-%m-%dT%H:%M:%SZ"),
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


def _escape_header(value: str) -> str:
    return escape_line(value).encode("ascii", "replace").decode()


def _escape_slack(value: str) -> str:
    """These three characters are Slack's markup."""
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def describe_request(method: str, url: str) -> str:
    """Without path and query: in the URL of a web hook they are the secret."""
    parts = urlsplit(url)
    return f"{method} {parts.scheme}://{parts.netloc}"


def describe_status(status: int, body: bytes) -> str:
    text = escape_line(body[:SHOWN_BYTES_MAX].decode("utf-8", "replace")).strip()
    return f"status {status}: {text}" if text else f"status {status}"


def send(
    request: urllib.request.Request,
    context: StepContext,
    *,
    is_final: Callable[[int], bool],
    bytes_max: int,
    ca_file: str = "",
    use_proxy: bool = False,
) -> tuple[int, bytes]:
    """The first final status, and at most `bytes_max` of its body.

    No response and other statuses are retried with growing pauses, until the step's time is up.
    """

    def attempt(seconds: float) -> tuple[int, bytes]:
        opener = _make_opener(ca_file if request.type == "https" else None, use_proxy=use_proxy)
        with opener.open(request, timeout=seconds) as response:
            return response.status, response.read(bytes_max)

    what = describe_request(request.get_method(), request.full_url)
    pause_seconds, reason = FIRST_PAUSE_SECONDS, ""
    while True:  # ends with a final status, or at the limit: `pause` raises there
        seconds = min(ATTEMPT_SECONDS, max(context.seconds_left, TIMEOUT_SECONDS_MIN))
        try:
            status, body = call_with_timeout(context, partial(attempt, seconds), seconds)
            if is_final(status):
                return status, body
            reason = describe_status(status, body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # ValueError: an impossible host name. An attempt cut short by the end of the step
            # explains less than the one before it.
            if not reason or context.seconds_left > 0:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        pause(context, pause_seconds, f"{what}: {reason}")
        pause_seconds = min(pause_seconds * 2, PAUSE_SECONDS_MAX)


def _make_opener(ca_file: str | None, *, use_proxy: bool) -> urllib.request.OpenerDirector:
    """Without a handler of redirects: a redirected POST becomes a GET without its body, sent to a
    host that the configuration does not name.

    `ca_file` "" has the certificates of the system; None does not load any.
    """
    try:
        tls = None if ca_file is None else ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot read the certificates in {ca_file}: {reason}") from error
    opener = urllib.request.OpenerDirector()
    opener.addheaders = [("User-Agent", "forewarn-agent")]
    opener.add_handler(urllib.request.ProxyHandler(None if use_proxy else {}))
    opener.add_handler(urllib.request.UnknownHandler())  # the variable may name another kind
    opener.add_handler(urllib.request.HTTPHandler())
    opener.add_handler(urllib.request.HTTPSHandler(context=tls))
    return opener
