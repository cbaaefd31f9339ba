"""Wrong: takes every event in the document for its own, and so lets the platform reboot a neighbour
that is not ready.
"""

import handler


class Handler(handler.Handler):
    """The document is shared by the whole availability set; this one does not look at `Resources`."""

    def concerns_us(self, event: dict[str, str]) -> bool:
        return True
