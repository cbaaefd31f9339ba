"""Kubernetes' API server, as far as a drain needs it: plain HTTPS, with our pod's service account
or with what was given.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from forewarn.agent.step import Occasion, StepFailed
from forewarn.agent.steps import web
from forewarn.agent.steps.wait import pause

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANSWER_BYTES_MAX = 64 * 1024 * 1024
AGAIN_SECONDS = 1.0
GRACE_SECONDS = 30  # Kubernetes' own default
MIRROR = "kubernetes.io/config.mirror"
OVER = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    uid: str
    grace_seconds: int
    is_leaving: bool
    is_to_leave: bool


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is not given is found where a pod finds it.

    The token is read at each call: it is renewed while we run.
    """

    node: str = ""
    server: str = ""
    token_file: str = ""
    ca_file: str = ""
    account: Path = ACCOUNT
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def node_name(self) -> str:
        name = self.node or self.environ.get("NODE_NAME", "")
        if not name:
            raise StepFailed(
                "which node is ours is not known: give `node`, or NODE_NAME in the environment (spec.nodeName)"
            )
        return name

    def pods(self, occasion: Occasion) -> list[Pod]:
        selector = quote(f"spec.nodeName={self.node_name()}", safe="")
        items = self.get(f"/api/v1/pods?fieldSelector={selector}", occasion).get("items")
        if not isinstance(items, list):
            raise StepFailed("the API server's list of pods has no items")
        return [_pod(item) for item in items]

    def get(self, path: str, occasion: Occasion) -> dict[str, object]:
        status, said = self.ask(occasion, "GET", path)
        if status != 200 or not isinstance(said, dict):
            raise StepFailed(f"GET {path}: status {status}: {said}", status=status)
        return said

    def ask(
        self,
        occasion: Occasion,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "",
    ) -> tuple[int, object]:
        """The status, and what was said: an object for 2xx, a message for the rest. 5xx and silence
        are tried again.

        A POST, which is an eviction, is not, if there is an answer: 429 and 5xx may be about this
        one pod, and others wait.
        """
        call = web.Call(
            method, self._server() + path, self._headers(content_type), body, self._ca_file()
        )
        reason = ""
        while True:  # ends with an answer that stays, or at the limit: `pause` raises there
            try:
                answer = web.send(call, occasion, bytes_max=ANSWER_BYTES_MAX)
            except web.NoAnswer as problem:
                reason = problem.reason(reason)
                pause(
                    occasion,
                    AGAIN_SECONDS,
                    f"the API server at {self._server()} does not answer: {reason}",
                )
                continue
            said = _read(answer.body)
            if method == "POST" or (answer.status < 500 and answer.status != 429):
                return answer.status, said if answer.status < 300 else _message(said)
            pause(
                occasion,
                AGAIN_SECONDS,
                f"{method} {path}: status {answer.status}: {_message(said)}",
            )

    def _server(self) -> str:
        if self.server:
            return self.server
        host, port = (
            self.environ.get("KUBERNETES_SERVICE_HOST", ""),
            self.environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if not host:
            raise StepFailed("there is no API server: give `server`, or run in a pod")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Accept": "application/json"} | (
            {"Content-Type": content_type} if content_type else {}
        )
        path = self.token_file or ("" if self.server else str(self.account / "token"))
        if not path:
            return headers
        try:
            token = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise StepFailed(f"the token in {path} cannot be read: {error}") from error
        return headers | {"Authorization": f"Bearer {token}"}

    def _ca_file(self) -> str:
        return self.ca_file or ("" if self.server else str(self.account / "ca.crt"))


def _pod(item: dict[str, dict[str, object]]) -> Pod:
    """DaemonSets put their pods back on a cordoned node, mirror pods belong to the kubelet, and
    what is over needs no end.
    """
    try:
        metadata, spec = item["metadata"], item.get("spec") or {}
        owners, notes = metadata.get("ownerReferences") or [], metadata.get("annotations") or {}
        assert isinstance(owners, list)
        assert isinstance(notes, dict)
        is_daemon = any(
            owner.get("kind") == "DaemonSet" and owner.get("controller") for owner in owners
        )
        is_over = (item.get("status") or {}).get("phase") in OVER
        grace = spec.get("terminationGracePeriodSeconds")
        return Pod(
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            uid=str(metadata.get("uid") or ""),
            grace_seconds=grace if isinstance(grace, int) else GRACE_SECONDS,
            is_leaving="deletionTimestamp" in metadata,
            is_to_leave=not (is_daemon or is_over or MIRROR in notes),
        )
    except (LookupError, TypeError, AttributeError, AssertionError) as error:
        raise StepFailed(
            f"the API server tells of a pod that cannot be understood: {error!r}"
        ) from error


def _read(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body[:300].decode("utf-8", "replace")


def _message(said: object) -> str:
    """The words of a Status object, or whatever came instead."""
    return str(said.get("message") or said)[:300] if isinstance(said, dict) else str(said)[:300]
