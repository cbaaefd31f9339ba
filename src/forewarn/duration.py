"""Durations as files and commands write them: `90s`, `15m`, `2h`, `1h30m`, `7d`.

The agent and the CLI work without msgspec, so the type for files is built on first use.
"""

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    Duration = str

PATTERN = r"(?=[0-9])(?:([0-9]{1,4})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,8})s)?"
EXPECTED = "a duration such as 90s, 15m, 2h, 1h30m or 7d"


def parse_duration(text: str) -> timedelta:
    """Parse a duration. Raises ValueError for anything else."""
    match = re.fullmatch(PATTERN, text)
    if match is None:
        raise ValueError(f"expected {EXPECTED}, got {text[:80]!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def __getattr__(name: str) -> object:
    """`Duration`: the text of a duration, as msgspec validates it."""
    if name != "Duration":
        raise AttributeError(name)
    from msgspec import Meta

    return Annotated[str, Meta(pattern=rf"^{PATTERN}$(?!\n)", description=EXPECTED)]
