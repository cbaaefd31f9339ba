"""The lab inside a test suite: `Lab`, the objects that a test holds, and the pytest plugin."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forewarn.testing.lab import Lab
    from forewarn.testing.ledger import LabApproval
    from forewarn.testing.objects import LabEvent, LabFault, LabHost, LabVm

__all__ = ["Lab", "LabApproval", "LabEvent", "LabFault", "LabHost", "LabVm"]


def __getattr__(name: str) -> object:
    """Imported on first use: pytest loads the plugin in this package at every start."""
    if name in __all__:
        from forewarn.testing import lab

        return getattr(lab, name)
    raise AttributeError(name)
