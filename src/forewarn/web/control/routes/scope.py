"""Scopes: list, show, and the document that their VMs read."""

from typing import Annotated, Any

from litestar import Controller, MediaType, Response, get
from litestar.params import QueryParameter

from forewarn.errors import Invalid, UnknownScope
from forewarn.web.control import lists, views
from forewarn.web.control.dependencies import Call, Name, Names, Page, split_names
from forewarn.web.control.pagination import render_list
from forewarn.web.http.message import BLANK_LINE
from forewarn.web.metadata.fast_path import render
from forewarn.wire.versions import VERSIONS

NAMES = [version.name for version in VERSIONS]
ApiVersion = Annotated[str, QueryParameter(description=f"One of {', '.join(NAMES)}.")]


class ScopeController(Controller):
    path = "/api/v1/scopes"
    tags = ("Scopes",)

    @get("/")
    async def list_scopes(
        self, call: Call, page: Page, names: Names = None
    ) -> Response[views.ScopeList]:
        """All scopes, or those that are named, by name."""
        shown = await lists.scope_list(call.service.engine, page, split_names(names))
        return await render_list(shown, page.take_turn)

    @get("/{name:str}", errors=(UnknownScope,))
    async def show_scope(self, name: Name, call: Call) -> views.ScopeView:
        """A scope, its policy, its VMs and the ids of its events."""
        engine = call.service.engine
        published = await engine.look_up(lambda: engine.find_scope(name))
        return views.scope_view(engine, published.scope)

    @get("/{name:str}/document", errors=(UnknownScope,), media_type=MediaType.JSON)
    async def read_document(
        self, name: Name, call: Call, api_version: ApiVersion = NAMES[-1]
    ) -> Response[Any]:
        """The document that the VMs of a scope read, byte for byte. It does not count as a poll."""
        if api_version not in NAMES:
            raise Invalid(
                f"api_version: expected one of {', '.join(NAMES)}, got {api_version[:80]!r}",
                field="api_version",
            )
        engine, version = call.service.engine, VERSIONS[NAMES.index(api_version)]
        published = await engine.look_up(lambda: engine.find_scope(name))
        page = render(published, version, is_iso=call.service.is_iso)
        return Response(page.partition(BLANK_LINE)[2], media_type=MediaType.JSON)
