"""The checks, one module per topic.

Importing this fills the registry, in the order in which they run.
"""

from importlib import import_module

TOPICS = (
    "path",
    "header",
    "version",
    "connection",
    "document",
    "etag",
    "event",
    "date",
    "kind",
    "instance",
    "refusal",
    "scope",
    "lifecycle",
    "malformed",
    "approval",
)

for _topic in TOPICS:
    import_module(f"{__name__}.{_topic}")
