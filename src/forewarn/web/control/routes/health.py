"""Routes about the service itself: the landing page and the health checks."""

from litestar import get

from forewarn.errors import Unavailable
from forewarn.web.control.dependencies import Call
from forewarn.web.control.views import Health, Landing


@get("/", tags=["Service"], is_public=True)
async def landing() -> Landing:
    """Lists the entry points: the API, its documentation and the health checks."""
    return Landing()


@get("/healthz", tags=["Service"], is_public=True)
async def healthz() -> Health:
    """Responds as long as the process does."""
    return Health("ok")


@get("/readyz", tags=["Service"], is_public=True)
async def readyz(call: Call) -> Health:
    """Responds with 200 while the store is read and followed, else with 503."""
    if not call.service.engine.can_serve:
        raise Unavailable(
            "the store is not being followed, or rejected the latest commit; try again"
        )
    return Health("ready")
