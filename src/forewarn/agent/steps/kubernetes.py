"""`kubernetes`: cordons the node and evicts its pods as far as their disruption budgets allow; in
recover, uncordons it.

An annotation of the node names the events that it is cordoned for. A node that was cordoned by
anything else has no annotation, and stays cordoned.
"""

import json
import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from forewarn.agent.config_reader import number
from forewarn.agent.steps.base import Step, StepContext, StepFailed, WorkflowPhase, pause
from forewarn.agent.steps.http import convert_url, send

ANNOTATION = "forewarn/cordoned-for"
ROUND_SECONDS = 1.0
GRACE_SECONDS_MAX = 24 * 3600.0
PODS_SHOWN_MAX = 5
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RESPONSE_BYTES_MAX = 64 * 1024 * 1024
MESSAGE_LENGTH_MAX = 300
POD_GRACE_SECONDS = 30  # the default of Kubernetes
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
TARGET = ("node", "server")
CONTENT_TYPES = {"POST": "application/json", "PATCH": "application/merge-patch+json"}
FINISHED_PHASES = ("Succeeded", "Failed")

Json = dict[str, Any]


def _convert_server(value: object, path: str) -> str:
    """With or without a slash at its end, it is the same server."""
    return convert_url(value, path).rstrip("/")


@dataclass(frozen=True, slots=True)
class KubernetesStep:
    """What is not configured is found where every pod finds it, and with it the API server.

    The token is read for each call: it is renewed while the agent runs.
    """

    node: str = ""
    server: Annotated[str, _convert_server] = ""
    token_file: str = ""
    ca_file: str = ""
    evict: bool = True
    grace_seconds: Annotated[float, number(0, GRACE_SECONDS_MAX)] = GRACE_SECONDS_MAX

    def describe(self) -> str:
        evict = " and evict its pods" if self.evict else ""
        return f"cordon {self.node or 'our node'}{evict}, or in recover uncordon it"

    def target(self) -> str:
        """Without credentials: those for uncordoning may be others."""
        given = [f'{key} = "{getattr(self, key)}"' for key in TARGET if getattr(self, key)]
        return f"kubernetes = {{{', '.join(given)}}}"

    def is_for_another(self, step: Step) -> bool:
        pairs = [(getattr(self, key), getattr(step, key, "")) for key in TARGET]
        return any(own and other and own != other for own, other in pairs)

    def run(self, context: StepContext) -> None:
        """Pods without a controller are evicted too: this node is about to go away."""
        located = self.located(os.environ)
        is_recover = context.phase is WorkflowPhase.RECOVER
        located._set_cordoned(context, should_cordon=not is_recover)
        if self.evict and not is_recover:
            located._evict_all(context)

    def located(
        self, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
    ) -> "KubernetesStep":
        """The same step with its node, server and credentials."""
        node = self.node or environ.get("NODE_NAME", "")
        if not node:
            raise StepFailed("unknown node: set `node`, or NODE_NAME in the environment")
        if self.server:
            return replace(self, node=node, server=self.server)
        host = environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise StepFailed("unknown API server: set `server`, or run in a pod")
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        return replace(
            self,
            node=node,
            server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            token_file=self.token_file or str(account / "token"),
            ca_file=self.ca_file or str(account / "ca.crt"),
        )

    def _set_cordoned(self, context: StepContext, *, should_cordon: bool) -> None:
        """One patch against the version that was read: other events may change the node too."""
        path = f"/api/v1/nodes/{quote(self.node, safe='')}"
        event = context.event.key
        while True:  # ends when the patch is accepted, or at the limit: `pause` raises there
            patch = cordon_patch(self.get(path, context), event, should_cordon=should_cordon)
            if patch is None:
                return
            status, reason = self.call(context, "PATCH", path, patch)
            if status == 200:
                return
            if status != 409:
                raise StepFailed(f"cannot change the node: {reason}", status=status)
            pause(context, ROUND_SECONDS, "the node changes faster than it can be cordoned")

    def _evict_all(self, context: StepContext) -> None:
        """In rounds: each lists the pods that are left, and asks again for those held back."""
        reason = ""
        try:
            while pods := self._list_pods(context):  # ends at the limit: `pause` raises there
                left = [f"{pod.namespace}/{pod.name} ({self._evict(pod, context)})" for pod in pods]
                more = len(left) - PODS_SHOWN_MAX
                suffix = f" and {more} more" if more > 0 else ""
                reason = f"still on the node: {', '.join(left[:PODS_SHOWN_MAX])}{suffix}"
                pause(context, ROUND_SECONDS, reason)
        except StepFailed as failure:
            # A round cut short by the end of the step explains less than the one before it.
            if reason and context.seconds_left <= 0:
                raise StepFailed(f"timed out: {reason}") from failure
            raise

    def _evict(self, pod: "Pod", context: StepContext) -> str:
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
        status, reason = self.call(context, "POST", path, eviction)
        if status < 300 or status in (404, 409):
            # 404, 409: gone, or another pod of that name. The next round shows it.
            return "evicted"
        if status == 429 or status >= 500:
            # 500: as for a pod with two budgets. It may never pass, and must not block the others.
            return f"held back: {reason}"
        raise StepFailed(f"cannot evict {pod.namespace}/{pod.name}: {reason}", status=status)

    def _list_pods(self, context: StepContext) -> "list[Pod]":
        """Those of the node that must leave it."""
        selector = quote(f"spec.nodeName={self.node}", safe="")
        found = self.get(f"/api/v1/pods?fieldSelector={selector}", context)
        try:
            return [pod for pod in map(Pod.parse, found["items"]) if pod is not None]
        except (LookupError, TypeError, AttributeError) as error:
            raise StepFailed(f"the API server's list of pods is invalid: {error!r}") from error

    def get(self, path: str, context: StepContext) -> Json:
        status, content = self.call(context, "GET", path)
        if status != 200 or not isinstance(content, dict):
            raise StepFailed(f"GET {path}: {str(content)[:MESSAGE_LENGTH_MAX]}", status=status)
        return content

    def call(
        self, context: StepContext, method: str, path: str, body: Json | None = None
    ) -> tuple[int, Any]:
        """The status, and the content: JSON for 2xx, a reason in words for the rest. 429, 5xx and
        no response are tried again.

        A POST is an eviction, and its status is final: 429 and 5xx may concern this one pod only.
        """
        headers = {"Accept": "application/json", **self._authorization()}
        if method in CONTENT_TYPES:
            headers["Content-Type"] = CONTENT_TYPES[method]
        content = None if body is None else json.dumps(body).encode()
        url = self.server + path
        status, received = send(
            urllib.request.Request(url, content, headers, method=method),  # noqa: S310 - checked by `convert_url`
            context,
            is_final=lambda status: method == "POST" or (status < 500 and status != 429),
            bytes_max=RESPONSE_BYTES_MAX,
            ca_file=self.ca_file,
        )
        try:
            found = json.loads(received)
        except (ValueError, RecursionError):
            found = received.decode("utf-8", "replace")
        if status < 300:
            return status, found
        # A Status object has a message.
        message = found.get("message") if isinstance(found, dict) else None
        return status, f"status {status}: {str(message or found)[:MESSAGE_LENGTH_MAX]}"

    def _authorization(self) -> dict[str, str]:
        if not self.token_file:
            return {}
        try:
            token = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise StepFailed(f"cannot read the token in {self.token_file}: {error}") from error
        return {"Authorization": f"Bearer {token}"}


