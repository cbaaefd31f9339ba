"""The lab: the service with a clock, ids, faults and a transcript of one's own.

Nothing is implemented twice.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forewarn.testing.lab import Lab as Lab


def __getattr__(name: str) -> object:
    """`from forewarn.lab import Lab`, imported when it is asked for: pytest loads this package at
    every start.
    """
    if name == "Lab":
        from forewarn.testing.lab import Lab

        return Lab
    raise AttributeError(name)
