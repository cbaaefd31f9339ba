"""The real agent against an endpoint that does everything wrong: it says what it got, goes on, and
approves nothing wrongly.
"""

from pathlib import Path

import pytest

from tests.e2e.agent_process import RULE, agent_of, eventually
from tests.e2e.crooked import Crooked, Then, Turn, answer, document

EAGER = RULE.replace("when-prepared", "at-once")
REBOOT = document(5, ("E1", "Scheduled"))
BODY = REBOOT.said.partition(b"\r\n\r\n")[2]

WRONG = {
    "truncated": (Turn(REBOOT.said[:-3], Then.CLOSE), "cut off|ended|before its end|whole"),
    "reset": (Turn(REBOOT.said[:-3], Then.RESET), "reset"),
    "silent": (Turn(b"", Then.STAY_SILENT), "did not answer in time"),
    "no json": (answer(b"<html>" + BODY), "no JSON"),
    "half json": (answer(BODY[:-2]), "no JSON"),
    "a list": (answer(b"[" + BODY + b"]"), "expected a document"),
    "events are no list": (
        answer(b'{"DocumentIncarnation":5,"Events":{"EventId":"E1"}}'),
        "expected a document",
    ),
    "an event is no object": (
        answer(b'{"DocumentIncarnation":5,"Events":["E1"]}'),
        "expected an object",
    ),
    "an id is a number": (answer(BODY.replace(b'"E1"', b"1")), "EventId"),
    "resources are text": (answer(BODY.replace(b'["web-0"]', b'"web-0"')), "Resources"),
    "a date that is none": (answer(BODY.replace(b"01 Mar", b"99 Mar")), "NotBefore"),
    "huge": (
        Turn(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n" + BODY, Then.CLOSE),
        "large|long|most",
    ),
    "endless": (
        Turn(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 5_000_000 + BODY, Then.CLOSE),
        "large|long|most",
    ),
    "redirect": (answer(BODY, 302, Location="http://127.0.0.1:1/"), "redirects"),
    "server error": (answer(BODY, 500), "500"),
    "no http": (Turn(BODY, Then.CLOSE), ""),
}


def posts(endpoint: Crooked) -> list[bytes]:
    return [request for request in endpoint.requests if request.startswith(b"POST")]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_understood_is_said_and_never_approved(tmp_path: Path, wrong: str) -> None:
    """Each answer holds an event that an eager rule would approve at once.

    When it comes as it should, it is.
    """
    turn, said = WRONG[wrong]
    with Crooked(turn, REBOOT) as endpoint, agent_of(tmp_path / "a", endpoint.url) as agent:
        agent.configure(EAGER, name="web-0")
        agent.start()
        eventually(lambda: posts(endpoint))

        assert [request[:4] for request in endpoint.requests[:2]] == [b"GET ", b"GET "]
        assert agent.log().count("the endpoint has a problem") == 1
        problem = agent.log().partition("problem=")[2].partition("\n")[0]
        assert any(word in problem for word in said.split("|")), problem
        assert eventually(agent.ran) == ["prepare Reboot"]


def test_an_empty_answer_is_no_events_and_no_problem(tmp_path: Path) -> None:
    """Endpoints that answer so exist."""
    with (
        Crooked(answer(b""), answer(b""), REBOOT) as endpoint,
        agent_of(tmp_path / "a", endpoint.url) as agent,
    ):
        agent.configure(EAGER, name="web-0")
        agent.start()
        eventually(agent.ran)

        assert "the endpoint has a problem" not in agent.log()


def test_a_name_that_does_not_come_is_asked_for_until_it_does(tmp_path: Path) -> None:
    """Without it nobody knows whom an event hits."""
    instance = answer(b'{"compute": {"name": "web-0"}}')
    with (
        Crooked(answer(b"{}"), instance, REBOOT) as endpoint,
        agent_of(tmp_path / "a", endpoint.url) as agent,
    ):
        agent.configure('[[rule]]\nname = "own"\n')
        agent.start()

        assert eventually(agent.ran) == ["prepare Reboot"]
        assert "compute.name" in agent.log()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"])
def test_a_proxy_in_the_environment_is_passed_by(tmp_path: Path, name: str) -> None:
    """It would see the calls of all VMs as its own. Nobody listens on port 1."""
    with Crooked(REBOOT) as endpoint, agent_of(tmp_path / "a", endpoint.url) as agent:
        agent.environ = {name: "http://127.0.0.1:1"}
        agent.configure(EAGER, name="web-0")
        agent.start()

        assert eventually(lambda: posts(endpoint))
