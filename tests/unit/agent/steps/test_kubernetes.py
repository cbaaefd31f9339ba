"""Whose cordon it is, which pods leave, and where the API server is.

Drains against a whole API server are in e2e.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed, StepTimedOut
from forewarn.agent.steps.kubernetes import ANNOTATION, ApiServer, KubernetesStep, cordon_patch
from tests.unit.agent.steps.build import Server, context


def node(*, cordoned: bool = False, reasons: str = "") -> dict[str, Any]:
    return {
        "metadata": {
            "resourceVersion": "7",
            "annotations": {ANNOTATION: reasons} if reasons else {"other": "x"},
        },
        "spec": {"unschedulable": True} if cordoned else {},
    }


def patch(reasons: str | None, *, cordoned: bool | None) -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": "7", "annotations": {ANNOTATION: reasons}},
        "spec": {"unschedulable": cordoned},
    }


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (node(), patch("E1", cordoned=True)),
        (node(cordoned=True), None),
        (node(cordoned=True, reasons="E1"), None),
        (node(cordoned=True, reasons="E0"), patch("E0 E1", cordoned=True)),
        ({"metadata": {"resourceVersion": "7"}}, patch("E1", cordoned=True)),
    ],
)
def test_a_node_is_cordoned_once_and_for_each_event_that_needs_it(
    before: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """A node that a person cordoned gets no mark of ours: it is not ours to uncordon."""
    assert cordon_patch(before, "E1", should_cordon=True) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (node(cordoned=True, reasons="E1"), patch(None, cordoned=None)),
        (node(cordoned=True, reasons="E0 E1"), patch("E0", cordoned=True)),
        (node(cordoned=True, reasons="E0"), None),
        (node(cordoned=True), None),
        (node(), None),
    ],
)
def test_a_node_is_uncordoned_by_the_last_event_that_it_was_cordoned_for(
    before: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """Another event that is still pending keeps it, and so does a person."""
    assert cordon_patch(before, "E1", should_cordon=False) == expected


def test_in_a_pod_the_service_account_says_it_all(tmp_path: Path) -> None:
    """Server from the environment, token and authority from the mounted folder."""
    environ = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "1", "NODE_NAME": "n1"}
    (tmp_path / "token").write_text("t")
    api = ApiServer.find(KubernetesStep(), environ, tmp_path)

    assert api.node == "n1"
    with pytest.raises(
        StepTimedOut,
        match=r"API server at https://\[::1\]:1 does not respond: cannot read the certificates in .*ca.crt",
    ):
        api.get("/x", context(is_simulated=True))
    (tmp_path / "token").unlink()
    with pytest.raises(StepFailed, match=r"cannot read the token in .*"):
        api.get("/x", context())


def test_outside_a_pod_what_is_missing_is_named() -> None:
    """With the words that help."""
    with pytest.raises(StepFailed, match="set `server`, or run in a pod"):
        ApiServer.find(KubernetesStep(node="n"), {})
    with pytest.raises(StepFailed, match="set `node`, or NODE_NAME"):
        ApiServer.find(KubernetesStep(server="http://x"), {})


def test_what_the_api_server_refuses_is_told_in_its_words() -> None:
    """Missing rights are the usual reason, and do not pass by themselves."""
    with Server(403).running() as server, pytest.raises(StepFailed, match="status 403: status 403"):
        make_step("kubernetes", {"node": "n", "server": server.url}, "W").run(context())

    assert [(method, path) for method, path, _, _ in server.requests] == [
        ("GET", "/api/v1/nodes/n")
    ]


@pytest.mark.parametrize("status", [503, 429])
def test_an_api_server_in_trouble_is_asked_again_until_the_limit(status: int) -> None:
    """Control planes are restarted by the same maintenance."""
    with Server(status).running() as server, pytest.raises(StepTimedOut, match=f"status {status}"):
        make_step("kubernetes", {"node": "n", "server": server.url}, "W").run(
            context(is_simulated=True)
        )

    assert len(server.requests) >= 2


def test_a_pod_whose_eviction_is_answered_with_500_does_not_keep_the_others_from_theirs() -> None:
    """Two budgets on one pod are answered so for ever.

    It is told at the limit, and asked again until then.
    """
    with api_server() as (url, evicted):
        made = make_step("kubernetes", {"node": "n", "server": url}, "W")
        with pytest.raises(
            StepTimedOut, match=r"still on the node: d/a \(held back: status 500: two budgets\)$"
        ):
            made.run(context(is_simulated=True))

    assert evicted[:3] == ["a", "b", "a"]


@contextmanager
def api_server() -> Iterator[tuple[str, list[str]]]:
    """Two pods: `a` is never evicted, `b` at once."""
    evicted: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, said: object) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            left = [name for name in "ab" if name == "a" or name not in evicted]
            items = [{"metadata": {"namespace": "d", "name": name, "uid": name}} for name in left]
            self.answer(200, node() if "/nodes/" in self.path else {"items": items})

        def do_PATCH(self) -> None:
            self.answer(200, {})

        def do_POST(self) -> None:
            evicted.append(self.path.split("/")[-2])
            self.answer(500 if evicted[-1] == "a" else 201, {"message": "two budgets"})

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", evicted
        finally:
            server.shutdown()
            thread.join()
