"""What the metadata listener was told: a value, made from `config.py` by `server.py`."""

from collections.abc import Set
from dataclasses import dataclass, field

from forewarn.config import Identify
from forewarn.errors import Invalid


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How callers are known and how the protocol's open points are settled.

    0 switches a limit or a delay off.
    """

    identify: Set[Identify] = frozenset({Identify.ADDRESS})
    proxy_key: bytes = field(default=b"", repr=False)
    wait_seconds_max: float = 60.0
    requests_per_second: float = 0.0
    first_call_delay_seconds: float = 0.0
    iso_not_before: bool = False
    legacy_path: bool = False
    lenient_versions: bool = False

    def __post_init__(self) -> None:
        if Identify.PROXY in self.identify and not self.proxy_key:
            raise Invalid(
                "callers are to be known by a proxy's signature, but its key is empty",
                option="proxy_key_file",
            )
