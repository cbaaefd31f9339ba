"""Wrong: says "go ahead" as soon as it has closed the door.

The job in hand is lost when the VM reboots at once.
"""

import handler


class Handler(handler.Handler):
    """Approves on sight."""

    def is_ready(self) -> bool:
        return True
