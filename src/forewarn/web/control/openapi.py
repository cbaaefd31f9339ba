"""The control API described for machines: OpenAPI 3.1. Litestar writes down what is there; here is
added what it cannot know.

Which role a request needs, which codes an error may have, the Idempotency-Key, and an example of
everything.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from litestar import Litestar, Request, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
    SecurityScheme,
)
from litestar.routes import BaseRoute

from forewarn import __version__
from forewarn.auth.tokens import Role
from forewarn.web.control.checks import OPEN, READS, ROLE, UNKEPT
from forewarn.web.control.example import MEMBERS, example_of, example_of_error, resolved
from forewarn.web.control.idempotency import HEADER, KEY_LENGTH_MAX
from forewarn.web.control.openapi_responses import EVERY
from forewarn.web.http_status import KeyReused, WrongMediaType, status_of

PATH = "/api/openapi.json"
SECURITY = "token"
ERROR = "#/components/schemas/ErrorAnswer"
INTRODUCTION = """What an operator may ask of the service that gives VMs notice. Every error has one form, a stable code, and a
sentence for a person. Where tokens exist, or the listener is not on loopback, a request carries one."""
IDEMPOTENCY = "Of your own choice, new for each wish. Asked again with the same key, the first answer is given again, for 24 hours."

Json = dict[str, Any]


@dataclass
class BodyOptional(Operation):
    """Litestar describes every body as required; these may be left out."""

    def __post_init__(self) -> None:
        assert isinstance(self.request_body, RequestBody)
        self.request_body.required = False


@dataclass
class BodyFleet(Operation):
    """The fleet file is read by its own parser, so its place in the description is written by hand."""

    def __post_init__(self) -> None:
        said = Schema(
            type=OpenAPIType.OBJECT,
            description="A fleet file; its schema is at /api/v1/fleet/schema.",
        )
        kinds = ("application/json", "application/yaml")
        self.request_body = RequestBody(
            content={kind: OpenAPIMediaType(schema=said) for kind in kinds}, required=True
        )


class _OnePath(Router):
    """The one path of the description.

    Litestar would answer all paths below it too, and in HTML.
    """

    def register(self, value: Any) -> list[BaseRoute]:
        is_catch_all = getattr(value, "handler_name", "").endswith("handle_schema_path_not_found")
        return [] if is_catch_all else super().register(value)


class _Render(JsonRenderPlugin):
    def render(self, request: Request[Any, Any, Any], openapi_schema: Json) -> bytes:
        state = request.app.state
        if "openapi" not in state:
            state["openapi"] = self.render_json(request, described(request.app, openapi_schema))
        rendered: bytes = state["openapi"]
        return rendered


def describe() -> OpenAPIConfig:
    """What Litestar is told of the description."""
    scheme = SecurityScheme(
        type="http", scheme="bearer", description="A token made by `forewarn token create`."
    )
    return OpenAPIConfig(
        title="Forewarn control API",
        version=__version__,
        description=" ".join(INTRODUCTION.split()),
        components=Components(security_schemes={SECURITY: scheme}),
        openapi_router=_OnePath(PATH, route_handlers=[], include_in_schema=False, opt={OPEN: True}),
        render_plugins=[_Render(path="/")],
        use_handler_docstrings=True,
    )


def described(app: Litestar, plain: Json | None = None) -> Json:
    """The whole description. It is made once: an application's routes do not change."""
    if "description" not in app.state:
        app.state["description"] = _completed(plain or app.openapi_schema.to_schema(), _marks(app))
    found: Json = app.state["description"]
    return found


def _marks(app: Litestar) -> dict[tuple[str, str], Mapping[str, Any]]:
    """What the handlers were marked with, by path and verb."""
    return {
        (route.path_format, method.lower()): handler.opt
        for route in app.routes
        for handler in getattr(route, "route_handlers", ())
        if isinstance(handler, HTTPRouteHandler)
        for method in handler.http_methods
    }


def _completed(plain: Json, marks: Mapping[tuple[str, str], Mapping[str, Any]]) -> Json:
    whole = deepcopy(plain)
    schemas = whole["components"]["schemas"]
    for schema in schemas.values():
        for name in schema.get("properties", {}).keys() & MEMBERS.keys():
            schema["properties"][name].setdefault("description", MEMBERS[name])
    for path, item in whole["paths"].items():
        for verb, operation in item.items():
            _complete(operation, verb.upper(), marks.get((path, verb), {}))
            _exemplify(operation, schemas, path)
    return whole


def _exemplify(operation: Json, schemas: Json, path: str) -> None:
    """An example of each parameter, of the body and of each good answer. Errors have theirs."""
    for parameter in operation.get("parameters", ()):
        _give_example(
            parameter,
            schemas,
            parameter["name"] if parameter["in"] == "path" else f"?{parameter['name']}",
        )
    for content in operation.get("requestBody", {}).get("content", {}).values():
        _close(content["schema"], schemas)
        _give_example(content, schemas, f"{path.rpartition('/')[2]} body")
    for status, response in operation["responses"].items():
        if int(status) < 400 and "application/json" in response.get("content", {}):
            _give_example(
                response["content"]["application/json"], schemas, operation["operationId"]
            )


def _complete(operation: Json, verb: str, mark: Mapping[str, Any]) -> None:
    codes: dict[int, list[str]] = {}
    for status, response in operation["responses"].items():
        if int(status) >= 400:
            codes[int(status)] = response["description"].split(", ")
    problems = list(EVERY)
    if mark.get(OPEN):
        operation["security"] = []
    else:
        operation["x-role"] = mark.get(ROLE) or (Role.VIEWER if verb in READS else Role.OPERATOR)
        operation["security"] = [{SECURITY: []}, {}]
    if verb == "POST":
        problems.append(WrongMediaType)
        if not mark.get(UNKEPT):
            problems.append(KeyReused)
            said = {
                "type": "string",
                "minLength": 1,
                "maxLength": KEY_LENGTH_MAX,
                "pattern": "^[!-~]([ -~]*[!-~])?$",
            }
            key = {
                "name": HEADER,
                "in": "header",
                "required": False,
                "description": IDEMPOTENCY,
                "schema": said,
            }
            operation.setdefault("parameters", []).append(key)
    for problem in problems:
        codes.setdefault(status_of(problem), []).append(problem.code)
    if any(parameter["in"] == "path" for parameter in operation.get("parameters", ())):
        codes.setdefault(404, []).append("not_found")
    good = {status: one for status, one in operation["responses"].items() if int(status) < 400}
    operation["responses"] = good | {
        str(status): _error(list(dict.fromkeys(codes[status]))) for status in sorted(codes)
    }


def _error(codes: list[str]) -> Json:
    schema = {
        "allOf": [{"$ref": ERROR}, {"type": "object", "properties": {"error": {"enum": codes}}}]
    }
    examples = {code: {"value": example_of_error(code)} for code in codes}
    return {
        "description": ", ".join(codes),
        "content": {"application/json": {"schema": schema, "examples": examples}},
    }


def _close(schema: Json, schemas: Json) -> None:
    """A member that is not listed is refused, in a body and in all that it holds."""
    found = resolved(schema, schemas)
    if "properties" in found and "additionalProperties" not in found:
        found["additionalProperties"] = False
        for member in found["properties"].values():
            _close(member, schemas)
    if "items" in found:
        _close(found["items"], schemas)


def _give_example(place: Json, schemas: Json, name: str) -> None:
    if not any(key in place for key in ("example", "examples")):
        example = example_of(place.get("schema", {}), schemas, name)
        if example is not None:
            place["example"] = example
