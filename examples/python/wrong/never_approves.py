"""Wrong: drains and then waits for the event to start, so every maintenance takes its full notice:

15 minutes for nothing.
"""

import handler


class Handler(handler.Handler):
    """Reads, and never answers."""

    def approve(self, event: dict[str, str]) -> None:
        print(f"ready for {event['EventType']}")
