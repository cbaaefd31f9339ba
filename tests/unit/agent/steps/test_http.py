"""Calls of URLs, against a real server."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepContext, StepFailed, WorkflowPhase
from tests.unit.agent.steps.build import Server, context, reboot

ROOT = Path(__file__).parents[4]


def test_bare_url_is_a_get_and_any_2xx_is_success() -> None:
    with Server(204).running() as server:
        make_step("http", f"{server.url}/x", "W").run(context())

    assert [(method, path) for method, path, _, _ in server.requests] == [("GET", "/x")]
    assert server.requests[0][2]["User-Agent"] == "forewarn-agent"


def test_facts_are_escaped_for_url_header_and_json() -> None:
    """The endpoint's values must not change the request."""
    body = '{"why": "{event_description}", "seconds": {event_duration}}'
    spec = {"body": body, "headers": {"X-Why": "{event_description}"}}
    with Server(200).running() as server:
        evil = reboot(description='"}\r\nX-Admin: 1 é/?')
        make_step("http", {**spec, "url": server.url + "/a?why={event_description}"}, "W").run(
            context(event=evil)
        )
    method, path, headers, sent = server.requests[0]

    assert (method, path) == ("POST", "/a?why=%22%7D%0D%0AX-Admin%3A%201%20%C3%A9%2F%3F")
    assert (headers["X-Why"], headers["Content-Type"]) == ('"} X-Admin: 1 ?/?', "application/json")
    assert "X-Admin" not in headers
    assert json.loads(sent) == {"why": evil.description, "seconds": 9}


def test_plain_text_body_is_not_escaped() -> None:
    with Server(200).running() as server:
        spec = {"url": server.url, "method": "PUT", "body": "why: {event_description}"}
        make_step("http", spec, "W").run(context(event=reboot(description='"x"')))

    assert (server.requests[0][0], server.requests[0][3]) == ("PUT", b'why: "x"')


def test_cloudevents_shape_is_structured_cloudevents_1_0() -> None:
    """The id is the same at every attempt, so that brokers can drop duplicates."""
    with Server(200).running() as server:
        make_step("http", {"url": server.url, "shape": "cloudevents"}, "W").run(context())
    method, _, headers, sent = server.requests[0]

    assert (method, headers["Content-Type"]) == ("POST", "application/cloudevents+json")
    assert json.loads(sent) == {
        "specversion": "1.0",
        "id": "E1/prepare/web-0",
        "source": "/forewarn/agent/web-0",
        "type": "forewarn.scheduledevent.prepare",
        "subject": "E1",
        "datacontenttype": "application/json",
        "data": {
            "EventId": "E1",
            "EventType": "Reboot",
            "EventStatus": "Scheduled",
            "EventSource": "Platform",
            "ResourceType": "VirtualMachine",
            "Resources": ["web-0", "web-1"],
            "NotBefore": "2026-03-04T12:00:00Z",
            "DurationInSeconds": 9,
            "Description": "Host is being maintained",
            "vm": "web-0",
            "phase": "prepare",
        },
    }


def test_slack_shape_escapes_markup() -> None:
    """<!channel> in a resource's name must not notify anyone."""
    with Server(200).running() as server:
        make_step("http", {"url": server.url, "shape": "slack"}, "W").run(
            context(event=reboot(resources=("<!channel>",)))
        )

    assert json.loads(server.requests[0][3]) == {
        "text": "Reboot of &lt;!channel&gt;: prepare on web-0"
        " (event E1, Scheduled, not before Wed, 04 Mar 2026 12:00:00 GMT, source Platform)"
    }


def test_temporary_errors_are_retried() -> None:
    """A load balancer that is being reloaded may respond 503."""
    with Server(503, 429, 200).running() as server:
        make_step("http", server.url, "W").run(context(is_simulated=True))

    assert len(server.requests) == 3


def test_permanent_errors_are_not_retried() -> None:
    """A wrong token stays wrong."""
    with (
        Server(403).running() as server,
        pytest.raises(StepFailed, match="status 403: status 403") as failure,
    ):
        make_step("http", server.url, "W").run(context())

    assert len(server.requests) == 1
    assert "time" not in failure.value.message


