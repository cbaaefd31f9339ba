"""Sorted keys, so that a page of a list costs the same however large the fleet is."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from sortedcontainers import SortedList

K = TypeVar("K")


class SortedKeys(Sequence[K]):
    """The keys of an index, sorted at the first read and kept sorted from then on.

    So loading a fleet sorts once, and a change in a large fleet costs hardly more than in a small.
    """

    def __init__(self, source: Callable[[], Iterable[K]]) -> None:
        self._source: Callable[[], Iterable[K]] = source
        self._sorted: Any = None  # a SortedList; the library has no types

    def sort(self) -> None:
        """Sort the keys of the source, once."""
        if self._sorted is None:
            self._sorted = SortedList(self._source())

    def add(self, key: K) -> None:
        """Add a key that is new in the source."""
        if self._sorted is not None:
            self._sorted.add(key)

    def remove(self, key: K) -> None:
        """Remove a key that has left the source."""
        if self._sorted is not None:
            self._sorted.remove(key)

    def __len__(self) -> int:
        self.sort()
        return len(self._sorted)

    @overload
    def __getitem__(self, index: int) -> K: ...
    @overload
    def __getitem__(self, index: slice) -> list[K]: ...
    def __getitem__(self, index: int | slice) -> K | list[K]:
        self.sort()
        found: K | list[K] = self._sorted[index]
        return found
