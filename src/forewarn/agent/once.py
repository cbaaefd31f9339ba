"""`--once`: a client that shows the agent one document, waits until all that is due for it is done,
and ends.
"""

import time
from collections.abc import Callable, Iterator

from forewarn.agent.journal import Journal
from forewarn.agent.step import Phase
from forewarn.agent.workflow import HandlingStatus
from forewarn.client import Change, Client, Clock, EndpointError, Watcher
from forewarn.client.client import Stop
from forewarn.errors import Error, Unavailable

APPROVAL_SECONDS_MAX = 5.0
"""A leader's turn, or a quiet scope, may never come."""
LOOK_SECONDS = 0.05


class Once:
    """`problem` is why there was nothing to show, or nothing can be done."""

    def __init__(
        self,
        client: Client,
        journal: Journal,
        *,
        handlings: Callable[[], tuple[HandlingStatus, ...]],
        journal_problems: Callable[[], int],
        give_up: Callable[[], None],
    ) -> None:
        self.problem: Error | None = None
        self._client = client
        self._journal = journal
        self._handlings = handlings
        self._journal_problems = journal_problems
        self._give_up = give_up

    def name(self) -> str:
        """The agent asks until it is answered; asked once, an endpoint that gives no name has had
        its turn.
        """
        try:
            return self._client.name()
        except EndpointError as problem:
            self.problem = problem
            self._give_up()
            raise

    def approve(self, *event_ids: str, timeout_seconds: float) -> None:
        self._client.approve(*event_ids, timeout_seconds=timeout_seconds)

    def watch(
        self,
        *,
        stop: Stop | None,
        on_error: Callable[[EndpointError], object],
        wait_seconds: float,
        watcher: Watcher | None,
        sleep: Callable[[float], object] | None,
    ) -> Iterator[Change]:
        assert stop is not None
        assert watcher is not None
        try:
            document = self._client.document()
        except EndpointError as problem:
            self.problem = problem
            return
        yield from watcher.update(document, Clock().now())
        shown = {event.key for event in document.events}
        since = time.monotonic()
        while not stop.is_set():  # ends when nothing is left to do but wait, or with the agent
            if self._journal_problems():  # the agent would try again for ever
                self.problem = Unavailable(
                    "the journal cannot be written, so not all that is due was done; the log says why"
                )
                return
            handlings = self._handlings()
            if any(one.event.key not in shown or self._is_busy(one) for one in handlings):
                since = time.monotonic()
            elif (
                not any(_wants_approval(one) for one in handlings)
                or time.monotonic() - since > APPROVAL_SECONDS_MAX
            ):
                return
            stop.wait(LOOK_SECONDS)

    def _is_busy(self, one: HandlingStatus) -> bool:
        """Whether the phase that is due is not behind us.

        What is over is there only until it is recovered from.
        """
        progress = self._journal.progress.get(one.event.key)
        due = Phase.START if one.event.is_started else Phase.PREPARE
        return progress is None or bool(one.phase) or due not in progress.ended


def _wants_approval(one: HandlingStatus) -> bool:
    return one.is_prepared and not (one.is_approved or one.is_held or one.event.is_started)
