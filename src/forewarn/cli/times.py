"""Times as people write and read them: `+15m`, `2h ago`, `in 14m`."""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from forewarn.cli.exit_codes import Usage
from forewarn.duration import parse_duration

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
"""As the API writes a time."""
UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
FUTURE = "+15m, 2h or 2030-01-31T12:00:00Z"
PAST = "15m, 2h ago or 2030-01-31T12:00:00Z"


def parse_time(
    option: str, text: str | None, now: Callable[[], datetime], expected: str = FUTURE
) -> str | None:
    """A time for the API. A duration counts from now: back if a PAST time is expected."""
    if text is None:
        return None
    sign, amount, ago = re.fullmatch(r"\s*([+-]?)\s*(.*?)\s*(ago)?\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    with suppress(ValueError):
        is_back = ago or sign == "-" or (expected == PAST and not sign)
        duration = parse_duration(amount) * (-1 if is_back else 1)
        return (now() + duration).astimezone(UTC).isoformat().replace("+00:00", "Z")
    with suppress(ValueError):
        if datetime.fromisoformat(text).tzinfo is not None:
            return text
    raise Usage(f"{option}: expected a time such as {expected}, got {text!r}")


def format_relative(text: str, now: datetime) -> str:
    """How long ago a time was, or how long it is until then, in the largest unit that fits."""
    seconds = round((datetime.fromisoformat(text) - now).total_seconds())
    for unit, size in UNITS:
        if abs(seconds) >= size:
            amount = f"{abs(seconds) // size}{unit}"
            return f"in {amount}" if seconds > 0 else f"{amount} ago"
    return "now"


def format_utc(text: str) -> str:
    """A time of the API, to the second."""
    return f"{text[:19]}Z"
