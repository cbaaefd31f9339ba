"""One life of the agent: its parts opened in order and closed in reverse, signals, and what systemd
is told.

Signal handlers only put their number into a queue: the main thread takes it from there, so no
handler ever meets a lock.
"""

import logging
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from forewarn.agent import status as view
from forewarn.agent.agent import Agent
from forewarn.agent.journal import Journal
from forewarn.agent.once import Once
from forewarn.agent.participant_socket import Applications
from forewarn.agent.settings import Settings, load
from forewarn.agent.step import Phase
from forewarn.client import Client, Clock, discover
from forewarn.client.backoff import RETRY_AFTER_SECONDS_MAX
from forewarn.client.protocol import TIMEOUT_SECONDS
from forewarn.errors import Error
from forewarn.systemd import Notifier, Pulse

log = logging.getLogger("forewarn.agent")

SLACK_SECONDS = 30.0
STATUS_SECONDS = 10.0
PROBLEM_LENGTH_MAX = 1000
ENDED = 0
"""In the queue of signals: the agent has ended by itself."""
RELOAD = getattr(signal, "SIGHUP", None)
STOP = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Orders:
    """What the command line says. `endpoint` "" leaves it to the file."""

    config: Path
    endpoint: str = ""
    is_dry_run: bool = False
    is_once: bool = False


