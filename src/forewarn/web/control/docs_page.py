"""The reference page /api/docs: the OpenAPI document as HTML, without any other resource."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from litestar import MediaType, Request, Response, get
from litestar.config.response_cache import CACHE_FOREVER

from forewarn.web.control.examples import Json, describe_type, make_example, resolve
from forewarn.web.control.openapi import openapi_document

STYLE = """
:root { color-scheme: light dark; }
body { margin: auto; padding: 1rem; max-width: 62rem; font: 16px/1.5 system-ui, sans-serif; }
li, h3, td, pre { overflow-wrap: anywhere; }
section { border: 1px solid #8884; border-radius: 6px; padding: 0 1rem; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0; }
caption, td { text-align: left; vertical-align: top; padding: 0.2rem; border-top: 1px solid #8884; }
pre { background: #8881; padding: 0.75rem; white-space: pre-wrap; }
"""
STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{STYLE_HASH}';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@get("/api/docs", include_in_schema=False, is_public=True, cache=CACHE_FOREVER)
async def docs(request: Request[Any, Any, Any]) -> Response[str]:
    """Rendered once, because any client may request it, without a token."""
    headers = {"Content-Security-Policy": POLICY}
    page = render(openapi_document(request.app))
    return Response(page, media_type=MediaType.HTML, headers=headers)


def render(document: Json) -> str:
    info, schemas = document["info"], document["components"]["schemas"]
    operations = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    operations.sort(key=lambda row: row[:3])
    index = "".join(
        f'<li><a href="#{escape(operation["operationId"])}">{method} {escape(path)}</a></li>\n'
        for _, method, path, operation in operations
    )
    groups = "".join(
        f"<h2>{escape(tag)}</h2>\n" + "".join(_operation(*row[1:], schemas) for row in rows)
        for tag, rows in groupby(operations, key=lambda row: row[0])
    )
    types = "".join(
        _table(escape(name), _fields(schema, schemas)) for name, schema in sorted(schemas.items())
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])}</title>
<style>{STYLE}</style>
</head><body><main>
<h1>{escape(info["title"])} {escape(info["version"])}</h1>
<p>{_prose(info["description"])}</p>
<p>For programs: <a href="/api/openapi.json">/api/openapi.json</a>.</p>
<nav aria-label="Operations"><ul>
{index}</ul></nav>
{groups}<h2>Types</h2>
{types}</main>
</body></html>
"""


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    role = f" <small>{escape(operation['x-role'])}</small>" if "x-role" in operation else ""
    bodies = operation.get("requestBody", {}).get("content", {})
    body = next((resolve(media["schema"], schemas) for media in bodies.values()), None)
    parameters = [
        (parameter["name"], parameter["in"], parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]
    errors, results = [], ""
    for status, response in operation["responses"].items():
        if int(status) >= 400:
            errors.append((status, response["description"]))
            continue
        for media in response.get("content", {}).values():
            schema = resolve(media.get("schema", {}), schemas)
            results += _table(f"Response {status}", _fields(schema, schemas))
            results += _example(media.get("example"))
    return f"""<section id="{escape(operation["operationId"])}">
<h3>{method} {escape(path)}{role}</h3>
<p>{_prose(operation.get("description", ""))}</p>
<pre>{escape(_curl(method, path, body, schemas))}</pre>
{_table("Parameters", parameters)}{_table("Body", _fields(body or {}, schemas))}{results}
{_table("Errors", errors)}</section>
"""


def _curl(method: str, path: str, body: Json | None, schemas: Json) -> str:
    url = re.sub(r"{(\w+)}", lambda name: name[1].upper(), path)
    line = f"curl -X {method} -H 'Authorization: Bearer TOKEN' http://127.0.0.1:8081{url}"
    if body is None or body.get("required") == []:
        return line
    if "required" in body:
        body = {**body, "properties": {name: body["properties"][name] for name in body["required"]}}
    example = make_example(body, schemas)
    return f"{line} \\\n  -H 'Content-Type: application/json' -d '{json.dumps(example)}'"


def _example(value: Any) -> str:
    if value in (None, "", {}):
        return ""
    text = escape(json.dumps(value, indent=2, ensure_ascii=False))
    return f"<details><summary>Example</summary><pre>{text}</pre></details>\n"


def _fields(schema: Json, schemas: Json) -> Iterable[tuple[str, str, str]]:
    for name, field in schema.get("properties", {}).items():
        yield name, describe_type(field, schemas), field.get("description", "")


def _table(caption: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A table whose first column is code; nothing if there are no rows."""
    lines = ""
    for name, *cells in rows:
        lines += f"<tr><td><code>{escape(name)}</code></td>"
        lines += "".join(f"<td>{_prose(cell)}</td>" for cell in cells) + "</tr>\n"
    return f"<table><caption>{caption}</caption>\n{lines}</table>\n" if lines else ""


def _prose(text: str) -> str:
    """Escaped text, with code between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(" ".join(text.split())))
