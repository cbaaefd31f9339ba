"""When each VM polled last, and which VMs have stopped polling.

A poll writes one entry of `Board.polled`. Once an hour the times of a scope are stored in
`polled/SCOPE/`, beside the record of the scope's last poll: so the other servers learn them, and a
restart does not lose them. The first poll of a VM is stored at once: a VM of which a server does
not know that it polls delays no event. Earlier versions ignore that record. A scope of one VM
needs none: its last poll is the VM's.
"""

from collections.abc import Mapping
from datetime import datetime

from forewarn.core.fleet import Scope
from forewarn.core.lifecycle import is_enabled
from forewarn.core.timing import Timing
from forewarn.engine.board import Board, PublishedScope
from forewarn.engine.record_cache import Records

POLLED_KEY = "polled/{}/"
AGAIN_INTERVALS = 1.5
"""After so many intervals a VM has not polled for a time, and its next poll is stored at once."""
VMS_PER_COUNT_MAX = 1_000
"""How many VMs are looked at in one second: the work must not grow with the fleet."""


class LastPolls:
    """Reads the polls of this server from the board, and those of the others from the records.

    `silent_count` is how many running VMs had not polled for an interval, in scopes that are
    polled, when the whole fleet was last counted.
    """

    def __init__(self, board: Board, records: Records) -> None:
        self._board = board
        self._records = records
        self.silent_count = self._counted = self._position = 0

    def times(self, scope: Scope) -> dict[str, int]:
        """When each VM of the scope polled last, in seconds since the epoch."""
        here, stored = self._board.polled, self._stored(scope)
        if len(scope.vms) == 1 and scope.seen_at is not None:
            stored = {scope.vms[0].name: int(scope.seen_at.timestamp())}
        latest = {
            vm.name: max(int(here.get(vm.name, 0)), stored.get(vm.name, 0)) for vm in scope.vms
        }
        return {name: seconds for name, seconds in latest.items() if seconds}

    def must_store(self, published: PublishedScope, vm: str, now: float) -> bool:
        """Whether a poll of this VM has to be stored, and not only noted on the board."""
        if published.fresh_until <= now:
            return True
        if len(published.scope.vms) == 1 or published.first_polls_at > now:
            return False
        stored = published.stored_polls
        if stored is None:
            stored = published.stored_polls = self._stored(published.scope)
        # Usually the scope's next record, which has all VMs, comes first.
        return stored.get(vm, 0) <= now - AGAIN_INTERVALS * self._board.seen_interval_seconds

    def are_behind(self, scope: Scope) -> bool:
        """Whether the stored times miss polls of this server, by half the time between records.

        Each of several servers may have its own VMs of a scope.
        """
        here, stored = self._board.polled, self._stored(scope)
        if len(scope.vms) == 1 or not here:
            return False
        slack = self._board.seen_interval_seconds / 2
        return any(here.get(vm.name, 0) - stored.get(vm.name, 0) > slack for vm in scope.vms)

    def count_silent(self, now: datetime, timing: Timing) -> None:
        """Count the silent VMs in the next part of the fleet. Called once a second."""
        names, vms_left = self._board.scope_names, VMS_PER_COUNT_MAX
        while vms_left > 0 and self._position < len(names):
            scope = self._board.scopes[names[self._position]].scope
            self._counted += self._count(scope, now, timing)
            self._position += 1
            vms_left -= 1 + len(scope.vms)
        if self._position >= len(names):
            self.silent_count, self._counted, self._position = self._counted, 0, 0

    def _count(self, scope: Scope, now: datetime, timing: Timing) -> int:
        if not is_enabled(scope, now, timing):
            return 0
        times, oldest = self.times(scope), (now - timing.seen_interval).timestamp()
        running = (vm.name for vm in scope.vms if not vm.power.is_off)
        return sum(times.get(name, 0) < oldest for name in running)

    def _stored(self, scope: Scope) -> Mapping[str, int]:
        return self._records.get(POLLED_KEY.format(scope.name)).value or {}
