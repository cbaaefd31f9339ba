"""An example of everything that the control API takes and gives: one small fleet, one event, one
mistake of each kind.
"""

from typing import Any

Json = dict[str, Any]

EVENT = "4CAEA225-A741-474D-A72E-428C86FCD853"
NOTICE = "Virtual machine is going to be restarted as requested by authorized user."
FLEET = {
    "scopes": [
        {
            "name": "web",
            "kind": "availability-set",
            "vms": [{"name": "web-0", "update_domain": 0, "host": "host-a"}],
        }
    ]
}

VALUES: dict[str, Any] = {
    # by the name of a member
    "id": EVENT, "name": "web-0", "vm": "web-0", "host": "host-a", "scope": "web", "event": EVENT, "address": "10.0.0.10",
    "resources": ["web-0"], "vms": ["web-0"], "scopes": ["web"], "events": [EVENT], "vms_joined": ["web-0"], "vms_left": [],
    "added": ["web"], "changed": [], "removed": [], "approvals": [], "impacts": [], "auto_approve": [],
    "not_before": "2030-01-31T12:15:00Z", "created_at": "2030-01-31T12:00:00Z", "started_at": None, "expires_at": None,
    "seen_at": "2030-01-31T11:59:58Z", "at": "2030-01-31T12:00:00Z", "duration_seconds": -1, "description": NOTICE, "total": 1,
    "type": "Reboot", "status": "Scheduled", "source": "User", "cause": "user-restart", "next": None, "detail": "",
    "text": "fw_ci_0123…",
    "role": "operator", "expires": "30d", "dry_run": False, "terminate_notice_seconds": 300.0, "user_operations_max": 100,
    "update_domain": 0, "fault_domain": 0, "incarnation": 2, "failures": 0, "tries": 1, "is_expired": False, "by": "token ci",
    # by the name of a parameter in the query; none: left out
    "?limit": 100, "?dry_run": True, "?cursor": None,
    # by the last word of a path, for a body
    "restart body": {}, "redeploy body": {}, "evict body": {}, "delete body": {}, "degrade body": {}, "approve body": {},
    "maintain body": {"type": "Freeze", "cause": "live-migration", "duration_seconds": 5},
    "tokens body": {"name": "ci", "role": "operator", "expires": "30d"},
    "fleet body": FLEET,
    "campaigns body": {"type": "Reboot", "hosts": ["rack7-*"], "max_hosts": 2, "max_unavailable": "25%", "plan": True},
    "campaign": "c1", "patterns": ["rack7-*"], "why_paused": "", "waiting_for": "", "ended_at": None,
}  # fmt: skip

MEMBERS = {
    "not_before": "The earliest moment, RFC 3339 with a time zone. More notice than the type asks may be given, never less.",
    "duration_seconds": "How long a VM will notice it; -1 for unknown.",
    "description": "What VMs read.",
    "cause": "Why it is done.",
    "type": "What is done to the VM.",
    "status": "Scheduled until it starts, then Started; what has ended is not shown.",
    "source": "Whose wish it is: Platform or User.",
    "vm": "The name of a VM.",
    "scope": "The name of a scope: VMs that see one document.",
    "host": "The name of a host.",
    "resources": "The names of the VMs that it befalls.",
    "approvals": "Who said go ahead: names of VMs, `operator` or `policy`.",
    "impacts": "What is being done to each VM, once it is Started.",
    "created_at": "When it was made.",
    "started_at": "When it started; null until then.",
    "expires_at": "When it ends by itself; null for never.",
    "expires": "For how long, such as 90d or 12h; null for good.",
    "role": "What its holder may do.",
    "text": "The token itself. It is told this once.",
    "total": "How many there are in all.",
    "next": "The cursor of the next page; null on the last.",
    "error": "A code that never changes.",
    "message": "What was refused, the value, and what would be accepted, for a person.",
    "facts": "The same for machines.",
    "incarnation": "Grows by one with every visible change of the scope's document.",
    "is_enabled": "Whether anybody polls; if not, users' operations run at once and make no event.",
    "seen_at": "When somebody last polled, to the hour; null for never.",
    "dry_run": "Whether nothing was changed.",
}
"""What a member is, by its name, where its own schema does not say."""

