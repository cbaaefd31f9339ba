"""The options of the etcd store, without its libraries."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EtcdOptions:
    """How to reach etcd, and how long it keeps old revisions (0: its operator decides).

    TLS is used if there is a CA file. A certificate and its key are for mutual TLS.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None
    retention_minutes: float = 60.0
