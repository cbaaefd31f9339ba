"""The OpenAPI 3.1 document of the control API.

Litestar generates it from the routes. Here is added what Litestar cannot know: the role that a
request needs, the codes of its errors, the Idempotency-Key, optional bodies, and examples.
"""

from typing import Any

from litestar import Litestar, Request, Router, get
from litestar.config.response_cache import CACHE_FOREVER
from litestar.enums import OpenAPIMediaType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.routes import BaseRoute, HTTPRoute
from msgspec.json import schema_components

from forewarn import __version__, errors
from forewarn.errors import Error
from forewarn.web.control.checks import reads_raw_body, required_role
from forewarn.web.control.examples import make_example, resolve
from forewarn.web.control.idempotency import HEADER, KEY_LENGTH_MAX
from forewarn.web.control.views import ErrorView
from forewarn.web.http_status import (
    BodyTooLarge,
    HeadTooLarge,
    KeyReused,
    TooManyRequests,
    TooSlow,
    WrongMediaType,
    status_of,
)

PATH = "/api/openapi.json"
INTRODUCTION = (
    "The API for operators. Every error has the same form: a stable code and a message for people."
    " Once tokens exist, or if the listener is not on loopback, a request must carry a token."
)
FLEET_BODY = {
    "type": "object",
    "description": "JSON or YAML; a schema is at the same path with /schema.",
    "examples": [{"scopes": [{"name": "web", "vms": [{"name": "web-0", "host": "host-a"}]}]}],
}
IDEMPOTENCY_KEY = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "Any text, new for each operation."
    " A retry with the same key gets the first response again, for 24 hours.",
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": KEY_LENGTH_MAX,
        "pattern": "^[!-~]([ -~]*[!-~])?$",
    },
}
FIELDS = {
    "not_before": "The earliest start.",
    "duration_seconds": "The expected length of the impact; -1 if unknown.",
    "description": "Text that VMs read.",
    "cause": "Why it is done.",
    "type": "What is done to the VM.",
    "status": "Scheduled, then Started; events that ended are not listed.",
    "source": "Who initiated it: Platform or User.",
    "vm": "The name of a VM.",
    "scope": "The name of a scope: VMs that read the same document.",
    "host": "The name of a host.",
    "resources": "The names of the affected VMs.",
    "approvals": "Who approved: names of VMs, `operator` or `policy`.",
    "is_approved": "Whether the approvals suffice: it starts as soon as its turn comes.",
    "update_domain": "VMs of different update domains are not affected at the same time.",
    "impacts": "The state of the impact on each VM, once Started.",
    "waits_for": "What has to happen before it starts or goes on; empty if it does, or is over.",
    "problems": "What is wrong with it.",
    "warnings": "VMs that may run on a host, and that are not notified.",
    "other_vms": "VMs that run there, and that the fleet does not have there.",
    "started_at": "Null until it has started.",
    "unreadable_since": "Its VMs have not been able to read it since then, so it does not start by"
    " time. Null if they can.",
    "unreadable_seconds": "How long its VMs could not read it, without the time since then.",
    "expires_at": "When the token expires; null for never.",
    "role": "What the holder of the token may do.",
    "text": "The token itself. It is shown only once.",
    "total": "How many items exist.",
    "next": "The cursor of the next page; null on the last.",
    "error": "A code that never changes.",
    "message": "For people: what was rejected, the value, and what would be accepted.",
    "facts": "The message's values, for machines.",
    "incarnation": "Incremented with every visible change of the scope's document.",
    "is_enabled": "Whether any VM polls; if not, user operations run now, without an event.",
    "seen_at": "When a VM last polled, to the hour; null for never.",
    "dry_run": "Whether this was a dry run: nothing was changed.",
}
"""What a field means, by name, for schemas that do not describe it themselves."""

Json = dict[str, Any]


EVERYWHERE: tuple[type[Error], ...] = (
    errors.Invalid,
    errors.Unauthorized,
    errors.Forbidden,
    TooSlow,
    TooManyRequests,
    HeadTooLarge,
    errors.Error,
    errors.Unavailable,
    errors.StoreLost,
    errors.StoreUnusable,
)


