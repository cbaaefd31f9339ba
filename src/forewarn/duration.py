"""Durations as files and commands write them: `500ms`, `90s`, `15m`, `1h30m`, `1.5h`, `7d`.

The agent and the CLI work without msgspec, so the type for files is built on first use.
"""

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    Duration = str

UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds"}
# At most about 30 years in all, so that adding a duration to a time cannot overflow.
_DIGITS_MAX = {"d": 4, "h": 5, "m": 6, "s": 8, "ms": 8}
PATTERN = "(?=[0-9])" + "".join(
    rf"(?:([0-9]{{1,{_DIGITS_MAX[unit]}}}(?:\.[0-9]{{1,3}})?){unit})?" for unit in UNITS
)
EXPECTED = "a duration such as 90s, 15m, 2h, 1h30m or 7d"


def parse_duration(text: str) -> timedelta:
    """Parse a duration. Raises ValueError for anything else."""
    match = re.fullmatch(PATTERN, text)
    if match is None:
        raise ValueError(f"expected {EXPECTED}, got {text[:80]!r}")
    amounts = (float(amount or 0) for amount in match.groups())
    return timedelta(**dict(zip(UNITS.values(), amounts, strict=True)))


def format_duration(duration: timedelta) -> str:
    """Format a duration, to a tenth of a second, such as 1h30m, or -5s."""
    if duration < timedelta():
        shown = format_duration(-duration)
        return shown if shown == "0s" else f"-{shown}"
    minutes, seconds = divmod(round(duration.total_seconds(), 1), 60)
    hours, minutes = divmod(int(minutes), 60)
    days, hours = divmod(hours, 24) if hours >= 48 else (0, hours)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s"))
    return "".join(f"{value:g}{unit}" for value, unit in parts if value) or "0s"


def __getattr__(name: str) -> object:
    """`Duration`: the text of a duration, as msgspec validates it."""
    if name != "Duration":
        raise AttributeError(name)
    from msgspec import Meta

    return Annotated[str, Meta(pattern=rf"^{PATTERN}$(?!\n)", description=EXPECTED)]
