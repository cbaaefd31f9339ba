"""`kubernetes`: cordons our node and evicts its pods as their disruption budgets allow; uncordons
it when the event is over.

The node's annotation names the events that it is cordoned for. A node that somebody else cordoned
has none, and stays cordoned.
"""

import json
from dataclasses import dataclass
from urllib.parse import quote

from forewarn.agent.step import Occasion, Phase, StepFailed
from forewarn.agent.steps.cluster import Cluster, Pod
from forewarn.agent.steps.spec import Spec
from forewarn.agent.steps.wait import pause
from forewarn.agent.steps.web import check_url

MEMBERS = ("node", "server", "token_file", "ca_file", "evict", "grace_seconds")
ANNOTATION = "forewarn/cordoned-for"
ROUND_SECONDS = 1.0
GRACE_SECONDS_MAX = 24 * 3600.0
SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Kubernetes:
    cluster: Cluster
    is_evicting: bool = True
    grace_seconds: float = GRACE_SECONDS_MAX

    def describe(self) -> str:
        evict = " and evict its pods" if self.is_evicting else ""
        return f"cordon {self.cluster.node or 'our node'}{evict}, or in recover uncordon it"

    def run(self, occasion: Occasion) -> None:
        """Pods that a controller will not make again elsewhere are evicted too: this node is about
        to go.
        """
        if occasion.phase is Phase.RECOVER:
            self._mark(occasion, is_ours=False)
            return
        self._mark(occasion, is_ours=True)
        if self.is_evicting:
            self._evict_all(occasion)

    def _mark(self, occasion: Occasion, *, is_ours: bool) -> None:
        """Cordon or uncordon in one patch, against the version that was read: other events are
        handled at the same time.
        """
        node = f"/api/v1/nodes/{quote(self.cluster.node_name(), safe='')}"
        while True:  # ends when the patch holds, or at the limit: `pause` raises there
            patch = cordon_patch(
                self.cluster.get(node, occasion), occasion.event.key, is_ours=is_ours
            )
            if patch is None:
                return
            body = json.dumps(patch).encode()
            status, said = self.cluster.ask(
                occasion, "PATCH", node, body, "application/merge-patch+json"
            )
            if status == 200:
                return
            if status != 409:
                raise StepFailed(
                    f"the node cannot be changed: status {status}: {said}", status=status
                )
            pause(occasion, ROUND_SECONDS, "the node changes faster than it can be cordoned")

    def _evict_all(self, occasion: Occasion) -> None:
        """In rounds: each looks at what is still there, and asks again for those that were held
        back.
        """
        while True:  # ends when no pod is left, or at the limit: `pause` raises there
            pods = [pod for pod in self.cluster.pods(occasion) if pod.is_to_leave]
            if not pods:
                return
            held = [f"{pod.namespace}/{pod.name} ({self._evict(pod, occasion)})" for pod in pods]
            more = f" and {len(held) - SHOWN_MAX} more" if len(held) > SHOWN_MAX else ""
            pause(
                occasion, ROUND_SECONDS, f"still on the node: {', '.join(held[:SHOWN_MAX])}{more}"
            )

    def _evict(self, pod: Pod, occasion: Occasion) -> str:
        """What to say of a pod that is still there.

        It is never given more time to end than it asks for, or than we have.
        """
        if pod.is_leaving:
            return "ending"
        left = occasion.seconds_left - 2 * ROUND_SECONDS  # so that its end is still seen
        grace = max(1, int(min(pod.grace_seconds, self.grace_seconds, left)))
        options = {"gracePeriodSeconds": grace, "preconditions": {"uid": pod.uid}}
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": options,
        }
        path = f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/pods/{quote(pod.name, safe='')}/eviction"
        status, said = self.cluster.ask(
            occasion, "POST", path, json.dumps(eviction).encode(), "application/json"
        )
        if status in (
            200,
            201,
            202,
            404,
            409,
        ):  # gone, or another pod under the same name: the next round sees
            return "asked to end"
        if status == 429:
            return f"held back: {said}"
        if (
            status >= 500
            # as for a pod with two budgets: it may never pass, and must not cost the others their turn
        ):
            return f"held back: status {status}: {said}"
        raise StepFailed(
            f"{pod.namespace}/{pod.name} cannot be evicted: status {status}: {said}", status=status
        )


def cordon_patch(node: dict[str, object], event: str, *, is_ours: bool) -> dict[str, object] | None:
    """The merge patch that adds our event to the reasons of a cordoned node, or takes it away;

    None if nothing is to change.
    """
    metadata, spec = _table(node, "metadata"), _table(node, "spec")
    reasons = str(_table(metadata, "annotations").get(ANNOTATION) or "").split()
    is_cordoned = spec.get("unschedulable") is True
    if is_ours is (event in reasons) or (is_ours and is_cordoned and not reasons):
        return None
    left = [*reasons, event] if is_ours else [reason for reason in reasons if reason != event]
    return {
        "metadata": {
            "resourceVersion": metadata.get("resourceVersion"),
            "annotations": {ANNOTATION: " ".join(left) or None},
        },
        "spec": {"unschedulable": True if left else None},
    }


def _table(value: dict[str, object], name: str) -> dict[str, object]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def make(value: object, where: str) -> Kubernetes:
    spec = Spec(value, where, members=MEMBERS)
    server = spec.text("server", "")
    return Kubernetes(
        Cluster(
            node=spec.text("node", ""),
            server=check_url(spec, "server", server).rstrip("/") if server else "",
            token_file=spec.text("token_file", ""),
            ca_file=spec.text("ca_file", ""),
        ),
        is_evicting=spec.is_set("evict", default=True),
        grace_seconds=spec.seconds("grace_seconds", GRACE_SECONDS_MAX, most=GRACE_SECONDS_MAX),
    )
