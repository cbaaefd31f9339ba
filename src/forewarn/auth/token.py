"""A token, and what its role may do. Its secret is not here: nobody keeps it but its holder."""

import re
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from forewarn.engine.record import RecordCodec

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""No underscore: it parts the name from the secret."""
EXPIRY_MAX = timedelta(days=3660)


class Role(StrEnum):
    """Who may do what, each all that the one before may: look; act on VMs, hosts and events; change
    the fleet and the tokens.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: "Role") -> bool:
        ranks = list(Role)
        return ranks.index(self) >= ranks.index(needed)


class Token(msgspec.Struct, frozen=True):
    """`digest` is the SHA-256 of the secret:

    256 bits of chance cannot be found by trying, so nothing slower is needed.
    """

    name: str
    role: Role
    digest: str
    created_at: datetime
    expires_at: datetime | None = None

    def is_good(self, now: datetime) -> bool:
        return self.expires_at is None or now < self.expires_at


TOKEN = RecordCodec("token", Token)