class Life:
    def __init__(
        self,
        orders: Orders,
        environ: Mapping[str, str],
        notifier: Notifier,
        *,
        make_agent: Callable[..., Agent] = Agent,
    ) -> None:
        self._orders = orders
        self._make_agent = make_agent
        self._environ = environ
        self._notifier = notifier
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._settings_problem = ""
        self._bug: Exception | None = None

    def run(self) -> None:
        """Until a signal ends it. From the main thread. A Problem is raised where the agent cannot
        even begin.

        Any other exception is a bug. It is logged here: the caller reports it in one line, which
        does not say where it was.
        """
        try:
            self._run()
        except Error:
            raise
        except Exception:
            log.critical("the agent ended because of a bug", exc_info=True)
            raise

    def _run(self) -> None:
        with ExitStack() as parts:
            self._listen_to_signals(parts)
            settings = self._load()
            self._client = Client(settings.endpoint, api_version=settings.api_version)
            parts.callback(self._client.close)
            parts.callback(self._stop.set)
            journal = self._journal(settings, parts)
            path = None if self._orders.is_dry_run else settings.socket
            self._applications = (
                None
                if path is None
                else Applications(path, self._status, resumed=_in_prepare(journal))
            )
            once = self._once(journal) if self._orders.is_once else None
            self._agent = self._make_agent(
                settings,
                once or self._client,
                journal,
                applications=self._applications,
                is_dry_run=self._orders.is_dry_run,
                is_once=self._orders.is_once,
            )
            self._quiet_seconds_max = (
                settings.wait_seconds + settings.poll_seconds + TIMEOUT_SECONDS + SLACK_SECONDS
            )
            self._open_doors(settings, parts)
            self._live(settings)
        if self._bug is not None:
            raise self._bug
        if once is not None and once.problem is not None:
            raise once.problem

    def _load(self) -> Settings:
        """The file, and where the endpoint is after all."""
        settings = load(self._orders.config)
        return replace(
            settings,
            endpoint=discover(self._environ, endpoint=self._orders.endpoint or settings.endpoint),
        )

    def _journal(self, settings: Settings, parts: ExitStack) -> Journal:
        """A dry run leaves the real one alone, which an agent at work may be using."""
        path = settings.journal
        if self._orders.is_dry_run:
            path = Path(
                parts.enter_context(tempfile.TemporaryDirectory(prefix="forewarn-agent-")),
                "journal",
            )
        journal = Journal.open(path)
        parts.callback(journal.close)
        return journal

    def _once(self, journal: Journal) -> Once:
        return Once(
            self._client,
            journal,
            handlings=lambda: self._agent.status().handlings,
            journal_problems=lambda: self._agent.counts()["forewarn_agent_journal_problems_total"],
            give_up=self._stop.set,
        )

    def _open_doors(self, settings: Settings, parts: ExitStack) -> None:
        if self._applications is not None:
            self._applications.open()
            parts.callback(self._applications.close)
        if settings.listen and not self._orders.is_dry_run:
            from forewarn.agent.status_http import (
                Port,  # whoever has no port needs no memory for one
            )

            port = Port(settings.listen, self._view)
            parts.callback(port.close)
            log.info("the port is open", extra={"facts": {"listen": port.address}})

    def _listen_to_signals(self, parts: ExitStack) -> None:
        for number in (*STOP, *(() if RELOAD is None else (RELOAD,))):
            parts.callback(
                signal.signal,
                number,
                signal.signal(number, lambda told, _: self._signals.put(told)),
            )

    def _live(self, settings: Settings) -> None:
        working = threading.Thread(target=self._work, name="forewarn-agent", daemon=True)
        working.start()
        log.info(
            "the agent is ready",
            extra={"facts": {"endpoint": settings.endpoint, "rules": len(settings.rules)}},
        )
        self._notifier.ready("watching")
        still_seconds_max = (
            settings.wait_seconds
            + settings.poll_seconds
            + TIMEOUT_SECONDS
            + RETRY_AFTER_SECONDS_MAX
            + SLACK_SECONDS
        )
        pulse = Pulse(still_seconds_max, time.monotonic())
        while (told := self._next_signal()) not in (
            *STOP,
            ENDED,
        ):  # ends with a signal, or with the agent
            if told is not None:
                self._reload()
            seen = self._view()
            if pulse.is_there((seen.status.last_contact, seen.status.problems), time.monotonic()):
                self._notifier.feed()
            self._notifier.status(view.words(seen))
        self._notifier.stopping("ending what is under way")
        self._stop.set()
        self._client.close()
        working.join()
        log.info("the agent has ended")

    def _next_signal(self) -> int | None:
        """None when it is time to feed the watchdog."""
        try:
            return self._signals.get(
                timeout=min(self._notifier.feed_seconds or STATUS_SECONDS, STATUS_SECONDS)
            )
        except queue.Empty:
            return None

    def _work(self) -> None:
        try:
            self._agent.run(self._stop)
        except Exception as bug:  # around a loop: the main thread raises it again
            self._bug = bug
        finally:
            self._signals.put(ENDED)

    def _reload(self) -> None:
        self._notifier.reloading()
        settings, self._settings_problem = read_again(self._load)
        if settings is not None:
            self._agent.reload(settings)
        self._notifier.ready(view.words(self._view()))

    def _view(self) -> view.View:
        return view.View(
            status=self._agent.status(),
            counts=self._agent.counts(),
            now=Clock().now(),
            quiet_seconds_max=self._quiet_seconds_max,
            applications=self._applications.names() if self._applications else (),
            settings_problem=self._settings_problem,
        )

    def _status(self) -> Mapping[str, object]:
        return view.plain(self._view())


def _in_prepare(journal: Journal) -> frozenset[str]:
    """The events that an earlier life was preparing for: programs may have been asking for time."""
    return frozenset(key for key, one in journal.progress.items() if Phase.PREPARE not in one.ended)


def live(orders: Orders) -> None:
    """In this process."""
    Life(orders, os.environ, Notifier(os.environ, pid=os.getpid())).run()


def read_again(read: Callable[[], Settings]) -> tuple[Settings | None, str]:
    """The settings as they are now, or what is wrong with them.

    Whatever it is, it is no reason to end.
    """
    try:
        return read(), ""
    except Exception as problem:  # also a file that we cannot even refuse well
        words = (
            problem.message
            if isinstance(problem, Error)
            else f"{type(problem).__name__}: {problem}"
        )
        log.error(
            "the file is refused; the old rules stay",
            extra={"facts": {"problem": words[:PROBLEM_LENGTH_MAX]}},
        )
        return None, words[:PROBLEM_LENGTH_MAX]
