"""What a decision reads and writes before it is committed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from forewarn.core.change import Change
from forewarn.engine.entry import Entry, make_entry
from forewarn.engine.record_cache import Versioned
from forewarn.engine.replica import Replica
from forewarn.errors import Unavailable
from forewarn.store.base import Lease


class LeaseLost(Unavailable):
    """The work needs a lease that this server no longer holds."""


@dataclass(eq=False)
class Transaction:
    """Reads come from the replica. Each key that was read is compared at the commit.

    `values` holds the records of kinds that are not cached. `is_confirmed` says that the keys
    were read from the store just now, so that a refusal can be believed. `committed_at` is the
    revision of the commit, 0 before.
    """

    replica: Replica
    values: Mapping[str, Versioned]
    now: datetime
    by: str
    is_confirmed: bool
    committed_at: int = 0
    reads: dict[str, Versioned] = field(default_factory=dict)
    writes: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

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
            self.entries.append(make_entry(change, at=self.now, by=by or self.by, scope=scope))

    def require(self, lease: Lease) -> None:
        """Commit only while this lease is held: its record is compared like one that was read."""
        self.reads[lease.key] = Versioned(None, lease.revision)

    def _read(self, key: str) -> Versioned:
        record = self.reads.get(key)
        if record is None:
            self.replica.check_readable(key)
            record = self.values[key] if key in self.values else self.replica.read(key)
            self.reads[key] = record
        return record
