"""Wrong: approves every event in the document, so VMs that are not ready are rebooted."""

import handler


class Handler(handler.Handler):
    """Ignores `Resources`, although the whole availability set shares the document."""

    def concerns_us(self, event: dict[str, str]) -> bool:
        return True
