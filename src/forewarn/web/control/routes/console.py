"""The console: the page at `/` and its files. Its data comes from the API."""

from functools import cache
from importlib.resources import files
from typing import Any

from litestar import Request, Response, get

from forewarn.errors import NotFound
from forewarn.web.control.dependencies import Name
from forewarn.web.control.views import Landing

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)


@get("/", tags=["Service"], is_public=True)
async def show_entry_points(request: Request[Any, Any, Any]) -> Response[Any]:
    """The console for a browser; for others the entry points: the API and its documentation."""
    if "text/html" in request.headers.get("accept", ""):
        return _respond("index.html")
    return Response(Landing())


@get("/console/{file:str}", include_in_schema=False, is_public=True)
async def console_file(file: Name) -> Response[bytes]:
    return _respond(file)


def _respond(name: str) -> Response[bytes]:
    content = read_files().get(name)
    if content is None:
        raise NotFound("the console has no such file", file=name[:80])
    media = TYPES[name.rpartition(".")[2]]
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache", "Vary": "Accept"}
    return Response(content, media_type=media, headers=headers)


@cache
def read_files() -> dict[str, bytes]:
    """The files of the page by name: no other can be requested."""
    found = (each for each in (files("forewarn.web") / "console").iterdir() if each.is_file())
    return {each.name: each.read_bytes() for each in found if each.name.rpartition(".")[2] in TYPES}
