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
from forewarn.agent.steps.base import StepContext, StepFailed, pause
from forewarn.agent.steps.kubernetes import (
    ANNOTATION,
    MESSAGE_LENGTH_MAX,
    KubernetesStep,
    cordon_patch,
)
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
def test_node_is_cordoned_for_each_event_that_needs_it(
    before: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """A node that an operator cordoned gets no annotation, so it is never uncordoned."""
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
def test_node_is_uncordoned_by_its_last_event(
    before: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """Another pending event keeps it cordoned, and so does an operator."""
    assert cordon_patch(before, "E1", should_cordon=False) == expected


def test_pod_uses_its_service_account(tmp_path: Path) -> None:
    """Server from the environment, token and certificate from the mounted directory."""
    environ = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "1", "NODE_NAME": "n1"}
    (tmp_path / "token").write_text("t")
    api = KubernetesStep().located(environ, tmp_path)

    assert api.node == "n1"
    with pytest.raises(
        StepFailed,
        match=r"timed out: .*https://\[::1\]:1: cannot read the certificates in .*ca.crt",
    ):
        api.get("/x", context(is_simulated=True))
    (tmp_path / "token").unlink()
    with pytest.raises(StepFailed, match=r"cannot read the token in .*"):
        api.get("/x", context())


def test_missing_node_or_server_is_named() -> None:
    with pytest.raises(StepFailed, match="set `server`, or run in a pod"):
        KubernetesStep(node="n").located({})
    with pytest.raises(StepFailed, match="set `node`, or NODE_NAME"):
        KubernetesStep(server="http://x").located({})


def test_rejection_of_the_api_server_is_reported() -> None:
    """Missing permissions are the usual reason."""
    with Server(403).running() as server, pytest.raises(StepFailed, match="status 403: status 403"):
        make_step("kubernetes", {"node": "n", "server": server.url}, "W").run(context())

    assert [(method, path) for method, path, _, _ in server.requests] == [
        ("GET", "/api/v1/nodes/n")
    ]


def test_long_response_is_cut_in_the_error() -> None:
    """A proxy's login page has status 200 and up to 64 MiB, and the error is logged."""

    class Proxy(KubernetesStep):
        def call(self, context: StepContext, method: str, path: str, *_: object) -> tuple[int, Any]:
            return 200, "<html>" * 1000

    with pytest.raises(StepFailed, match=r"^GET /api: <html><html>") as failure:
        Proxy("n", "http://127.0.0.1").get("/api", context())

    assert len(failure.value.message) == len("GET /api: ") + MESSAGE_LENGTH_MAX


@pytest.mark.parametrize("status", [503, 429])
def test_failing_api_server_is_retried_until_the_limit(status: int) -> None:
    """Control planes are restarted by the same maintenance."""
    with (
        Server(status).running() as server,
        pytest.raises(StepFailed, match=rf"timed out: .*status {status}"),
    ):
        make_step("kubernetes", {"node": "n", "server": server.url}, "W").run(
            context(is_simulated=True)
        )

    assert len(server.requests) >= 2


def test_pod_with_a_failing_eviction_does_not_block_others() -> None:
    """Two budgets on one pod always get a 500. It is retried, and reported at the limit."""
    with api_server() as (url, evicted):
        made = make_step("kubernetes", {"node": "n", "server": url}, "W")
        with pytest.raises(
            StepFailed,
            match=r"timed out: .*still on the node: d/a \(held back: status 500: two budgets\)$",
        ):
            made.run(context(is_simulated=True))

    assert evicted[:3] == ["a", "b", "a"]


def test_list_cut_short_does_not_hide_the_pods_that_are_left() -> None:
    """The operator wants to know what is on the node, not that the last request had no time."""

    class SlowLists(KubernetesStep):
        def get(self, path: str, context: StepContext) -> dict[str, Any]:
            if "/nodes/" in path:
                return node(cordoned=True, reasons="E1")
            if context.seconds_left < 20:
                pause(context, 20, "no response")
            metadata = {"namespace": "d", "name": "a", "deletionTimestamp": "now"}
            return {"items": [{"metadata": metadata}]}

    step = SlowLists(node="n", server="http://127.0.0.1")
    with pytest.raises(StepFailed, match=r"^timed out: still on the node: d/a \(terminating\)$"):
        step.run(context(seconds=20, is_simulated=True))


@contextmanager
def api_server() -> Iterator[tuple[str, list[str]]]:
    """Two pods: `a` is never evicted, `b` at once."""
    evicted: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def response(self, status: int, content: object) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            left = [name for name in "ab" if name == "a" or name not in evicted]
            items = [{"metadata": {"namespace": "d", "name": name, "uid": name}} for name in left]
            self.response(200, node() if "/nodes/" in self.path else {"items": items})

        def do_PATCH(self) -> None:
            self.response(200, {})

        def do_POST(self) -> None:
            evicted.append(self.path.split("/")[-2])
            self.response(500 if evicted[-1] == "a" else 201, {"message": "two budgets"})

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
