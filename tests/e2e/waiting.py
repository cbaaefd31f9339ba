"""Wait for a condition in another process."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TIMEOUT_SECONDS = 60
PAUSE_SECONDS = 0.03


def eventually(
    read: Callable[[], T],
    is_expected: Callable[[T], bool] = bool,
    seconds_max: float = TIMEOUT_SECONDS,
) -> T:
    """Read again and again until the value is as expected, and return it."""
    deadline = time.monotonic() + seconds_max
    while True:  # ends at the deadline
        value = read()
        if is_expected(value):
            return value
        assert time.monotonic() < deadline, f"still {value!r} after {seconds_max:g} s"
        time.sleep(PAUSE_SECONDS)
