"""Indexes of the board: the VM that has a key, and sorted keys for paginated lists."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from sortedcontainers import SortedList

RANK_MAX = 3

K = TypeVar("K")


class VmKeys(dict[str, str]):
    """The VM that has an address or an id; "" while several have it: they are in `shared`.

    So a lookup finds no VM then, rather than one of them. But a VM of a higher rank has
    precedence: only the VMs of the highest rank share it.
    """

    def __init__(self) -> None:
        self.shared: dict[str, set[str]] = {}
        self._ranks: dict[str, dict[int, set[str]]] = {}
        """Of keys that several VMs have, or one that is not of the highest rank."""

    def assign(self, key: str, name: str, rank: int = RANK_MAX) -> None:
        if not key:
            return
        first = self.get(key, name)
        if key not in self._ranks and first == name and rank == RANK_MAX:
            self[key] = name
            return
        ranks = self._ranks.setdefault(key, {RANK_MAX: {first}} if key in self else {})
        self._discard(ranks, name)
        ranks.setdefault(rank, set()).add(name)
        self._choose(key)

    def release(self, key: str, name: str) -> None:
        if key in self._ranks:
            self._discard(self._ranks[key], name)
            self._choose(key)
        elif self.get(key) == name:
            del self[key]

    def holders(self, key: str) -> set[str]:
        """All that have it, of any rank."""
        if key in self._ranks:
            return set().union(*self._ranks[key].values())
        return {self[key]} if key in self else set()

    def count(self, key: str) -> int:
        return sum(map(len, self._ranks[key].values())) if key in self._ranks else key in self

    def has(self, key: str, name: str) -> bool:
        if key in self._ranks:
            return any(name in names for names in self._ranks[key].values())
        return self.get(key) == name

    @staticmethod
    def _discard(ranks: dict[int, set[str]], name: str) -> None:
        for rank, names in list(ranks.items()):
            names.discard(name)
            if not names:
                del ranks[rank]

    def _choose(self, key: str) -> None:
        """Find the VM of the highest rank again."""
        ranks = self._ranks[key]
        self.shared.pop(key, None)
        if not ranks:
            del self._ranks[key], self[key]
            return
        best = ranks[max(ranks)]
        if len(best) > 1:
            self[key], self.shared[key] = "", best
            return
        (self[key],) = best
        if list(ranks) == [RANK_MAX]:
            del self._ranks[key]


class SortedKeys(Sequence[K]):
    """The keys of an index, sorted at the first read and kept sorted from then on.

    So loading a fleet sorts once, and a change costs hardly more in a large fleet than in a small
    one.
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
