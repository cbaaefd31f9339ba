"""Examples of what the control API accepts and returns, made from the schemas."""

from typing import Any

Json = dict[str, Any]

EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
VALUES: Json = {
    "id": EVENT_ID,
    "event_id": EVENT_ID,
    "event": EVENT_ID,
    "events": [EVENT_ID],
    "name": "web",
    "VmView.name": "web-0",
    "VmView.id": "9a3f1c52-0f0e-4c6b-9d0e-2f7b6f1c0a11",
    "Vm.name": "web-0",
    "Vm.id": "9a3f1c52-0f0e-4c6b-9d0e-2f7b6f1c0a11",
    "HostView.name": "host-a",
    "NewToken.name": "alice",
    "TokenView.name": "alice",
    "SessionView.name": "alice",
    "NewCampaign.name": "november",
    "NewCampaign.hosts": ["host-*"],
    "CampaignView.name": "november",
    "CampaignView.id": "c1",
    "CampaignView.patterns": ["host-*"],
    "CampaignView.waiting_hosts": ["host-b"],
    "Health.status": "ready",
    "HostCounts.total": 4,
    "HostCounts.waiting": 2,
    "HostCounts.skipped": 0,
    "HostCounts.failed": 0,
    "EventIdList.value": [EVENT_ID],
    "Acknowledged.value": "Successfully Approved",
    "PlanView.waves": [["host-a"], ["host-b"]],
    "SignIn.token": "fw_…",
    "WorkRequest.session": "5f2c",
    "WorkRequest.machine": "8d1e",
    "HostReport.vms": [],
    "Problem.code": "unserved",
    "Problem.message": "has received only errors since 2030-01-31T12:00:00Z: status 400, no header",
    "vm": "web-0",
    "vms": ["web-0"],
    "scope": "web",
    "scopes": ["web"],
    "host": "host-a",
    "resources": ["web-0"],
    "approvals": ["web-0"],
    "by": "alice",
    "description": "Host server is undergoing maintenance.",
    "duration_seconds": 9,
    "expires": "90d",
    "text": "fw_…",
    "address": "10.0.0.10",
    "message": "the fleet has no VM web-9",
    "facts": {"vm": "web-9"},
}
"""Values by the name of a member, or by that of its schema and member."""
SIMPLE: Json = {"string": "", "integer": 1, "number": 1, "boolean": True, "null": None}
PYTHON = {"string": str, "integer": int, "array": list, "object": dict}


def make_example(schema: Json, schemas: Json, member: str = "", parent: str = "") -> Any:
    """A value that the schema accepts, with all its members."""
    if "allOf" in schema:
        parts = [make_example(part, schemas) for part in schema["allOf"]]
        return {name: value for part in parts for name, value in part.items()}
    known = resolve(schema, schemas)
    type_ = known.get("type", "object")
    if "examples" in known or "enum" in known:
        return [*known.get("examples", ()), *known.get("enum", ())][0]
    if known.get("format") == "date-time":
        return None if _is_nullable(schema) else "2030-01-31T12:00:00Z"
    value = VALUES.get(f"{parent}.{member}", VALUES.get(member))
    is_typed = isinstance(value, PYTHON.get(type_, ())) and not known.get("properties")
    if is_typed and "$ref" not in known.get("items", {}):
        return value
    if type_ == "array":
        return [make_example(known["items"], schemas)] if known.get("items") else []
    title, members = known.get("title", ""), known.get("properties", {})
    return SIMPLE.get(
        type_, {name: make_example(each, schemas, name, title) for name, each in members.items()}
    )


def describe_type(schema: Json, schemas: Json) -> str:
    """The type of a member, for people: `EventView`, `array of string`, `date-time or null`."""
    known = resolve(schema, schemas)
    if "enum" in known:
        text = ", ".join(map(str, known["enum"]))
    elif known.get("type") == "array":
        text = f"array of {describe_type(known.get('items', {}), schemas)}"
    else:
        text = str(known.get("format") or known.get("title") or known.get("type", "object"))
    return f"{text} or null" if _is_nullable(schema) else text


def resolve(schema: Json, schemas: Json) -> Json:
    """Follow references; of a value that may be null, take the other choice."""
    for choice in schema.get("oneOf") or schema.get("anyOf") or ():
        if choice.get("type") != "null":
            return resolve(choice, schemas)
    if "$ref" in schema:
        return resolve(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    return schema


def _is_nullable(schema: Json) -> bool:
    return any(choice.get("type") == "null" for choice in schema.get("oneOf", ()))
