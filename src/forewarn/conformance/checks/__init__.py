"""The checks by topic. Importing this package registers them, in the order in which they run."""

from importlib import import_module

from forewarn.conformance.check import CHECKS

__all__ = ["CHECKS"]

TOPICS = ("request", "version", "document", "event", "lifecycle", "instance", "approval")

for _topic in TOPICS:
    import_module(f"{__name__}.{_topic}")
