"""Wrong: takes every event in the document for its own, and so lets the platform reboot a neighbour
that is not ready.
"""

import handler


class Handler(handler.Handler):
    """Ignores `Resources`, although the whole availability set shares the document."""

    def concerns_us(self, event: dict[str, str]) -> bool:
        return True
