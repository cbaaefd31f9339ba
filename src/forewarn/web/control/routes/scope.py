"""Scopes: list and show."""

from litestar import Controller, get
from litestar.params import FromPath

from forewarn.errors import UnknownScope
from forewarn.web.control import views
from forewarn.web.control.dependencies import Cursor, EngineDependency, Limit
from forewarn.web.control.openapi import COMMON_ERRORS, error_responses


class ScopeController(Controller):
    path = "/api/v1/scopes"
    tags = ("Scopes",)

    @get("/", responses=COMMON_ERRORS)
    async def list_scopes(
        self, engine: EngineDependency, limit: Limit = 1000, cursor: Cursor = None
    ) -> views.ScopeList:
        """All scopes, by name."""
        return await views.scope_list(engine, limit, cursor)

    @get("/{name:str}", responses=error_responses(UnknownScope))
    async def show_scope(self, name: FromPath[str], engine: EngineDependency) -> views.ScopeView:
        """A scope, its policy, its VMs and the ids of its events."""
        published = await engine.look_up(lambda: engine.find_scope(name))
        return views.scope_view(engine, published.scope)
