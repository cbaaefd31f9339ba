"""What the agent counts, by the name and labels that Prometheus sees.

All are there from the start, at nought.
"""

import threading
from collections.abc import Mapping

from forewarn.agent.step import Phase

NAMES = (
    *(
        f'forewarn_agent_steps_total{{phase="{phase}",result="{result}"}}'
        for phase in Phase
        for result in ("done", "failed", "cut")
    ),
    *(f'forewarn_agent_events_total{{matched="{matched}"}}' for matched in ("yes", "no")),
    *(f'forewarn_agent_approvals_total{{result="{result}"}}' for result in ("sent", "failed")),
    "forewarn_agent_late_total",
    "forewarn_agent_endpoint_problems_total",
    "forewarn_agent_journal_problems_total",
)


class Tally:
    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._counts = dict.fromkeys(NAMES, 0)

    def add(self, name: str, **labels: str) -> None:
        """One more of `forewarn_agent_{name}_total`."""
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        with self._turn:
            self._counts[f"forewarn_agent_{name}_total" + (f"{{{shown}}}" if shown else "")] += 1

    def counts(self) -> Mapping[str, int]:
        with self._turn:
            return dict(self._counts)
