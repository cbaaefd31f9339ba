"""Runs a service in an event loop until it is stopped."""

import importlib.util
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from forewarn.config import Config
from forewarn.errors import Error
from forewarn.log import log, log_to_stderr

Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, None]]


def run_service(config: Config, work: Work) -> None:
    """Run it until it is stopped, with a log. What the config makes impossible is Invalid.

    The systemd units do not restart after its exit code: an operator has to fix the config. The
    traceback is logged here, because the caller reports only one line: that of a bug always, that
    of an Error at the level debug.
    """
    with log_to_stderr(config.log_format, config.log_level, logger=""):
        try:
            run_until_stopped(work)
        except Error:
            log.debug("the service ended because of an error", exc_info=True)
            raise
        except Exception:
            log.critical("the service ended because of a bug", exc_info=True)
            raise


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result | None:
    """Run it until it ends, or until SIGTERM or Ctrl-C cancels it. Uses uvloop if it is there."""
    import asyncio

    async def run() -> Result | None:
        task = asyncio.ensure_future(work())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            return await task
        return None

    library = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"  # as in the extra lab
    result: Result | None = importlib.import_module(library).run(run())
    return result
