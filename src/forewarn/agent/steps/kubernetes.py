"""`kubernetes`: cordons the node and evicts its pods as far as their disruption budgets allow; in
recover, uncordons it.

An annotation of the node names the events that it is cordoned for. A node that was cordoned by
anything else has no annotation, and stays cordoned.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from forewarn.agent.config_reader import Range
from forewarn.agent.steps.base import StepContext, StepFailed, WorkflowPhase, pause
from forewarn.agent.steps.http import HttpRequest, NoResponse, check_url, send

ANNOTATION = "forewarn/cordoned-for"
ROUND_SECONDS = 1.0
GRACE_SECONDS_MAX = 24 * 3600.0
PODS_SHOWN_MAX = 5
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RESPONSE_BYTES_MAX = 64 * 1024 * 1024
POD_GRACE_SECONDS = 30  # the default of Kubernetes
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
FINISHED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class KubernetesStep:
    node: str = ""
    server: str = ""
    token_file: str = ""
    ca_file: str = ""
    evict: bool = True
    grace_seconds: Annotated[float, Range(0, GRACE_SECONDS_MAX)] = GRACE_SECONDS_MAX

    def __post_init__(self) -> None:
        if self.server:
            check_url("server", self.server)

    def describe(self) -> str:
        evict = " and evict its pods" if self.evict else ""
        return f"cordon {self.node or 'our node'}{evict}, or in recover uncordon it"

    def run(self, context: StepContext) -> None:
        self.run_with(ApiServer.find(self, os.environ), context)

    def run_with(self, api: "ApiServer", context: StepContext) -> None:
        """Pods without a controller are evicted too: this node is about to go away."""
        if context.phase is WorkflowPhase.RECOVER:
            self._set_cordoned(api, context, should_cordon=False)
            return
        self._set_cordoned(api, context, should_cordon=True)
        if self.evict:
            self._evict_all(api, context)

    def _set_cordoned(self, api: "ApiServer", context: StepContext, *, should_cordon: bool) -> None:
        """One patch against the version that was read: other events may change the node too."""
        path = f"/api/v1/nodes/{quote(api.node, safe='')}"
        while True:  # ends when the patch is accepted, or at the limit: `pause` raises there
            node = api.get(path, context)
            patch = cordon_patch(node, context.event.key, should_cordon=should_cordon)
            if patch is None:
                return
            body = json.dumps(patch).encode()
            media_type = "application/merge-patch+json"
            status, message = api.call(context, "PATCH", path, body, media_type)
            if status == 200:
                return
            if status != 409:
                reason = f"status {status}: {message}"
                raise StepFailed(f"cannot change the node: {reason}", status=status)
            pause(context, ROUND_SECONDS, "the node changes faster than it can be cordoned")

    def _evict_all(self, api: "ApiServer", context: StepContext) -> None:
        """In rounds: each lists the pods that are left, and asks again for those held back."""
        while True:  # ends when no pod is left, or at the limit: `pause` raises there
            pods = [pod for pod in api.pods(context) if pod.should_evict]
            if not pods:
                return
            left = [
                f"{pod.namespace}/{pod.name} ({self._evict(api, pod, context)})" for pod in pods
            ]
            shown = ", ".join(left[:PODS_SHOWN_MAX])
            more = len(left) - PODS_SHOWN_MAX
            suffix = f" and {more} more" if more > 0 else ""
            pause(context, ROUND_SECONDS, f"still on the node: {shown}{suffix}")

    def _evict(self, api: "ApiServer", pod: "Pod", context: StepContext) -> str:
        """Returns the state of the pod for the message. It never gets more time to end than its
        own grace period, or than the step has.
        """
        if pod.is_terminating:
            return "terminating"
        left = context.seconds_left - 2 * ROUND_SECONDS  # so that its end is still observed
        grace = max(1, int(min(pod.grace_seconds, self.grace_seconds, left)))
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"gracePeriodSeconds": grace, "preconditions": {"uid": pod.uid}},
        }
        namespace, name = quote(pod.namespace, safe=""), quote(pod.name, safe="")
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        body = json.dumps(eviction).encode()
        status, message = api.call(context, "POST", path, body, "application/json")
        if status in (200, 201, 202, 404, 409):
            # 404, 409: gone, or another pod of that name. The next round shows it.
            return "evicted"
        if status == 429:
            return f"held back: {message}"
        if status >= 500:
            # As for a pod with two budgets. It may never pass, and must not block the others.
            return f"held back: status {status}: {message}"
        reason = f"status {status}: {message}"
        raise StepFailed(f"cannot evict {pod.namespace}/{pod.name}: {reason}", status=status)


def cordon_patch(
    node: dict[str, object], event: str, *, should_cordon: bool
) -> dict[str, object] | None:
    """The merge patch that adds the event to the reasons of a cordoned node, or removes it. None
    if nothing changes.
    """
    metadata, spec = _table(node, "metadata"), _table(node, "spec")
    reasons = str(_table(metadata, "annotations").get(ANNOTATION) or "").split()
    is_cordoned = spec.get("unschedulable") is True
    if should_cordon is (event in reasons):
        return None
    if should_cordon and is_cordoned and not reasons:
        return None
    kept = [reason for reason in reasons if reason != event]
    if should_cordon:
        kept.append(event)
    return {
        "metadata": {
            "resourceVersion": metadata.get("resourceVersion"),
            "annotations": {ANNOTATION: " ".join(kept) or None},
        },
        "spec": {"unschedulable": True if kept else None},
    }


def _table(value: dict[str, object], name: str) -> dict[str, object]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    uid: str
    grace_seconds: int
    is_terminating: bool
    should_evict: bool

    @classmethod
    def parse(cls, item: dict[str, dict[str, object]]) -> "Pod":
        """DaemonSets put their pods back on a cordoned node, mirror pods belong to the kubelet,
        and finished pods need no eviction.
        """
        try:
            metadata, spec = item["metadata"], item.get("spec") or {}
            owners = metadata.get("ownerReferences") or []
            annotations = metadata.get("annotations") or {}
            assert isinstance(owners, list)
            assert isinstance(annotations, dict)
            is_daemon = any(
                owner.get("kind") == "DaemonSet" and owner.get("controller") for owner in owners
            )
            is_finished = (item.get("status") or {}).get("phase") in FINISHED_PHASES
            grace = spec.get("terminationGracePeriodSeconds")
            return cls(
                namespace=str(metadata["namespace"]),
                name=str(metadata["name"]),
                uid=str(metadata.get("uid") or ""),
                grace_seconds=grace if isinstance(grace, int) else POD_GRACE_SECONDS,
                is_terminating="deletionTimestamp" in metadata,
                should_evict=not (is_daemon or is_finished or MIRROR_ANNOTATION in annotations),
            )
        except (LookupError, TypeError, AttributeError, AssertionError) as error:
            raise StepFailed(f"the API server lists an invalid pod: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server, with the pod's service account or the configured credentials.

    The token is read for each call: it is renewed while the agent runs.
    """

    node: str
    url: str
    token_file: str = ""
    ca_file: str = ""

    @classmethod
    def find(
        cls,
        step: KubernetesStep,
        environ: Mapping[str, str],
        account: Path = SERVICE_ACCOUNT,
    ) -> "ApiServer":
        """What the step does not configure is found where every pod finds it."""
        node = step.node or environ.get("NODE_NAME", "")
        if not node:
            raise StepFailed("unknown node: set `node`, or NODE_NAME in the environment")
        if step.server:
            return cls(node, step.server.rstrip("/"), step.token_file, step.ca_file)
        host = environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise StepFailed("unknown API server: set `server`, or run in a pod")
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        return cls(
            node,
            f"https://{f'[{host}]' if ':' in host else host}:{port}",
            step.token_file or str(account / "token"),
            step.ca_file or str(account / "ca.crt"),
        )

    def pods(self, context: StepContext) -> list[Pod]:
        selector = quote(f"spec.nodeName={self.node}", safe="")
        items = self.get(f"/api/v1/pods?fieldSelector={selector}", context).get("items")
        if not isinstance(items, list):
            raise StepFailed("the API server's list of pods has no items")
        return [Pod.parse(item) for item in items]

    def get(self, path: str, context: StepContext) -> dict[str, object]:
        status, content = self.call(context, "GET", path)
        if status != 200 or not isinstance(content, dict):
            raise StepFailed(f"GET {path}: status {status}: {content}", status=status)
        return content

    def call(
        self,
        context: StepContext,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "",
    ) -> tuple[int, object]:
        """The status, and the content: JSON for 2xx, a message for the rest. 429, 5xx and no
        response are tried again.

        A POST is an eviction, and its status is final: 429 and 5xx may concern this one pod only.
        """
        headers = self._headers(content_type)
        request = HttpRequest(method, self.url + path, headers, body, self.ca_file)
        reason = ""
        while True:  # ends with a final response, or at the limit: `pause` raises there
            try:
                response = send(request, context, bytes_max=RESPONSE_BYTES_MAX)
            except NoResponse as error:
                reason = error.reason(reason)
                waiting_for = f"the API server at {self.url} does not respond: {reason}"
                pause(context, ROUND_SECONDS, waiting_for)
                continue
            content = _parse(response.body)
            if method == "POST" or (response.status < 500 and response.status != 429):
                return response.status, content if response.status < 300 else _message(content)
            problem = f"{method} {path}: status {response.status}: {_message(content)}"
            pause(context, ROUND_SECONDS, problem)

    def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if content_type:
            headers["Content-Type"] = content_type
        if not self.token_file:
            return headers
        try:
            token = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise StepFailed(f"cannot read the token in {self.token_file}: {error}") from error
        return headers | {"Authorization": f"Bearer {token}"}


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body[:300].decode("utf-8", "replace")


def _message(content: object) -> str:
    """The message of a Status object, or the content itself."""
    message = content.get("message") if isinstance(content, dict) else None
    return str(message or content)[:300]
