"""The lab inside a test suite: `Lab`, the objects that a test holds, and the pytest plugin."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forewarn.testing.lab import Lab as Lab


def __getattr__(name: str) -> object:
    """`Lab`, imported on first use: pytest loads the plugin in this package at every start."""
    if name == "Lab":
        from forewarn.testing.lab import Lab

        return Lab
    raise AttributeError(name)
