"""The agent's own command line: what it refuses, in one line and with which exit code."""

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, cast

import pytest

from forewarn.agent.__main__ import main
from forewarn.agent.agent import Agent
from forewarn.agent.daemon import Life, Orders, read_again
from forewarn.agent.journal import Journal
from forewarn.agent.log import Lines
from forewarn.agent.once import Once
from forewarn.client import Client, Document, Watcher
from forewarn.errors import Unavailable
from forewarn.systemd import Notifier
from tests.unit.agent.view_of import REBOOT, handling

RULE = '[[rule]]\nname = "all"\napprove = "when-prepared"\nprepare = [{log = "x"}]\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(RULE)
    return path


def test_a_file_that_is_fine_is_said_to_be_with_its_rules(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(config)]) == 0
    assert (
        capsys.readouterr().out
        == f"all: all types, approve when-prepared\n{config} is fine: 1 rule(s)\n"
    )


def test_a_wrong_file_is_refused_with_its_line_and_field(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one line says where to look."""
    config.write_text(RULE.replace("when-prepared", "whenever"))

    assert main(["check", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"forewarn-agent: {config}:3: rule[0].approve: expected one of never, at-once"
    )
    assert said.count("\n") == 1


def test_a_wrong_file_is_refused_before_anything_is_begun(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("journl = 1")

    assert main(["run", "--config", str(config)]) == 2
    assert "did you mean 'journal'?" in capsys.readouterr().err


def test_an_endpoint_that_is_none_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--config", str(config), "--endpoint", "ftp://x"]) == 2
    assert "endpoint is 'ftp://x'" in capsys.readouterr().err


@pytest.fixture
def logging_at_debug() -> Iterator[logging.Logger]:
    """The root logger with a handler and a level of its own."""
    root, handler = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield root
    root.removeHandler(handler)
    root.setLevel(level)


def test_a_run_leaves_the_logging_of_its_process_as_it_was(
    config: Path, logging_at_debug: logging.Logger
) -> None:
    """`forewarn agent run` also runs inside other programs, such as this one, whose standard error
    may be closed later.
    """
    before = list(logging_at_debug.handlers)
    main(["run", "--config", str(config), "--endpoint", "ftp://x"])

    assert logging_at_debug.handlers == before
    assert logging_at_debug.level == logging.DEBUG


class Buggy(Agent):
    """An agent with a bug in the thread that watches."""

    def run(self, stop: threading.Event) -> None:
        raise KeyError("boom")


class Mute(Notifier):
    """With a bug in the main thread."""

    def ready(self, words: str) -> None:
        raise KeyError("boom")


@pytest.mark.parametrize(
    ("make_agent", "make_notifier", "place"),
    [(Buggy, Notifier, "in run\n"), (Agent, Mute, "in ready\n")],
    ids=["watching thread", "main thread"],
)
def test_a_bug_that_ends_the_agent_is_logged_with_its_traceback(
    config: Path,
    caplog: pytest.LogCaptureFixture,
    make_agent: type[Agent],
    make_notifier: type[Notifier],
    place: str,
) -> None:
    """Under `Restart=always` the log is all that is left of it."""
    config.write_text(f'name = "web-0"\njournal = "{config.parent}/journal"\n')
    life = Life(
        Orders(config, "http://127.0.0.1:1"), {}, make_notifier({}, pid=1), make_agent=make_agent
    )
    with pytest.raises(KeyError, match="boom"):
        life.run()

    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert place in Lines().format(record)


def test_no_agent_is_exit_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where no service answers."""
    assert main(["status", "--socket", str(tmp_path / "socket")], program="forewarn agent") == 4
    assert capsys.readouterr().err.startswith("forewarn agent: no agent answers at ")


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run", "--confg", "x"], ["status", "more"]])
def test_a_command_line_that_makes_no_sense_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("forewarn-agent")


def test_a_status_with_half_a_character_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an endpoint said may be no text that can be printed."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        answering = threading.Thread(
            target=answer_once, args=(listening, b'{"status": {"name": "web\\ud800"}}\n')
        )
        answering.start()
        assert main(["status", "--socket", str(path)]) == 0
        answering.join()

    assert capsys.readouterr().out.startswith("web\\ud800, forewarn agent")


def answer_once(listening: socket.socket, answer: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(100)
        connection.sendall(answer)


@pytest.mark.parametrize(
    "problem", [RecursionError("too deep"), OverflowError("int too large"), Unavailable("no disk")]
)
def test_whatever_is_wrong_with_a_new_file_the_old_rules_stay(
    problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A slip of the pen must not end the agent before an event."""

    def refuse() -> NoReturn:
        raise problem

    settings, words = read_again(refuse)

    assert settings is None
    assert str(problem) in words
    assert [record.getMessage() for record in caplog.records] == [
        "the file is refused; the old rules stay"
    ]


def test_once_ends_when_the_journal_cannot_be_written(tmp_path: Path) -> None:
    """The agent tries again for ever; who asked once waits for an answer."""
    journal = Journal.open(tmp_path / "journal")
    give_up = threading.Event()
    client = cast("Client", Shown(Document(1, (REBOOT,))))
    once = Once(
        client,
        journal,
        handlings=lambda: (handling(),),
        journal_problems=lambda: 1,
        give_up=give_up.set,
    )
    changes = once.watch(
        stop=give_up, on_error=print, wait_seconds=0, watcher=Watcher(), sleep=None
    )
    seen = [change.event for change in changes]
    journal.close()

    assert seen == [REBOOT]
    assert isinstance(once.problem, Unavailable)


class Shown:
    """A client that has one document."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def document(self) -> Document:
        return self._document


def test_the_unit_never_gives_up() -> None:
    """A disk or an address that comes late must not leave the VM without its agent."""
    unit = Path(__file__).parents[3] / "deploy" / "forewarn-agent.service"

    assert "\nStartLimitIntervalSec=0\n" in unit.read_text().partition("[Service]")[0]
