"""Scopes: list and show."""

from litestar import Controller, get

from forewarn.errors import UnknownScope
from forewarn.web.control import views
from forewarn.web.control.dependencies import Call, Name, Page


class ScopeController(Controller):
    path = "/api/v1/scopes"
    tags = ("Scopes",)

    @get("/")
    async def list_scopes(self, call: Call, page: Page) -> views.ScopeList:
        """All scopes, by name."""
        return await views.scope_list(call.service.engine, page)

    @get("/{name:str}", errors=(UnknownScope,))
    async def show_scope(self, name: Name, call: Call) -> views.ScopeView:
        """A scope, its policy, its VMs and the ids of its events."""
        engine = call.service.engine
        published = await engine.look_up(lambda: engine.find_scope(name))
        return views.scope_view(engine, published.scope)
