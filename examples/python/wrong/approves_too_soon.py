"""Wrong: approves before the job is done, and the job is lost in the reboot."""

import handler


class Handler(handler.Handler):
    """Approves immediately."""

    def is_ready(self) -> bool:
        return True
