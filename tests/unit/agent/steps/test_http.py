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
from forewarn.agent.steps.base import Phase, StepContext, StepFailed, StepTimedOut
from tests.unit.agent.steps.build import Server, context, reboot

ROOT = Path(__file__).parents[4]


def test_a_url_alone_is_asked_by_get_and_any_2xx_is_right() -> None:
    """The shortest form does the plain thing."""
    with Server(204).running() as server:
        make_step("http", f"{server.url}/x", "W").run(context())

    assert [(method, path) for method, path, _, _ in server.requests] == [("GET", "/x")]


def test_facts_are_escaped_for_the_place_where_they_stand() -> None:
    """What the endpoint says must not become part of our request."""
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


def test_a_text_that_is_no_json_is_sent_as_it_is() -> None:
    """Quotes need no backslashes there."""
    with Server(200).running() as server:
        spec = {"url": server.url, "method": "PUT", "body": "why: {event_description}"}
        make_step("http", spec, "W").run(context(event=reboot(description='"x"')))

    assert (server.requests[0][0], server.requests[0][3]) == ("PUT", b'why: "x"')


def test_the_cloudevents_shape_is_cloudevents_1_0_in_structured_mode() -> None:
    """Brokers refuse what is only nearly that.

    The id is the same at every try, so that they can drop repeats.
    """
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


def test_the_slack_shape_is_one_text_without_markup_from_outside() -> None:
    """<!channel> in a resource's name should wake nobody."""
    with Server(200).running() as server:
        make_step("http", {"url": server.url, "shape": "slack"}, "W").run(
            context(event=reboot(resources=("<!channel>",)))
        )

    assert json.loads(server.requests[0][3]) == {
        "text": "Reboot of &lt;!channel&gt;: prepare on web-0"
        " (event E1, Scheduled, not before Wed, 04 Mar 2026 12:00:00 GMT, source Platform)"
    }


def test_what_passes_by_itself_is_tried_again() -> None:
    """A balancer that is just being reloaded answers 503 for a moment."""
    with Server(503, 429, 200).running() as server:
        make_step("http", server.url, "W").run(context(is_simulated=True))

    assert len(server.requests) == 3


def test_what_stays_is_not_tried_again() -> None:
    """A wrong token is as wrong in a minute."""
    with (
        Server(403).running() as server,
        pytest.raises(StepFailed, match="status 403: status 403") as failure,
    ):
        make_step("http", server.url, "W").run(context())

    assert len(server.requests) == 1
    assert not isinstance(failure.value, StepTimedOut)


def test_the_tries_end_at_the_limit_with_the_last_reason() -> None:
    """Not with a bare time-out."""
    with (
        Server(503).running() as server,
        pytest.raises(StepTimedOut, match="status 503: status 503"),
    ):
        make_step("http", server.url, "W").run(context(is_simulated=True))


def test_a_last_try_that_is_cut_short_does_not_hide_why_the_others_failed() -> None:
    """The last try has only what is left of the step's time; that it did not suffice is not the
    reason.
    """
    with Server(503, Server.SILENT).running() as server:
        limited = StepContext(
            reboot(),
            Phase.PREPARE,
            "web-0",
            deadline=50,
            now=lambda: 99 if len(server.requests) > 1 else 0,
            sleep=lambda seconds: None,
        )

        with pytest.raises(StepTimedOut, match="status 503: status 503"):
            make_step("http", server.url, "W").run(limited)


def test_only_what_is_expected_counts_where_it_is_given() -> None:
    """For services that answer 200 to everything but 202 to what they took."""
    with Server(200).running() as server:
        with pytest.raises(StepFailed, match="status 200"):
            make_step("http", {"url": server.url, "expect": [202]}, "W").run(context())
        make_step("http", {"url": server.url, "expect": [200]}, "W").run(context())


def test_a_redirect_is_not_followed() -> None:
    """Whoever it leads to was not named in the settings."""
    with Server(302).running() as server, pytest.raises(StepFailed, match="status 302"):
        make_step("http", server.url, "W").run(context())

    assert len(server.requests) == 1


def test_nobody_there_is_told_at_the_limit() -> None:
    """With the reason that the system gives."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StepTimedOut, match="refused"):
            make_step("http", f"http://127.0.0.1:{taken.getsockname()[1]}/", "W").run(
                context(is_simulated=True)
            )


def test_a_host_whose_name_cannot_be_one_is_a_failure_of_the_step() -> None:
    """Where a fact stands in the host, the endpoint chooses the name."""
    odd = reboot(type="x" * 70)
    with pytest.raises(StepTimedOut, match=r"http://{event_type}\.test"):
        make_step("http", "http://{event_type}.test/", "W").run(
            context(event=odd, is_simulated=True)
        )


def test_an_answer_that_drips_in_is_given_up_at_the_limit() -> None:
    """A limit on each byte is none on the whole."""
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not over.wait(0.05):  # ends with the test
                connection.sendall(b"HTTP/1.1 200 OK\r\n" if over.is_set() else b"X")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(StepTimedOut):
            make_step("http", f"http://127.0.0.1:{listener.getsockname()[1]}/", "W").run(
                context(seconds=0.2)
            )
        over.set()
        thread.join()


@pytest.mark.parametrize(("by_proxy", "asked"), [(False, "/x"), (True, "http://far.test/x")])
def test_a_proxy_in_the_environment_is_used_only_where_it_is_wanted(
    by_proxy: bool, asked: str
) -> None:
    """A proxy set for package updates must not get to hear of drains."""
    with Server(200).running() as server:
        url = "http://far.test/x" if by_proxy else f"{server.url}/x"
        proxy = server.url if by_proxy else "http://127.0.0.1:9"
        code = (
            "from tests.unit.agent.steps.build import context; from forewarn.agent.steps import make_step;"
            f"make_step('http', {{'url': {url!r}, 'proxy': {by_proxy}}}, 'W').run(context())"
        )
        environ = {**os.environ, "http_proxy": proxy, "no_proxy": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, cwd=ROOT, check=False, capture_output=True
        )

    assert (done.returncode, done.stderr) == (0, b"")
    assert server.requests[0][1] == asked


def test_the_path_of_a_url_is_never_told() -> None:
    """In the URL of a web hook it is the secret, and descriptions and failures go to logs and
    status pages.
    """
    with Server(403).running() as server:
        made = make_step("http", f"{server.url}/services/T0/secret?key=secret", "W")
        with pytest.raises(StepFailed) as failure:
            made.run(context())

    assert made.describe() == f"GET {server.url}"
    assert failure.value.message == f"GET {server.url}: status 403: status 403"
