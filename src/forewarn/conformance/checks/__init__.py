"""The checks by topic. Importing this package registers them, in the order in which they run."""

from importlib import import_module

from forewarn.conformance.check import CHECKS

__all__ = ["CHECKS"]

for _topic in ("request", "version", "document", "event", "instance", "approval"):
    import_module(f"{__name__}.{_topic}")
