"""What keeps a long command alive while the service restarts: attempts with growing pauses."""

import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from forewarn.errors import Unavailable

Result = TypeVar("Result")

PAUSE_SECONDS_MAX = 30.0
ATTEMPTS_MAX = 1000
"""About six hours: a campaign takes hours, and a script must not hang forever."""


def pause_seconds(failures: int) -> float:
    """How long to wait after so many failures in a row, from 0.5 to 30 seconds."""
    return random.uniform(0.5, 1) * min(2.0**failures, PAUSE_SECONDS_MAX)  # noqa: S311


def report_retry(error: Unavailable) -> None:
    """Without advice such as to start a service: there was one."""
    print(f"forewarn: {error.facts.get('brief', error.message)}; retrying", file=sys.stderr)


def keep_trying(
    attempt: Callable[[], Result], *, sleep: Callable[[float], object] = time.sleep
) -> Result:
    """The result of the first attempt that reaches the service. Only the first failure is
    reported. Raises the last error after ATTEMPTS_MAX.
    """
    for failures in range(ATTEMPTS_MAX):
        try:
            return attempt()
        except Unavailable as error:
            if failures == 0:
                report_retry(error)
            sleep(pause_seconds(failures))
    return attempt()