MESSAGES: dict[str, tuple[str, Json]] = {
    "invalid": ("limit: Expected `int` <= 10000, got '20000'", {"field": "limit"}),
    "client_gone": ("the connection ended before the body did", {}),
    "unauthorized": ("this needs a token; expected the header `Authorization: Bearer TOKEN`", {}),
    "forbidden": ("token ci is viewer; expected operator: see the table of roles", {"role": "viewer", "needed": "operator"}),
    "not_found": ("there is nothing at /api/v1/vm; /api/openapi.json tells what there is", {}),
    "unknown_scope": ("there is no scope 'wbe'", {"scope": "wbe"}),
    "unknown_vm": ("there is no VM 'web-9'", {"vm": "web-9"}),
    "unknown_host": ("there is no host 'host-z'", {"host": "host-z"}),
    "unknown_event": (f"there is no event '{EVENT}'", {"event": EVENT}),
    "unknown_token": ("there is no token 'ci'", {"token": "ci"}),
    "unknown_campaign": ("there is no campaign 'c9'", {"campaign": "c9"}),
    "event_ended": (f"event {EVENT} is over: completed", {"event": EVENT, "how": "completed"}),
    "request_timeout": ("Request timeout. It took longer than 10 s to arrive", {}),
    "refused": ("the first token is a viewer; expected an admin: nobody could make or revoke tokens", {"role": "viewer"}),
    "already_pending": (f"web-0 has a Reboot pending already: {EVENT}", {"vm": "web-0", "event": EVENT}),
    "too_many_operations": ("100 operations of users are scheduled in web; at most 100 may be", {"scope": "web", "pending": 100}),
    "notice_too_short": ("not_before is 2030-01-31T12:05:00Z; a Reboot needs a notice of 0:15:00", {"notice_min_seconds": 900}),
    "wrong_status": (f"{EVENT} is Started; only a Scheduled event can be canceled", {"event": EVENT}),
    "scope_busy": ("web has an event Started; its VMs cannot leave now", {"scope": "web"}),
    "vm_busy": ("web-0 is under impact", {"vm": "web-0"}),
    "vm_down": ("web-0 is deallocated already; there is nothing to evict", {"vm": "web-0"}),
    "over_budget": ("rack7-1 alone takes 2 VMs of web down at once; at most 1 may be", {"host": "rack7-1"}),
    "too_many_campaigns": ("100 campaigns are going on; at most 100 may", {"campaigns_max": 100}),
    "campaign_over": ("campaign c1 is done; expected one that is running or paused", {"campaign": "c1", "state": "done"}),
    "fleet_changed": ("the fleet has changed since it was read; read it again and retry", {}),
    "body_too_large": ("the body is larger than the 65536 bytes accepted here", {"size_max": 65536}),
    "unsupported_media_type": ("Content-Type is 'text/plain'; expected application/json", {"content_type": "text/plain"}),
    "idempotency_key_reused": ("Idempotency-Key 'k1' came with another request before; expected a new key", {"key": "k1"}),
    "too_many_requests": ("too many bad tokens came from 192.0.2.1; at most 5 a second are looked at", {}),
    "head_too_large": ("Request header fields too large. At most 65536 bytes are accepted", {}),
    "problem": ("something is wrong with the service itself; its log tells more", {}),
    "impact_failed": ("the platform could not do it", {}),
    "unavailable": ("the store is not being followed yet; try again", {}),
    "conflict": ("somebody else wrote first; try again", {}),
    "store_lost": ("the store does not answer; nobody knows whether it was done", {}),
    "store_unusable": ("the store is full", {}),
}  # fmt: skip


def example_of_error(code: str) -> Json:
    message, facts = MESSAGES.get(
        code, ("what was refused, the value, and what would be accepted", {})
    )
    return {"error": code, "message": message, "facts": facts}


def example_of(schema: Json, schemas: Json, name: str) -> Any:
    """An example of what a schema describes: by its name where that is known, else by its form."""
    if name in VALUES and (name.startswith("?") or _fits(VALUES[name], schema, schemas)):
        return VALUES[name]
    schema = resolved(schema, schemas)
    if "properties" in schema:
        return {
            name: example_of(member, schemas, name) for name, member in schema["properties"].items()
        }
    if "enum" in schema:
        return schema["enum"][0]
    if "items" in schema:
        return [example_of(schema["items"], schemas, name.removesuffix("s"))]
    if schema.get("format") == "date-time":
        return VALUES["at"]
    kind = schema.get("type")
    if name.startswith("?") or isinstance(kind, list):
        return None
    return {"boolean": True, "integer": 1, "number": 1.0, "object": {}, "string": name}.get(
        str(kind)
    )


def resolved(schema: Json, schemas: Json) -> Json:
    """What stands behind a reference, and of a value that may be null what it is if it is not."""
    for choice in schema.get("oneOf") or schema.get("anyOf") or ():
        if choice.get("type") != "null":
            return resolved(choice, schemas)
    if "$ref" in schema:
        return resolved(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    return schema


def _fits(value: Any, schema: Json, schemas: Json) -> bool:
    """Roughly: the same name may be text here and a list there."""
    told = resolved(schema, schemas)
    if value is None:
        return any(
            choice.get("type") == "null"
            for choice in schema.get("oneOf") or schema.get("anyOf") or ()
        )
    if "enum" in told:
        return value in told["enum"]
    kinds = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
    }
    is_right = kinds[type(value)] == told.get("type", "object" if "properties" in told else None)
    items = resolved(told["items"], schemas) if isinstance(value, list) and "items" in told else {}
    return is_right and "properties" not in items
