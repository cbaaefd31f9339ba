"""The agent as a process: opens its parts in order and closes them in reverse, handles signals,
and reports to systemd.

Signal handlers only put their number into a queue. The main thread takes it from there, so no
handler ever waits for a lock.
"""

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

from forewarn.agent.agent import Agent
from forewarn.agent.journal import Journal
from forewarn.agent.participant_socket import ParticipantSocket
from forewarn.agent.participants import Participants
from forewarn.agent.settings import AgentSettings, load
from forewarn.agent.status import to_json, to_line
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Client, discover
from forewarn.client.backoff import RETRY_AFTER_SECONDS_MAX
from forewarn.errors import Error
from forewarn.log import log, log_to_stderr
from forewarn.systemd import Notifier, Pulse

STATUS_SECONDS = 10.0
MESSAGE_LENGTH_MAX = 1000
AGENT_ENDED = 0
"""Put into the signal queue when the agent thread ends."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD_SIGNALS = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()  # not on Windows


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `endpoint` "" leaves it to the file."""

    config: Path
    endpoint: str = ""
    is_dry_run: bool = False
    is_once: bool = False


def run(options: Options) -> None:
    """Run the agent in this process until a signal ends it."""
    with log_to_stderr():
        Daemon(options, os.environ, Notifier(os.environ, pid=os.getpid())).run()


@dataclass(eq=False)
class Daemon:
    options: Options
    environ: Mapping[str, str]
    notifier: Notifier
    make_agent: Callable[..., Agent] = Agent

    def __post_init__(self) -> None:
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Call from the main thread. Raises an Error where the agent cannot begin.

        Any other exception is a bug. It is logged here, because the caller reports only one line.
        """
        try:
            with ExitStack() as stack:
                self._run(stack)
            if self._error is not None:
                raise self._error
        except Error:
            raise
        except Exception:
            log.critical("the agent ended because of a bug", exc_info=True)
            raise

    def _run(self, stack: ExitStack) -> None:
        """A dry run has its own journal and opens neither socket nor port: a running agent may use
        the real ones.
        """
        self._handle_signals(stack)
        settings, options = self._load(), self.options
        journal_path, socket, listen = settings.journal, settings.socket, settings.listen
        if options.is_dry_run:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="forewarn-agent-"))
            journal_path, socket, listen = Path(directory, "journal"), None, ""
        journal = Journal(journal_path)
        stack.callback(journal.close)
        self._client = Client(settings.endpoint, api_version=settings.api_version)
        stack.callback(self._client.close)
        stack.callback(self._stop.set)
        programs = Participants(resumed=_events_in_prepare(journal) if socket else ())
        self._agent = self.make_agent(
            settings,
            self._client,
            journal,
            programs=programs,
            is_dry_run=options.is_dry_run,
            is_once=options.is_once,
        )
        if socket is not None:
            opened = ParticipantSocket(socket, programs, lambda: to_json(self._agent.status()))
            stack.callback(opened.close)
        if listen:
            from forewarn.agent.status_http import StatusPort  # costs memory where it is not used

            port = StatusPort(listen, self._agent.status)
            stack.callback(port.stop)
            log.info("listening", listen=port.address)
        self._serve(settings)

    def _load(self) -> AgentSettings:
        """The file, with the endpoint that is actually used."""
        settings = load(self.options.config)
        for rule in settings.rules:
            for target in rule.left_changed:
                log.warning("no recover step undoes a step", rule=rule.name, step=target)
        endpoint = self.options.endpoint or settings.endpoint
        return replace(settings, endpoint=discover(self.environ, endpoint=endpoint))

    def _handle_signals(self, stack: ExitStack) -> None:
        for number in (*STOP_SIGNALS, *RELOAD_SIGNALS):
            old = signal.signal(number, lambda received, _: self._signals.put(received))
            stack.callback(signal.signal, number, old)

    def _serve(self, settings: AgentSettings) -> None:
        worker = threading.Thread(target=self._run_agent, name="forewarn-agent", daemon=True)
        worker.start()
        log.info("agent ready", endpoint=settings.endpoint, rules=len(settings.rules))
        self.notifier.ready("watching")
        pulse = Pulse(settings.quiet_seconds_max + RETRY_AFTER_SECONDS_MAX, time.monotonic())
        while (received := self._next_signal()) not in (*STOP_SIGNALS, AGENT_ENDED):
            if received is not None:
                self._reload()
            status = self._agent.status()
            if pulse.is_there((status.last_contact, status.problems), time.monotonic()):
                self.notifier.feed()
            self.notifier.status(to_line(status))
        self.notifier.stopping("stopping steps")
        self._stop.set()
        self._client.close()
        worker.join()
        log.info("agent stopped")

    def _next_signal(self) -> int | None:
        """None when it is time to feed the watchdog."""
        seconds = min(self.notifier.feed_seconds or STATUS_SECONDS, STATUS_SECONDS)
        try:
            return self._signals.get(timeout=seconds)
        except queue.Empty:
            return None

    def _run_agent(self) -> None:
        try:
            self._agent.run(self._stop)
        except Exception as error:  # around a loop: the main thread raises it
            self._error = error
        finally:
            self._signals.put(AGENT_ENDED)

    def _reload(self) -> None:
        """An invalid file is logged, and the agent keeps its current rules."""
        self.notifier.reloading()
        try:
            self._agent.reload(self._load())
        except Exception as error:
            bug = None if isinstance(error, Error) else error
            message = f"{type(error).__name__}: {error}" if bug else str(error)
            self._agent.config_error = message[:MESSAGE_LENGTH_MAX]
            message = "config rejected, keeping previous rules"
            log.error(message, problem=self._agent.config_error, exc_info=bug)
        self.notifier.ready(to_line(self._agent.status()))


def _events_in_prepare(journal: Journal) -> frozenset[str]:
    """Events that an earlier process was preparing for: programs may have asked for more time."""
    return frozenset(
        key
        for key, progress in journal.progress.items()
        if WorkflowPhase.PREPARE not in progress.ended
    )
