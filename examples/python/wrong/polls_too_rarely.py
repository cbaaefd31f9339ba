"""Wrong: polls once a minute. A spot eviction has a notice of 30 seconds."""

import handler


class Handler(handler.Handler):
    """Azure recommends one poll a second."""

    period_seconds = 60
