"""`http`: calls a URL.

What passes by itself (no answer, 408, 429, some 5xx) is tried again for as long as the step has
time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from urllib.parse import quote, urlsplit

from forewarn.agent.step import Occasion, StepFailed
from forewarn.agent.steps import fact, web
from forewarn.agent.steps.spec import Spec
from forewarn.agent.steps.wait import pause

MEMBERS = ("url", "method", "headers", "body", "shape", "expect", "proxy", "ca_file")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
FIRST_PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 10.0
SHOWN_BYTES_MAX = 300
SUCCESS = tuple(range(200, 300))
SHAPES = {"cloudevents": "application/cloudevents+json", "slack": "application/json"}
SLACK = (
    "{event_type} of {event_resources}: {event_phase} on {event_vm}"
    " (event {event_id}, {event_status}, not before {event_notbefore}, source {event_source})"
)


@dataclass(frozen=True, slots=True)
class Http:
    """`body` is a template; it is JSON if `is_json`, and then what is filled in is escaped for it.

    A shape makes its own body.
    """

    url: str
    method: str
    headers: Mapping[str, str]
    body: str = ""
    is_json: bool = False
    shape: str = ""
    expect: tuple[int, ...] = SUCCESS
    by_proxy: bool = False
    ca_file: str = ""

    def describe(self) -> str:
        """Without path and query: in the URL of a web hook they are the secret."""
        split = urlsplit(self.url)
        return f"{self.method} {split.scheme}://{split.netloc}"

    def run(self, occasion: Occasion) -> None:
        seconds, problem = FIRST_PAUSE_SECONDS, ""
        while True:  # ends with an answer that stays, or at the limit: `pause` raises there
            problem = self._attempt(occasion, problem)
            if not problem:
                return
            pause(occasion, seconds, f"{self.describe()}: {problem}")
            seconds = min(seconds * 2, PAUSE_SECONDS_MAX)

    def _attempt(self, occasion: Occasion, before: str) -> str:
        """Empty when done, or why to try again; `before` is why the last try failed.

        The same event and phase give the same CloudEvents id at every try.
        """
        try:
            answer = web.send(self._call(occasion), occasion, bytes_max=SHOWN_BYTES_MAX)
        except web.NoAnswer as problem:
            return problem.reason(before)
        if answer.status in self.expect:
            return ""
        said = fact.in_line(answer.body.decode("utf-8", "replace")).strip()
        refusal = f"status {answer.status}" + (f": {said}" if said else "")
        if answer.status not in web.AGAIN:
            raise StepFailed(f"{self.describe()}: {refusal}", status=answer.status)
        return refusal

    def _call(self, occasion: Occasion) -> web.Call:
        facts = fact.facts(occasion)
        headers = {
            name: fact.fill(value, facts, _in_header) for name, value in self.headers.items()
        }
        url = fact.fill(self.url, facts, lambda value: quote(value, safe=""))
        return web.Call(
            self.method, url, headers, self._body(occasion, facts), self.ca_file, self.by_proxy
        )

    def _body(self, occasion: Occasion, facts: dict[str, str]) -> bytes | None:
        if self.shape == "cloudevents":
            return json.dumps(cloud_event(occasion, facts)).encode()
        if self.shape == "slack":
            return json.dumps({"text": fact.fill(SLACK, facts, _in_slack)}).encode()
        return (
            fact.fill(self.body, facts, fact.in_json if self.is_json else str).encode()
            if self.body
            else None
        )


def cloud_event(occasion: Occasion, facts: Mapping[str, str]) -> dict[str, object]:
    """CloudEvents 1.0, structured mode.

    Its data is the event as its endpoint tells it, with our own name and phase.
    """
    event = occasion.event
    told = {
        "EventId": facts["event_id"],
        "EventType": facts["event_type"],
        "EventStatus": facts["event_status"],
        "EventSource": facts["event_source"],
        "ResourceType": facts["event_resourcetype"],
        "Resources": list(event.resources),
        "NotBefore": event.not_before.astimezone(UTC).isoformat().replace("+00:00", "Z")
        if event.not_before
        else "",
        "DurationInSeconds": event.duration_seconds,
        "Description": facts["event_description"],
    }
    return {
        "specversion": "1.0",
        "id": f"{facts['event_id']}/{occasion.phase.value}/{occasion.name}",
        "source": f"/forewarn/agent/{quote(occasion.name, safe='')}",
        "type": f"forewarn.scheduledevent.{occasion.phase.value}",
        "subject": facts["event_id"],
        "datacontenttype": "application/json",
        "data": {**told, "vm": occasion.name, "phase": occasion.phase.value},
    }


def make(value: object, where: str) -> Http:
    spec = Spec(value, where, members=MEMBERS, short="url")
    shape = spec.choice("shape", tuple(SHAPES), "") if spec.get("shape") is not None else ""
    body = fact.check(spec, "body", spec.text("body", ""))
    if shape and body:
        raise spec.refused("body", f"no body beside shape = '{shape}'")
    headers = _headers(spec)
    declared = next((text for name, text in headers.items() if name.lower() == "content-type"), "")
    is_json = "json" in declared.lower() if declared else body.lstrip()[:1] in ("{", "[")
    if body and is_json:
        _check_json(spec, body)
    if not declared and (shape or body):
        headers["Content-Type"] = (
            SHAPES[shape]
            if shape
            else "application/json"
            if is_json
            else "text/plain; charset=utf-8"
        )
    url = fact.check(spec, "url", spec.text("url", expected="a URL"))
    web.check_url(spec, "url", fact.fill(url, dict.fromkeys(fact.NAMES, "x"), str))
    return Http(
        url=url,
        method=spec.choice("method", METHODS, "POST" if shape or body else "GET"),
        headers=headers,
        body=body,
        is_json=is_json,
        shape=shape,
        expect=_expect(spec),
        by_proxy=spec.is_set("proxy"),
        ca_file=spec.text("ca_file", ""),
    )


def _headers(spec: Spec) -> dict[str, str]:
    headers = spec.pairs("headers", expected="a table of names and texts")
    for name, value in headers.items():
        fact.check(spec, "headers", value)
        if (
            not name.replace("-", "").replace("_", "").isalnum()
            or not (name + value).isascii()
            or not value.isprintable()
        ):
            raise spec.refused(
                "headers", "names of letters, digits and '-', and texts of one line in ASCII"
            )
    return headers


def _check_json(spec: Spec, body: str) -> None:
    """With words in place of facts it must be JSON: then it is with every fact, for what is filled
    in is escaped.
    """
    samples = {name: "0" if name in fact.NUMBERS else "x" for name in fact.NAMES}
    try:
        json.loads(fact.fill(body, samples, str))
    except ValueError as error:
        raise spec.refused("body", f"JSON ({error})") from error


def _expect(spec: Spec) -> tuple[int, ...]:
    value = spec.get("expect")
    if value is None:
        return SUCCESS
    if (
        not isinstance(value, list)
        or not value
        or not all(type(part) is int and 100 <= part <= 599 for part in value)
    ):
        raise spec.refused("expect", "a list of HTTP statuses")
    return tuple(value)


def _in_header(value: str) -> str:
    return fact.in_line(value).encode("ascii", "replace").decode()


def _in_slack(value: str) -> str:
    """As Slack wants it: these three are its markup."""
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
