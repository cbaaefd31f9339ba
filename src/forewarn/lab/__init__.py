"""The lab: the service with a virtual clock, faults, scenarios and a transcript."""

from typing import TYPE_CHECKING

# `forewarn.lab.Lab` is `forewarn.testing.Lab`, which that package imports on first use: pytest
# loads this package at every start.
from forewarn.testing import __getattr__ as __getattr__

if TYPE_CHECKING:
    from forewarn.testing import Lab as Lab
