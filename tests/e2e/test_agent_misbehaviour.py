"""The real agent against an endpoint that responds wrongly. `test_client_misbehaviour` has the
whole list; here it is enough that the agent logs an error and goes on.
"""

from pathlib import Path

import pytest

from tests.e2e.agent_process import RULE, agent_of, eventually
from tests.e2e.faulty_endpoint import (
    AfterResponse,
    FaultyEndpoint,
    ScriptedResponse,
    document,
    response,
)

EAGER = RULE.replace("when-prepared", "at-once")
REBOOT = document(5, ("E1", "Scheduled"))
BODY = REBOOT.sent.partition(b"\r\n\r\n")[2]


def posts(endpoint: FaultyEndpoint) -> list[bytes]:
    return [request for request in endpoint.requests if request.startswith(b"POST")]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (ScriptedResponse(REBOOT.sent[:-3], AfterResponse.RESET), "reset"),
        (response(BODY.replace(b'["web-0"]', b'"web-0"')), "Resources"),
    ],
    ids=["connection reset", "invalid document"],
)
def test_invalid_response_is_logged_and_never_approved(
    tmp_path: Path, wrong: ScriptedResponse, field: str
) -> None:
    """Each wrong response holds an event that an eager rule would approve immediately."""
    with FaultyEndpoint(wrong, REBOOT) as endpoint, agent_of(tmp_path / "a", endpoint.url) as agent:
        agent.configure(EAGER, name="web-0")
        agent.start()
        eventually(lambda: posts(endpoint))

        assert [request[:4] for request in endpoint.requests[:2]] == [b"GET ", b"GET "]
        assert agent.log().count("endpoint failed") == 1
        assert field in agent.log().partition("problem=")[2].partition("\n")[0]
        assert eventually(agent.ran) == ["prepare Reboot"]


def test_name_is_requested_until_it_comes(tmp_path: Path) -> None:
    """Without it the agent cannot know which events affect this VM. An empty body means no events,
    and is no error.
    """
    instance = response(b'{"compute": {"name": "web-0"}}')
    with (
        FaultyEndpoint(response(b"{}"), instance, response(b""), REBOOT) as endpoint,
        agent_of(tmp_path / "a", endpoint.url) as agent,
    ):
        agent.configure('[[rule]]\nname = "own"\n')
        agent.start()

        assert eventually(agent.ran) == ["prepare Reboot"]
        assert agent.log().count("endpoint failed") == 1
        assert "compute.name" in agent.log()


def test_proxy_in_the_environment_is_bypassed(tmp_path: Path) -> None:
    """It would see the requests of all VMs as its own. Nothing listens on port 1."""
    with FaultyEndpoint(REBOOT) as endpoint, agent_of(tmp_path / "a", endpoint.url) as agent:
        names = ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy")
        agent.environ = dict.fromkeys(names, "http://127.0.0.1:1")
        agent.configure(EAGER, name="web-0")
        agent.start()

        assert eventually(lambda: posts(endpoint))
