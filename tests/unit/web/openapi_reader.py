"""Reads an OpenAPI document."""

from collections.abc import Iterator
from typing import Any


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operation by method and path, such as `GET /healthz`."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield f"{method.upper()} {path}", operation
