"""Wrong: looks once a minute, which is enough for a reboot.

A spot eviction gives 30 seconds, and is over before it is seen.
"""

import handler


class Handler(handler.Handler):
    """Spares the endpoint, which needs no sparing: once a second is what its makers recommend."""

    period_seconds = 60
