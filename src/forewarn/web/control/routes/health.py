"""Routes about the service itself: the landing page and the health checks."""

from litestar import get

from forewarn.errors import Unavailable
from forewarn.web.control.checks import PUBLIC
from forewarn.web.control.dependencies import EngineDependency
from forewarn.web.control.openapi import COMMON_ERRORS
from forewarn.web.control.views import Health, Landing


@get("/", tags=["Service"], opt={PUBLIC: True})
async def landing() -> Landing:
    """Lists the entry points: the API, its documentation and the health checks."""
    return Landing()


@get("/healthz", tags=["Service"], opt={PUBLIC: True})
async def healthz() -> Health:
    """Responds as long as the process does."""
    return Health("ok")


@get("/readyz", tags=["Service"], responses=COMMON_ERRORS, opt={PUBLIC: True})
async def readyz(engine: EngineDependency) -> Health:
    """Responds with 200 while the store is read and followed, else with 503."""
    if not engine.can_serve:
        raise Unavailable(
            "the store is not being followed, or rejected the latest commit; try again"
        )
    return Health("ready")
