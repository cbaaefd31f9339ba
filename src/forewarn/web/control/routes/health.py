"""The health checks."""

from litestar import get

from forewarn.errors import Unavailable
from forewarn.web.control.dependencies import Call
from forewarn.web.control.views import Health


@get("/healthz", tags=["Service"], is_public=True)
async def check_health() -> Health:
    """Responds as long as the process does."""
    return Health("ok")


@get("/readyz", tags=["Service"], is_public=True)
async def check_readiness(call: Call) -> Health:
    """Responds with 200 while the store is followed and this server has its lease, else 503."""
    engine = call.service.engine
    if engine.stale_since is not None:
        since = engine.stale_since.isoformat(timespec="seconds")
        reason = f"cannot be used: {engine.unusable}" if engine.unusable else ""
        problem = reason or f"has not been reachable since {since}"
        raise Unavailable(
            f"the store {problem}; polls are answered from memory",
            since=since,
        )
    if not engine.can_serve:
        lease, can_write = engine.server_lease, "the store is not read yet, or refused a commit"
        is_lost = lease is not None and not engine.holds(lease)
        raise Unavailable("this server has lost its lease" if is_lost else can_write)
    if engine.is_clock_off:  # its documents are right, so VMs may poll it
        skew = f"{engine.clock_skew_seconds:+.1f} s"
        return Health("ready", f"starts no events: its clock is {skew} from the other servers'")
    return Health("ready")