def test_retries_end_at_the_limit_with_the_last_reason() -> None:
    with (
        Server(503).running() as server,
        pytest.raises(StepFailed, match=r"timed out: .*status 503: status 503"),
    ):
        make_step("http", server.url, "W").run(context(is_simulated=True))


def test_last_attempt_cut_short_does_not_hide_the_reason() -> None:
    with Server(503, Server.SILENT).running() as server:
        limited = StepContext(
            reboot(),
            WorkflowPhase.PREPARE,
            "web-0",
            deadline=50,
            now=lambda: 99 if len(server.requests) > 1 else 0,
            sleep=lambda seconds: None,
        )

        with pytest.raises(StepFailed, match=r"timed out: .*status 503: status 503"):
            make_step("http", server.url, "W").run(limited)


def test_expect_replaces_2xx() -> None:
    """For services that respond 202 when they accept."""
    with Server(200).running() as server:
        with pytest.raises(StepFailed, match="status 200"):
            make_step("http", {"url": server.url, "expect": [202]}, "W").run(context())
        make_step("http", {"url": server.url, "expect": [200]}, "W").run(context())


def test_redirect_is_not_followed() -> None:
    """The configuration does not name its target."""
    with Server(302).running() as server, pytest.raises(StepFailed, match="status 302"):
        make_step("http", server.url, "W").run(context())

    assert len(server.requests) == 1


def test_refused_connection_is_reported_at_the_limit() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StepFailed, match=r"timed out: .*refused"):
            make_step("http", f"http://127.0.0.1:{taken.getsockname()[1]}/", "W").run(
                context(is_simulated=True)
            )


def test_impossible_host_name_fails_the_step() -> None:
    """A fact in the host lets the endpoint choose the name."""
    odd = reboot(type="x" * 70)
    with pytest.raises(StepFailed, match=r"timed out: .*http://x{70}\.test"):
        make_step("http", "http://{event_type}.test/", "W").run(
            context(event=odd, is_simulated=True)
        )


def test_slow_response_is_abandoned_at_the_limit() -> None:
    """A limit on each byte does not limit the whole."""
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not over.wait(0.05):  # ends with the test
                connection.sendall(b"HTTP/1.1 200 OK\r\n" if over.is_set() else b"X")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(StepFailed, match="timed out"):
            make_step("http", f"http://127.0.0.1:{listener.getsockname()[1]}/", "W").run(
                context(seconds=0.2)
            )
        over.set()
        thread.join()


@pytest.mark.parametrize(("by_proxy", "expected"), [(False, "/x"), (True, "http://far.test/x")])
def test_proxy_is_used_only_if_configured(by_proxy: bool, expected: str) -> None:
    """A proxy for package updates must not see drains."""
    with Server(200).running() as server:
        url = "http://far.test/x" if by_proxy else f"{server.url}/x"
        proxy = server.url if by_proxy else "http://127.0.0.1:9"
        step = {"url": url, "proxy": by_proxy}
        done = run_with_proxy(step, proxy, "context()")

    assert (done.returncode, done.stderr) == (0, b"")
    assert server.requests[0][1] == expected


def test_proxy_of_another_kind_fails_the_step() -> None:
    """The environment may be meant for curl, which knows SOCKS."""
    step = {"url": "http://far.test/x", "proxy": True}
    done = run_with_proxy(step, "socks5://127.0.0.1:9", "context(is_simulated=True)")

    assert b"StepFailed: timed out: GET http://far.test: unknown url type: socks5" in done.stderr


def run_with_proxy(
    step: dict[str, object], proxy: str, context: str
) -> "subprocess.CompletedProcess[bytes]":
    """The variables of a process are read once."""
    code = (
        "from tests.unit.agent.steps.build import context;"
        "from forewarn.agent.steps import make_step;"
        f"make_step('http', {step!r}, 'W').run({context})"
    )
    environ = {**os.environ, "http_proxy": proxy, "no_proxy": ""}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, check=False, capture_output=True
    )


def test_path_of_a_url_is_never_shown() -> None:
    """In the URL of a web hook it is the secret, and errors go to logs and status pages."""
    with Server(403).running() as server:
        made = make_step("http", f"{server.url}/services/T0/secret?key=secret", "W")
        with pytest.raises(StepFailed) as failure:
            made.run(context())

    assert made.describe() == f"GET {server.url}"
    assert failure.value.message == f"GET {server.url}: status 403: status 403"