def cordon_patch(node: Json, event: str, *, should_cordon: bool) -> Json | None:
    """The merge patch that adds the event to the reasons of a cordoned node, or removes it. None
    if nothing changes.
    """
    metadata, spec = node.get("metadata") or {}, node.get("spec") or {}
    reasons = str((metadata.get("annotations") or {}).get(ANNOTATION) or "").split()
    if should_cordon is (event in reasons):
        return None
    if should_cordon and spec.get("unschedulable") is True and not reasons:
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


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    uid: str
    grace_seconds: int
    is_terminating: bool

    @classmethod
    def parse(cls, item: Json) -> "Pod | None":
        """None for a pod that is not evicted: DaemonSets put their pods back on a cordoned node,
        mirror pods belong to the kubelet, and finished pods need no eviction.
        """
        metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
        is_daemon = any(
            owner.get("kind") == "DaemonSet" and owner.get("controller")
            for owner in metadata.get("ownerReferences") or []
        )
        is_mirror = MIRROR_ANNOTATION in (metadata.get("annotations") or {})
        if is_daemon or is_mirror or status.get("phase") in FINISHED_PHASES:
            return None
        grace = spec.get("terminationGracePeriodSeconds")
        return cls(
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            uid=str(metadata.get("uid") or ""),
            grace_seconds=grace if isinstance(grace, int) else POD_GRACE_SECONDS,
            is_terminating="deletionTimestamp" in metadata,
        )
