"""What a user sees of an error and of a bug, and how to get the traceback."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from forewarn.cli.event_loop import run_service
from forewarn.config import Config
from forewarn.error_report import run_command
from forewarn.errors import Invalid

HINT = "; FOREWARN_DEBUG=1 prints the traceback, for a report"


def fail_with_a_bug() -> NoReturn:
    raise KeyError("missing\x1b[31m")


def refuse() -> NoReturn:
    raise Invalid("rate is 0; expected more")


def test_bug_is_one_line_that_says_how_to_get_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("forewarn", fail_with_a_bug, lambda error: 2, environ={}) == 1
    assert capsys.readouterr().err == (
        f"forewarn: this is a bug in Forewarn: KeyError: 'missing\\x1b[31m'{HINT}\n"
    )


@pytest.mark.parametrize("value", ["", "0", "no", "false", "False", "off"])
def test_variable_that_says_no_is_off(capsys: pytest.CaptureFixture[str], value: str) -> None:
    run_command("forewarn", fail_with_a_bug, lambda error: 2, environ={"FOREWARN_DEBUG": value})

    assert capsys.readouterr().err.count("\n") == 1


def test_traceback_of_a_bug_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Without it a report is useless. The one line is last, where a user looks."""
    environ = {"FOREWARN_DEBUG": "1"}
    assert run_command("forewarn", fail_with_a_bug, lambda error: 2, environ=environ) == 1
    *trace, last = capsys.readouterr().err.splitlines()

    assert trace[0] == "Traceback (most recent call last):"
    assert any("in fail_with_a_bug" in line for line in trace)
    assert last == "forewarn: this is a bug in Forewarn: KeyError: 'missing\\x1b[31m'"


def test_traceback_of_an_expected_error_is_printed_on_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its cause may be what matters."""
    assert run_command("x", refuse, lambda error: 2, environ={"FOREWARN_DEBUG": "1"}) == 2
    *trace, last = capsys.readouterr().err.splitlines()

    assert any("in refuse" in line for line in trace)
    assert last == "x: rate is 0; expected more"


@pytest.mark.parametrize(("level", "is_logged"), [("debug", True), ("info", False)])
def test_error_that_ends_a_service_is_logged_at_the_level_debug(
    tmp_path: Path, level: str, is_logged: bool
) -> None:
    """A process of its own: here pytest has a handler for everything that is logged."""
    command = (sys.executable, "-m", "forewarn", "serve", "--fleet", "nope", "--store", "memory")
    environ = {name: value for name, value in os.environ.items() if "FOREWARN" not in name}
    ended = subprocess.run(
        [*command, "--log-level", level],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environ,
    )
    *logged, last = ended.stderr.splitlines()

    assert ended.returncode == 2
    assert last == "forewarn: cannot read the fleet file nope: No such file or directory"
    for part in ("debug    the service ended because of an error", "    Traceback (most recent"):
        assert any(part in each for each in logged) == is_logged


def test_bug_that_ends_a_service_is_in_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A service that died at night cannot be asked again."""

    async def work() -> None:
        fail_with_a_bug()

    with pytest.raises(KeyError):
        run_service(Config(), work)
    error = capsys.readouterr().err

    assert "critical  the service ended because of a bug\n" in error
    assert "in fail_with_a_bug" in error
