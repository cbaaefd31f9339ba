"""The control API described for people: one page, made from the OpenAPI, that asks nobody else for
anything.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from litestar import MediaType, Request, Response, get

from forewarn.web.control.checks import OPEN
from forewarn.web.control.example import example_of_error, resolved
from forewarn.web.control.openapi import ERROR, described

Json = dict[str, Any]

_FOLDER = Path(__file__).with_name("docs")
STYLE = (_FOLDER / "style.css").read_text()
SCRIPT = (_FOLDER / "search.js").read_text()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)};"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is fetched, and nothing runs but what is written here."""


@get("/api/docs", include_in_schema=False, opt={OPEN: True})
async def docs(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The page. It is made once: anybody may ask for it, without a token."""
    state = request.app.state
    if "docs" not in state:
        state["docs"] = page(described(request.app)).encode()
    return Response(
        state["docs"], media_type=MediaType.HTML, headers={"Content-Security-Policy": POLICY}
    )


def page(description: Json) -> str:
    operations = [
        (operation["tags"][0], verb.upper(), path, operation)
        for path, item in description["paths"].items()
        for verb, operation in item.items()
    ]
    tags = list(dict.fromkeys(tag for tag, *_ in operations))
    operations.sort(key=lambda one: (tags.index(one[0]), one[2], one[1]))
    groups = [(tag, list(group)) for tag, group in groupby(operations, key=lambda one: one[0])]
    schemas = description["components"]["schemas"]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(description["info"]["title"])}</title>
<style>{STYLE}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<nav aria-label="Operations">
<label for="search">Search</label>
<input id="search" type="search" placeholder="restart, 409, token …" autocomplete="off">
<p id="found" role="status"></p>
{"".join(_index(tag, group) for tag, group in groups)}
<p><a href="#errors">Errors</a></p>
</nav>
<main id="content">
<h1>{escape(description["info"]["title"])} {escape(description["info"]["version"])}</h1>
<p>{_words(description["info"]["description"])}</p>
<p>For machines: <a href="/api/openapi.json">/api/openapi.json</a> (OpenAPI {escape(description["openapi"])}).</p>
{"".join(_group(tag, group, schemas) for tag, group in groups)}
{_errors(description)}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _index(tag: str, group: list[tuple[str, str, str, Json]]) -> str:
    lines = "".join(
        f'<li data-words="{_found_by(verb, path, operation)}"><a href="#{_anchor(operation)}">'
        f'<span class="verb">{verb}</span> {escape(path)}</a></li>\n'
        for _, verb, path, operation in group
    )
    return f"<h2>{escape(tag)}</h2>\n<ul>\n{lines}</ul>\n"


def _group(tag: str, group: list[tuple[str, str, str, Json]], schemas: Json) -> str:
    return f"<h2>{escape(tag)}</h2>\n" + "".join(
        _operation(verb, path, one, schemas) for _, verb, path, one in group
    )


def _operation(verb: str, path: str, operation: Json, schemas: Json) -> str:
    role = (
        f'<span class="role">{escape(operation["x-role"])}</span>' if "x-role" in operation else ""
    )
    parts = [
        f"<h3><a href='#{_anchor(operation)}'><span class='verb'>{verb}</span> {escape(path)}</a>{role}</h3>",
        f"<p>{_words(operation.get('description', ''))}</p>",
        _table("Parameters", ("name", "in", "what it is"), _parameters(operation)),
        *(_content("Body", kind, content, schemas) for kind, content in _bodies(operation)),
        _answers(operation, schemas),
    ]
    words = _found_by(verb, path, operation)
    return f'<section class="operation" id="{_anchor(operation)}" data-words="{words}">\n{"".join(parts)}</section>\n'


def _parameters(operation: Json) -> Iterator[tuple[str, ...]]:
    for one in operation.get("parameters", ()):
        need = "" if one.get("required") else " Optional."
        limits = [
            f"{word} {one['schema'][key]}"
            for key, word in LIMITS.items()
            if key in one.get("schema", {})
        ]
        told = f"{one.get('description', '')}{need} {', '.join(limits)}".strip()
        yield f"<code>{escape(one['name'])}</code>", escape(one["in"]), _words(told)


LIMITS = {
    "minimum": "At least",
    "maximum": "at most",
    "maxLength": "length at most",
    "default": "default",
}


def _bodies(operation: Json) -> list[tuple[str, Json]]:
    return list(operation.get("requestBody", {}).get("content", {}).items())[:1]


def _content(title: str, kind: str, content: Json, schemas: Json) -> str:
    schema = resolved(content.get("schema", {}), schemas)
    members = _table(
        f"{title}: {kind}", ("member", "type", "what it is"), _members(schema, schemas)
    )
    text = schema.get("description", "")
    about = f"<p>{_words(text)}</p>" if text else ""
    example = (
        f"<pre>{escape(json.dumps(content['example'], indent=1, ensure_ascii=False))}</pre>"
        if "example" in content
        else ""
    )
    return f"<details><summary>{escape(title)}: {escape(kind)}</summary>{about}{members}{example}</details>\n"


def _members(schema: Json, schemas: Json) -> Iterator[tuple[str, ...]]:
    for name, member in schema.get("properties", {}).items():
        told = resolved(member, schemas)
        kind = (
            ", ".join(map(str, told["enum"]))
            if "enum" in told
            else str(told.get("format") or told.get("type", "object"))
        )
        need = (
            "Needed."
            if name in schema.get("required", ()) and not schema.get("additionalProperties", True)
            else ""
        )
        yield (
            f"<code>{escape(name)}</code>",
            escape(kind),
            _words(" ".join(filter(None, (member.get("description", ""), need)))),
        )


def _answers(operation: Json, schemas: Json) -> str:
    good = [(status, one) for status, one in operation["responses"].items() if int(status) < 400]
    bad = [(status, one) for status, one in operation["responses"].items() if int(status) >= 400]
    told = "".join(
        _content(f"Answer {status}", kind, content, schemas)
        for status, one in good
        for kind, content in one.get("content", {}).items()
    )
    rows = [
        (escape(status), " ".join(_code(code) for code in one["description"].split(", ")))
        for status, one in bad
    ]
    return f"{told}<details><summary>Errors</summary>{_table('Errors', ('status', 'code'), iter(rows))}</details>\n"


def _errors(description: Json) -> str:
    """Every code there is, with its status and an example."""
    found: dict[str, str] = {}
    for item in description["paths"].values():
        for operation in item.values():
            for status, one in operation["responses"].items():
                if int(status) >= 400:
                    found |= dict.fromkeys(one["description"].split(", "), status)
    rows = [
        (
            f'<code id="error-{escape(code)}">{escape(code)}</code>',
            escape(status),
            escape(example_of_error(code)["message"]),
        )
        for code, status in sorted(found.items(), key=lambda pair: (pair[1], pair[0]))
    ]
    about = _words(
        description["components"]["schemas"][ERROR.rpartition("/")[2]].get("description", "")
    )
    return f'<h2 id="errors">Errors</h2>\n<p>{about}</p>\n{_table("All codes", ("code", "status", "for example"), iter(rows))}'


def _code(code: str) -> str:
    return f'<a class="error" href="#error-{escape(code)}"><code>{escape(code)}</code></a>'


def _table(caption: str, titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A table of cells that are HTML already; nothing where there are no rows."""
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table>\n"
        if lines
        else ""
    )


def _anchor(operation: Json) -> str:
    return escape(operation["operationId"])


def _found_by(verb: str, path: str, operation: Json) -> str:
    """What the search looks through: verb, path, words, role, statuses and codes."""
    codes = " ".join(
        f"{status} {one['description']}"
        for status, one in operation["responses"].items()
        if int(status) >= 400
    )
    words = (
        f"{verb} {path} {operation.get('description', '')} {operation.get('x-role', '')} {codes}"
    )
    return escape(" ".join(words.lower().split()), quote=True)


def _words(text: str) -> str:
    """Plain words; what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(" ".join(text.split())))
