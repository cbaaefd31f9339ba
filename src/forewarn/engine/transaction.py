"""What a decision reads and writes before it is committed."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from forewarn.core.change import Change
from forewarn.engine.entry import Entry, make_entry
from forewarn.engine.replica import Replica, Versioned
from forewarn.errors import Unavailable
from forewarn.store.base import Lease


class LeaseLost(Unavailable):
    """The work needs a lease that this server no longer holds."""


class Transaction:
    """Reads come from the replica. Each key that was read is compared at the commit.

    `values` holds the records of kinds that are not cached. `is_confirmed` says that the keys
    were read from the store just now, so that a refusal can be believed. `committed_at` is the
    revision of the commit, 0 before.
    """

    def __init__(
        self,
        replica: Replica,
        values: Mapping[str, Versioned],
        now: datetime,
        by: str,
        *,
        is_confirmed: bool,
    ) -> None:
        self.now = now
        self.is_confirmed = is_confirmed
        self.committed_at = 0
        self.reads: dict[str, Versioned] = {}
        self.writes: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.leases: dict[str, Lease] = {}
        self._replica = replica
        self._values = values
        self._by = by

    def get(self, key: str) -> Any | None:
        """The decoded value, None if there is none; RecordUnreadable if it cannot be decoded."""
        if key in self.writes:
            return self.writes[key]
        return self._read(key).value

    def revision(self, key: str) -> int:
        """The revision of the record that is read; 0 if there is none."""
        return self._read(key).revision

    def put(self, key: str, value: Any | None) -> None:
        """Set the record to this value when the transaction commits. None deletes it."""
        self._read(key)
        self.writes[key] = value

    def record(self, *changes: Change, scope: str = "", by: str = "") -> None:
        """Write these changes into the history."""
        for change in changes:
            self.entries.append(make_entry(change, at=self.now, by=by or self._by, scope=scope))

    def require(self, lease: Lease) -> None:
        """Commit only while this lease is held."""
        self.leases[lease.key] = lease

    def _read(self, key: str) -> Versioned:
        record = self.reads.get(key)
        if record is None:
            self._replica.check_readable(key)
            record = self._values[key] if key in self._values else self._replica.read(key)
            self.reads[key] = record
        return record
