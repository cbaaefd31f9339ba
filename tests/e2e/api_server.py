"""As much of a Kubernetes API server as a drain needs, over real HTTPS: nodes, pods, evictions,
budgets, ends after a grace.
"""

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "let-me-in"


@dataclass
class Pod:
    """`ends_after_seconds` is what its program needs once it is asked; it is killed when its grace
    is over.
    """

    name: str
    node: str = "n1"
    owner: str = "ReplicaSet"
    is_mirror: bool = False
    phase: str = "Running"
    ends_after_seconds: float = 0.3
    grace_seconds: int = 30
    budget: str = ""
    gone_at: float | None = None

    def item(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "namespace": "default",
            "name": self.name,
            "uid": f"uid-{self.name}",
        }
        metadata["ownerReferences"] = [{"kind": self.owner, "controller": True}]
        if self.is_mirror:
            metadata["annotations"] = {"kubernetes.io/config.mirror": "x"}
        if self.gone_at is not None:
            metadata["deletionTimestamp"] = "2026-03-04T12:00:00Z"
        spec = {"nodeName": self.node, "terminationGracePeriodSeconds": self.grace_seconds}
        return {"metadata": metadata, "spec": spec, "status": {"phase": self.phase}}


@dataclass
class ApiServer:
    """`budgets` is how many pods of a budget may be away; one that is gone is back elsewhere
    `replaced_after_seconds` later.
    """

    pods: dict[str, Pod] = field(default_factory=dict)
    budgets: dict[str, int] = field(default_factory=dict)
    replaced_after_seconds: float = 0.5
    node: dict[str, Any] = field(default_factory=dict)
    evictions: list[tuple[str, int, int]] = field(default_factory=list)
    conflicts_left: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def response(
        self, method: str, target: str, content_type: str, body: Any
    ) -> tuple[int, dict[str, Any]]:
        with self.lock:
            now = time.monotonic()
            path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
            parts = path.strip("/").split("/")
            if path == "/api/v1/nodes/n1":
                return self._patch(content_type, body) if method == "PATCH" else (200, self.node)
            if path == "/api/v1/pods" and query.get("fieldSelector") == ["spec.nodeName=n1"]:
                here = [
                    pod for pod in self.pods.values() if pod.gone_at is None or pod.gone_at > now
                ]
                return 200, {
                    "kind": "PodList",
                    "items": [pod.item() for pod in here if pod.node == "n1"],
                }
            if (
                method == "POST"
                and parts[-1] == "eviction"
                and parts[:4] == ["api", "v1", "namespaces", "default"]
            ):
                status, message = self._evict(self.pods.get(parts[5]), body, now)
                return status, {"kind": "Status", "message": message}
            return 404, {"kind": "Status", "message": f"no {path}"}

    def _patch(self, content_type: str, body: Any) -> tuple[int, dict[str, Any]]:
        if content_type != "application/merge-patch+json":
            return 415, {"kind": "Status", "message": content_type}
        version = self.node["metadata"]["resourceVersion"]
        if self.conflicts_left or body["metadata"]["resourceVersion"] != version:
            self.conflicts_left = max(0, self.conflicts_left - 1)
            return 409, {"kind": "Status", "message": "the object has been modified"}
        self.node = merged(self.node, body)
        self.node["metadata"]["resourceVersion"] = str(int(version) + 1)
        return 200, self.node

    def _evict(self, pod: Pod | None, body: Any, now: float) -> tuple[int, str]:
        if pod is None or (pod.gone_at is not None and pod.gone_at <= now):
            return 404, "not found"
        if (
            body["kind"] != "Eviction"
            or body["deleteOptions"]["preconditions"]["uid"] != f"uid-{pod.name}"
        ):
            return 409, "another pod"
        away = [
            other
            for other in self.pods.values()
            if other.budget == pod.budget
            and other.gone_at is not None
            and other.gone_at + self.replaced_after_seconds > now
        ]
        grace = body["deleteOptions"]["gracePeriodSeconds"]
        if pod.budget and len(away) >= self.budgets[pod.budget]:
            self.evictions.append((pod.name, 429, grace))
            return 429, "Cannot evict pod as it would violate the pod's disruption budget."
        pod.gone_at = now + min(grace, pod.ends_after_seconds)
        self.evictions.append((pod.name, 201, grace))
        return 201, "Created"


def merged(value: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    base = value if isinstance(value, dict) else {}
    kept = {
        name: part for name, part in base.items() if not (name in patch and patch[name] is None)
    }
    return {
        **kept,
        **{name: merged(base.get(name), part) for name, part in patch.items() if part is not None},
    }


@contextmanager
def serving(folder: Path, *pods: Pod, budgets: dict[str, int] | None = None) -> Iterator[ApiServer]:
    """Runs it with a certificate of its own;

    `folder` gets the authority (`ca.crt`) and the token (`token`).
    """
    api = ApiServer({pod.name: pod for pod in pods}, budgets or {})
    api.node = {"metadata": {"name": "n1", "resourceVersion": "1"}, "spec": {}}
    (folder / "token").write_text(f"{TOKEN}\n")
    certify(folder)

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, said = 401, {"kind": "Status", "message": "Unauthorized"}
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                body = json.loads(sent) if sent else None
                status, said = api.response(
                    self.command, self.path, self.headers.get("Content-Type") or "", body
                )
            response = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        do_GET = do_POST = do_PATCH = reply

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "ca.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        api.url = f"https://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


def certify(folder: Path) -> None:
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt"))
    subprocess.run(
        ["openssl", "req", "-x509", *key, *subject, *files, "-days", "2"],
        check=True,
        capture_output=True,
    )
