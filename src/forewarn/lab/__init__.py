"""The lab: the service with a virtual clock, faults, scenarios and a transcript."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forewarn.testing.lab import Lab as Lab


def __getattr__(name: str) -> object:
    """`forewarn.lab.Lab` is `forewarn.testing.Lab`, imported on first use: pytest loads this
    package at every start.
    """
    if name == "Lab":
        from forewarn.testing.lab import Lab

        return Lab
    raise AttributeError(name)
