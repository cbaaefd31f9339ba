"""Wrong: drains but never approves, so every maintenance takes its full notice of 15 minutes."""

import handler


class Handler(handler.Handler):
    """Polls and drains only."""

    def approve(self, event: dict[str, str]) -> None:
        print(f"ready for {event['EventType']}")