class _NoRoutes(Router):
    """Litestar would also respond to all paths below the document's, in HTML."""

    def register(self, value: Any) -> list[BaseRoute]:
        return []


@get(
    PATH,
    include_in_schema=False,
    is_public=True,
    cache=CACHE_FOREVER,
    media_type=OpenAPIMediaType.OPENAPI_JSON,
)
async def openapi_json(request: Request[Any, Any, Any]) -> Json:
    """Rendered once, because any client may request it, without a token."""
    return openapi_document(request.app)


def make_openapi_config() -> OpenAPIConfig:
    token = SecurityScheme(
        type="http", scheme="bearer", description="Created by `forewarn token create`."
    )
    return OpenAPIConfig(
        title="Forewarn control API",
        version=__version__,
        description=INTRODUCTION,
        components=Components(security_schemes={"token": token}),
        openapi_router=_NoRoutes(PATH, route_handlers=[]),
        use_handler_docstrings=True,
        operation_id_creator=lambda handler, *_: handler.handler_name,
    )


def openapi_document(app: Litestar) -> Json:
    document = app.openapi_schema.to_schema()
    schemas = document["components"]["schemas"]
    schemas |= schema_components([ErrorView], ref_template="#/components/schemas/{name}")[1]
    for schema in schemas.values():
        for name in schema.get("properties", {}).keys() & FIELDS.keys():
            schema["properties"][name].setdefault("description", FIELDS[name])
    for route in app.routes:
        assert isinstance(route, HTTPRoute)
        for handler in route.route_handlers:
            for method in handler.http_methods if handler.resolve_include_in_schema() else ():
                operation = document["paths"][route.path_format][method.lower()]
                _complete(operation, handler, method, schemas)
    return document


def _complete(operation: Json, handler: HTTPRouteHandler, method: str, schemas: Json) -> None:
    kinds = [*handler.opt.get("errors", ()), *EVERYWHERE]
    parameters = operation.setdefault("parameters", [])
    # Litestar lists path parameters that the handler does not read in any order
    parameters.sort(key=lambda one: (one["in"] != "path", one["in"] == "path" and one["name"]))
    operation["security"] = []
    if not handler.opt.get("is_public"):
        operation["x-role"] = required_role(handler, method)
        operation["security"] = [{"token": []}, {}]
    if reads_raw_body(handler):
        types = ("application/json", "application/yaml")
        content = {kind: {"schema": FLEET_BODY} for kind in types}
        operation["requestBody"] = {"content": content, "required": True}
    elif "requestBody" in operation:
        (media,) = operation["requestBody"]["content"].values()
        schema = resolve(media["schema"], schemas)
        schema["additionalProperties"] = False
        operation["requestBody"]["required"] = bool(schema["required"])
    if method in ("POST", "PUT"):
        kinds.append(BodyTooLarge)
    if method == "POST":
        kinds.append(WrongMediaType)
        if not handler.opt.get("ignores_key"):
            kinds.append(KeyReused)
            parameters.append(IDEMPOTENCY_KEY)
    if any(parameter["in"] == "path" for parameter in parameters):
        kinds.append(errors.NotFound)
    codes: dict[int, list[str]] = {}
    for kind in dict.fromkeys(kinds):
        codes.setdefault(status_of(kind), []).append(kind.code)
    operation["responses"] = {
        status: response
        for status, response in operation["responses"].items()
        if int(status) < 400  # Litestar describes its own form of a 400
    } | {str(status): _error_response(codes[status], handler) for status in sorted(codes)}
    bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
    for media in (media for body in bodies for media in body.get("content", {}).values()):
        media["example"] = make_example(media["schema"], schemas)


def _error_response(codes: list[str], handler: HTTPRouteHandler) -> Json:
    enum = {"type": "object", "properties": {"error": {"enum": codes}}}
    schema: Json = {"allOf": [{"$ref": "#/components/schemas/ErrorView"}, enum]}
    if handler.opt.get("is_azure"):
        members = {"code": {"enum": codes}, "message": {"type": "string"}}
        error = {"type": "object", "required": [*members], "properties": members}
        schema = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return {"description": ", ".join(codes), "content": {"application/json": {"schema": schema}}}
