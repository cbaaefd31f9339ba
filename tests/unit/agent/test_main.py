"""The agent's command line: what it rejects, in one line and with which exit code."""

import logging
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from forewarn.agent.__main__ import main
from forewarn.agent.agent import Agent
from forewarn.agent.daemon import Daemon, Options
from forewarn.agent.settings import AgentSettings
from forewarn.errors import Unavailable
from forewarn.log import HumanLines, log_to_stderr
from forewarn.systemd import Notifier

RULE = '[[rule]]\nname = "all"\napprove = "when-prepared"\nprepare = [{log = "x"}]\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(RULE)
    return path


def test_check_lists_the_rules(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(config)]) == 0
    assert capsys.readouterr().out == (
        f"all: all types, approve when-prepared\n{config} is valid: 1 rule(s)\n"
    )


@pytest.mark.parametrize(
    ("types", "warnings"),
    [
        ([], ['all: warning: no recover step undoes kubernetes = {node = "n"}']),
        (
            ["Terminate", "Reboot"],
            ['all: warning: no recover step undoes kubernetes = {node = "n"}'],
        ),
        (["terminate", "Preempt"], []),
    ],
)
def test_check_warns_of_a_node_that_stays_cordoned(
    config: Path, capsys: pytest.CaptureFixture[str], types: list[str], warnings: list[str]
) -> None:
    """Only a VM that is deleted needs no recover step."""
    chosen = f"types = {types}\n" if types else ""
    config.write_text(
        f"[[rule]]\nname = 'all'\n{chosen}prepare = [{{kubernetes = {{node = 'n'}}}}]"
    )

    assert main(["check", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "warning" in line] == warnings


@pytest.mark.parametrize(
    ("prepare", "recover", "warning"),
    [
        ("node = 'n', server = 'https://a:1'", "", '{node = "n", server = "https://a:1"}'),
        ("", "node = 'n'", "{}"),
        ("node = 'n'", "node = 'n', server = 'https://a:1'", '{node = "n"}'),
        ("node = 'n'", "node = 'n', token_file = '/etc/uncordon.token', ca_file = '/ca'", ""),
        ("node = 'n', evict = false", "node = 'n'", ""),
        ("node = 'n', server = 'https://a:1'", "node = 'n', server = 'https://a:1/'", ""),
        ("node = 'n', server = 'https://a:1/'", "node = 'n', server = 'https://a:1'", ""),
    ],
)
def test_check_warns_of_a_recover_step_that_may_be_for_another_node(
    config: Path, capsys: pytest.CaptureFixture[str], prepare: str, recover: str, warning: str
) -> None:
    """The environment may name the same node, and the account that uncordons may be another one."""
    config.write_text(
        f"[[rule]]\nname = 'all'\nprepare = [{{kubernetes = {{{prepare}}}}}]\n"
        f"recover = [{{kubernetes = {{{recover}}}}}]"
    )

    assert main(["check", "--config", str(config)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert lines == (
        [f"all: warning: no recover step undoes kubernetes = {warning}"] if warning else []
    )


def test_check_reports_a_wrong_field_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(RULE.replace("when-prepared", "whenever"))

    assert main(["check", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"forewarn-agent: {config}:1: rule[0].approve: expected one of never")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("chek", "did you mean 'check'? Try"), ("xyz", "expected one of run, status, check; try")],
)
def test_mistyped_command_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str], typed: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([typed])

    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"forewarn-agent: no such command '{typed}'; {hint} 'forewarn-agent --help'\n"
    )


def test_run_rejects_a_wrong_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("journl = 1")

    assert main(["run", "--config", str(config)]) == 2
    assert "did you mean 'journal'?" in capsys.readouterr().err


def test_invalid_endpoint_url_is_rejected(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", str(config), "--endpoint", "ftp://x"]) == 2
    assert "endpoint is 'ftp://x'" in capsys.readouterr().err


def test_run_leaves_the_logging_of_its_process_as_it_was() -> None:
    """`forewarn agent run` also runs inside other programs, whose standard error may be closed."""
    logger, root = logging.getLogger("forewarn"), logging.getLogger()
    before = [*logger.handlers], logger.level, [*root.handlers], root.level
    with log_to_stderr():
        assert len(logger.handlers) == len(before[0]) + 1
        assert ([*root.handlers], root.level) == before[2:]

    assert ([*logger.handlers], logger.level) == before[:2]


class BuggyAgent(Agent):
    """A bug in the agent's thread."""

    def run(self, stop: threading.Event) -> None:
        raise KeyError("boom")


class BuggyNotifier(Notifier):
    """A bug in the main thread."""

    def ready(self, words: str) -> None:
        raise KeyError("boom")


@pytest.mark.parametrize(
    ("make_agent", "make_notifier", "place"),
    [(BuggyAgent, Notifier, "in run\n"), (Agent, BuggyNotifier, "in ready\n")],
    ids=["agent thread", "main thread"],
)
def test_bug_that_ends_the_agent_is_logged_with_traceback(
    config: Path,
    caplog: pytest.LogCaptureFixture,
    make_agent: type[Agent],
    make_notifier: type[Notifier],
    place: str,
) -> None:
    """Under `Restart=always` the log is the only trace."""
    daemon = daemon_of(config, make_agent, make_notifier({}, pid=1))
    with pytest.raises(KeyError, match="boom"):
        daemon.run()

    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert place in HumanLines().format(record)


def daemon_of(config: Path, make_agent: type[Agent], notifier: Notifier | None = None) -> Daemon:
    config.write_text(f'name = "web-0"\njournal = "{config.parent}/journal"\n')
    options = Options(config, "http://127.0.0.1:1")
    return Daemon(options, {}, notifier or Notifier({}, pid=1), make_agent=make_agent)


@pytest.mark.parametrize(
    "error", [RecursionError("too deep"), OverflowError("int too large"), Unavailable("no disk")]
)
def test_failed_reload_keeps_the_rules(
    config: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A typo must not end the agent before an event."""
    shown: list[str] = []

    class Reloading(Agent):
        def run(self, stop: threading.Event) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            while not self.config_error and not stop.wait(0.01):
                pass
            shown.append(self.status().config_error)

        def reload(self, settings: AgentSettings) -> None:
            raise error

    daemon_of(config, Reloading).run()

    assert str(error) in shown[0]
    assert "config rejected, keeping previous rules" in caplog.messages


def test_status_without_an_agent_is_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where no service responds."""
    assert main(["status", "--socket", str(tmp_path / "socket")], program="forewarn agent") == 4
    assert capsys.readouterr().err.startswith("forewarn agent: no agent responds at ")


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run", "--confg", "x"], ["status", "more"]])
def test_usage_error_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("forewarn-agent")


def test_status_with_half_a_character_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An endpoint's texts may not be printable."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = threading.Thread(
            target=respond_once, args=(listener, b'{"status": {"name": "web\\ud800"}}\n')
        )
        server.start()
        assert main(["status", "--socket", str(path)]) == 0
        server.join()

    assert capsys.readouterr().out.startswith("web\\ud800, forewarn agent")


def respond_once(listener: socket.socket, response: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(100)
        connection.sendall(response)


def test_unit_for_systemd_never_gives_up() -> None:
    """A disk or an address that comes late must not leave the VM without its agent."""
    unit = Path(__file__).parents[3] / "deploy" / "forewarn-agent.service"

    assert "\nStartLimitIntervalSec=0\n" in unit.read_text().partition("[Service]")[0]
