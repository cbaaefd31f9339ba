"""Lengths of time as files and commands write them: `90s`, `15m`, `2h`, `1h30m`, `7d`.

Commands work where msgspec is not installed, so the type for files is made when it is asked for.
"""

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    Span = str

PATTERN = r"(?=[0-9])(?:([0-9]{1,4})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,8})s)?"
EXPECTED = "a time such as 90s, 15m, 2h, 1h30m or 7d"


def parse(text: str) -> timedelta:
    """The length of time. ValueError for what is none."""
    found = re.fullmatch(PATTERN, text)
    if found is None:
        raise ValueError(f"expected {EXPECTED}, got {text[:80]!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def __getattr__(name: str) -> object:
    """`Span`: the text of a length of time, as msgspec checks it."""
    if name != "Span":
        raise AttributeError(name)
    from msgspec import Meta

    return Annotated[str, Meta(pattern=rf"^{PATTERN}$(?!\n)", description=EXPECTED)]
