"""Callbacks that are called one after the other, each isolated from the others and from the caller.

Every server sees every record. If an exception of a callback ended the task that follows the store,
one record could end all servers, again after each start. The log of a lasting bug is limited for
each record.
"""

from collections.abc import Callable
from typing import Generic, ParamSpec

from forewarn.engine.log_throttle import ThrottledLog

P = ParamSpec("P")


class Callbacks(Generic[P]):
    def __init__(self, throttled_log: ThrottledLog) -> None:
        self._throttled_log = throttled_log
        self._callbacks: list[Callable[P, None]] = []

    def add(self, callback: Callable[P, None]) -> None:
        self._callbacks.append(callback)

    def call(self, subject: str, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all. One that raises is a bug: it is logged with the subject, and the others are
        called.
        """
        for callback in self._callbacks:
            try:
                callback(*args, **kwargs)
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__qualname__)
                self._throttled_log.error(
                    "bug in a callback", error=error, subject=subject, callback=name
                )
